"""The server that forks programs: what reaches the next program, and how a program that fails or hangs ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.adapters import server
from tests.adapters.environments import search_path
from tests.adapters.processes import forked_ranks

HERE = "tests.adapters.test_server"
pytestmark = pytest.mark.slow  # each server loads torch

# --- programs --------------------------------------------------------------------------------------------------------


def leave_traces() -> list[Any]:
    """Change whatever a program can change. Return what this process found before, and the process id of its server."""
    found = [os.environ.get("TESTS_TRACE"), hasattr(torch, "left_by_a_test"), threading.active_count()]
    found += [torch.get_num_threads(), os.getcwd(), os.getppid()]
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    os.environ["TESTS_TRACE"] = torch.left_by_a_test = "left"  # type: ignore[attr-defined]
    torch.set_num_threads(3)
    os.chdir("/")
    return found


def end_after_a_start(pid_file: str, signal_number: int, of_server: bool = False) -> None:
    """Start a process that would outlive this one. Then send a signal to this process or to its server, and sleep."""
    Path(pid_file).write_text(str(subprocess.Popen(["sleep", "60"]).pid), encoding="utf-8")
    print("printed before")
    os.kill(os.getppid() if of_server else os.getpid(), signal_number)
    time.sleep(60)


def fail_on_a_rank(pid_file: str) -> None:
    """Raise ValueError on the last of three ranks, while the others sleep."""

    def rank(number: int) -> None:
        print(f"rank {number} printed")
        if number == 0:
            Path(pid_file).write_text(str(os.getpid()), encoding="utf-8")
        if number < 2:
            time.sleep(60)
        while not Path(pid_file).exists():
            time.sleep(0.01)
        raise ValueError("planted")

    forked_ranks(3, rank)


def work(seconds: float) -> None:
    """Use this many core seconds."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def arguments_of(*arguments: Any) -> list[Any]:
    print("printed earlier")
    return list(arguments)


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    yield
    server.end()


def call(function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0, **variables: str) -> Any:
    entry = f"{HERE}:{function.__name__}"
    return server.call(entry, *arguments, variables={"PYTHONPATH": search_path(), **variables}, timeout_s=timeout_s)


def lives(pid: int) -> bool:
    """Return whether a process runs. After its end it is a zombie until its parent reads its exit code."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def check_ended(pid_file: Path) -> None:
    """Check that the process that a program started ends within ten seconds."""
    pid, until = int(pid_file.read_text(encoding="utf-8")), time.monotonic() + 10.0
    while lives(pid):
        assert time.monotonic() < until, f"process {pid} lives"
        time.sleep(0.02)


def test_nothing_reaches_the_next_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_TRACE", "first")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    *found, pid = call(leave_traces)
    assert found == ["first", False, 1, 1, str(server.ROOT)]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert call(leave_traces) == [*found, pid]
    assert not hasattr(torch, "left_by_a_test")
    monkeypatch.setenv("TESTS_TRACE", "second")  # modules may read it when they are imported
    *found, other_pid = call(leave_traces)
    assert found[0] == "second" and other_pid != pid


def test_another_module_gets_another_server(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text("import sys\ndef names(): return [*sys.modules]\n", encoding="utf-8")
    path = search_path(tmp_path)
    assert call(arguments_of, PYTHONPATH=path) == []
    names = server.call("imports:names", variables={"PYTHONPATH": path}, timeout_s=60.0)
    assert "imports" in names and HERE not in names


def test_arguments_and_values_are_json() -> None:
    assert call(arguments_of, (1, 2), {"a": None}, "ä", 0.1) == [[1, 2], {"a": None}, "ä", 0.1]


def test_a_failure_shows_the_output_and_ends_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pid_file = tmp_path / "pid"
    with pytest.raises(AssertionError, match=r"(?s)end_after_a_start ended with exit code -11\nprinted before\n"):
        call(end_after_a_start, str(pid_file), signal.SIGSEGV)
    check_ended(pid_file)
    with pytest.raises(AssertionError, match=r"(?s)end_after_a_start lost its server\nprinted before\n"):
        call(end_after_a_start, str(pid_file), signal.SIGKILL, True)
    check_ended(pid_file)
    assert call(arguments_of, 1) == [1]


def test_the_first_rank_that_fails_ends_its_peers(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)fail_on_a_rank ended with exit code 1.*ValueError: planted"
    ) as error:
        call(fail_on_a_rank, str(tmp_path / "pid"), timeout_s=30.0)
    assert "rank 2 printed" in str(error.value)
    check_ended(tmp_path / "pid")


def test_a_program_beyond_its_time_ends_with_its_group(tmp_path: Path) -> None:
    call(arguments_of)  # a server runs, so the time is that of the program
    with pytest.raises(AssertionError, match=r"end_after_a_start took more than 1.0 s\nprinted before\n"):
        call(end_after_a_start, str(tmp_path / "pid"), 0, timeout_s=1.0)
    check_ended(tmp_path / "pid")


def test_imports_that_fail_or_start_threads_are_shown(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    variables = {"PYTHONPATH": search_path(tmp_path)}
    for module, message in {"threaded": "the imports started threads", "absent": "No module named 'absent'"}.items():
        with pytest.raises(AssertionError, match=rf"(?s){module}:print lost its server.*{message}"):
            server.call(f"{module}:print", variables=variables, timeout_s=60.0)


def test_core_seconds_of_programs_count() -> None:
    call(arguments_of)
    before = running.core_s()
    call(work, 1.0)
    used = running.core_s() - before
    assert used >= 0.9
    server.end()  # then they are those of an ended child of this process
    assert running.core_s() - before >= used


def test_a_program_ends_with_the_process_that_called_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        f"from tests.adapters import server\n"
        f"server.call('{HERE}:end_after_a_start', {str(pid_file)!r}, 0, variables={{}}, timeout_s=60.0)"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=server.ROOT)
    until = time.monotonic() + 60.0
    while not (pid_file.exists() and pid_file.read_text(encoding="utf-8")):
        assert time.monotonic() < until and caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    check_ended(pid_file)
