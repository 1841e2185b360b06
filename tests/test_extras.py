"""The library without the packages of its extras, and the message of a command whose package is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringattn import cli
from ringattn.launch.doctor import doctor
from ringattn.launch.doctor.probes import WARNING, Finding
from ringattn.launch.options import advice

ROOT = Path(__file__).resolve().parents[1]
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('hydra', 'omegaconf', 'rich', 'matplotlib', 'jinja2', 'submitit'):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
LIBRARY = """
import torch
import ringattn
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.testing import run_ranks

torch.manual_seed(0)
x = torch.randn(1, 40, 4, 8, dtype=torch.float64)
layer = ringattn.RingMultiheadAttention(32, 4, causal=True).double()
dilated = ringattn.RingDilatedAttention([10, 40], [1, 2], causal=True)

def on_rank(ring):
    seq = ring.sequence(40, layout="zigzag")
    q, tokens = seq.shard(x, dim=1), seq.shard(x.flatten(2), dim=1)
    with ring.activate(seq):
        heads_first = q.transpose(1, 2)
        hosts = ring_sdpa(heads_first, heads_first, heads_first, is_causal=True).transpose(1, 2)
    found = ring.attention(q, q, q, seq, causal=True), hosts, layer(tokens, seq), dilated(q, q, q, seq)
    print(ring.explain(seq, q=q, causal=True)) if ring.rank == 0 else None
    return [seq.gather(one.detach()) for one in found]

one, two = run_ranks(1, on_rank)[0], run_ranks(2, on_rank)[0]
print(max(float((a - b).abs().max()) for a, b in zip(one, two)))
"""


def run_without_packages(code: str, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process that cannot import any package of the extras."""
    return subprocess.run(
        [sys.executable, "-c", ABSENT + code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.slow
def test_the_library_needs_no_extra() -> None:
    done = run_without_packages(LIBRARY)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1e-14


@pytest.mark.slow
def test_the_doctor_needs_no_extra() -> None:
    done = run_without_packages("from ringattn.cli import main; sys.exit(main(['doctor', 'json=-']))")
    record = json.loads(done.stdout)
    assert done.returncode == 0 and record["passed"] and len(record["ranks"]) == 2, done.stderr


@pytest.mark.slow
def test_commands_name_the_missing_package() -> None:
    commands = "run tokens=64", "run -m tokens=64,96", "sweep tokens=64,96", "plan preset=7b", "report .", "explain"
    code = "from ringattn.cli import main\nfor words in sys.argv[1:]: print(main(words.split()))"
    done = run_without_packages(code, *commands)
    assert done.stdout.split() == ["2"] * len(commands), done.stderr
    needs = r"needs (hydra|rich), which is not installed: pip install 'ringattn\[launch\]'\n"
    begun = {name: f"ringattn {name}: {line}\n" for name, line in cli.STARTS.items()}
    names = [command.split()[0] for command in commands]
    expected = "".join(f"{begun.get(name, '')}ringattn {name}: {needs}" for name in names)
    assert re.fullmatch(expected, done.stderr), done.stderr


def test_a_missing_hydra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert cli.main(["run", "tokens=64"]) == 2
    message = "ringattn run: needs hydra, which is not installed: pip install 'ringattn[launch]'\n"
    assert capsys.readouterr().err == f"ringattn run: {cli.STARTS['run']}\n{message}"


def test_packages_of_no_extra_get_no_advice() -> None:
    assert advice(ModuleNotFoundError("x", name="submitit.core")) == (
        "needs submitit, which is not installed: pip install 'ringattn[slurm]'"
    )
    assert advice(ModuleNotFoundError("x", name="torch")) is advice(ModuleNotFoundError("x")) is None


def test_the_doctors_lines_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    doctor._shown([Finding("NCCL", WARNING, "is old", "renew it", "it is slow")], {}, [])
    lines = "NCCL           warning  is old", "                        it is slow", "                        renew it"
    assert capsys.readouterr().out == "\n".join([*lines, "1 warning"]) + "\n"
