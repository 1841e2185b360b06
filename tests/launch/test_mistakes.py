"""The mistakes that users are most likely to make, each made as a user would: an exit code, and what to do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringattn import cli
from ringattn.launch.measure import run
from ringattn.launch.measure.environment import code_version
from ringattn.launch.measure.points import opened
from tests.contract.processes import free_port
from tests.launch.test_run import ROOT, ringattn

SMALL = ("tokens=64", "shape=small", "repeats=1", "warmup=1")
INSIDE = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""What torchrun sets for rank 0 of 4; the mistakes are found before anybody meets."""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("sweep out=/proc/nowhere tokens=64,128", "out=/proc/nowhere: cannot be written"),
        ("sweeep ranks=1,2", "'sweeep' is not a command; did you mean sweep?"),
    ],
)
def test_mistakes_in_words(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    printed = capsys.readouterr()
    assert told in printed.err and not printed.out


@pytest.mark.slow
def test_the_command_exits_with_the_code() -> None:
    done = ringattn("run", "shedule=ring")
    assert done.returncode == 2 and "shedule: no such key; did you mean schedule?" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("main", "words", "told"),
    [
        (run.main, ["ranks=8", "tokens=64"], "ranks=8: torchrun started 4; leave ranks out"),
        (run.main, ["tokens=64,128"], "without torchrun, for it starts its own ranks"),
        (cli.main, ["sweep", "tokens=64,128"], "run it without torchrun"),
    ],
)
def test_mistakes_under_torchrun(
    main: Callable[[list[str]], int], words: list[str], told: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2 and told in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(words) == 2 and ("sweep" in words or not capsys.readouterr().err)  # said once, not by every rank


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_an_exit_code() -> None:
    done = ringattn("run", "ranks=8", "tokens=64", env=INSIDE)
    assert done.returncode == 2 and "torchrun started 4; leave ranks out" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ranks=2", "transport=nccl"], "transport='nccl' needs a CUDA device, and torch finds none; use gloo"),
        (["engine=triton"], "engine='triton' "),
    ],
)
def test_what_this_machine_cannot_do(words: list[str], told: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine can")
    done = ringattn("run", *words, *SMALL)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_host_that_nobody_can_reach() -> None:
    meeting = "nnodes=2", "node_rank=1", "timeout_s=2"
    for host in ("127.0.0.1", "no.such.host.invalid"):
        port = free_port()
        done = ringattn("run", *meeting, f"rdzv_endpoint={host}:{port}", *SMALL)
        assert done.returncode == 1
        assert f"node 0 does not answer at {host}:{port}: check the host and port" in done.stderr


@pytest.mark.slow
def test_a_node_that_waits_alone() -> None:
    done = ringattn("run", "nnodes=2", f"rdzv_endpoint=127.0.0.1:{free_port()}", "timeout_s=2", *SMALL)
    assert done.returncode == 1 and "nodes [1] of 2 did not arrive within 2 s: start `ringattn run`" in done.stderr


@pytest.mark.slow
def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        meeting = f"rdzv_endpoint=127.0.0.1:{taken.getsockname()[1]}"
        done = ringattn("run", meeting, "timeout_s=2", *SMALL)
    assert done.returncode == 1 and "is in use on node 0: choose another" in done.stderr


@pytest.mark.slow
def test_a_missing_nccl(tmp_path: Path) -> None:
    # A GPU and no libnccl: torch says that there is a GPU, and no file is found under any of the library's names.
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "from ringattn.transport import location\n"
        "from ringattn.transport.nccl import library\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.set_device = lambda device: None\n"
        "torch.cuda.device_count, torch.cuda.current_device = lambda: 1, lambda: 0\n"
        "location.torch_gpu = lambda index: location.Gpu('a GPU', None)\n"
        "library.SONAME, library.WHEEL = 'libnone.so.2', 'none.such'\n"
        "import ringattn\n"
        "try:\n    ringattn.Ring(transport='nccl', timeout_s=5)\n"
        "except ringattn.errors.RingError as error:\n    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 1 and "UnsupportedError: no libnccl in this process" in done.stderr
    assert "install a CUDA build" in done.stderr and "`ringattn[cu13]`" in done.stderr


@pytest.mark.slow
def test_the_folder_of_another_sweep(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.claim(["tokens=64,128"], ["0123456789ab"], code_version())
    done = ringattn("sweep", f"out={tmp_path}", *SMALL, "seed=1,2")
    assert done.returncode == 2 and "holds the points of another sweep (tokens=64,128)" in done.stderr
    assert "give this sweep a folder of its own with out=" in done.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ringattn", "run", "ranks=2", "tokens=2048", "repeats=100000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RINGATTN_FLIGHT_DIR": str(tmp_path)}
    running = subprocess.Popen(words, cwd=ROOT, env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1)  # fmt: skip
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("pass 1 "):
            break
    victim = next(pid for pid, rank in ranks_below(running.pid) if rank == "1")
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 1 and time.monotonic() - start < 60
    assert "rank 1 was killed (SIGKILL)" in errors and "use fewer tokens" in errors
    (left,) = tmp_path.iterdir()  # by the other rank
    assert left.name == "flight-0.json" and json.loads(left.read_text())["exchanges"] > 0
    assert cli.main(["flight", str(tmp_path)]) == 1


def ranks_below(parent: int) -> list[tuple[int, str]]:
    """(process, RANK) of the workers that `parent` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"ringattn.launch.worker" in words and above == parent:
                variables = (folder / "environ").read_bytes().split(b"\0")
                found += [(int(folder.name), one[5:].decode()) for one in variables if one.startswith(b"RANK=")]
        except OSError:
            continue  # ended meanwhile
    return found
