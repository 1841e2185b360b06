"""Builds the stand-in for libnccl and tells it what to answer.

Guarantees: `build` needs a C compiler and well under two seconds; `Stub` speaks to the copy of the library that
is in this process. One process, one copy: load the stub where nothing else has loaded a libnccl.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
VERSION = 22809


def build(folder: Path, *without: str) -> Path:
    """The library, made in `folder`, without some functions: MEM_ALLOC, REGISTER, FINALIZE, LAST_ERROR."""
    assert COMPILER is not None
    made = folder / "libnccl.so.2"
    flags = ["-shared", "-fPIC", "-pthread", f"-Wl,-soname,{made.name}"]
    subprocess.run(
        [COMPILER, *flags, *(f"-DWITHOUT_{name}" for name in without), "-o", str(made), str(SOURCE)], check=True
    )
    return made


class Stub:
    """The controls of one loaded stand-in; see `stub.c`."""

    def __init__(self, path: str) -> None:
        self._c = ctypes.CDLL(path)
        self._c.stub_log.restype = ctypes.c_size_t
        self._c.stub_set_async.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def log(self) -> list[str]:
        """The calls since `clear`, one a line: the function, then its arguments as C formats them."""
        text = ctypes.create_string_buffer(self._c.stub_log(None, ctypes.c_size_t(0)))
        self._c.stub_log(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def calls(self, function: str) -> list[str]:
        """The lines of `log` about one function."""
        return [line for line in self.log() if line.split()[0] == function]

    def clear(self) -> None:
        """Forget the log and the last error."""
        self._c.stub_clear()

    def log_to(self, path: Path) -> None:
        """Write every later call to a file too, which is there when the process is not."""
        self._c.stub_log_to(str(path).encode())

    def version(self) -> int:
        """What `ncclGetVersion` says."""
        number = ctypes.c_int()
        self._c.ncclGetVersion(ctypes.byref(number))
        return number.value

    def set_version(self, version: int) -> None:
        """Let `ncclGetVersion` say this; a binding that is made later sees it."""
        self._c.stub_set_version(version)

    def set_polls(self, polls: int) -> None:
        """How often a non-blocking communicator is in progress after each init, finalize and group end."""
        self._c.stub_set_polls(polls)

    def set_async(self, comm: int, status: int) -> None:
        """The asynchronous status of a communicator."""
        self._c.stub_set_async(comm, status)

    def answer(self, function: str, nth: int, status: int) -> None:
        """Let the `nth` call of `function` from now on return `status`."""
        self._c.stub_answer(function.encode(), nth, status)

    def block(self, function: str) -> None:
        """Let the next call of `function` wait for `release`; after five seconds it returns TIMEOUT."""
        self._c.stub_block(function.encode())

    def is_inside(self) -> bool:
        """Whether a call waits for `release`."""
        return bool(self._c.stub_inside())

    def release(self) -> None:
        """Let the waiting call go on."""
        self._c.stub_release()
