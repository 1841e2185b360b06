"""`ringattn verify-trainer`: silent faults of training scripts are found and named, right scripts are not blamed."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringattn import InputError
from ringattn.cli import main
from ringattn.launch.verify.command import VerifyConfig, show
from ringattn.launch.verify.comparison import TIMES, compare
from ringattn.launch.verify.observer import Observer, StopTraining, names_of_modules, plain_name
from ringattn.launch.verify.rounding import RoundsOtherwise, in_double
from tests.adapters.environments import environment
from tests.adapters.processes import ROOT, call_in_program
from tests.launch.commands import ringattn
from tests.launch.verify_runs import SCRIPT

SENTENCES = {
    "summed": "they are summed over the {ranks} ranks, not averaged. Divide the loss by {ranks}",
    "clipped sum": "they are summed over the {ranks} ranks, not averaged. Divide the loss by {ranks}",
    "averaged twice": "they are averaged over the {ranks} ranks, although the loss of each rank is already a part",
    "mean of means": "This is a mean of the ranks' means: divide the loss by the labels of all ranks",
    "local labels": "Shift labels before sharding",
    "local positions": "the ranks together use other positions than one process",
    "documents": "what remains is attention (keys of other ranks, masks, boundaries of packed documents)",
    "other data": "the ranks together read other tokens than one process",
    "one layer": "the other 23 are equal",
    "embeddings": "only embeddings differ",
    "learning rate": "the learning rate is [0.1] on one process",
    "not reduced": "they are not reduced over the ranks",
    "seeds": "differ before the first step, so the runs cannot be compared",
}
"""By fault of `faulty_trainers.py`: a part of its diagnosis, which no other fault has."""
RIGHT = ("right", "clipped right")
FAULTS = [(2, False, tuple(SENTENCES)), (3, True, ("mean of means", "local labels", "local positions", "documents"))]


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, int, bool], dict[str, Any]]:
    """Return the verdict on each fault, by the number of ranks and whether float64 was asked for."""
    result = {}
    for ranks, double, faults in FAULTS:
        found = call_in_program("tests.launch.verify_runs:verdicts", [*RIGHT, *faults], ranks, double)
        result.update({(fault, ranks, double): verdict for fault, verdict in found.items()})
    return result


@pytest.mark.slow
def test_right_scripts_are_equal(verdicts: dict[tuple[str, int, bool], dict[str, Any]]) -> None:
    for (fault, _, double), verdict in verdicts.items():
        if fault in RIGHT:
            assert verdict["equal"] and verdict["step"] == 2 and verdict["diagnosis"] == ""
            assert max(entry["error"] for entry in verdict["differences"]) <= (1e-13 if double else 1e-5)
            assert max(entry["times_rounding"] for entry in verdict["differences"]) <= TIMES / 8
            assert len(verdict["differences"]) == 24


@pytest.mark.slow
def test_each_fault_is_named_and_no_other(verdicts: dict[tuple[str, int, bool], dict[str, Any]]) -> None:
    for (fault, ranks, _), verdict in verdicts.items():
        if fault in RIGHT:
            continue
        assert not verdict["equal"] and verdict["step"] == 1, fault
        told = [sentence for sentence in SENTENCES.values() if sentence.format(ranks=ranks) in verdict["diagnosis"]]
        assert told and set(told) == {SENTENCES[fault]}, (fault, verdict["diagnosis"])
        wrong = [entry for entry in verdict["differences"] if not entry["times_rounding"] <= TIMES]
        assert wrong or fault == "not reduced"
        assert min(entry["times_rounding"] for entry in wrong) >= 1000, fault  # faults are far from the bound


@pytest.mark.slow
def test_the_figures_of_faults(verdicts: dict[tuple[str, int, bool], dict[str, Any]]) -> None:
    for fault, factor in (("summed", 2), ("clipped sum", 2), ("averaged twice", 0.5)):
        verdict = verdicts[fault, 2, False]
        assert all(entry["ratio"] == pytest.approx(factor, rel=1e-4) for entry in verdict["differences"])
        assert verdict["differences"][0]["error"] == pytest.approx(abs(factor - 1), rel=1e-3)
    weighed = "not weighed as one process weighs them: 0.37, 0.63 (their labels: 20, 34)"
    assert weighed in verdicts["mean of means", 2, False]["diagnosis"]
    assert "over 52 labels together, that of one process over 54" in verdicts["local labels", 2, False]["diagnosis"]
    attention = verdicts["documents", 2, False]["diagnosis"]
    assert "the tokens, positions and number of labels of all ranks together are those of one process" in attention
    for fault, name in (("one layer", "blocks.1.up.weight"), ("embeddings", "tokens.weight")):
        differences = verdicts[fault, 2, False]["differences"]
        assert [entry["name"] for entry in differences if entry["times_rounding"] > TIMES] == [name]
    assert verdicts["learning rate", 2, False]["what"] == "weight"
    assert verdicts["seeds", 2, False]["what"] == "before"


@pytest.mark.slow
def test_sharded_and_compiled_models_are_compared_by_name() -> None:
    for kind, verdict in call_in_program("tests.launch.verify_runs:wrapped_verdicts").items():
        assert verdict["equal"] and verdict["step"] == 2, (kind, verdict["diagnosis"])
        names = {entry["name"] for entry in verdict["differences"]}
        assert names == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}, kind
        assert 0 < max(entry["error"] for entry in verdict["differences"]) < 1e-5


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    done = ringattn("verify-trainer", "steps=2", "json=-", SCRIPT, "summed", cwd=tmp_path)
    figures = json.loads(done.stdout)
    assert done.returncode == 1 and not figures["equal"] and figures["ranks"] == 2
    assert len(figures["differences"]) == 24 and figures["losses"][1] == pytest.approx(2 * figures["losses"][0])
    assert "24 of 24 parameters differ by more than rounding" in done.stderr
    script = tmp_path / "idle.py"
    script.write_text("import sys\nprint('from the script', sys.argv[1:])\n")
    done = ringattn("verify-trainer", "verbose=true", "one='a b'", str(script), "{ranks}", "steps=2", cwd=tmp_path)
    assert done.returncode == 2 and "idle.py ended without a step of a torch.optim.Optimizer" in done.stderr


AXOLOTL = (
    "axolotl==0.19.0", "ring-flash-attn==0.1.8", "transformers==5.16.1", "huggingface_hub==1.33.0", "httpx==0.28.1",
    "httpcore==1.0.9",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "requirements", "at_fault"),
    [
        ("diffusers", ("diffusers==0.39.0",), "attn.to_q.weight"),
        ("diffusers", (), None),
        ("accelerate", ("accelerate==1.14.0",), "linear_attn.in_proj_qkvz.weight"),
        ("axolotl", AXOLOTL, "self_attn.o_proj.weight"),
        ("axolotl-single", AXOLOTL, None),
    ],
)
def test_public_faults_are_found(project: str, requirements: tuple[str, ...], at_fault: str | None) -> None:
    path = os.pathsep.join([*([str(environment(*requirements))] if requirements else []), str(ROOT)])
    verdict = call_in_program("tests.launch.verify_runs:public_verdict", project, PYTHONPATH=path)
    assert verdict["equal"] == (at_fault is None), verdict["diagnosis"]
    wrong = {entry["name"] for entry in verdict["differences"] if entry["times_rounding"] > TIMES}
    assert bool(wrong) == (at_fault is not None) == any(name.endswith(str(at_fault)) for name in wrong)
    assert verdict["step"] == (2 if at_fault is None else 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script: write the path of a Python file, or -m and a module"),
        (["ranks=1", "absent.py"], "ranks=1: must be at least 2"),
        (["dtype=bf16", "absent.py"], "dtype=bf16: choose one of script, float64"),
        (["absent.py", "ranks=1"], "absent.py: no such file"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-trainer", *words]) == 2
    assert message in capsys.readouterr().err


# --- the observer ----------------------------------------------------------------------------------------------------


def trained(observer: Observer, steps: int, clip: float | None = None) -> nn.Module:
    """Train a small model under the observer, with two micro batches a step, until it stops the training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    with observer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for number in range(1, steps + 1):
            for tokens in (torch.tensor([0, 1]), torch.tensor([1, 3])):
                F.cross_entropy(model(tokens), torch.tensor([2, -100])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            with pytest.raises(StopTraining) if number == steps else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    return model


def first_loss() -> float:
    """Return the loss of the first step of `trained`: the sum over its two micro batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    batches = torch.tensor([[0, 1], [1, 3]])
    return sum(F.cross_entropy(model(tokens)[:1], torch.tensor([2])).item() for tokens in batches)


def test_what_is_recorded_of_a_step() -> None:
    originals = Tensor.backward, F.cross_entropy, nn.utils.clip_grad_norm_, torch.optim.Optimizer.add_param_group
    observer = Observer(2)
    model = trained(observer, 2)
    assert (Tensor.backward, F.cross_entropy, nn.utils.clip_grad_norm_, torch.optim.Optimizer.add_param_group) == (
        originals
    )
    first, second = observer.records
    assert list(first["gradients"]) == ["0.weight", "1.weight", "1.bias"] == list(first["before"])
    assert second["before"] == {} and first["labels"] == 2 and first["rates"] == [0.5]
    assert first["reads"]["0"].tolist() == [1, 2, 0, 1] and second["reads"]["0"].tolist() == [1, 2, 0, 1]
    for name, parameter in model.named_parameters():
        # The last step was the second: its weights are those of the model.
        assert torch.equal(second["weights"][name]["values"], parameter.detach().flatten())
        step = first["before"][name]["values"] - 0.5 * first["gradients"][name]["values"]
        torch.testing.assert_close(first["weights"][name]["values"], step)
        torch.testing.assert_close(first["local"][name], first["gradients"][name]["values"])
    assert first["loss"] == pytest.approx(first_loss(), rel=1e-6)


def test_losses_and_labels_are_counted_once_in_float64() -> None:
    observer = Observer(1)
    with in_double():
        trained(observer, 1)
        expected = first_loss()
    (record,) = observer.records
    assert record["labels"] == 2 and record["loss"] == pytest.approx(expected, rel=1e-12)
    assert record["gradients"]["0.weight"]["values"].dtype == torch.float64


def test_gradients_are_recorded_before_clipping() -> None:
    plain, clipped = Observer(1), Observer(1)
    trained(plain, 1)
    trained(clipped, 1, clip=1e-3)
    for name, sample in plain.records[0]["gradients"].items():
        assert torch.equal(sample["values"], clipped.records[0]["gradients"][name]["values"])
        assert not torch.equal(
            plain.records[0]["weights"][name]["values"], clipped.records[0]["weights"][name]["values"]
        )


def test_names_without_wrappers() -> None:
    assert plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
    assert plain_name("base_model.model.head.weight") == "head.weight"
    inner = nn.Linear(2, 2)
    outer = nn.ModuleDict({"module": nn.ModuleDict({"head": inner})})
    assert names_of_modules()[id(inner.weight)] == "head.weight"
    assert outer is not None


# --- rounding --------------------------------------------------------------------------------------------------------


class Casts(nn.Module):
    """A layer with dtypes of its own, a float32 buffer, and a checkpointed part."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, dtype=torch.float32), nn.Linear(3, 3).to(torch.bfloat16)
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float16))
        self.seen: list[torch.dtype] = []

    def part(self, x: Tensor) -> Tensor:
        y = self.first(x).float().softmax(-1, dtype=torch.float32)
        self.seen.append(y.dtype)
        return y * y

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.part, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return self.second(y.bfloat16()) * self.scale


def test_everything_is_float64() -> None:
    with in_double():
        layer = Casts()
        x = torch.randn(2, 3, dtype=torch.float32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        out.sum().backward()
        assert layer.seen == [torch.float64] * 2  # forward, and the recomputation in backward
        assert {p.dtype for p in (*layer.parameters(), *layer.buffers(), x, out)} == {torch.float64}
        assert x.grad is not None and x.grad.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32 == torch.ones(1, dtype=torch.float32).dtype
    assert nn.Linear(1, 1, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_sums_are_rounded_otherwise_and_nothing_else() -> None:
    x = torch.rand(8, 8) + 1
    torch.manual_seed(0)
    expected, draw = x @ x, torch.rand(3)
    torch.manual_seed(0)
    with RoundsOtherwise(1) as mode:
        product, others = x @ x, (x * 3, x.clone(), x.t())
        mode.paused = True
        paused = x @ x
    assert torch.equal(draw, torch.rand(3)), "the script's random numbers"
    error = ((product - expected) / expected).abs()
    eps = torch.finfo(torch.float32).eps
    assert 0.4 * eps <= float(error.min()) and float(error.max()) <= 2 * eps
    assert torch.equal(paused, expected)
    assert all(torch.equal(a, b) for a, b in zip(others, (x * 3, x.clone(), x.t()), strict=True))


# --- the comparison --------------------------------------------------------------------------------------------------


def record(values: dict[str, list[float]], shift: float = 0.0) -> dict[str, Any]:
    """Return a step whose gradients are `values`, each multiplied by 1 + `shift`."""
    samples = {}
    for name, numbers in values.items():
        x = torch.tensor(numbers, dtype=torch.float64) * (1 + shift)
        samples[name] = {"values": x, "norm": float(x.norm()), "numel": x.numel(), "shape": tuple(x.shape)}
    return {"before": {}, "gradients": samples, "weights": {}, "local": {}, "reads": {}, "loss": 1.0, "labels": None,
            "rates": [0.1]}  # fmt: skip


VALUES = {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_the_bound_is_a_multiple_of_the_rounding_of_one_process() -> None:
    for shift, equal in ((15e-9, True), (17e-9, False), (float("nan"), False)):
        verdict = compare([record(VALUES)], [record(VALUES, 1e-9)], [[record(VALUES, shift)]] * 2)
        assert verdict.equal == equal, shift
    # A parameter that the second run happens to leave as it is has the typical rounding.
    still = record(VALUES, 1e-9)
    still["gradients"]["a"] = record(VALUES)["gradients"]["a"]
    still["gradients"]["c"] = record({"c": [1.0 + 1e-9]})["gradients"]["c"]
    one = record({**VALUES, "c": [1.0]})
    assert compare([one], [still], [[record({**VALUES, "c": [1.0]}, 10e-9)]] * 2).equal


@pytest.mark.parametrize("counts", [(1, 1), (3, 3), (2, 1)])
def test_runs_with_other_numbers_of_steps_differ(counts: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    step = record({"a": [3.0, 4.0]})
    verdict = compare([step] * 2, [step] * 2, [[step] * count for count in counts])
    assert not verdict.equal and verdict.what == "steps" and verdict.step == min(2, *counts)
    assert verdict.diagnosis.startswith(f"one process made 2 optimizer steps, the ranks {counts[0]}, {counts[1]}. ")
    show(verdict, VerifyConfig())
    printed = capsys.readouterr().out
    assert "0 of 1 parameters differ" in printed and "DIFFERENT: one process made 2 optimizer steps" in printed
    assert compare([step] * 2, [step] * 2, [[step] * 2] * 2).equal


def test_names_that_differ_are_matched_by_order() -> None:
    other = record({"inner.a": VALUES["a"], "inner.b": VALUES["b"]})
    assert compare([record(VALUES)], [record(VALUES, 1e-9)], [[other]] * 2).equal
    with pytest.raises(InputError, match=r"a has the shape \(2,\) on one process and \(1,\) over ranks"):
        compare([record(VALUES)], [record(VALUES)], [[record({"a": [1.0], "b": VALUES["b"]})]] * 2)


def test_a_gradient_that_is_missing_on_the_ranks_differs() -> None:
    verdict = compare([record(VALUES)], [record(VALUES, 1e-9)], [[record({"a": VALUES["a"]})]] * 2)
    assert not verdict.equal and verdict.differences[0].name == "b" and verdict.differences[0].own_error == 1.0
    assert "the gradients of b differ" in verdict.diagnosis or "of b are 0 times" in verdict.diagnosis


def test_float64_is_required_where_it_was_asked_for() -> None:
    coarse = record(VALUES)
    coarse["gradients"]["a"]["values"] = coarse["gradients"]["a"]["values"].float()
    with pytest.raises(InputError, match="dtype=float64: a stayed in a coarser dtype"):
        compare([coarse], [coarse], [[coarse]] * 2, double=True)
