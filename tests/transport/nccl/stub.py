"""Build the stub of libnccl, and control its answers.

Guarantees: `build` needs a C compiler, and takes less than two seconds. `Stub` controls the copy of the library in this
process. Load the stub only in a process that has loaded no other libnccl.
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
    """Build the library in `folder`. `without`: functions to leave out (MEM_ALLOC, REGISTER, FINALIZE, LAST_ERROR)."""
    assert COMPILER is not None
    library = folder / "libnccl.so.2"
    flags = ["-shared", "-fPIC", "-pthread", f"-Wl,-soname,{library.name}"]
    subprocess.run(
        [COMPILER, *flags, *(f"-DWITHOUT_{name}" for name in without), "-o", str(library), str(SOURCE)], check=True
    )
    return library


class Stub:
    """The functions that control a loaded stub; see `stub.c`."""

    def __init__(self, path: str) -> None:
        self._c = ctypes.CDLL(path)
        self._c.stub_log.restype = ctypes.c_size_t
        self._c.stub_set_async.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def log(self) -> list[str]:
        """Return the calls since `clear`, one per line: the function, then its arguments as C formats them."""
        text = ctypes.create_string_buffer(self._c.stub_log(None, ctypes.c_size_t(0)))
        self._c.stub_log(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def calls(self, function: str) -> list[str]:
        """Return the lines of `log` about one function."""
        return [line for line in self.log() if line.split()[0] == function]

    def clear(self) -> None:
        """Clear the log and the last error."""
        self._c.stub_clear()

    def log_to(self, path: Path) -> None:
        """Also write every later call to a file, which can be read after the process has ended."""
        self._c.stub_log_to(str(path).encode())

    def version(self) -> int:
        """Return the result of `ncclGetVersion`."""
        number = ctypes.c_int()
        self._c.ncclGetVersion(ctypes.byref(number))
        return number.value

    def set_version(self, version: int) -> None:
        """Set the result of `ncclGetVersion`, for bindings that are created later."""
        self._c.stub_set_version(version)

    def set_polls(self, polls: int) -> None:
        """Set how often a non-blocking communicator reports IN_PROGRESS after each init, finalize and group end."""
        self._c.stub_set_polls(polls)

    def set_async(self, comm: int, status: int) -> None:
        """Set the asynchronous status of a communicator."""
        self._c.stub_set_async(comm, status)

    def answer(self, function: str, nth: int, status: int) -> None:
        """Let the `nth` call of `function`, counted from now, return `status`."""
        self._c.stub_answer(function.encode(), nth, status)

    def block(self, function: str) -> None:
        """Let the next call of `function` wait for `release`; after five seconds it returns TIMEOUT."""
        self._c.stub_block(function.encode())

    def is_inside(self) -> bool:
        """Return whether a thread is inside a call that waits for `release`."""
        return bool(self._c.stub_inside())

    def release(self) -> None:
        """Let the waiting call continue."""
        self._c.stub_release()
