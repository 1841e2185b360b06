"""A model over two ranks that are threads against the unmodified one in one process: outputs, loss, every gradient.

Everything is computed in float64, see `InDouble`; what a model gives at padded places is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import Ring
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers import shard_batch
from ringattn.errors import InputError
from tests.adapters.ranks import InDouble, gradients
from tests.fuzz.models.cases import TOKENS, Case
from tests.fuzz.models.tiny import line
from tests.fuzz.ranks import on_threads

RANKS = 2
TOLERANCE = 1e-8
FLOOR = 1e-4
"""Of the greatest gradient of a model, below which a parameter's own is not told from rounding of the others'."""

LEFT_OUT = {"pooler_output"}
"""Outputs that the documentation says are left out."""

SKIPPED = ("past_key_values", "cache_params", "mems", "attentions", "cross_attentions", "decoder_attentions",
           "encoder_attentions", "past_buckets_states", "state")  # fmt: skip
"""Outputs that are kept for a later call, or weights that nothing over a ring holds."""


class Verdict(NamedTuple):
    """What became of one case: exact, refused, wrong, or without a reference in one process."""

    what: str
    why: str = ""


class Result(NamedTuple):
    """Of one rank or of one process: outputs by name, the loss if any, gradients of all parameters."""

    outputs: dict[str, Tensor]
    loss: Tensor | None
    gradients: dict[str, Tensor]
    positions: Tensor


class Asked(NamedTuple):
    """Where the tokens of an output lie in one process: its dimension, or -1 for rows and tokens in one."""

    shape: torch.Size
    dim: int | None


@contextmanager
def in_double() -> Iterator[None]:
    """No number is float32, in this thread; `torch.tensor(0.5)` is not in any."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(before)


def judge(reference: Any, ours: list[Any], case: Case) -> Verdict:
    """`reference`: the unmodified model; `ours`: copies, one for each rank, on which `prepare` was called."""
    for model in (reference, *ours):
        model.train(case.trains)
    with in_double():
        before = torch.get_rng_state()
        try:
            alone = one_process(reference, case)
        except Exception as error:
            return Verdict("no reference", line(error))
        if not torch.equal(torch.get_rng_state(), before):  # as PhiMoE's routers do in training: ranks draw others
            if case.trains:
                return judge(reference, ours, replace(case, trains=False))
            return Verdict("no reference", "it draws random numbers")
        numbers = [*alone.outputs.values(), *alone.gradients.values()]
        if not all(bool(x.isfinite().all()) for x in numbers):
            return Verdict("no reference", "it is not finite")
        if not numbers:
            return Verdict("no reference", "it gives nothing to compare")
        asked = {name: Asked(x.shape, _token_dim(x.shape, case)) for name, x in alone.outputs.items()}
        found = over_ranks(ours, case, asked)
    refusals = [one for one in found if isinstance(one, BaseException)]
    if refusals:
        others = [one for one in refusals if not isinstance(one, InputError)]
        if others or len(refusals) < RANKS:
            said = "; ".join(line(one) if isinstance(one, BaseException) else "an answer" for one in found)
            return Verdict("wrong", f"not refused by name on every rank: {said}")
        return Verdict("refused", line(refusals[0], 600))
    return _compared(alone, [one for one in found if isinstance(one, Result)], asked, case)


def one_process(model: Any, case: Case) -> Result:
    """Each document, or each batch of rows, as the unmodified model takes it."""
    cuts = case.documents or [0, TOKENS]
    parts: list[dict[str, Tensor]] = []
    loss: Tensor | None = None
    for start, stop in pairwise(cuts):
        given = {k: x for k, x in case.batch.items() if k != "cu_seq_lens_q"} | case.beside
        given = {k: _slice(x, start, stop) if case.documents else x for k, x in given.items()}
        given = {k: x.clone() for k, x in given.items()}  # CTRL scales its inputs_embeds in place
        if case.documents and case.labels_count is not None:
            given["num_items_in_batch"] = case.labels_count
        out = model(**given, **case.rest)
        outputs = dict(_outputs(out))
        part = outputs.pop("loss", None)
        if part is not None:
            loss = part if loss is None else loss + part
        parts.append(outputs)
    outputs = parts[0]
    if case.documents:
        dims = {name: _token_dim(x.shape, case, cuts[1]) for name, x in outputs.items()}
        outputs = {
            name: torch.cat([part[name] for part in parts], 0 if (dims[name] or 0) < 0 else dims[name] or 0)
            for name in outputs
            if dims[name] is not None
        }
    score = loss if loss is not None else _score(outputs, case, None)
    if score is None:
        return Result({k: x.detach() for k, x in outputs.items()}, None, {}, torch.arange(TOKENS))
    return Result(
        {k: x.detach() for k, x in outputs.items()}, None if loss is None else loss.detach(),
        gradients(model, score), torch.arange(TOKENS),
    )  # fmt: skip


def over_ranks(models: list[Any], case: Case, asked: Mapping[str, Asked]) -> list[Result | BaseException]:
    """As the documentation tells users to call a model, on every rank."""

    def body(ring: Ring, options: object) -> Result:
        with InDouble():
            return on_rank(ring)

    def on_rank(ring: Ring) -> Result:
        ours = adapter.prepare(models[ring.rank])
        seq, mine = shard_batch(ring, case.batch, layout=case.layout, **({"model": ours} if case.is_told else {}))
        beside = {name: seq.shard(x, 2 if x.shape[1] != TOKENS else 1) for name, x in case.beside.items()}
        if case.labels_count is not None:
            mine["num_items_in_batch"] = case.labels_count
        with ring.activate(seq):
            out = ours(**mine, **beside, **case.rest)
        outputs = dict(_outputs(out))
        loss = outputs.pop("loss", None)
        places = seq.positions()
        score = loss if loss is not None else _score(outputs, case, asked, places)
        grads = {} if score is None else gradients(ours, score)
        return Result(
            {k: x.detach() for k, x in outputs.items()}, None if loss is None else loss.detach(), grads, places
        )

    return on_threads(body, {"ranks": RANKS, "engine": "auto", "ring": {}})


def _compared(alone: Result, ranks: list[Result], asked: Mapping[str, Asked], case: Case) -> Verdict:
    if (alone.loss is None) != any(one.loss is None for one in ranks):
        return Verdict("wrong", "a loss on one side only")
    if alone.loss is not None:
        total = torch.stack([one.loss for one in ranks if one.loss is not None]).sum()
        if (off := _off(total, alone.loss)) > TOLERANCE:
            return Verdict("wrong", f"loss off by {off:.1e}")
    for name, (shape, dim) in asked.items():
        if any(name not in one.outputs for one in ranks):
            if name not in LEFT_OUT and shape.numel() > 1:
                return Verdict("wrong", f"{name} is missing")
            continue
        whole = _joined([one.outputs[name] for one in ranks], [one.positions for one in ranks], shape, dim)
        if whole is None:
            got = [tuple(one.outputs[name].shape) for one in ranks]
            return Verdict("wrong", f"{name} has shapes {got}, in one process {tuple(shape)}")
        real = _real_of(shape, dim, case)
        for one in whole:
            if (off := _off(one * real, alone.outputs[name] * real)) > TOLERANCE:
                return Verdict("wrong", f"{name} off by {off:.1e}")
    if more := {name for one in ranks for name in one.outputs} - set(asked):
        if not case.documents:
            return Verdict("wrong", f"{', '.join(sorted(more))} only over ranks")
    if not alone.gradients:
        return Verdict("exact", "without gradients")
    floor = FLOOR * max(x.abs().max().item() for x in alone.gradients.values() if x.numel())
    if floor == 0:
        return Verdict("no reference", "all its gradients are zero")
    for name, true in alone.gradients.items():
        if not true.numel():
            continue
        error = (sum(one.gradients[name] for one in ranks) - true).abs().max().item()
        off = error / max(true.abs().max().item(), floor)
        if not off <= TOLERANCE:
            return Verdict("wrong", f"gradient of {name} off by {off:.1e}")
    return Verdict("exact")


def _joined(parts: list[Tensor], positions: list[Tensor], shape: torch.Size, dim: int | None) -> list[Tensor] | None:
    """The whole of what ranks have parts of; every rank's, where each has the whole. None where shapes do not fit."""
    if all(one.shape == shape for one in parts):
        return parts
    if dim is None:
        return None
    where, rest = max(dim, 0), list(shape)
    if dim < 0:
        parts = [
            one.unflatten(0, (-1, len(at))) if len(one) % len(at) == 0 else one
            for one, at in zip(parts, positions, strict=True)
        ]
        where, rest = 1, [shape[0] // TOKENS, TOKENS, *shape[1:]]
    whole = parts[0].new_zeros(rest)
    for one, at in zip(parts, positions, strict=True):
        if list(one.shape) != [*rest[:where], len(at), *rest[where + 1 :]]:
            return None
        whole.index_copy_(where, at, one)
    return [whole.reshape(shape)]


def _off(mine: Tensor, theirs: Tensor) -> float:
    """The greatest difference, relative to the greatest value."""
    if not mine.numel():
        return 0.0
    off = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-6)
    return float("inf") if off.isnan() else float(off)


def _outputs(out: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of an output, by name."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield prefix or "out", out
    elif isinstance(out, Mapping):
        for name, one in out.items():
            if not name.startswith(SKIPPED) and "cache" not in name:
                yield from _outputs(one, f"{prefix}.{name}" if prefix else name)
    elif isinstance(out, (tuple, list)):
        for number, one in enumerate(out):
            yield from _outputs(one, f"{prefix}.{number}" if prefix else str(number))


def _token_dim(shape: torch.Size, case: Case, tokens: int = TOKENS) -> int | None:
    rows = len(case.real)
    if len(shape) >= 2 and shape[1] == tokens:
        return 1
    if len(shape) >= 1 and shape[0] == rows * tokens:
        return -1
    return next((dim for dim, size in enumerate(shape) if size == tokens), None)


def _real_of(shape: torch.Size, dim: int | None, case: Case) -> Tensor:
    """1 where a token is real, 0 for padding, to be multiplied with an output of this shape."""
    real = case.real.reshape(len(case.real), -1, TOKENS)[:, 0]
    if dim == -1:
        return real.reshape(-1, *(1 for _ in shape[1:])).double()
    if dim is not None and dim > 0 and shape[dim - 1] == len(real):
        return real.reshape(*real.shape, *(1 for _ in shape[dim + 1 :])).double()
    return torch.ones((), dtype=torch.float64)


def _score(
    outputs: Mapping[str, Tensor], case: Case, asked: Mapping[str, Asked] | None, at: Tensor | None = None
) -> Tensor | None:
    """Random numbers, the same for a token wherever it lies, times the outputs of tokens; 0 for padding."""
    total: Tensor | None = None
    for name, x in outputs.items():
        if not x.requires_grad or (asked is not None and name not in asked):
            continue
        shape, dim = (x.shape, _token_dim(x.shape, case)) if asked is None else asked[name]
        if dim is None:
            continue
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        weights = weights * _real_of(shape, dim, case)
        if at is not None and x.shape != shape:
            if dim < 0:
                weights = weights.unflatten(0, (-1, TOKENS))[:, at].flatten(0, 1)
            else:
                weights = weights.index_select(dim, at)
        if weights.shape != x.shape:
            continue
        part = (weights * x).sum()
        total = part if total is None else total + part
    return total


def _slice(x: Any, start: int, stop: int) -> Any:
    return x[:, start:stop] if isinstance(x, Tensor) and x.dim() > 1 else x
