"""The libnccl of this process and its capabilities, and a check that the installed wheels fit this torch.

Guarantees: the library that torch or cupy has loaded takes precedence. A process with two copies of libnccl, with one
older than `FLOOR_VERSION`, or with none is refused, and the error says what to do. The version comes from the library
itself, because a wheel's metadata may describe another file. Sources: dlopen(3) on names without a slash, proc(5) on
maps; `nccl.h` of 2.13 to 2.29 for the versions in `NEEDS`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch  # a CUDA build loads its own libnccl, which must be in the process before this module looks for one

from ringattn.errors import InputError, UnsupportedError
from ringattn.transport.nccl.binding import FLOOR_VERSION, Capability, MissingError, version_text

SONAME = "libnccl.so.2"
WHEEL = "nvidia.nccl"
"""The package in which NVIDIA's wheels install it: a namespace package, the same for CUDA 12 and 13."""

REQUIRED = (
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclCommAbort",
    "ncclCommDestroy",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclSend",
    "ncclRecv",
)
"""Functions that every ring needs. All of them are older than `FLOOR_VERSION`."""


class Need(NamedTuple):
    """The requirements of a capability: the oldest NCCL version, as `ncclGetVersion` counts, and the C functions."""

    since: int
    functions: tuple[str, ...] = ()


NEEDS = {
    Capability.LAST_ERROR: Need(21300, ("ncclGetLastError",)),
    Capability.NONBLOCKING: Need(21400),
    Capability.FINALIZE: Need(21400, ("ncclCommFinalize",)),
    Capability.MAX_CTAS: Need(21700),
    Capability.CGA: Need(21700),
    Capability.MEMORY: Need(21900, ("ncclMemAlloc", "ncclMemFree")),
    Capability.REGISTER: Need(21900, ("ncclCommRegister", "ncclCommDeregister")),
    Capability.NAME: Need(22700),
    Capability.NET_CHANNELS: Need(22800),
}


@dataclass(frozen=True)
class Library:
    """A loaded libnccl. `path` is its file; `version` counts as `ncclGetVersion` does."""

    cdll: ctypes.CDLL
    path: str
    version: int
    capabilities: frozenset[Capability]

    def require(self, capability: Capability) -> None:
        """Raise `MissingError` if the library lacks `capability`."""
        if capability not in self.capabilities:
            raise MissingError(
                f"{capability.value} needs NCCL {version_text(NEEDS[capability].since)}, and {self.path} is "
                f"{version_text(self.version)}{self._absent(capability)}; avoid it or install a newer NCCL"
            )

    def _absent(self, capability: Capability) -> str:
        absent = [name for name in NEEDS[capability].functions if not hasattr(self.cdll, name)]
        return f" without {' and '.join(absent)}" if absent else ""


def load_library(path: str | None = None) -> Library:
    """Load libnccl: `path` if given, else the loaded library, else the system's, else the wheel's.

    Raises `InputError` if `path` cannot be loaded, and `UnsupportedError` if no libnccl is found, if two different
    files are loaded, or if the library is incomplete or too old.
    """
    cdll = _load(path)
    if absent := [name for name in REQUIRED if not hasattr(cdll, name)]:
        raise UnsupportedError(f"{cdll._name} is not a complete NCCL: it lacks {', '.join(absent)}. {_remedy()}")
    used = _file_at(ctypes.cast(cdll.ncclGetVersion, ctypes.c_void_p).value or 0)
    refuse_copies(used)
    number = ctypes.c_int()
    cdll.ncclGetVersion(ctypes.byref(number))
    version = number.value
    if version < FLOOR_VERSION:
        versions = f"{version_text(version)}; ringattn needs {version_text(FLOOR_VERSION)} or newer"
        raise UnsupportedError(f"{used} is NCCL {versions}. {_remedy()}")
    capabilities = frozenset(
        capability
        for capability, need in NEEDS.items()
        if version >= need.since and all(hasattr(cdll, name) for name in need.functions)
    )
    return Library(cdll, used, version, capabilities)


def refuse_copies(used: str) -> None:
    """Raise `UnsupportedError` if a libnccl other than the file `used` is mapped into this process."""
    copies = {used} | {file for _, _, file in _mappings() if re.fullmatch(r"libnccl\.so[.\d]*", Path(file).name)}
    if len(copies) > 1:
        raise UnsupportedError(
            f"two copies of libnccl in one process: {' and '.join(sorted(copies))}. They do not share communicators "
            "and may differ in version. Keep one: uninstall the wheel that torch does not use "
            f"(`pip uninstall nvidia-nccl-cu12` or `-cu13`), take its folder out of LD_LIBRARY_PATH, or give no path"
        )


def _load(path: str | None) -> ctypes.CDLL:
    if path is not None:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            raise InputError(f"no libnccl at {path!r}: {error}. Give the path of {SONAME}, or none") from error
    causes = []
    for name in (SONAME, *_wheel_files()):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            causes.append(str(error))
    raise UnsupportedError(f"no libnccl in this process, on the library path or in a wheel ({causes[-1]}). {_remedy()}")


def _wheel_files() -> list[str]:
    try:
        spec = importlib.util.find_spec(WHEEL)
    except ModuleNotFoundError:  # even the parent package is missing
        return []
    folders = spec.submodule_search_locations if spec else None
    return [str(Path(folder, "lib", SONAME)) for folder in folders or ()]


def _remedy() -> str:
    """Return a sentence that says which packages to install for this torch."""
    cuda = torch.version.cuda
    if cuda is None:
        return "This torch has no CUDA: install a CUDA build of it, and `ringattn[cu12]` or `ringattn[cu13]` to match"
    return f"This torch has CUDA {cuda}: pip install 'ringattn[cu{cuda.split('.')[0]}]'"


def _mappings() -> list[tuple[int, int, str]]:
    """Return (first address, end, file) of each file mapping of this process."""
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, file = line.split(maxsplit=5)
        if file.startswith("/"):
            start, end = addresses.split("-")
            mappings.append((int(start, 16), int(end, 16), file))
    return mappings


def _file_at(address: int) -> str:
    return next(file for start, end, file in _mappings() if start <= address < end)


# --- wheels -----------------------------------------------------------------------------------------------------------

CUDA = ("13", "12", "11")
FORMS = ("cupy-cuda{}x", "nvidia-nccl-cu{}")
"""Wheel names by CUDA version."""
CUPY_FROM_SOURCE = "cupy"
"""A build from source, for the CUDA version that was installed then."""


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def mismatch(cuda_build: str | None, version_of: Callable[[str], str | None] = installed) -> str | None:
    """Return one line if the installed wheels do not fit this torch, or None.

    The line names the wheels, the CUDA version of this torch, and the commands that fix the installation.

    Wheels for several CUDA versions install the same files (`cupy/`, `nvidia/nccl/lib/libnccl.so.2`): the last one
    installed overwrites the others, and removing any of them removes the files of all. `cuda_build` is
    `torch.version.cuda`. For a CPU build (None), only several wheels of one kind are a mismatch.
    """
    major = cuda_build.partition(".")[0] if cuda_build else None
    all_found: dict[str, str] = {}
    remove: list[str] = []
    install: list[str] = []
    for form in FORMS:
        names = [*(form.format(cuda) for cuda in CUDA), *([CUPY_FROM_SOURCE] if "cupy" in form else [])]
        present = {name: version for name in names if (version := version_of(name))}
        fitting = [name for name in present if major is None or name in (form.format(major), CUPY_FROM_SOURCE)]
        if wrong := [name for name in present if name not in fitting[:1]]:
            remove += wrong
            install += [f"{name}=={present[name]}" for name in fitting[:1]] or [form.format(major)]
        all_found |= present
    if not remove:
        return None
    listed = ", ".join(f"{name} {version}" for name, version in all_found.items())
    wants = f"this torch has CUDA {cuda_build}" if cuda_build else "wheels of one kind install the same files"
    return (
        f"installed: {listed}; {wants}: pip uninstall -y {' '.join(remove)}, then "
        f"pip install --force-reinstall --no-deps {' '.join(install)}"
    )
