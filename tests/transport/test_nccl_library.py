"""The bindings agree with the real libnccl and its header in constants, structs, signatures and errors.

No CUDA device is needed. The tests read the header in NVIDIA's wheel, and load its library in separate processes.
Not covered: working communicators. Tests with the stub (`test_nccl_bindings.py`) and tests on GPUs cover them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.transport.nccl.binding import UNIQUE_ID_BYTES, Capability, Status
from ringattn.transport.nccl.ctypes_binding import (
    CONFIG_MAGIC,
    CONFIG_VERSION,
    SIGNATURES,
    UINT8,
    UNDEFINED_INT,
    Config,
    UniqueId,
)
from ringattn.transport.nccl.library import NEEDS, REQUIRED

ROOT = Path(__file__).resolve().parents[2]


def wheel() -> Path | None:
    """Return the folder of NVIDIA's wheel, or None if it is not installed."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


WHEEL = wheel()
pytestmark = pytest.mark.skipif(WHEEL is None, reason="no nvidia-nccl wheel")

# --- the header ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def header() -> str:
    assert WHEEL is not None
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", (WHEEL / "include" / "nccl.h").read_text(), flags=re.DOTALL)


def enum(header: str, name: str) -> dict[str, int]:
    """Return the members of the C enumeration `name`, with their values."""
    body = re.search(rf"typedef enum \{{([^}}]*)\}} {name};", header)
    assert body, name
    return {member: int(value) for member, value in re.findall(r"(\w+)\s*=\s*(\d+)", body[1])}


def define(header: str, name: str) -> str:
    match = re.search(rf"#define {name} +(\S+)", header)
    assert match, name
    return match[1]


def c_type(declared: str) -> Any:
    """Return the ctypes type that corresponds to the C declaration of an argument or field."""
    if "*" in declared:
        return ctypes.c_char_p if "char" in declared else ctypes.c_void_p
    kind = re.sub(r"\bconst\b|\w+$", "", declared.strip()).strip()
    return {
        "size_t": ctypes.c_size_t,
        "unsigned int": ctypes.c_uint,
        "int": ctypes.c_int,
        "ncclDataType_t": ctypes.c_int,
        "ncclUniqueId": UniqueId,
        "ncclComm_t": ctypes.c_void_p,
        "cudaStream_t": ctypes.c_void_p,
    }[kind]


def test_statuses(header: str) -> None:
    members = enum(header, "ncclResult_t")
    members.pop("ncclNumResults")
    ours = {re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("nccl")).upper(): n for name, n in members.items()}
    assert len(ours) >= 8
    assert ours.items() <= {status.name: status.value for status in Status}.items()


def test_constants(header: str) -> None:
    assert enum(header, "ncclDataType_t")["ncclUint8"] == UINT8.value
    assert int(define(header, "NCCL_UNIQUE_ID_BYTES")) == UNIQUE_ID_BYTES == ctypes.sizeof(UniqueId)
    assert int(define(header, "NCCL_API_MAGIC"), 16) == CONFIG_MAGIC
    assert define(header, "NCCL_CONFIG_UNDEF_INT") == "INT_MIN"
    assert ctypes.c_int(UNDEFINED_INT - 1).value == 2**31 - 1


def test_config(header: str) -> None:
    body = re.search(r"typedef struct ncclConfig_v(\d+) \{([^}]*)\} ncclConfig_t;", header)
    assert body and int(body[1]) >= CONFIG_VERSION
    declared = [line.strip() for line in body[2].split(";") if line.strip()]
    fields = [(re.search(r"\w+$", line)[0], c_type(line)) for line in declared]
    theirs = type("Theirs", (ctypes.Structure,), {"_fields_": fields})
    assert tuple(fields[: len(Config._fields_)]) == Config._fields_
    for name, _ in Config._fields_:
        assert getattr(Config, name).offset == getattr(theirs, name).offset, name
    assert ctypes.sizeof(Config) == 80


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(header: str, name: str) -> None:
    match = re.search(rf"(ncclResult_t|const char\*)\s+{name}\(([^)]*)\);", header)
    assert match, f"{name} is not in nccl.h"
    assert (match[1] == "const char*") == (name == "ncclGetLastError")
    declared = [argument for argument in match[2].split(",") if argument.strip()]
    assert len(declared) == len(SIGNATURES[name])
    for argument, ours in zip(declared, SIGNATURES[name], strict=True):
        assert c_type(argument) == (ctypes.c_void_p if issubclass(ours, ctypes._Pointer) else ours), argument


def test_every_function_has_a_signature() -> None:
    needed = {*REQUIRED, *(name for need in NEEDS.values() for name in need.functions)}
    assert needed == set(SIGNATURES)
    assert set(NEEDS) == set(Capability)


# --- the library -----------------------------------------------------------------------------------------------------

CALLS = """
import json, sys
from ringattn.transport.nccl.binding import CommConfig, NcclError
if sys.argv[1] == "cupy":
    from ringattn.transport.nccl.cupy_binding import CupyBinding
    binding = CupyBinding()
else:
    from ringattn.transport.nccl.ctypes_binding import CtypesBinding
    from ringattn.transport.nccl.library import load_library
    binding = CtypesBinding(load_library())
found = {
    "path": binding.path, "version": binding.version, "ids": len({binding.unique_id() for _ in range(3)}),
    "statuses": [binding.group_start(), binding.group_end(), binding.group_end(), binding.send(64, 1, 0, 0, 0)],
}
try:
    binding.init(1, binding.unique_id(), 0, CommConfig(blocking=sys.argv[1] == "cupy", cga_cluster_size=None))
except NcclError as error:
    found["init"] = [error.status, error.function, binding.group_end()]
print(json.dumps(found))
"""


@pytest.mark.parametrize("binding", ["ctypes", "cupy"])
def test_answers_of_the_library(header: str, binding: str) -> None:
    assert WHEEL is not None
    if binding == "cupy" and not find_spec("cupy"):
        pytest.skip("cupy is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CALLS, binding],
        cwd=ROOT, env=os.environ | {"NCCL_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["ids"] == 3 and answers["statuses"] == [0, 0, Status.INVALID_USAGE, Status.INVALID_ARGUMENT]
    assert Path(answers["path"]).name.startswith("libnccl.so.2")
    if Path(answers["path"]).is_relative_to(WHEEL):
        assert answers["version"] == int(define(header, "NCCL_VERSION_CODE"))
    if not torch.cuda.is_available():  # a failed init is named and leaves no group open
        assert answers["init"] == [Status.UNHANDLED_CUDA_ERROR, "ncclCommInitRankConfig", Status.INVALID_USAGE]
