"""The Triton engine: its suite in the interpreter, and what holds without one.

The suite (tests/interpreter/engine_cases.py) runs in one child process, so that this one stays un-interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import ringattn.engine.triton as engine_module
from ringattn.engine.base import Softmax
from ringattn.engine.select import engine_named
from ringattn.engine.triton import TritonEngine
from ringattn.errors import UnsupportedError
from ringattn.kernels.launch_call import Config
from tests.contract.engine_scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
CASES = "tests/interpreter/engine_cases.py"
HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each case of the interpreted suite, run by two children side by side: why it failed, or nothing."""
    folder = tmp_path_factory.mktemp("interpreter")
    children = []
    for half in ("test_scenario", "not test_scenario"):
        report, log = folder / f"{half}.xml", folder / f"{half}.log"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", half]
        with log.open("w") as output:
            child = subprocess.Popen(
                [*command, CASES], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=output, stderr=output
            )
        children.append((child, report, log))
    found = {}
    try:
        for child, report, log in children:
            child.wait(timeout=540)
            assert report.exists(), f"ended with {child.returncode}\n{log.read_text()}"
            for case in ElementTree.parse(report).iter("testcase"):
                why = [bad.get("message", bad.tag) for bad in case if bad.tag in ("failure", "error", "skipped")]
                found[case.get("name", "")] = "; ".join(why)
    finally:
        for child, _, _ in children:
            child.kill()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_passes_in_the_interpreter(outcomes: dict[str, str]) -> None:
    failed = {name: why for name, why in outcomes.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    scenarios = [name for name in outcomes if name.startswith("test_scenario[")]
    assert len(scenarios) == 4 * len(SCENARIOS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_carried_steps_equal_one_launch_bitwise(outcomes: dict[str, str]) -> None:
    """Two, four and eight steps in float32, float16 and bfloat16, each case by its name in the interpreted suite."""
    cases = {name: why for name, why in outcomes.items() if name.startswith("test_carried_steps_equal_one_launch")}
    assert len(cases) == 9 and not any(cases.values()), cases


def test_off_a_gpu_it_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="engine='triton' needs a CUDA device, not cpu; use engine='auto'"):
        engine_named("triton", None, HOST)


def test_on_a_gpu_it_is_chosen_by_name() -> None:
    assert engine_named("triton", 30.0, torch.device("cuda", 0)).name == "triton"


def test_without_the_package_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith(("ringattn.engine.triton", "ringattn.kernels"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match="needs the package triton, which is not installed"):
        engine_named("triton", None, torch.device("cuda", 1))


def test_tables_are_made_once_for_each_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    work = TritonEngine().prepare(SCENARIOS["zigzag"].steps[0].tiles, Softmax(0.3, 2))
    first = work.by_query(Config(16, 32, 4, 1), HOST), work.by_key(Config(16, 32, 4, 1), HOST)

    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(engine_module, "query_blocks", unwanted)
    monkeypatch.setattr(engine_module, "key_blocks", unwanted)
    # Warps and stages are no part of a table.
    again = work.by_query(Config(16, 32, 8, 3), HOST), work.by_key(Config(16, 32, 8, 3), HOST)
    assert again[0] is first[0] and again[1] is first[1] and first[0] is not first[1]
    with pytest.raises(AssertionError, match="made again"):
        work.by_query(Config(32, 16, 4, 1), HOST)


@pytest.mark.parametrize(
    ("capability", "found"), [((8, 0), 80), ((8, 7), 86), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)]
)
def test_block_sizes_of_the_nearest_architecture_below(
    capability: tuple[int, int], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert engine_module.architecture.__wrapped__(torch.device("cuda", 0)) == found


def test_a_gpu_without_block_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedError, match="from sm_80 on, not sm_75; use engine='plain'"):
        engine_module.architecture.__wrapped__(torch.device("cuda", 0))
