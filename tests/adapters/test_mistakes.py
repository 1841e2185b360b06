"""Mistakes in sharded training after which the loss looks right: each is impossible, or reported by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ringattn import InputError, Ring, RingError, Sequence
from ringattn.adapters.attend import attend
from ringattn.adapters.context import sequence_of
from ringattn.adapters.loss import Parity, _Coarsest, count_labels, loss_scale, parity
from ringattn.adapters.pair_functions import _Recorder
from ringattn.bench.storage_meter import StorageMeter
from ringattn.launch.train.config import ModelConfig
from ringattn.launch.train.model import Transformer
from ringattn.testing import run_ranks

TOKENS = torch.randint(256, (2, 37), generator=torch.Generator().manual_seed(3))
PROMPT = 15
"""Tokens that have no label, so that ranks have different numbers of labels."""


def model() -> Transformer:
    return Transformer(ModelConfig(2, 32, 4, 2, 48), 256, torch.float64, seed=1)


def attends(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(sequence_of(), q, k, v, causal=True)


def learned() -> Tensor:
    tokens = TOKENS.clone()
    tokens[:, :PROMPT] = -100
    return tokens


def logits_of(net: nn.Module, seq: Sequence, positions: Tensor | None = None) -> Tensor:
    logits = net(seq.shard(TOKENS), seq.positions() if positions is None else positions, attends)
    assert isinstance(logits, Tensor)
    return logits.flatten(0, 1)


def shifted_locally(seq: Sequence) -> Tensor:
    """Return the labels of a shard, shifted within the shard as a model would do it."""
    return F.pad(seq.shard(learned())[:, 1:], (0, 1), value=-100).flatten()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def right(net: nn.Module, seq: Sequence, gradients: str) -> Tensor:
    labels = seq.shard_labels(learned()).flatten()
    return summed(logits_of(net, seq), labels) * loss_scale(labels, seq.ring, gradients=gradients)


def without_the_ranks(net: nn.Module, seq: Sequence) -> Tensor:
    return right(net, seq, "sum")


def mean_of_means(net: nn.Module, seq: Sequence) -> Tensor:
    labels = seq.shard_labels(learned()).flatten()
    return summed(logits_of(net, seq), labels) / (labels != -100).sum().clamp(min=1)


def local_labels(net: nn.Module, seq: Sequence) -> Tensor:
    labels = shifted_locally(seq)
    return summed(logits_of(net, seq), labels) * loss_scale(labels, seq.ring, gradients="mean")


def local_positions(net: nn.Module, seq: Sequence) -> Tensor:
    labels = seq.shard_labels(learned()).flatten()
    logits = logits_of(net, seq, torch.arange(seq.counts[seq.ring.rank]))
    return summed(logits, labels) * loss_scale(labels, seq.ring, gradients="mean")


def over(ranks: int, layout: str, step: Callable[..., Tensor], gradients: str = "mean", **options: Any) -> Parity:
    """Run `parity` on all ranks, check that every rank has the same verdict, and return it."""

    def body(ring: Ring) -> Parity:
        return parity(model(), step, ring.sequence(37, layout=layout), gradients=gradients, **options)

    first, *others = run_ranks(ranks, body)
    assert all(str(result) == str(first) for result in others)
    return first


def test_a_step_draws_the_same_random_numbers_in_both_runs() -> None:
    result = over(1, "zigzag", lambda net, seq: right(net, seq, "mean") * torch.rand(()))
    assert result.advice == "" and result.loss_error < 1e-13


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_right_step_is_the_step_of_one_process(ranks: int, layout: str, gradients: str) -> None:
    result = over(ranks, layout, lambda net, seq: right(net, seq, gradients), gradients)
    assert result.advice == "" and result.loss_error < 1e-13 and result.grad_error < 1e-12
    assert result.loss == pytest.approx(5.55, abs=0.2) and str(result).startswith("equal to one process (loss 5.")


@pytest.mark.parametrize(
    ("step", "layout", "least"),
    [
        (mean_of_means, "zigzag", 1e-2),
        (mean_of_means, "contiguous", 1e-2),
        (local_labels, "zigzag", 1e-2),
        (local_labels, "contiguous", 1e-2),
        (local_positions, "zigzag", 1e-4),
    ],
)
def test_a_mistake_is_found(step: Callable[..., Tensor], layout: str, least: float) -> None:
    result = over(2, layout, step, raises=False)
    assert result.grad_error > least and "usual causes: labels shifted on each rank" in result.advice
    with pytest.raises(RingError, match=r"the sharded step is NOT equal to one process.*use seq\.positions"):
        over(2, layout, step)


def test_a_factor_is_named() -> None:
    result = over(4, "zigzag", without_the_ranks, raises=False)
    assert result.ratio == pytest.approx(0.25, rel=1e-12) and result.grad_error == pytest.approx(0.75, rel=1e-12)
    assert (
        'all gradients are 0.25 times their correct size; scale the loss by loss_scale, gradients="mean"'
        in result.advice
    )
    twice = over(2, "zigzag", lambda net, seq: right(net, seq, "mean"), "sum", raises=False)
    assert "all gradients are 2 times their correct size; scale the loss by loss_scale" in twice.advice


def test_only_one_parameter_is_wrong() -> None:
    """A layer whose gradient is lost on one rank is named."""

    def step(net: nn.Module, seq: Sequence) -> Tensor:
        if seq.ring.world_size == 2 and seq.ring.rank == 1:
            net.norm.requires_grad_(False)
        return right(net, seq, "mean")

    def body(ring: Ring) -> str:
        seen = model()
        try:
            return parity(seen, step, ring.sequence(37), gradients="mean", raises=False).worst
        finally:
            assert all(weight.requires_grad for weight in seen.parameters())

    assert run_ranks(2, body)[0] == "norm.weight"


class Faint(nn.Module):
    """A model with extra parameters whose gradients are small, zero by the symmetry of softmax, or absent."""

    def __init__(self, single: bool = False) -> None:
        super().__init__()
        self.net, self.single = model(), single
        self.faint, self.unused = nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.ones(3))
        self.key_bias = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k + self.key_bias, v)

        logits: Tensor = self.net(tokens, positions, biased) * (1 + 1e-8 * (self.faint - 1).sum())
        return logits.float().double() if self.single else logits


def faintly(gradients: Callable[[nn.Module, Ring], None], single: bool = False) -> Parity:
    """Return the `parity` of `Faint` with a correct step, if `gradients` changes its gradients on two ranks."""

    def step(net: nn.Module, seq: Sequence) -> Tensor:
        if seq.ring.world_size > 1:
            gradients(net, seq.ring)
        return right(net, seq, "mean")

    def body(ring: Ring) -> Parity:
        return parity(Faint(single), step, ring.sequence(37), gradients="mean", raises=False)

    first, second = run_ranks(2, body)
    assert str(first) == str(second)
    return first


def scaled(name: str, factor: float) -> Callable[[nn.Module, Ring], None]:
    def spoil(net: nn.Module, ring: Ring) -> None:
        net.get_parameter(name).register_hook(lambda grad: grad * factor)

    return spoil


def test_a_small_gradient_is_judged_by_its_own_norm() -> None:
    """A gradient 1e-8 times as large as the others and wrong by 110 percent is reported.

    If rounding is as large as the gradient, `parity` does not judge it.
    """
    result = faintly(scaled("faint", 2.1))
    assert result.wrong == ("faint",) == (result.worst,) and result.worst_error == pytest.approx(1.1, rel=1e-6)
    assert result.grad_error < 1e-5 and "the gradients of faint differ, of " in result.advice
    assert str(result).startswith("NOT equal to one process")
    for factor, names in ((2.1, ("faint", "key_bias")), (1.0, ("key_bias",))):
        coarse = faintly(scaled("faint", factor), single=True)
        assert coarse.advice == "" and coarse.wrong == () and coarse.not_judged == names, coarse
    assert "; not compared, because they are as small as rounding errors: key_bias" in str(coarse)


def test_a_gradient_of_zero_is_equal_or_not_judged() -> None:
    result = faintly(lambda net, ring: None)
    assert result.advice == "" and result.not_judged == ("key_bias",) and result.worst_error < 1e-6
    assert "; not compared, because they are as small as rounding errors: key_bias" in str(result)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["faint", "net.norm.weight"])
def test_a_gradient_that_is_not_finite_differs(name: str, value: float) -> None:
    result = faintly(scaled(name, value))
    assert result.wrong == (name,) == (result.worst,) and name in result.advice and name not in result.not_judged


def test_ranks_without_a_label_take_part() -> None:
    def body(ring: Ring) -> tuple[int, float, float]:
        labels = torch.full((2, 5), -100)
        if ring.rank == 2:
            labels[0, :3] = 1
        none = loss_scale(torch.full((3,), -100), ring, gradients="mean")
        micro = [labels, labels]
        return count_labels(micro, ring), loss_scale(labels, ring, gradients="mean"), none

    assert run_ranks(3, body) == [(6, 1.0, 3.0)] * 3


def test_an_unknown_reduction_is_refused() -> None:
    with Ring() as ring, pytest.raises(InputError, match="gradients='average' is not known; choose one of mean, sum"):
        loss_scale(torch.zeros(1), ring, gradients="average")
    with Ring() as ring, pytest.raises(InputError, match="gradients='average' is not known"):
        parity(model(), lambda net, seq: right(net, seq, "sum"), ring.sequence(37), gradients="average")


@pytest.mark.parametrize("make", [_Coarsest, _Recorder])
def test_overlapping_modes_of_two_threads_leave_compiled_code_compiled(make: Callable[[], Any]) -> None:
    """Compiled code stays compiled, although torch keeps whether a mode is active in flags of the whole process.

    A mode saves the flags at entry and restores them at exit.
    """
    ran = [threading.Event() for _ in range(3)]

    def overlapping() -> None:
        ran[0].wait()
        with StorageMeter() if make is _Coarsest else make():
            ran[1].set()
            ran[2].wait()

    thread = threading.Thread(target=overlapping)
    thread.start()
    with make():
        ran[0].set()
        ran[1].wait()
    ran[2].set()
    thread.join()
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(lambda x: x * 2, backend=counter)
    torch._dynamo.reset()
    for _ in range(3):
        with _Coarsest():
            run(torch.ones(3))
    assert counter.frame_count == 1
