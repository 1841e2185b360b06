"""The loss of a sharded step: its scale, and the comparison of a step with that of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringattn.adapters.attend import lone_sequence
from ringattn.errors import InputError, RingError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

# --- Scale of the loss ------------------------------------------------------------------------------------------------
# What a rank's loss is multiplied by, so that the reduced gradients are those of the one-process mean.  A rank sums
# its loss over its own labels. The mean of the whole batch divides that by the labels of *all* ranks, and a stack that
# averages gradients (DDP, FSDP) divides once more by the number of ranks, which has to be undone. A mean of the ranks'
# means is another loss, and looks fine in a log.

__all__ = ["count_labels", "loss_scale", "parity"]

GRADIENTS = ("mean", "sum")

GradientReduction = Literal["mean", "sum"]


def count_labels(
    labels: Tensor | Many[Tensor], ring: Ring, *, data_parallel: Any = None, ignore_index: int = -100
) -> int:
    """Labels that count, over all ranks of the ring and of `data_parallel`. A collective call.

    Args:
        labels: Integers of any shape, this rank's (`Sequence.shard_labels`), or those of all micro batches of a step.
        ring: The ring.
        data_parallel: The process group of the ranks that hold the same place in other rings. None: there are none.
        ignore_index: The label that does not count.

    Returns:
        Their number, the same on all ranks.

    Raises:
        RingError: What `Ring.all_reduce` raises.
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    valid = torch.zeros(1, dtype=torch.int64, device=ring.device)
    for part in parts:
        valid += (part != ignore_index).sum().to(valid.device)
    ring.all_reduce([valid])
    if data_parallel is not None:
        dist.all_reduce(valid, group=data_parallel)
    return int(valid)


def loss_scale(
    labels: Tensor | Many[Tensor],
    ring: Ring,
    *,
    gradients: GradientReduction,
    data_parallel: Any = None,
    ignore_index: int = -100,
) -> float:
    """The factor of a loss that is *summed* over this rank's labels. A collective call.

    The scaled losses of all ranks have, by the same reduction, the mean loss of the whole batch as their value.

    Args:
        labels: Integers of any shape, this rank's (`Sequence.shard_labels`), or those of all micro batches of a step.
        ring: The ring.
        gradients: What reduces gradients over the ranks of the ring and of `data_parallel` together: mean (DDP, FSDP as
            they come) or sum (`Ring.all_reduce`, FSDP2 with `set_gradient_divide_factor(1.0)` and
            `set_force_sum_reduction_for_comms(True)`).
        data_parallel: The process group of the ranks that hold the same place in other rings. None: there are none.
        ignore_index: The label that does not count.

    Returns:
        The factor; finite where there are no labels at all.

    Raises:
        InputError: `gradients` is not known.
        RingError: What `Ring.all_reduce` raises.

    Example:
        loss = F.cross_entropy(logits, labels, reduction="sum") * loss_scale(labels, ring, gradients="mean")
    """
    if gradients not in GRADIENTS:
        raise InputError(f"gradients={gradients!r} is not known; choose one of {', '.join(GRADIENTS)}")
    valid = count_labels(labels, ring, data_parallel=data_parallel, ignore_index=ignore_index)
    replicas = 1 if data_parallel is None else dist.get_world_size(data_parallel)
    return (ring.world_size * replicas if gradients == "mean" else 1) / max(1, valid)


# --- Comparison with one process --------------------------------------------------------------------------------------
# Whether a training step on shards is the step of one process: the same loss, the same gradients.  Most mistakes of
# sharded training leave a loss that looks right: local positions move it in the sixth digit and the gradients by 0.3
# percent. So the same step is run twice on copies of the model in float64, over a ring of this process alone and over
# the ring at hand, and every parameter's gradient is compared, by its own norm.

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
    """The parameter whose gradient is furthest off, relative to its own norm, of those that are judged."""
    worst_error: float
    wrong: tuple[str, ...]
    """The parameters whose own gradient differs."""
    not_judged: tuple[str, ...]
    """Those whose gradient is too small to be told from rounding: it may be zero, and it may be wrong."""
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
            + (f"; not judged, as small as rounding: {_listed(self.not_judged)}" if self.not_judged else "")
        )


def parity(
    model: nn.Module,
    step: Step,
    seq: Sequence,
    *,
    gradients: GradientReduction,
    tolerance: float = 1e-5,
    raises: bool = True,
) -> Parity:
    """Compare `step` over `seq` with the same step over a ring of one rank. A collective call.

    The batch must fit one process. The models are float64 copies, without FSDP or DDP. Their hooks run, because a hook
    may change the step. torch's random numbers continue as before the call. A parameter whose difference is
    within rounding is not judged: that is eps of the coarsest dtype in the model, times the norms of what the ranks
    add, times the root of the tokens.

    Args:
        model: The model; it stays as it is.
        step: Shards its batch by the sequence it is given, which is active then, runs the model and returns the loss it
            would call backward on; of rings it knows only the sequence's own.
        seq: The sequence of the batch.
        gradients: "mean" or "sum", as for `loss_scale`; they are reduced here.
        tolerance: Relative, of the loss, of all gradients together and of each parameter's own. float32 inside a model
            leaves about 1e-6, the mistakes that `docs/embedding.md` lists 2e-3 and more.
        raises: Raise where the two differ.

    Returns:
        How far they differ, the same on every rank.

    Raises:
        InputError: `gradients` is not known.
        RingError: The two differ and `raises` is True, on every rank; or what `step` and `Ring.all_reduce` raise.

    Example:
        print(parity(model, step, seq, gradients="mean"))
    """
    if gradients not in GRADIENTS:
        raise InputError(f"gradients={gradients!r} is not known; choose one of {', '.join(GRADIENTS)}")
    ring = seq.ring
    alone, shared = (copy.deepcopy(model).double() for _ in range(2))
    with torch.random.fork_rng(sorted({x.device for x in model.parameters() if x.is_cuda}, key=str)):
        expected, eps = _run(step, alone, lone_sequence(seq.length, seq.documents))
        found, ours = _run(step, shared, seq)
    pairs = {}
    for (name, one), other in zip(alone.named_parameters(), shared.parameters(), strict=True):
        if one.requires_grad:
            pairs[name] = _grad(one), _grad(other)
    facts = torch.zeros(ring.world_size, 2, dtype=torch.float64, device=found.device)
    facts[ring.rank, 0] = max(eps, ours)
    facts[ring.rank, 1] = math.hypot(*(norm for _, grad in pairs.values() if math.isfinite(norm := float(grad.norm()))))
    ring.all_reduce([facts, found, *(grad for _, grad in pairs.values())])
    if gradients == "mean":
        for value in (facts[:, 1], found, *(grad for _, grad in pairs.values())):
            value /= ring.world_size
    rounding = float(facts[:, 0].max() * facts[:, 1].sum()) * math.sqrt(max(seq.length, 1))
    result = _compared(expected, found, pairs, ring.world_size, tolerance, rounding)
    if result.advice and raises:
        raise RingError(f"rank {ring.rank}: the sharded step is {result}")
    return result


class _Coarsest(TorchDispatchMode):
    """The eps of the coarsest floating point dtype that operators give inside, of compiled code as far as it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = torch.finfo(torch.float64).eps

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: what is compared is the step that will run.

        Otherwise torch keeps in one flag of the process that such a mode is on. Modes of two threads that overlap leave
        it set, and from then on every call of compiled code is compiled again.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.eps = max(self.eps, torch.finfo(one.dtype).eps)
        return out


def _run(step: Step, model: nn.Module, seq: Sequence) -> tuple[Tensor, float]:
    """The loss, once its gradients are in the model, and the eps of the coarsest dtype on the way to it."""
    with _Coarsest() as seen, seq.ring.activate(seq):
        loss = step(model, seq)
    loss = loss.double()
    loss.backward()
    return loss.detach().clone(), seen.eps


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _compared(
    expected: Tensor, found: Tensor, pairs: dict[str, tuple[Tensor, Tensor]], ranks: int, tolerance: float,
    rounding: float,
) -> Parity:  # fmt: skip
    reference, ours = (torch.cat([pair[index].flatten() for pair in pairs.values()]) for index in range(2))
    errors = {name: _share(other - one, one) for name, (one, other) in pairs.items()}
    off = [name for name, error in errors.items() if not error <= tolerance]  # NaN is no parity either
    not_judged = tuple(name for name in off if float((pairs[name][1] - pairs[name][0]).norm()) <= rounding)
    wrong = tuple(name for name in off if name not in not_judged)
    judged = {name: error for name, error in errors.items() if name not in not_judged} or {"no parameter": 0.0}
    worst = max(judged, key=lambda name: math.inf if math.isnan(judged[name]) else judged[name])
    square = reference.dot(reference)
    ratio = float(reference.dot(ours) / square) if square > 0 else 1.0
    loss_error, grad_error = _share(found - expected, expected), _share(ours - reference, reference)
    advice = ""
    is_rounding = float((ours - reference).norm()) <= rounding
    if wrong or not (loss_error <= tolerance and (grad_error <= tolerance or is_rounding)):
        advice = f"usual causes: {CAUSES}"
        if wrong and len(wrong) < len(judged):
            advice = f"the gradients of {_listed(wrong)} differ, of {len(judged)} parameters; {advice}"
        if _share(ours - ratio * reference, reference) <= tolerance and abs(ratio - 1) > tolerance:
            advice = f"everything is {ratio:.4g} times what it should be; scale the loss by loss_scale"
            if abs(ratio * ranks - 1) <= tolerance:
                advice += f', gradients="mean" (an average over {ranks} ranks is to be undone)'
    return Parity(float(expected), loss_error, grad_error, worst, judged[worst], wrong, not_judged, ratio, advice)


def _share(part: Tensor, whole: Tensor) -> float:
    """0 where both are; NaN or infinite where either is not finite."""
    return float(part.norm() / whole.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
