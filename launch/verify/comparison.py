"""Comparison of the recorded steps of three runs: one process, one process that rounds otherwise, and several ranks.

Rule: the difference of a gradient between several ranks and one process is more than rounding if its norm exceeds
`TIMES` the difference between the two runs on one process. If this difference is unusually small for a parameter, the
typical one counts: the median over parameters, relative to the norm. Weights are compared by the same rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ringattn.adapters.loss import listed
from ringattn.errors import InputError
from ringattn.launch.verify.rounding import COARSE

TIMES = 16.0
"""How many times as far as rounding in one process a gradient may be off."""
FACTOR_DIGITS = 1e-2
"""A factor is constant if no gradient is further from it than this part of its difference, or than rounding."""
POSITION_LIKE = re.compile(r"pos|wpe|rotary|rope", re.IGNORECASE)
EMBEDDING_LIKE = re.compile(r"emb|wte|wpe|pos|rotary|tok", re.IGNORECASE)

Record = Mapping[str, Any]
"""One step of one process, as `observer` saves it."""


@dataclass(frozen=True)
class Difference:
    """How far the gradient (or weight) of one parameter is from one process."""

    name: str
    error: float
    """The norm of the difference, relative to the largest norm of all parameters."""
    own_error: float
    """The same, relative to the norm of this parameter's own gradient."""
    times_rounding: float
    """The norm of the difference, relative to what rounding explains; different if above `TIMES`."""
    ratio: float | None
    """The factor between the gradients, if one factor explains the difference."""

    @property
    def differs(self) -> bool:
        return not self.times_rounding <= TIMES  # NaN differs too


@dataclass(frozen=True)
class Verdict:
    """The first step that differs, or the last one that all runs made if none does."""

    equal: bool
    step: int
    """The number of the step, from 1."""
    what: str
    """What differs there: gradient, weight, before (the weights before the first step), or steps (their number)."""
    losses: tuple[float | None, float | None]
    """The loss of one process, and the mean of the ranks' losses."""
    differences: list[Difference] = field(default_factory=list)
    """Of every parameter, the largest first."""
    diagnosis: str = ""


def compare(
    one: Sequence[Record], otherwise: Sequence[Record], ranks: Sequence[Sequence[Record]], double: bool = False
) -> Verdict:
    """Return the first step at which the ranks differ from one process, with its diagnosis.

    Args:
        one: The steps of the run on one process.
        otherwise: Those of the run on one process that rounds otherwise.
        ranks: Those of each rank.
        double: Raise if a parameter is not float64.

    Raises:
        InputError: The parameters are not the same, or not in float64 although `double`.
    """
    verdict = Verdict(True, 0, "gradient", (None, None))
    for number, (first, rounded, *others) in enumerate(zip(one, otherwise, *ranks, strict=False), 1):
        losses = first["loss"], _mean([other["loss"] for other in others])
        for what in ("before", "gradients", "weights"):
            if what == "before" and number > 1:
                continue
            sides = [_aligned(first[what], side) for side in (rounded[what], *(other[what] for other in others))]
            if double:
                _check_double(first[what])
            differences = _differences(first[what], sides[0], _united(sides[1:]))
            spread = [] if what == "before" else _spread(first[what], sides[0], sides[1:])
            wrong = [difference for difference in differences if difference.differs]
            if wrong or spread:
                if what == "before":
                    diagnosis = f"{_which('weights', wrong, differences)} differ {BEFORE}"
                elif spread:
                    diagnosis = f"the ranks differ among each other in the {what} of {listed(spread)}: {SPREAD}"
                elif what == "gradients":
                    diagnosis = _diagnosis(first, others, differences)
                else:
                    diagnosis = _of_weights(first, others, _which("weights", wrong, differences))
                return Verdict(False, number, what.removesuffix("s"), losses, differences, diagnosis)
            if what == "gradients":
                verdict = Verdict(True, number, "gradient", losses, differences)
    counts = [len(steps) for steps in ranks]
    if {*counts} != {len(one)}:
        diagnosis = f"one process made {len(one)} optimizer steps, the ranks {', '.join(map(str, counts))}. {STEPS}"
        return replace(verdict, equal=False, what="steps", diagnosis=diagnosis)
    return verdict


BEFORE = (
    "before the first step, so the runs cannot be compared: set the seed before the model is made, on every rank the "
    "same, and load the same checkpoint"
)
STEPS = (
    "Compare how the script counts its steps: the data of a process, the batch size and the accumulation of gradients"
)
SPREAD = (
    "they are not reduced over the ranks. Wrap the model in DDP or FSDP, or call all_reduce on every gradient after "
    "backward"
)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None


def _aligned(first: Mapping[str, Any], side: Mapping[str, Any]) -> dict[str, Any]:
    """Return the samples of `side` under the names of `first`. Other names must be of the same shapes, in order."""
    for name in first.keys() & side.keys():
        if first[name]["shape"] != side[name]["shape"]:
            raise InputError(
                f"{name} has the shape {first[name]['shape']} on one process and {side[name]['shape']} over ranks; "
                "shards that are not DTensors cannot be compared, as of FSDP version 1"
            )
    missing = [name for name in first if name not in side]
    unknown = [name for name in side if name not in first]
    if [first[name]["shape"] for name in missing] != [side[name]["shape"] for name in unknown]:
        return dict(side)
    renamed = dict(zip(unknown, missing, strict=True))
    return {renamed.get(name, name): sample for name, sample in side.items()}


def _united(sides: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples of the first rank that has each parameter: with pipelines, a rank has some."""
    return {name: sample for side in reversed(sides) for name, sample in side.items()}


def _check_double(samples: Mapping[str, Any]) -> None:
    coarse = [name for name, sample in samples.items() if sample["values"].dtype in COARSE]
    if coarse:
        raise InputError(f"dtype=float64: {listed(coarse)} stayed in a coarser dtype; run without dtype=float64")


def _vector(samples: Mapping[str, Any], name: str, like: Any) -> Tensor:
    return (
        samples[name]["values"].double() if name in samples else torch.zeros_like(like["values"], dtype=torch.float64)
    )


def _norm(values: Tensor, sample: Any) -> float:
    """Return the norm of a whole tensor from that of its sampled values."""
    return float(values.norm()) * math.sqrt(sample["numel"] / max(1, values.numel()))


def _rounding(first: Mapping[str, Any], rounded: Mapping[str, Any]) -> dict[str, float]:
    """Return how far rounding moves each parameter: between the two runs on one process, at least the typical share."""
    moved = {name: _norm(_vector(rounded, name, x) - x["values"].double(), x) for name, x in first.items()}
    shares = [moved[name] / x["norm"] for name, x in first.items() if x["norm"] > 0]
    typical = median(shares) if shares else 0.0
    return {
        name: max(moved[name], typical * x["norm"], torch.finfo(x["values"].dtype).eps * x["norm"])
        for name, x in first.items()
        if x["values"].is_floating_point()
    }


def _differences(first: Mapping[str, Any], rounded: Mapping[str, Any], shared: Mapping[str, Any]) -> list[Difference]:
    rounding, largest = _rounding(first, rounded), max((x["norm"] for x in first.values()), default=0.0)
    result = []
    for name in {**first, **shared}:
        like = first.get(name, shared.get(name))
        reference, actual = _vector(first, name, like), _vector(shared, name, like)
        off = _norm(actual - reference, like)
        if not math.isnan(off):  # norms are over all values, also of a sample
            off = max(off, abs(shared.get(name, {"norm": 0.0})["norm"] - first.get(name, {"norm": 0.0})["norm"]))
        own = first.get(name, {"norm": 0.0})["norm"]
        result.append(
            Difference(name, _divided(off, largest), _divided(off, own), _divided(off, rounding.get(name, 0.0)),
                       _ratio(reference, actual, rounding.get(name, 0.0)))
        )  # fmt: skip
    return sorted(result, key=lambda d: -math.inf if math.isnan(d.error) else -d.error)


def _divided(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


def _ratio(reference: Tensor, actual: Tensor, rounding: float) -> float | None:
    """Return the factor of `reference` that is nearest to `actual`, or None if the two are not parallel."""
    square = float(reference.dot(reference))
    if square == 0:
        return None
    ratio = float(reference.dot(actual)) / square
    rest = float((actual - ratio * reference).norm())
    allowed = max(TIMES * rounding * max(1.0, abs(ratio)), FACTOR_DIGITS * abs(ratio - 1) * math.sqrt(square))
    return ratio if rest <= allowed else None


def _spread(first: Mapping[str, Any], rounded: Mapping[str, Any], sides: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters that are not the same on all ranks."""
    rounding = _rounding(first, rounded)
    return [
        name
        for name, x in first.items()
        if len(held := [_vector(side, name, x) for side in sides if name in side]) > 1
        and any(_norm(other - held[0], x) > TIMES * rounding.get(name, 0.0) for other in held[1:])
    ]


# --- causes ----------------------------------------------------------------------------------------------------------


def _which(what: str, wrong: Sequence[Difference], differences: Sequence[Difference]) -> str:
    return f"all {what}" if len(wrong) == len(differences) else f"the {what} of {listed([d.name for d in wrong])}"


def _of_weights(first: Record, others: Sequence[Record], which: str) -> str:
    rates = first["rates"], others[0]["rates"]
    start = f"the gradients are equal, but {which} differ after the step: "
    if rates[0] != rates[1]:
        return start + f"the learning rate is {rates[0]} on one process and {rates[1]} over ranks"
    return start + "compare clipping (each rank may clip by the norm of its own shard) and the optimizer's settings"


def _diagnosis(first: Record, others: Sequence[Record], differences: Sequence[Difference]) -> str:
    """Return the cause of wrong gradients in one step, as far as the records of the ranks show it."""
    ranks, wrong = len(others), [difference for difference in differences if difference.differs]
    names, right = [d.name for d in wrong], len(differences) - len(wrong)
    which = _which("gradients", wrong, differences)
    factors = [difference.ratio for difference in wrong if difference.ratio is not None]
    if len(factors) == len(wrong) and max(factors) - min(factors) <= FACTOR_DIGITS * abs(factors[0]):
        factor = factors[0]
        start = f"constant factor: {which} are {factor:.4g} times those of one process"
        if abs(factor / ranks - 1) <= FACTOR_DIGITS:
            return f"{start}: they are summed over the {ranks} ranks, not averaged. Divide the loss by {ranks}"
        if abs(factor * ranks - 1) <= FACTOR_DIGITS:
            return (
                f"{start}: they are averaged over the {ranks} ranks, although the loss of each rank is already a part "
                f"of the whole. Multiply the loss by {ranks}, or sum the gradients"
            )
        return f"{start}. Compare how the loss and the gradients are divided"
    start = f"{which} differ, without a constant factor: "
    seen, cleared = _reads(first, others), []
    for kind, cause in CAUSES.items():
        tables = [name for name in seen if bool(POSITION_LIKE.search(name)) == (kind == "positions")]
        if off := [name for name in tables if seen[name] is False]:
            return f"{start}{cause} (read by {listed(off)})"
        cleared += [kind] if tables and all(seen[name] for name in tables) else []
    labels = [record["labels"] for record in (first, *others)]
    if all(count is not None for count in labels):
        total = sum(labels[1:])
        if total not in (labels[0], labels[0] * ranks):
            return (
                f"{start}the losses of the ranks are over {total} labels together, that of one process over "
                f"{labels[0]}. Shift labels before sharding: a shard cannot know the first label of the next one"
            )
        cleared.append("number of labels")
    if (weights := _weights_of_ranks(first, others, names)) is not None:
        right_weights = ", ".join(f"{weight:.3g}" for weight in weights)
        counts = "" if None in labels else f" (their labels: {', '.join(map(str, labels[1:]))})"
        return (
            f"{start}each rank's own gradient is right, but the ranks are not weighed as one process weighs them: "
            f"{right_weights}{counts}. This is a mean of the ranks' means: divide the loss by the labels of all ranks"
        )
    if right and all(EMBEDDING_LIKE.search(name) for name in names):
        return f"{start}only embeddings differ. Look at how tokens and positions are sharded and how ties are reduced"
    if right:
        return f"{start}the other {right} are equal. Look at what only these layers do"
    *most, last = cleared or [""]
    kinds = f"{', '.join(most)} and {last}" if most else last
    known = f"the {kinds} of all ranks together are those of one process; " if cleared else ""
    unknown = [kind for kind in (*CAUSES, "number of labels") if kind not in cleared]
    unseen = f" Not observed: {', '.join(unknown)}." if unknown else ""
    return (
        f"{start}{known}what remains is attention (keys of other ranks, masks, boundaries of packed documents), or "
        f"another layer that mixes tokens.{unseen}"
    )


CAUSES = {
    "tokens": "the ranks together read other tokens than one process. Compare the batches, the seeds of their order, "
    "and what is cut off or padded",
    "positions": "the ranks together use other positions than one process. A shard must keep the positions of the "
    "whole text, not count from 0",
}


def _reads(first: Record, others: Sequence[Record]) -> dict[str, bool | None]:
    """Return, for each embedding and kind of position, whether the ranks together read the indices of one process.

    Their counts may be a multiple of those of one process, because ranks may repeat what they read. The count of one
    token may differ: ranks may pad to other lengths. Positions are other ones if some occur in only one of the runs. If
    only their counts differ, the value is None, for not known.
    """
    result: dict[str, bool | None] = {}
    for name, counts in first["reads"].items():
        parts = [other["reads"][name] for other in others if name in other["reads"]]
        if not parts:
            continue
        size = max(len(counts), *map(len, parts))
        expected, *padded = (torch.nn.functional.pad(part, (0, size - len(part))) for part in (counts, *parts))
        total = torch.stack(padded).sum(0)
        multiples = {*range(1, len(others) + 1), round(int(total.sum()) / max(1, int(expected.sum())))}
        off = min(int((total != multiple * expected).sum()) for multiple in multiples)
        if not POSITION_LIKE.search(name):
            result[name] = off <= 1
        else:
            result[name] = True if not off else None if torch.equal(total > 0, expected > 0) else False
    return result


def _weights_of_ranks(first: Record, others: Sequence[Record], wrong: Sequence[str]) -> list[float] | None:
    """Return the weights by which the ranks' own gradients add up to that of one process; None if there are none.

    The ranks' own gradients are those before any reduction. Those of parameters before the last attention also contain
    the losses of other ranks, so one of the `wrong` parameters for which the weights exist is enough. It needs many
    more values than there are weights. The weights are relative to their sum; equal ones are no explanation.
    """
    for name in wrong:
        if name not in first["gradients"]:
            continue
        sample, count = first["gradients"][name], len(others)
        target = sample["values"].double()
        if count < 2 or target.numel() < LEAST_VALUES * count or not all(name in other["local"] for other in others):
            continue
        parts = torch.stack([other["local"][name].double() for other in others], 1)
        weights = torch.linalg.lstsq(parts, target[:, None]).solution[:, 0]
        rest, total = float((parts @ weights - target).norm() / target.norm()), float(weights.sum())
        shares = [float(weight) / total for weight in weights] if total else []
        is_uneven = any(abs(share * count - 1) > FACTOR_DIGITS for share in shares)
        if rest <= math.sqrt(torch.finfo(sample["values"].dtype).eps) and is_uneven:
            return shares
    return None


LEAST_VALUES = 16
"""Values of a gradient for each weight that is fitted to it."""
