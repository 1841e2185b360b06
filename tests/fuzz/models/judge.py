"""Compares a model over two ranks, which are threads, with the unmodified model in one process.

It compares outputs, the loss and every gradient in float64, see `InDouble`. It does not compare outputs at padding.
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
from ringattn.adapters.transformers.token_labels import shifts_labels
from ringattn.errors import InputError
from tests.adapters.ranks import InDouble, gradients
from tests.fuzz.models.cases import TOKENS, Case
from tests.fuzz.models.tiny import line
from tests.fuzz.ranks import on_threads

RANKS = 2
TOLERANCE = 1e-8
FLOOR = 1e-4
"""Relative to the largest gradient of a model. A smaller gradient cannot be distinguished from rounding of others."""

LEFT_OUT = {"pooler_output"}
"""Outputs that a ring leaves out, as documented."""

SKIPPED = ("past_key_values", "cache_params", "mems", "attentions", "cross_attentions", "decoder_attentions",
           "encoder_attentions", "past_buckets_states", "state")  # fmt: skip
"""Outputs that are caches for a later call, or attention weights, which no rank of a ring holds."""


class Verdict(NamedTuple):
    """The outcome of one case, and the reason: "exact", "refused", "wrong", or "no reference" in one process."""

    what: str
    why: str = ""


class Result(NamedTuple):
    """The result of one rank or of one process: outputs by name, the loss if any, gradients of all parameters."""

    outputs: dict[str, Tensor]
    loss: Tensor | None
    gradients: dict[str, Tensor]
    positions: Tensor


class TokenAxis(NamedTuple):
    """The shape of an output in one process and its token dimension; -1 if rows and tokens share one dimension."""

    shape: torch.Size
    dim: int | None


@contextmanager
def in_double() -> Iterator[None]:
    """Replace float32 by float64 in this thread (`InDouble`), and set the default dtype of all threads to float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(before)


def judge(reference: Any, ours: list[Any], case: Case) -> Verdict:
    """Run a case and return its verdict. `reference`: the unmodified model. `ours`: prepared copies, one per rank."""
    for model in (reference, *ours):
        model.train(case.trains)
    with in_double():
        before = torch.get_rng_state()
        try:
            alone = one_process(reference, case)
        except Exception as error:
            return Verdict("no reference", line(error))
        if not torch.equal(torch.get_rng_state(), before):  # PhiMoE's routers draw in training, and ranks draw others
            if case.trains:
                return judge(reference, ours, replace(case, trains=False))
            return Verdict("no reference", "it draws random numbers")
        numbers = [*alone.outputs.values(), *alone.gradients.values()]
        if not all(bool(x.isfinite().all()) for x in numbers):
            return Verdict("no reference", "it is not finite")
        if not numbers:
            return Verdict("no reference", "it returns nothing to compare")
        requested = {name: TokenAxis(x.shape, _token_dim(x.shape, case)) for name, x in alone.outputs.items()}
        results = over_ranks(ours, case, requested)
    refusals = [result for result in results if isinstance(result, BaseException)]
    if refusals:
        others = [result for result in refusals if not isinstance(result, InputError)]
        if others or len(refusals) < RANKS:
            summary = "; ".join(
                line(result) if isinstance(result, BaseException) else "an answer" for result in results
            )
            return Verdict("wrong", f"not refused by name on every rank: {summary}")
        return Verdict("refused", line(refusals[0], 600))
    return _compare(alone, [result for result in results if isinstance(result, Result)], requested, case)


def one_process(model: Any, case: Case) -> Result:
    """Return the result of the unmodified model, called once per packed document, or once with all rows."""
    cuts = case.documents or [0, TOKENS]
    parts: list[dict[str, Tensor]] = []
    loss: Tensor | None = None
    for start, stop in pairwise(cuts):
        arguments = {k: x for k, x in case.batch.items() if k != "cu_seq_lens_q"} | case.beside
        arguments = {k: _slice(x, start, stop) if case.documents else x for k, x in arguments.items()}
        arguments = {k: x.clone() for k, x in arguments.items()}  # CTRL scales its inputs_embeds in place
        count = case.labels_count(model) if case.documents else None
        if count is not None and shifts_labels(model):
            arguments["num_items_in_batch"] = count
        out = model(**arguments, **case.rest)
        outputs = dict(_outputs(out))
        part = outputs.pop("loss", None)
        if part is not None:
            if count is not None and not shifts_labels(model):  # a mean over the labels of this document
                part = part * (arguments["labels"] != -100).sum() / count
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


def over_ranks(models: list[Any], case: Case, requested: Mapping[str, TokenAxis]) -> list[Result | BaseException]:
    """Call the model on every rank as the documentation says. Return each rank's result or error."""

    def body(ring: Ring, options: object) -> Result:
        with InDouble():
            return on_rank(ring)

    def on_rank(ring: Ring) -> Result:
        ours = adapter.prepare(models[ring.rank])
        seq, local_batch = shard_batch(
            ring, case.batch, layout=case.layout, **({"model": ours} if case.is_told else {})
        )
        beside = {name: seq.shard(x, 2 if x.shape[1] != TOKENS else 1) for name, x in case.beside.items()}
        if (count := case.labels_count(ours)) is not None:
            local_batch["num_items_in_batch"] = count
        with ring.activate(seq):
            out = ours(**local_batch, **beside, **case.rest)
        outputs = dict(_outputs(out))
        loss = outputs.pop("loss", None)
        places = seq.positions()
        score = loss if loss is not None else _score(outputs, case, requested, places)
        grads = {} if score is None else gradients(ours, score)
        return Result(
            {k: x.detach() for k, x in outputs.items()}, None if loss is None else loss.detach(), grads, places
        )

    return on_threads(body, {"ranks": RANKS, "engine": "auto", "ring": {}})


def _compare(alone: Result, ranks: list[Result], requested: Mapping[str, TokenAxis], case: Case) -> Verdict:
    if (alone.loss is None) != any(result.loss is None for result in ranks):
        return Verdict("wrong", "a loss on one side only")
    if alone.loss is not None:
        total = torch.stack([result.loss for result in ranks if result.loss is not None]).sum()
        if (off := _relative_error(total, alone.loss)) > TOLERANCE:
            return Verdict("wrong", f"loss off by {off:.1e}")
    for name, (shape, dim) in requested.items():
        if any(name not in result.outputs for result in ranks):
            if name not in LEFT_OUT and shape.numel() > 1:
                return Verdict("wrong", f"{name} is missing")
            continue
        whole = _join_shards(
            [result.outputs[name] for result in ranks], [result.positions for result in ranks], shape, dim
        )
        if whole is None:
            got = [tuple(result.outputs[name].shape) for result in ranks]
            return Verdict("wrong", f"{name} has shapes {got}, in one process {tuple(shape)}")
        real = _real_of(shape, dim, case)
        for result in whole:
            if (off := _relative_error(result * real, alone.outputs[name] * real)) > TOLERANCE:
                return Verdict("wrong", f"{name} off by {off:.1e}")
    if more := {name for result in ranks for name in result.outputs} - set(requested):
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
        error = (sum(result.gradients[name] for result in ranks) - true).abs().max().item()
        off = error / max(true.abs().max().item(), floor)
        if not off <= TOLERANCE:
            return Verdict("wrong", f"gradient of {name} off by {off:.1e}")
    return Verdict("exact")


def _join_shards(
    parts: list[Tensor], positions: list[Tensor], shape: torch.Size, dim: int | None
) -> list[Tensor] | None:
    """Join the shards of an output; return the list of the values to compare.

    The list has one joined value, or each rank's value if every rank returned the whole output. A single number is a
    router loss, of which each rank returns a part. Return None if shapes do not fit.
    """
    if not shape:
        return [torch.stack(parts).sum()]
    if all(part.shape == shape for part in parts):
        return parts
    if dim is None:
        return None
    where, rest = max(dim, 0), list(shape)
    if dim < 0:
        parts = [
            part.unflatten(0, (-1, len(rows))) if len(part) % len(rows) == 0 else part
            for part, rows in zip(parts, positions, strict=True)
        ]
        where, rest = 1, [shape[0] // TOKENS, TOKENS, *shape[1:]]
    whole = parts[0].new_zeros(rest)
    for part, rows in zip(parts, positions, strict=True):
        if list(part.shape) != [*rest[:where], len(rows), *rest[where + 1 :]]:
            return None
        whole.index_copy_(where, rows, part)
    return [whole.reshape(shape)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    if not actual.numel():
        return 0.0
    off = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6)
    return float("inf") if off.isnan() else float(off)


def _outputs(out: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all floating-point tensors of an output with their names, except those in `SKIPPED`."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield prefix or "out", out
    elif isinstance(out, Mapping):
        for name, value in out.items():
            if not name.startswith(SKIPPED) and "cache" not in name:
                yield from _outputs(value, f"{prefix}.{name}" if prefix else name)
    elif isinstance(out, (tuple, list)):
        for number, value in enumerate(out):
            yield from _outputs(value, f"{prefix}.{number}" if prefix else str(number))


def _token_dim(shape: torch.Size, case: Case, tokens: int = TOKENS) -> int | None:
    rows = len(case.real)
    if len(shape) >= 2 and shape[1] == tokens:
        return 1
    if len(shape) >= 1 and shape[0] == rows * tokens:
        return -1
    return next((dim for dim, size in enumerate(shape) if size == tokens), None)


def _real_of(shape: torch.Size, dim: int | None, case: Case) -> Tensor:
    """Return 1 for real tokens and 0 for padding, in a shape that multiplies an output of this shape."""
    real = case.real.reshape(len(case.real), -1, TOKENS)[:, 0]
    if dim == -1:
        return real.reshape(-1, *(1 for _ in shape[1:])).double()
    if dim is not None and dim > 0 and shape[dim - 1] == len(real):
        return real.reshape(*real.shape, *(1 for _ in shape[dim + 1 :])).double()
    return torch.ones((), dtype=torch.float64)


def _score(
    outputs: Mapping[str, Tensor], case: Case, requested: Mapping[str, TokenAxis] | None, rows: Tensor | None = None
) -> Tensor | None:
    """Return the sum of the outputs times random weights, a loss for models without one.

    The weights of a token are the same on every rank. Those of padding are 0.
    """
    total: Tensor | None = None
    for name, x in outputs.items():
        if not x.requires_grad or (requested is not None and name not in requested):
            continue
        shape, dim = (x.shape, _token_dim(x.shape, case)) if requested is None else requested[name]
        if dim is None:
            continue
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        weights = weights * _real_of(shape, dim, case)
        if rows is not None and x.shape != shape:
            if dim < 0:
                weights = weights.unflatten(0, (-1, TOKENS))[:, rows].flatten(0, 1)
            else:
                weights = weights.index_select(dim, rows)
        if weights.shape != x.shape:
            continue
        part = (weights * x).sum()
        total = part if total is None else total + part
    return total


def _slice(x: Any, start: int, stop: int) -> Any:
    return x[:, start:stop] if isinstance(x, Tensor) and x.dim() > 1 else x
