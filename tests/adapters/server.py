"""Programs that are forked from a server process, which has imported their module once.

A new Python process imports torch and a host in 5 to 9 core seconds. A fork takes none. A server is a new Python
process that imports one module and runs no program itself, and each program is a fork of it. So a program has the
modules and the environment of a new process, and nothing that it does reaches the next one. The programs of a server
share its hash seed. A call of another module, or with other environment variables, gets a new server.

A server leads a process group, to which its programs and their ranks belong. The whole group is killed when a program
fails or exceeds its time, and when the process that started the server ends.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
OUTPUT_CHARACTERS = 20_000
Variables = dict[str, str]
SAFE_THREADS = {"jemalloc_bg_thd"}
"""Names of threads with which a server may fork. The import of pyarrow starts this one, whose library handles forks."""

# --- the server ------------------------------------------------------------------------------------------------------


def serve(connection: Connection, module: str) -> None:
    """Import a module, and fork a program for each request until the connection ends. Then kill the whole group.

    A request is the name of a function of the module, and its arguments as JSON. The answer is the exit code of the
    program, and the returned value as JSON.
    """
    functions = import_module(module)
    check_threads()
    gc.freeze()  # garbage collection in a program would copy the pages of all modules
    with suppress(EOFError, ConnectionError):
        while True:
            name, arguments = connection.recv()
            with tempfile.TemporaryFile("w+") as value:
                program = os.fork()
                if not program:
                    connection.close()
                    run(functions, name, arguments, value)
                ended = os.pidfd_open(program)
                if connection in wait([connection, ended]):  # the process that started this server has ended
                    break
                os.close(ended)
                code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
                value.seek(0)
                connection.send((code, value.read()))
    os.killpg(0, signal.SIGKILL)


def check_threads() -> None:
    """Raise RuntimeError if this process has threads other than the main thread and SAFE_THREADS."""
    tasks = (task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid()))
    unsafe = sorted({(task / "comm").read_text(encoding="utf-8").strip() for task in tasks} - SAFE_THREADS)
    if unsafe:
        raise RuntimeError(f"the imports started threads, without which a fork may hang: {unsafe}")


def run(functions: ModuleType, name: str, arguments: str, value: IO[str]) -> NoReturn:
    """Call a function, write its value, and end this process at once, because the exit of torch takes 0.4 seconds."""
    code = 1
    try:
        json.dump(getattr(functions, name)(*json.loads(arguments)), value)
        value.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# --- the client ------------------------------------------------------------------------------------------------------


class Server:
    """A running server of a module, and the output of its programs and their ranks."""

    def __init__(self, module: str, environment: Variables) -> None:
        """Start a server. `environment`: all environment variables of the server and of its programs."""
        self.started_with = module, environment
        self._output, self._start = tempfile.TemporaryFile(), 0
        self._connection, other_end = Pipe()
        # -u, because buffered output of a killed process is lost.
        command = [sys.executable, "-u", "-m", "tests.adapters.server", str(other_end.fileno()), module]
        with other_end:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, pass_fds=[other_end.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output,
            )  # fmt: skip
        self.pid = self._process.pid

    def call(self, name: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Call a function of the module in a program. Raises AssertionError with the output if the program fails."""
        failure, value = f"took more than {timeout_s} s", ""
        try:
            self._connection.send((name, json.dumps(arguments)))
            if self._connection.poll(timeout_s):
                code, value = self._connection.recv()
                failure = f"ended with exit code {code}" if code else ""
        except (EOFError, ConnectionError):
            failure = "lost its server"
        assert not failure, f"{self.started_with[0]}:{name} {failure}\n{self._read_output()}"
        self._start = self._output_bytes()
        return json.loads(value)

    def _output_bytes(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _read_output(self) -> str:
        """Return the end of the output since the last program that succeeded."""
        output = os.pread(self._output.fileno(), self._output_bytes() - self._start, self._start)
        return output.decode(errors="replace")[-OUTPUT_CHARACTERS:]

    def end(self) -> None:
        """Kill the server, its programs and their ranks."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


_servers: list[Server] = []
"""The running server, if there is one."""


def call(entry: str, *arguments: Any, variables: Variables, timeout_s: float) -> Any:
    """Call a function in a fork of a server of its module, in which torch has one thread, and return its value.

    Raises AssertionError with the end of the output if the function fails.

    Args:
        entry: The function, as "module:function".
        arguments: Arguments of the function. The arguments and the returned value are passed as JSON.
        variables: Environment variables in addition to those of this process.
        timeout_s: Seconds after which the program is killed. The start of a server counts.
    """
    module, _, name = entry.partition(":")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("PYTEST_CURRENT_TEST", None)  # it differs for each test
    if not _servers or _servers[0].started_with != (module, environment):
        end()
        _servers.append(Server(module, environment))
    try:
        return _servers[0].call(name, arguments, timeout_s)
    except BaseException:  # also an interrupt by pytest-timeout
        end()
        raise


def end() -> None:
    """End the running server."""
    while _servers:
        _servers.pop().end()


def server_pid() -> int | None:
    """Return the process id of the running server."""
    return _servers[0].pid if _servers else None


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
