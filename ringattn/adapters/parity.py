"""Whether a training step on shards is the step of one process: the same loss, the same gradients.

Most mistakes of sharded training leave a loss that looks right: local positions move it in the sixth digit and the
gradients by 0.3 percent. So the same step is run twice on copies of the model in float64, over a ring of this process
alone and over the ring at hand, and every gradient is compared.
Does not know: models, hosts, optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringattn.adapters.attend import lone_sequence
from ringattn.adapters.loss import GRADIENTS
from ringattn.errors import InputError, RingError
from ringattn.sequence import Sequence

Step = Callable[[nn.Module, Sequence], Tensor]
"""What a trainer does before `backward()`: a model, and the sequence whose shards it takes -> the loss, a scalar."""

CAUSES = (
    "labels shifted on each rank (use seq.shard_labels), local position ids (use seq.positions), a mean over this "
    "rank's labels (use loss_scale), rotary frequencies that each rank chooses by its own length (RoPE dynamic, "
    "longrope), or layers that mix tokens outside of attention"
)


@dataclass(frozen=True)
class Parity:
    """How far the sharded step is from one process; the same on every rank."""

    loss: float
    """Of one process."""
    loss_error: float
    """The sharded loss, reduced like the gradients, minus it, relative to it."""
    grad_error: float
    """Norm of the difference of all gradients over their norm."""
    worst: str
    """The parameter whose gradient is furthest off, relative to its own norm."""
    worst_error: float
    ratio: float
    """The factor between the gradients that explains most of the difference."""
    advice: str
    """Empty where the step is right."""

    def __str__(self) -> str:
        """One line: the verdict, the figures, what to do."""
        verdict = "equal to one process" if not self.advice else f"NOT equal to one process: {self.advice}"
        return (
            f"{verdict} (loss {self.loss:.6f}, off by {self.loss_error:.1e}; gradients off by {self.grad_error:.1e}, "
            f"most in {self.worst}: {self.worst_error:.1e})"
        )


def parity(
    model: nn.Module, step: Step, seq: Sequence, *, gradients: str, tolerance: float = 1e-5, raises: bool = True
) -> Parity:
    """Compare `step` over `seq` with the same step over a ring of one rank. A collective call.

    `step` shards its batch by the sequence it is given, which is active then, runs the model and returns the loss it
    would call backward on; of rings it knows only the sequence's own. `gradients`: "mean" or "sum", as for
    `loss_scale`; they are reduced here. The batch must fit one process. The models are float64 copies, without FSDP or
    DDP. `tolerance`: relative, of loss and gradients; float32 inside a model leaves about 1e-6, the mistakes that
    `docs/embedding.md` lists 2e-3 and more. Raises `RingError` on every rank where they differ by more, unless `raises`
    is False.
    """
    if gradients not in GRADIENTS:
        raise InputError(f"gradients={gradients!r} is not known; choose one of {', '.join(GRADIENTS)}")
    ring = seq.ring
    alone, shared = (copy.deepcopy(model).double() for _ in range(2))
    expected = _run(step, alone, lone_sequence(seq.length, seq.documents))
    found = _run(step, shared, seq)
    pairs = {}
    for (name, one), other in zip(alone.named_parameters(), shared.parameters(), strict=True):
        if one.requires_grad:
            pairs[name] = _grad(one), _grad(other)
    ring.all_reduce([found, *(grad for _, grad in pairs.values())])
    if gradients == "mean":
        for value in (found, *(grad for _, grad in pairs.values())):
            value /= ring.world_size
    result = _compared(expected, found, pairs, ring.world_size, tolerance)
    if result.advice and raises:
        raise RingError(f"rank {ring.rank}: the sharded step is {result}")
    return result


def _run(step: Step, model: nn.Module, seq: Sequence) -> Tensor:
    """The loss, once its gradients are in the model."""
    with seq.ring.activate(seq):
        loss = step(model, seq).double()
    loss.backward()
    return loss.detach().clone()


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _compared(
    expected: Tensor, found: Tensor, pairs: dict[str, tuple[Tensor, Tensor]], ranks: int, tolerance: float
) -> Parity:
    def share(part: Tensor, whole: Tensor) -> float:
        return float(part.norm() / whole.norm().clamp_min(torch.finfo(torch.float64).tiny))

    truth, ours = (torch.cat([pair[index].flatten() for pair in pairs.values()]) for index in range(2))
    errors = {name: share(other - one, one) for name, (one, other) in pairs.items()}
    worst = max(errors, key=errors.__getitem__)
    square = truth.dot(truth)
    ratio = float(truth.dot(ours) / square) if square > 0 else 1.0
    loss_error, grad_error = share(found - expected, expected), share(ours - truth, truth)
    advice = ""
    if not (loss_error <= tolerance and grad_error <= tolerance):  # NaN is no parity either
        advice = f"usual causes: {CAUSES}"
        if share(ours - ratio * truth, truth) <= tolerance:
            advice = f"everything is {ratio:.4g} times what it should be; scale the loss by loss_scale"
            if abs(ratio * ranks - 1) <= tolerance:
                advice += f', gradients="mean" (an average over {ranks} ranks is to be undone)'
    return Parity(float(expected), loss_error, grad_error, worst, errors[worst], ratio, advice)
