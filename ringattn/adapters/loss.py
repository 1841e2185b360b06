"""The loss of a sharded step: its scale, log-probabilities, and a comparison with the same step on one process."""

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
from ringattn.gradients import once_differentiable
from ringattn.ring import Ring
from ringattn.sequence import Sequence

# --- Scale of the loss ------------------------------------------------------------------------------------------------
# The factor of a rank's loss that makes the reduced gradients those of the mean loss on one process. A rank sums its
# loss over its own labels. The mean over the whole batch divides this sum by the labels of *all* ranks. A stack that
# averages gradients (DDP, FSDP) also divides by the number of ranks, which the factor has to undo. A mean of the ranks'
# means is a different loss, but the logged values look plausible.

__all__ = ["count_labels", "loss_scale", "parity", "sum_documents", "token_log_probs"]

GRADIENTS = ("mean", "sum")

GradientReduction = Literal["mean", "sum"]


def count_labels(
    labels: Tensor | Many[Tensor], ring: Ring, *, data_parallel: Any = None, ignore_index: int = -100
) -> int:
    """Count the labels other than `ignore_index` on all ranks of the ring and of `data_parallel`. A collective call.

    Args:
        labels: This rank's labels (`Sequence.shard_labels`), integers of any shape; or a list with the labels of each
            micro batch of a step.
        ring: The ring.
        data_parallel: The process group of the ranks with the same number in other rings. None: there is one ring.
        ignore_index: Labels with this value are not counted.

    Returns:
        The number of labels, the same on all ranks.

    Raises:
        RingError: What `Ring.all_reduce` raises.
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    # The counts stay on the device until the end, because `int` synchronizes with the host. So there is one
    # synchronization for all micro batches.
    valid = torch.zeros(1, dtype=torch.int64, device=ring.device)
    for part in parts:
        # In uint8, torch compares with -100 as if it were 156.
        valid += (part.long() != ignore_index).sum().to(valid.device)
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
    """Return the factor for a loss that is *summed* over this rank's labels. A collective call.

    If the scaled losses of all ranks are reduced in the same way as gradients, the result is the mean loss of the
    batch.

    Args:
        labels: This rank's labels (`Sequence.shard_labels`), integers of any shape; or a list with the labels of each
            micro batch of a step.
        ring: The ring.
        gradients: How gradients are reduced over the ranks of the ring and of `data_parallel`: mean (the default of DDP
            and FSDP) or sum (`Ring.all_reduce`, or FSDP2 with `set_gradient_divide_factor(1.0)` and
            `set_force_sum_reduction_for_comms(True)`).
        data_parallel: The process group of the ranks with the same number in other rings. None: there is one ring.
        ignore_index: Labels with this value are not counted.

    Returns:
        The factor. It is finite even if no rank has labels.

    Raises:
        InputError: `gradients` is neither mean nor sum.
        RingError: What `Ring.all_reduce` raises.

    Example:
        loss = F.cross_entropy(logits, labels, reduction="sum") * loss_scale(labels, ring, gradients="mean")
    """
    if gradients not in GRADIENTS:
        raise InputError(f"gradients={gradients!r} is not known; choose one of {', '.join(GRADIENTS)}")
    valid = count_labels(labels, ring, data_parallel=data_parallel, ignore_index=ignore_index)
    replicas = 1 if data_parallel is None else dist.get_world_size(data_parallel)
    return (ring.world_size * replicas if gradients == "mean" else 1) / max(1, valid)


# --- Log-probabilities ------------------------------------------------------------------------------------------------
# Losses of reinforcement and preference learning (GRPO, DPO) are functions of the log-probabilities of tokens, or of
# their sums over documents. Logits stay on the rank of their token.

ROWS_AT_A_TIME = 1024
"""Rows of logits whose probabilities exist at a time."""


def token_log_probs(logits: Tensor, labels: Tensor, seq: Sequence, *, ignore_index: int = -100) -> Tensor:
    """Return the log-probability of each label under this rank's logits; differentiable. Not a collective call.

    The computation is in float32, or in float64 for float64 logits. Forward and backward process a part of the rows at
    a time, so no second tensor of the size of the logits is made, except their gradient.

    Args:
        logits: This rank's logits.
        labels: This rank's labels, already shifted (`Sequence.shard_labels`).
        seq: The sequence of the tokens.
        ignore_index: The log-probability of a label with this value is 0.

    Shape:
        logits: (batch, tokens, vocabulary)
        labels: (batch, tokens)

    Returns:
        (batch, tokens), float32 or float64.

    Raises:
        InputError: On all ranks: the shapes do not fit each other or this rank's number of tokens; or the labels are
            not integers, or one other than `ignore_index` is negative or not less than the vocabulary.

    Example:
        log_probs = token_log_probs(model(seq.shard(tokens)), seq.shard_labels(tokens), seq)
    """
    tokens = seq.counts[seq.ring.rank]
    with seq.ring.refused_by_all():
        if logits.dim() != 3 or labels.shape != logits.shape[:2] or labels.shape[1] != tokens:
            raise InputError(
                f"rank {seq.ring.rank}: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must be (batch, "
                f"tokens, vocabulary) and (batch, tokens), with this rank's {tokens} tokens"
            )
        flat_labels = int64_labels("labels", labels).flatten()
        index = first_outside(flat_labels, logits.shape[2], ignore_index)
        if index is not None:
            row, token = divmod(index, tokens)
            raise InputError(
                f"rank {seq.ring.rank}: label {int(flat_labels[index])} of row {row}, position "
                f"{int(seq.positions()[token])}, is neither in the vocabulary of {logits.shape[2]} tokens nor "
                f"ignore_index={ignore_index}; pass the ignore_index of the labels (-100 in shard_labels if not set) "
                "and logits of the whole vocabulary"
            )
    result: Tensor = LabelLogProbs.apply(logits.flatten(0, 1), flat_labels, ignore_index)
    return result.unflatten(0, labels.shape)


def int64_labels(name: str, labels: Tensor) -> Tensor:
    """Return labels or ids as int64. Raises `InputError`, with their `name`, unless they are integers."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"{name} must be integers, got {labels.dtype}; give it {name}.long()")
    return labels.long()  # torch takes uint8 indices for a mask, and compares uint8 with -100 as if it were 156


def first_outside(labels: Tensor, vocabulary: int, ignore_index: int | None) -> int | None:
    """Return the index of the first label that is counted but not in the vocabulary, or None. `labels`: (labels,).

    As an index, a negative label would read another token without an error. A label that is too large would end the
    CUDA context.
    """
    outside = (labels < 0) | (labels >= vocabulary)
    if ignore_index is not None:
        outside &= labels != ignore_index
    # One reduction on the device, and one synchronization with the host, before any work on logits.
    return int(outside.nonzero()[0]) if outside.any() else None


class LabelLogProbs(torch.autograd.Function):
    """The log-probabilities of labels: logits (rows, vocabulary) and labels (labels,), int64, to (labels,).

    `labels`: those other than `ignore_index` are in the vocabulary (see `first_outside`). `ignore_index`: the label
    whose log-probability is 0, or None. `rows`: the row of each label; None: row i has label i.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int | None, rows: Tensor | None = None
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
        indices = torch.where(counts, labels, 0)
        lse = torch.cat([part.to(dtype).logsumexp(1) for part in logits.split(ROWS_AT_A_TIME)] or [logits.new_zeros(0)])
        rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
        ctx.save_for_backward(logits, indices, counts, lse, rows)
        return torch.where(counts, logits[rows, indices].to(dtype) - lse[rows], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, indices, counts, lse, rows = ctx.saved_tensors
        scale = torch.where(counts, grad, 0.0)
        of_rows = torch.zeros_like(lse).index_add_(0, rows, scale)
        has_label = torch.zeros_like(lse, dtype=torch.bool).index_put_((rows,), counts, accumulate=True)
        grad_logits = torch.empty_like(logits)
        # d log p(label) / d logit = 1 at the label, minus the probability.
        for start in range(0, len(logits), ROWS_AT_A_TIME):
            block = slice(start, start + ROWS_AT_A_TIME)
            part = (logits[block].to(lse.dtype) - lse[block, None]).exp_().mul_(-of_rows[block, None])
            part[~has_label[block]] = 0  # also where the logits of an ignored row are NaN
            inside = (rows >= start) & (rows < start + len(part))
            part.index_put_((torch.where(inside, rows - start, 0), indices), torch.where(inside, scale, 0.0), True)
            grad_logits[block] = part
        return grad_logits, None, None, None


def sum_documents(values: Tensor, seq: Sequence) -> Tensor:
    """Sum a value per token over each document, on all ranks; differentiable. A collective call.

    Compute the same loss from the result on every rank. The gradients of a rank are then its tokens' part of the
    gradient of one process: sum them over ranks, or multiply the loss by `ring.world_size` if they are averaged.

    Args:
        values: One value for each of this rank's tokens, for example `token_log_probs`.
        seq: The sequence of the tokens. A sequence without documents is one document.

    Shape:
        values: (batch, tokens)

    Returns:
        (batch, documents), the same on all ranks.

    Raises:
        InputError: On all ranks: the number of tokens is not this rank's.
        RingError: What `Ring.all_reduce` raises.

    Example:
        margin = sum_documents(token_log_probs(logits, labels, seq) - reference, seq)
    """
    tokens = seq.counts[seq.ring.rank]
    with seq.ring.refused_by_all():
        if values.dim() != 2 or values.shape[1] != tokens:
            raise InputError(
                f"rank {seq.ring.rank}: values {tuple(values.shape)} must be (batch, tokens), with this rank's "
                f"{tokens} tokens"
            )
    cuts = torch.tensor((seq.documents or (0, seq.length))[1:], device=values.device)
    documents = torch.bucketize(seq.positions().to(values.device), cuts, right=True)
    sums = values.new_zeros(len(values), len(cuts)).index_add(1, documents, values)
    result: Tensor = SumOverRanks.apply(sums, seq.ring)
    return result


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks. The gradient passes through unchanged, because every rank computes the whole loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        total = x.clone()
        ring.all_reduce([total])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# --- Comparison with one process --------------------------------------------------------------------------------------
# `parity` checks that a training step on shards has the loss and gradients of the step on one process. Most mistakes in
# sharded training leave a loss that looks right: local positions change it in the sixth digit and the gradients by 0.3
# percent. So the same step runs twice on float64 copies of the model, over a ring of one rank and over the given ring.
# Every parameter's gradient is then compared, relative to its norm.

Step = Callable[[nn.Module, Sequence], Tensor]
"""A trainer's step before `backward()`: takes a model and the sequence to shard by, and returns the scalar loss."""

CAUSES = (
    "labels shifted on each rank (use seq.shard_labels), local position ids (use seq.positions), a mean over this "
    "rank's labels (use loss_scale), rotary frequencies that each rank chooses by its own length (RoPE dynamic, "
    "longrope), or layers that mix tokens outside of attention"
)


@dataclass(frozen=True)
class Parity:
    """The difference between the sharded step and the step on one process; the same on every rank."""

    loss: float
    """The loss of one process."""
    loss_error: float
    """The sharded loss, reduced like the gradients, minus `loss`, relative to `loss`."""
    grad_error: float
    """Norm of the difference of all gradients, relative to their norm."""
    worst: str
    """Among the judged parameters, the one whose gradient differs most relative to its norm."""
    worst_error: float
    wrong: tuple[str, ...]
    """Parameters whose gradient differs."""
    not_judged: tuple[str, ...]
    """Parameters whose difference is within rounding: the gradient may be zero, or it may be wrong."""
    ratio: float
    """The factor between the gradients that explains most of the difference."""
    advice: str
    """Empty if the step is right."""

    def __str__(self) -> str:
        """Return one line with the verdict, the figures and advice."""
        verdict = "equal to one process" if not self.advice else f"NOT equal to one process: {self.advice}"
        return (
            f"{verdict} (loss {self.loss:.6f}, off by {self.loss_error:.1e}; gradients off by {self.grad_error:.1e}, "
            f"most in {self.worst}: {self.worst_error:.1e})"
            + (
                f"; not compared, because they are as small as rounding errors: {listed(self.not_judged)}"
                if self.not_judged
                else ""
            )
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
    may change the step. torch's random state is the same after the call as before. A parameter whose difference is
    within rounding is not judged. The bound is eps of the coarsest dtype in the model, times the sum of the ranks'
    gradient norms, times the square root of the tokens.

    Args:
        model: The model; it is not changed.
        step: Shards its batch by the given sequence, which is active, runs the model, and returns the loss that the
            trainer would call backward on. It must use the ring of the sequence and no other.
        seq: The sequence of the batch.
        gradients: "mean" or "sum", as for `loss_scale`. This function does the reduction.
        tolerance: The relative tolerance of the loss, of all gradients together and of each parameter's gradient.
            float32 inside a model causes errors of about 1e-6; the mistakes in `docs/embedding.md` cause 2e-3 and more.
        raises: Raise if the two steps differ.

    Returns:
        The differences, the same on every rank.

    Raises:
        InputError: `gradients` is neither mean nor sum.
        RingError: On every rank: the steps differ and `raises` is True. Also what `step` and `Ring.all_reduce` raise.

    Example:
        print(parity(model, step, seq, gradients="mean"))
    """
    if gradients not in GRADIENTS:
        raise InputError(f"gradients={gradients!r} is not known; choose one of {', '.join(GRADIENTS)}")
    ring = seq.ring
    lone_model, sharded_model = (copy.deepcopy(model).double() for _ in range(2))
    # Each run begins with the same random state, so that a step that draws one number for all ranks draws it twice.
    devices = sorted({x.device for x in model.parameters() if x.is_cuda}, key=str)
    with torch.random.fork_rng(devices):
        expected, eps = _run(step, lone_model, lone_sequence(seq.length, seq.documents))
    with torch.random.fork_rng(devices):
        sharded_loss, sharded_eps = _run(step, sharded_model, seq)
    pairs = {}
    for (name, parameter), sharded_parameter in zip(
        lone_model.named_parameters(), sharded_model.parameters(), strict=True
    ):
        if parameter.requires_grad:
            pairs[name] = _grad(parameter), _grad(sharded_parameter)
    # One all-reduce carries everything. Each rank's eps and norm go to its own row, so that summing only collects them.
    facts = torch.zeros(ring.world_size, 2, dtype=torch.float64, device=sharded_loss.device)
    facts[ring.rank, 0] = max(eps, sharded_eps)
    facts[ring.rank, 1] = math.hypot(*(norm for _, grad in pairs.values() if math.isfinite(norm := float(grad.norm()))))
    ring.all_reduce([facts, sharded_loss, *(grad for _, grad in pairs.values())])
    # Average the gradients in place, as DDP or FSDP would. The loss and the bound of rounding scale in the same way.
    if gradients == "mean":
        for value in (facts[:, 1], sharded_loss, *(grad for _, grad in pairs.values())):
            value /= ring.world_size
    rounding = float(facts[:, 0].max() * facts[:, 1].sum()) * math.sqrt(max(seq.length, 1))
    result = _compared(expected, sharded_loss, pairs, ring.world_size, tolerance, rounding)
    if result.advice and raises:
        raise RingError(f"rank {ring.rank}: the sharded step is {result}")
    return result


class _Coarsest(TorchDispatchMode):
    """A mode that records the largest eps of the floating-point dtypes of operator results.

    Compiled code may not dispatch all of its operators, and then the mode does not see their results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = torch.finfo(torch.float64).eps

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled, because the step that will run is the one to compare.

        Otherwise torch records in a process-wide flag that a dispatch mode is active. Overlapping modes of two threads
        leave the flag set, and every later call of compiled code recompiles.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return out


def _run(step: Step, model: nn.Module, seq: Sequence) -> tuple[Tensor, float]:
    """Run forward and backward. Return the loss, and the eps of the coarsest dtype in forward."""
    with _Coarsest() as seen, seq.ring.activate(seq):
        loss = step(model, seq)
    loss = loss.double()
    loss.backward()
    return loss.detach().clone(), seen.eps


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _compared(
    expected: Tensor, sharded_loss: Tensor, pairs: dict[str, tuple[Tensor, Tensor]], ranks: int, tolerance: float,
    rounding: float,
) -> Parity:  # fmt: skip
    reference, sharded = (torch.cat([pair[index].flatten() for pair in pairs.values()]) for index in range(2))
    errors = {
        name: relative_norm(sharded_grad - expected_grad, expected_grad)
        for name, (expected_grad, sharded_grad) in pairs.items()
    }
    off = [name for name, error in errors.items() if not error <= tolerance]  # NaN is no parity either
    not_judged = tuple(name for name in off if float((pairs[name][1] - pairs[name][0]).norm()) <= rounding)
    wrong = tuple(name for name in off if name not in not_judged)
    judged = {name: error for name, error in errors.items() if name not in not_judged} or {"no parameter": 0.0}
    # `max` skips a NaN unless it comes first, because every comparison with NaN is false.
    worst = max(judged, key=lambda name: math.inf if math.isnan(judged[name]) else judged[name])
    # The factor of the reference that is nearest to the sharded gradients in least squares.
    square = reference.dot(reference)
    ratio = float(reference.dot(sharded) / square) if square > 0 else 1.0
    loss_error, grad_error = (
        relative_norm(sharded_loss - expected, expected),
        relative_norm(sharded - reference, reference),
    )
    advice = ""
    is_rounding = float((sharded - reference).norm()) <= rounding
    if wrong or not (loss_error <= tolerance and (grad_error <= tolerance or is_rounding)):
        advice = f"usual causes: {CAUSES}"
        if wrong and len(wrong) < len(judged):
            advice = f"the gradients of {listed(wrong)} differ, of {len(judged)} parameters; {advice}"
        # If one factor explains all gradients, the scale of the loss is wrong, and the computation is right.
        if relative_norm(sharded - ratio * reference, reference) <= tolerance and abs(ratio - 1) > tolerance:
            advice = f"all gradients are {ratio:.4g} times their correct size; scale the loss by loss_scale"
            if abs(ratio * ranks - 1) <= tolerance:
                advice += f', gradients="mean" (it undoes the average over {ranks} ranks)'
    return Parity(float(expected), loss_error, grad_error, worst, judged[worst], wrong, not_judged, ratio, advice)


def relative_norm(part: Tensor, whole: Tensor) -> float:
    """Return |part| / |whole|: 0 if both are 0, NaN or infinite if either is not finite."""
    return float(part.norm() / whole.norm().clamp_min(torch.finfo(torch.float64).tiny))


def listed(names: Many[str]) -> str:
    """Return the first eight names, and the number of the others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
