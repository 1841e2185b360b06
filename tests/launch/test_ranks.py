"""The ranks that a command starts: their failures, their end, the rendezvous of nodes, and listening on loopback."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.errors import NonFiniteError
from ringattn.launch import nodes, processes, worker
from ringattn.launch.nodes import ALONE, Meeting, Nodes, meeting
from ringattn.launch.processes import Exit, RankProcesses, RanksError, root_cause
from ringattn.launch.ranks import _environment, run_ranks_in_processes
from tests.contract.processes import free_port
from tests.launch import rank_entries
from tests.launch.commands import all_end, below, environment, soon, started

ENTRIES = "tests.launch.rank_entries"

# --- the first failure -----------------------------------------------------------------------------------------------

ADVICE = "the kernel did, because memory ran out"


def report(folder: Path, rank: int, kind: str, time_s: float) -> None:
    """Write the failure report that a failed rank writes into `folder`."""
    content = {"rank": rank, "time_s": time_s, "kind": kind, "message": "why", "refused": False, "traceback": ""}
    (folder / f"failure-{rank}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("reports", "exits", "message", "kind"),
    [
        # An error takes precedence over the loss of a peer, whichever was reported first.
        ({1: ("ValueError", 5.0)}, {1: (1, 4.0)}, "rank 1 failed first: ValueError: why", "ValueError"),
        ({0: ("PeerLostError", 1.0), 1: ("ValueError", 5.0)}, {0: (1, 1.0), 1: (1, 5.0)}, "rank 1", "ValueError"),
        ({0: ("PeerLostError", 2.0), 2: ("ClosedError", 1.0)}, {0: (1, 2.0), 2: (1, 1.0)}, "rank 2", "ClosedError"),
        # A signal takes precedence over later errors of the other ranks.
        ({}, {1: (-9, 1.0)}, f"rank 1 was killed (SIGKILL). If no user or scheduler killed it, {ADVICE}", "killed"),
        ({0: ("PeerLostError", 2.0)}, {0: (1, 2.0), 1: (-9, 1.0)}, "rank 1 was killed (SIGKILL)", "killed"),
        ({0: ("RuntimeError", 2.0)}, {0: (1, 2.0), 1: (-9, 1.0)}, "rank 1 was killed (SIGKILL)", "killed"),
        ({}, {1: (-11, 1.0)}, "rank 1 was killed (SIGSEGV)", "killed"),
        ({}, {1: (-15, 1.0)}, "rank 1 was killed (SIGTERM). This command did not send the signal", "killed"),
        ({}, {1: (-40, 1.0)}, "rank 1 was killed (signal 40)", "killed"),
        # A signal after a rank has reported a silent peer or an error is ignored.
        (
            {0: ("DeadlineError", 1.0)},
            {0: (1, 1.0), 1: (-9, 2.0)},
            "rank 0 failed first: DeadlineError",
            "DeadlineError",
        ),
        ({0: ("ValueError", 1.0)}, {0: (1, 1.0), 1: (-9, 2.0)}, "rank 0 failed first: ValueError", "ValueError"),
        ({1: ("ValueError", 1.0)}, {1: (-6, 0.9)}, "rank 1 failed first: ValueError", "ValueError"),
        # A deadline that passed because a rank had been killed is ignored.
        ({0: ("DeadlineError", 9.0)}, {0: (1, 9.0), 1: (-9, 1.0)}, "rank 1 was killed (SIGKILL)", "killed"),
        ({}, {2: (3, 2.0), 1: (7, 1.0)}, "rank 1 ended with exit code 7 and reported no error\nits last words", "exit"),
    ],
)
def test_the_first_failure_is_named(
    tmp_path: Path, reports: dict[int, Any], exits: dict[int, Any], message: str, kind: str
) -> None:
    for rank, (name, time_s) in reports.items():
        report(tmp_path, rank, name, time_s)
    for rank in range(3):
        (tmp_path / f"errors-{rank}.txt").write_text("its last words\n" if rank == 1 else "", encoding="utf-8")
    error = root_cause(tmp_path, [Exit(rank, *ended) for rank, ended in exits.items()])
    assert message in str(error) and error.kind == kind
    assert (ADVICE in str(error)) == ("SIGKILL" in message)


@pytest.mark.parametrize(
    ("error", "message", "shows_traceback"),
    [
        (NonFiniteError("step 2 of 3: its loss is nan"), "NonFiniteError: step 2 of 3: its loss is nan", False),
        (
            OSError(errno.ENOSPC, "", "a.json"),
            "OSError: a.json could not be written: No space left on device; free",
            False,
        ),
        (OSError(errno.EIO, "Input/output error"), "OSError: [Errno 5] Input/output error", True),
        (ValueError("planted"), "ValueError: planted", True),
    ],
)
def test_only_unexpected_errors_have_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, shows_traceback: bool
) -> None:
    def fail(spec: dict[str, Any]) -> None:
        raise error

    monkeypatch.setattr(rank_entries, "meet", fail)
    monkeypatch.setattr(worker, "end_with_parent", lambda parent: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(processes.LAUNCHER, "1")
    (tmp_path / "job.json").write_text(json.dumps({"entry": f"{ENTRIES}:meet", "spec": {}}))
    assert worker.main(tmp_path / "job.json") == 1
    text = str(root_cause(tmp_path, [Exit(1, 1, 0.0)]))
    assert text.startswith(f"rank 1 failed first: {message}")
    assert ("Traceback" in text) == ("\n" in text) == shows_traceback


def test_a_full_disk_of_the_reports_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "errors-0.txt").touch()
    usage = SimpleNamespace(free=processes.REPORT_BYTES - 1)
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: usage)
    full = f"reported no error, perhaps because the disk of {tmp_path.parent} is full: free some space there"
    assert full in str(root_cause(tmp_path, [Exit(0, 1, 0.0)]))
    usage.free += 1
    assert str(root_cause(tmp_path, [Exit(0, 1, 0.0)])) == "rank 0 ended with exit code 1 and reported no error"

    def write_text(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(RanksError, match=r"cannot be started, .* \(No space left on device\); free some space"):
        run_ranks_in_processes(f"{ENTRIES}:meet", {}, 2)


def start_scripts(folder: Path, *code: str) -> tuple[RankProcesses, list[int]]:
    """Start a rank for each of these Python programs, without torch. Return the ranks and their process ids."""
    ranks = RankProcesses(folder)
    for rank, lines in enumerate(code):
        ranks.start(rank, [sys.executable, "-c", f"import os, signal, time\n{lines}"], os.environ)
    return ranks, [process.pid for process in ranks._all]


def test_signals_of_the_launcher_do_not_count_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is stopped. Rank 0 reports it as silent and ends, and only then the launcher kills rank 1."""
    monkeypatch.setattr(processes, "REPORT_S", 0.3)
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    report(tmp_path, 0, "DeadlineError", time.time())
    stopped = "signal.signal(15, signal.SIG_IGN)\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)"
    ranks, pids = start_scripts(tmp_path, "raise SystemExit(1)", stopped)
    with ranks:
        assert ranks.finish(20.0)
        error = root_cause(tmp_path, ranks.exits)
    assert ranks._all[1].returncode == -signal.SIGKILL and all_end(pids)
    assert str(error).startswith("rank 0 failed first: DeadlineError")


def test_a_stopped_rank_may_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher continues a stopped rank, so that it handles SIGTERM and can write its flight record."""
    monkeypatch.setattr(processes, "REPORT_S", 0.3)
    cleans_up = (
        "def leave(*_):\n open('left', 'w').close()\n os._exit(0)\n"
        "signal.signal(15, leave)\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)"
    )
    monkeypatch.chdir(tmp_path)
    ranks, pids = start_scripts(tmp_path, "raise SystemExit(1)", cleans_up)
    with ranks:
        while "T (stopped)" not in Path(f"/proc/{pids[1]}/status").read_text():
            time.sleep(0.01)
        assert ranks.finish(20.0)
    assert (tmp_path / "left").exists()


def test_a_rank_has_no_input_and_its_own_session(tmp_path: Path) -> None:
    ranks, pids = start_scripts(tmp_path, "assert not os.read(0, 1)\nassert os.getsid(0) == os.getpid()")
    with ranks:
        assert ranks.finish(20.0) and not ranks.exits
    assert all_end(pids)


# --- no process is left ----------------------------------------------------------------------------------------------


def read_pids(folder: Path, ranks: int) -> list[int]:
    """Wait until all ranks have written their process id and that of a child. Return all process ids."""
    files = [folder / str(rank) for rank in range(ranks)]
    assert soon(lambda: all(file.exists() and file.read_text().endswith(" ") for file in files)), "did not start"
    return [int(pid) for file in files for pid in file.read_text().split()]


@pytest.mark.slow
def test_a_failure_names_the_rank_and_shows_its_traceback() -> None:
    with pytest.raises(RanksError, match="rank 1 failed first: ValueError: planted word") as raised:
        run_ranks_in_processes(f"{ENTRIES}:fail_on_rank_1", {"word": "word"}, 2, 50)
    assert "in fail_on_rank_1" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_exits_without_a_result_is_named(code: int) -> None:
    with pytest.raises(RanksError, match=rf"^rank 1 ended with exit code {code} and reported no error\nthese were"):
        run_ranks_in_processes(f"{ENTRIES}:leave_early", {"code": code}, 2, 50)


@pytest.mark.slow
def test_no_process_is_left_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: RankProcesses, limit_s: float | None) -> bool:
        read_pids(tmp_path, 2)  # wait until both ranks have started, however long that takes
        return False

    monkeypatch.setattr(RankProcesses, "finish", finish)
    with pytest.raises(RanksError, match="2 ranks did not end within 99 s"):
        run_ranks_in_processes(f"{ENTRIES}:wait_for_end", {"folder": str(tmp_path)}, 2, 99.0)
    assert all_end(read_pids(tmp_path, 2))


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    with pytest.raises(RanksError, match="rank 1 failed first: ValueError: planted word"):
        run_ranks_in_processes(f"{ENTRIES}:ignore_sigterm", {"folder": str(tmp_path)}, 2, 50)
    assert all_end(read_pids(tmp_path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        # A process that was started in the background inherits an ignored SIGINT, so install the handler again.
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ringattn.launch.ranks import _environment, run_ranks_in_processes as run\n"
        f"run('{ENTRIES}:wait_for_end', {{'folder': sys.argv[1]}}, 2, 200)"
    )
    # After SIGKILL, the launcher's folder of temporary files remains: put it into the folder of the test.
    launcher = started("-c", code, str(tmp_path), env={"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    pids, shared = read_pids(tmp_path, 2), set(os.listdir("/dev/shm"))
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode
    ranks, children = pids[::2], pids[1::2]
    assert all_end(ranks)
    if number == signal.SIGKILL:  # the kernel ends only the ranks with their launcher, not the children of the ranks
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    assert all_end(children)
    assert set(os.listdir("/dev/shm")) <= shared


# --- killed ranks of a ring ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_killed_rank_is_reported_as_killed(transport: str) -> None:
    spec = {"transport": transport, "timeout_s": 20.0, "rank": 1, "signal": int(signal.SIGKILL)}
    with pytest.raises(RanksError, match=rf"rank 1 was killed .SIGKILL.\. If no user or scheduler killed it, {ADVICE}"):
        run_ranks_in_processes(f"{ENTRIES}:meet", spec, 2, 100)


# --- nodes -----------------------------------------------------------------------------------------------------------


def meet(*machines: Nodes, ranks: tuple[int, ...] = (1, 1, 1)) -> list[str]:
    """Run the launcher of each node as a thread. Return the run id of each, or its error."""
    messages = [""] * len(machines)

    def launch(number: int) -> None:
        try:
            with meeting(machines[number], ranks[number]) as rendezvous:
                messages[number] = rendezvous.run_id
        except RanksError as error:
            messages[number] = str(error)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return messages


def node(rank: int, count: int, endpoint: str, timeout_s: float = 20.0) -> Nodes:
    return Nodes(count, rank, endpoint, timeout_s)


def test_all_nodes_receive_the_same_run_id() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    run_ids = meet(*(node(rank, 3, endpoint) for rank in (2, 0, 1)))
    assert len(set(run_ids)) == 1 and len(run_ids[0]) == 32


def test_nodes_with_contradictory_options_are_refused() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    messages = meet(node(0, 2, endpoint), node(1, 2, endpoint), ranks=(1, 2))
    assert messages == ["ranks=2 on node 1, but ranks=1 on node 0: give all nodes the same value"] * 2
    messages = meet(node(0, 3, endpoint), node(1, 3, endpoint), node(1, 3, endpoint))
    assert messages == ["node_rank=1 was given to two nodes: give each node a different number"] * 3


def test_a_missing_node_is_named() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    messages = meet(node(0, 3, endpoint, 0.5), node(2, 3, endpoint))
    assert all(text.startswith("nodes [1] of 3 did not arrive within 0.5 s: start `ringattn run`") for text in messages)
    (message,) = meet(node(1, 2, endpoint, 0.5))
    assert message.startswith(f"node 0 does not answer at {endpoint}: check") and "node_rank=0 is started" in message


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("nowhere.invalid:29400", "the host of rdzv_endpoint, nowhere.invalid, has no address"),
        ("127.0.0.1", "rdzv_endpoint=127.0.0.1: write host:port"),
        ("127.0.0.1:0", "rdzv_endpoint=127.0.0.1:0: write host:port"),
    ],
)
def test_a_wrong_endpoint_is_refused(endpoint: str, message: str) -> None:
    assert meet(node(0, 2, endpoint))[0].startswith(message)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (message,) = meet(node(0, 2, f"127.0.0.1:{port}"))
    assert message.startswith(f"the port of rdzv_endpoint, {port}, is in use on node 0")


@contextmanager
def listening(host: str, addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make `host` resolve to these addresses, let node 0 listen, and yield the address on which it listens."""
    monkeypatch.setattr(
        socket, "getaddrinfo",
        lambda _, port, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses],
    )  # fmt: skip
    with nodes._listening(host, 0) as listener:
        yield listener.getsockname()[0]


def test_node_0_listens_on_the_address_of_its_endpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening("127.0.0.2", ["127.0.0.2"], monkeypatch) as address:
        assert address == "127.0.0.2" and not capsys.readouterr().err
    # The first address is one that /etc/hosts may give this machine's name, the second is one that a router translates.
    for host, addresses in (("node0", ["127.0.1.1"]), ("node0.example", ["192.0.2.7"])):
        with listening(host, addresses, monkeypatch) as address:
            assert address == "0.0.0.0"
        assert f"{host} is not an address of this machine" in capsys.readouterr().err


def test_a_port_that_node_0_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The address is not of this machine, so node 0 listens on all interfaces, where the port is in use too.
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.7", port))]
        )
        with pytest.raises(RanksError, match=f"rdzv_endpoint, {port}, is in use on node 0: .* a different node_rank"):
            nodes._listening("node0.example", port)

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(
        RanksError, match=r"cannot listen on the port of rdzv_endpoint, 80 \(Permission denied\): choose"
    ):
        nodes._listening("node0.example", 80)


def test_ranks_of_one_machine_use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    rendezvous = Meeting("127.0.0.1", 29400, "run", lambda: None)
    variables = _environment(rendezvous, 2, ALONE, 1)
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["NCCL_SOCKET_IFNAME"] == "eth7"  # the user's setting
    assert "GLOO_SOCKET_IFNAME" not in _environment(rendezvous, 2, Nodes(2, 1, "node0:29400"), 1)


# --- processes listen only on loopback -------------------------------------------------------------------------------


LISTEN = "0A"
"""The state of a listening socket in /proc/net."""
LOOPBACK = re.compile(r"^(0{24}|0{16}F{4}0{4})?[0-9A-F]{6}7F$|^0{24}01000000$")
"""127.0.0.0/8, the same as an IPv6 address, and ::1, in the format of /proc/net: words of four bytes, each reversed."""

COMMANDS = {
    "run": "run ranks=2 tokens=64 shape=small warmup=1 repeats=1 transport=gloo",
    "run by shared memory": "run ranks=2 tokens=64 shape=small warmup=1 repeats=1 json=-",
    "sweep": "sweep out=points ranks=2 tokens=64 shape=small warmup=1 repeats=1 transport=gloo schedule=ring",
    "train": "train ranks=2 replicas=2 batch=2 model=tiny tokens=64 steps=2 checkpoint_every_steps=1 transport=gloo",
    "timeline": "timeline ranks=2 tokens=64 picture=",
    "calibrate": "calibrate ranks=2 transport=gloo rounds=1",
    "doctor": "doctor json=-",
    "demo": "demo ranks=2 steps=2 tokens=64 model=tiny",
}


def is_loopback(address: str) -> bool:
    return LOOPBACK.match(address) is not None


def listening_addresses(command: int) -> set[str]:
    """Return the addresses on which a process and its descendants listen, in the format of /proc/net."""
    sockets = set()
    for process in below(command):
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(descriptor))
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1].partition(":")[0])
    return addresses


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F")))
    assert not any(map(is_loopback, ("0" * 8, "0" * 32, "0100000A")))


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, id=name, marks=pytest.mark.slow) for name, line in COMMANDS.items()],
)
def test_commands_listen_only_on_loopback(tmp_path: Path, line: str) -> None:
    """`demo` runs `check` too. With `json=-`, the output is one document, although processes of ranks print as well."""
    variables = {name: value for name, value in environment().items() if not name.endswith("SOCKET_IFNAME")}
    with (tmp_path / "output").open("wb") as output, (tmp_path / "errors").open("wb") as errors:
        command = subprocess.Popen([sys.executable, "-m", "ringattn", *line.split()], cwd=tmp_path, env=variables,
                                   stdout=output, stderr=errors)  # fmt: skip
    addresses: set[str] = set()
    try:
        while command.poll() is None:
            addresses |= listening_addresses(command.pid)
            time.sleep(0.02)
    finally:
        command.terminate()
        command.wait()
    printed = (tmp_path / "output").read_text()
    assert command.returncode == 0, printed + (tmp_path / "errors").read_text()
    if "json=-" in line:
        figures = json.loads(printed)
        if line.startswith("run"):
            assert figures["resolved"]["transport"] == "shm" and figures["forward_ms"]["samples"] == 1
    assert addresses and all(map(is_loopback, addresses)), addresses
