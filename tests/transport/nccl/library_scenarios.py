"""Load missing, broken, old, new and duplicate copies of libnccl, in this order, in one process.

`python -m tests.transport.nccl.library_scenarios LIBRARY SECOND` takes the paths of two copies of the stub. It prints a
JSON object with the traceback of each scenario, or null for a scenario that passed. The order matters, because a loaded
library cannot be unloaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from ringattn.errors import InputError, UnsupportedError
from ringattn.transport.nccl import library
from ringattn.transport.nccl.binding import Capability, MissingError
from ringattn.transport.nccl.cupy_binding import CupyBinding
from ringattn.transport.nccl.library import load_library
from tests.transport.nccl.binding_contract import refusal, tracebacks
from tests.transport.nccl.stub import VERSION, Stub


class NoWheel:
    """An import finder that hides NVIDIA's packages."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError if `name` is one of NVIDIA's packages."""
        if name.split(".")[0] == "nvidia":
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


def a_missing_library_is_refused_with_a_remedy(path: str, second: str) -> None:
    soname, library.SONAME = library.SONAME, "libnccl-absent.so.2"
    finders, cuda = list(sys.meta_path), torch.version.cuda
    try:
        # At first only the library file is missing, and the folder of an installed wheel is found. In the second round
        # the folder is hidden too.
        for hidden in ([], [NoWheel()]):
            sys.meta_path[:] = [*hidden, *finders]
            for version, remedy in {
                "12.8": "pip install 'ringattn[cu12]'",
                "13.0": "pip install 'ringattn[cu13]'",
                None: "no CUDA: install a CUDA build",
            }.items():
                torch.version.cuda = version
                text = refusal(load_library, UnsupportedError)
                assert "libnccl-absent.so.2" in text and remedy in text
    finally:
        library.SONAME, torch.version.cuda, sys.meta_path[:] = soname, cuda, finders


def a_path_without_a_file_is_refused(path: str, second: str) -> None:
    assert "'/absent/libnccl.so.2'" in refusal(lambda: load_library("/absent/libnccl.so.2"), InputError)


def another_library_is_refused(path: str, second: str) -> None:
    text = refusal(lambda: load_library("libm.so.6"), UnsupportedError)
    assert "libm.so.6" in text and "ncclGetVersion" in text and "ncclRecv" in text


def an_old_version_is_refused(path: str, second: str) -> None:
    stub = Stub(path)
    for version in (22299, 21805):
        stub.set_version(version)
        text = refusal(lambda: load_library(path), UnsupportedError)
        assert path in text and "2.23.0 or newer" in text
    assert "is NCCL 2.18.5;" in text


def capabilities_follow_the_version(path: str, second: str) -> None:
    stub = Stub(path)
    for version in (22300, 22699):
        stub.set_version(version)
        old = load_library(path)
        assert frozenset(Capability) - old.capabilities == {Capability.NAME, Capability.NET_CHANNELS}
        text = refusal(lambda old=old: old.require(Capability.NAME), MissingError)
        assert "config.commName needs NCCL 2.27.0" in text
        old.require(Capability.MEMORY)
        text = refusal(lambda old=old: old.require(Capability.NET_CHANNELS), MissingError)
        assert "config.nChannelsPerNetPeer needs NCCL 2.28.0" in text
    stub.set_version(22700)
    assert load_library(path).capabilities == frozenset(Capability) - {Capability.NET_CHANNELS}
    stub.set_version(22800)
    assert load_library(path).capabilities == frozenset(Capability)
    stub.set_version(VERSION)


def a_loaded_library_has_priority(path: str, second: str) -> None:
    loaded = load_library()
    assert (loaded.path, loaded.version) == (path, VERSION)


class Cupy(ModuleType):
    """A fake of cupy and of `cupy.cuda.nccl` in one module."""

    def __init__(self, version: str = "14.2.0", available: bool = True, nccl: int = VERSION) -> None:
        super().__init__("cupy")
        self.__version__, self._available, self.get_version = version, available, lambda: nccl

    @property
    def available(self) -> bool:
        """Whether cupy was built with NCCL. `CupyBinding` reads this once cupy is imported and has loaded libraries."""
        return self._available


class CupyWithACopy(Cupy):
    """A fake cupy that loads another libnccl, the file `copy`, when `available` is read."""

    copy = ""

    @property
    def available(self) -> bool:
        """See `Cupy.available`."""
        ctypes.CDLL(self.copy)
        return True


def cupy_refusal(cupy: Cupy | None, path: str) -> str:
    """Return the message with which the binding refuses `cupy`. If it is None, cupy is not installed."""
    names = ("cupy", "cupy.cuda.nccl")
    try:
        sys.modules.update(dict.fromkeys(names, cupy))  # None blocks an import
        return refusal(lambda: CupyBinding(path), UnsupportedError)
    finally:
        for name in names:
            del sys.modules[name]


def an_unfit_cupy_is_refused(path: str, second: str) -> None:
    assert "pip install 'ringattn[cu13]'" in cupy_refusal(None, path)
    assert "cupy 14 or newer, not 13.6.0" in cupy_refusal(Cupy(version="13.6.0"), path)
    assert "without NCCL" in cupy_refusal(Cupy(available=False), path)
    assert "cupy uses NCCL 2.29.7" in cupy_refusal(Cupy(nccl=22907), path)


def a_cupy_with_another_copy_is_refused(path: str, second: str) -> None:
    cupy = CupyWithACopy()
    cupy.copy = second
    text = cupy_refusal(cupy, path)
    assert path in text and second in text


def a_second_copy_is_refused(path: str, second: str) -> None:
    for requested in (second, None, path):
        text = refusal(lambda requested=requested: load_library(requested), UnsupportedError)
        assert path in text and second in text and "pip uninstall" in text


SCENARIOS: tuple[Callable[[str, str], None], ...] = (
    a_missing_library_is_refused_with_a_remedy,
    a_path_without_a_file_is_refused,
    another_library_is_refused,
    an_old_version_is_refused,
    capabilities_follow_the_version,
    a_loaded_library_has_priority,
    an_unfit_cupy_is_refused,
    a_cupy_with_another_copy_is_refused,
    a_second_copy_is_refused,
)


if __name__ == "__main__":
    print(json.dumps(tracebacks(SCENARIOS, *sys.argv[1:])))
