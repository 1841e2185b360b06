"""Translate a score_mod of torch's flex_attention into options of `Ring.attention`: a softcap, ALiBi, or both.

A score_mod may be any code, so its name proves nothing. First it is evaluated on a grid of scores, with positions that
raise when they are read: a function that passes is a softcap or the identity. One that reads positions can only be
ALiBi. Its softcap follows from pairs of a query and its own key, its slopes from neighboring pairs. It then has to
agree at every pair that the mask allows, in every head, each with a drawn score.
Guarantees: a function that is not proven is refused by name, unless the caller passes `trust=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from ringattn.adapters.flex_functions import (
    TILE_TOKENS,
    PairFunction,
    ReadError,
    Tiles,
    Unread,
    checked_tiles,
    record,
    tiles_of,
)
from ringattn.adapters.flex_masks import FoundMask, met_blocks
from ringattn.errors import UnsupportedError

ROUNDING = 2.0**-22
"""How far a bias may be from slope * distance, relative: score_mods compute it in float32, in two steps or three."""


class FoundScore(NamedTuple):
    """A score_mod in the words of `Ring.attention`; `alibi_slopes`: one for each query head."""

    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


def found_score(
    score_mod: Callable[..., Tensor] | None, masks: tuple[FoundMask, ...], length: int, heads: int,
    device: torch.device, trust: bool = False,
) -> FoundScore:  # fmt: skip
    """Return what a score_mod is under these masks, one of each row of the batch.

    Raises UnsupportedError for any other, and for too many pairs to evaluate unless the caller says `trust`.
    """
    if score_mod is None or length == 0 or not masks:
        return FoundScore()
    nowhere = torch.zeros((), dtype=torch.int64).as_subclass(Unread)
    try:
        return FoundScore(_softcap(score_mod, nowhere))
    except ReadError:
        pass
    mod = _ScoreFunction(score_mod, device)
    # Where a query meets itself, ALiBi adds nothing.
    softcap = _softcap(score_mod, torch.zeros((), dtype=torch.int64, device=device))
    slopes = _slopes(mod, masks, length, heads)
    _check_pairs(mod, masks, length, slopes, softcap, trust)
    return FoundScore(softcap, tuple(slopes.tolist()) if slopes.any() else None)


def _check_pairs(
    mod: _ScoreFunction, masks: tuple[FoundMask, ...], length: int, slopes: Tensor, softcap: float | None, trust: bool
) -> None:
    """Raise UnsupportedError unless score_mod is this softcap and ALiBi at all pairs that the masks let meet."""
    device, single = mod.device, torch.zeros(1, dtype=torch.float64, device=mod.device)
    # A mask that several rows have is evaluated in the first of them, unless score_mod tells rows apart.
    rows = range(len(masks)) if mod.reads(0, single) else [masks.index(mask) for mask in dict.fromkeys(masks)]
    heads = torch.arange(len(slopes) if mod.reads(1, single) else 1, device=device)
    recording = record(mod.function, device, True)
    tiles_of_mask = _tiles_of_distances if recording is not None and recording.is_of_distance() else _tiles_of_pairs
    tiles = {row: tiles_of_mask(masks[row], length, device) for row in rows}
    tiles = checked_tiles(tiles, len(heads), trust, f"score_mod {_name(mod.function)}")
    for row, part in tiles.items():
        first, last = masks[row].ranges(length, device)
        scores = _drawn_scores(part.size, device)
        capped = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        for some_heads, q, k in part.pieces(heads):
            said = mod.on_tiles(torch.tensor(row, device=device), some_heads, q, k, scores).double()
            queries, keys, slope = q[:, None, :, None], k[:, None, None, :], slopes[some_heads][:, None, None]
            distances = (queries - keys).abs().double()
            wanted = torch.addcmul(capped, slope, distances, value=-1)
            met = (keys >= first[q][:, None, :, None]) & (keys < last[q][:, None, :, None])
            error = (said - wanted).abs_()
            wrong = ~(error <= (ROUNDING * slope.abs()) * distances) & met
            if wrong.any():  # unlikely; so the rest of the rounding that is allowed is not computed for all pairs
                # slope * key - slope * query, where that is how it is written, rounds each of the two.
                apart = 2.0**-50 * (slope * (queries + keys)).abs()
                wrong &= ~(error <= ROUNDING * slope.abs() * distances + 1e-14 * wanted.abs() + apart)
            if wrong.any():
                tile, head, i, j = wrong.nonzero()[0].tolist()
                raise _unknown(
                    mod.function,
                    f"of the score {scores[i, j]:.6g} it makes {said[tile, head, i, j]:.6g} at query "
                    f"{int(q[tile, i])}, key {int(k[tile, j])} of row {row}, head {int(some_heads[head])}, where ALiBi "
                    f"with its slope between neighbors, {slopes[some_heads[head]]:.6g}, makes "
                    f"{wanted[tile, head, i, j]:.6g}",
                )


def _tiles_of_pairs(mask: FoundMask, length: int, device: torch.device) -> Tiles:
    """Return tiles that hold all pairs of a mask."""
    size = min(TILE_TOKENS, length), min(TILE_TOKENS, length)
    return tiles_of(met_blocks(mask, length, size, device)[0], size, length)


def _tiles_of_distances(mask: FoundMask, length: int, device: torch.device) -> Tiles:
    """Return tiles that hold all distances of a mask: those of the queries with the first and the last key farthest.

    The keys of each query are a range around it, so no distance between is left out.
    """
    first, last = mask.ranges(length, device)
    places = torch.arange(length, device=device)
    starts, ends = [], []
    for q in ((places - first).argmax(), (last - places).argmax()):
        keys = torch.arange(int(first[q]), int(last[q]), TILE_TOKENS, device=device)
        starts.append(torch.stack([q.expand_as(keys), keys], 1))
        ends.append(torch.stack([q, last[q] - 1]).expand(len(keys), 2))
    return Tiles(torch.cat(starts), torch.cat(ends), (1, min(TILE_TOKENS, length)))


def _drawn_scores(size: tuple[int, int], device: torch.device) -> Tensor:
    """Draw the scores of a tile, float64: most of them moderate, some up to 100,000."""
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    moderate = 12 * torch.rand(size, generator=generator, dtype=torch.float64) - 6
    scale = 10 ** (6 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
    return torch.where(scale < 1e3, moderate, moderate.sign() * scale).to(device)


def _softcap(score_mod: Callable[..., Tensor], place: Tensor) -> float | None:
    """The softcap that a score_mod is where row, head, query and key are this number, None for the score itself."""

    def of(scores: Tensor) -> Tensor:
        return torch.vmap(lambda score: score_mod(score, place, place, place, place))(scores.to(place.device))

    with torch.inference_mode(False), torch.enable_grad(), TransformGetItemToIndex():
        try:
            cap = of(torch.tensor([1e30], dtype=torch.float64)).detach().double().cpu()
            steps = torch.linspace(-6, 6, 4097, dtype=torch.float64)
            grid = torch.cat([steps * cap.clamp(-1e4, 1e4), steps, 1e-6 * steps, 1e6 * steps])
            out = of(grid).cpu()
        except ReadError:
            raise
        except Exception as error:
            raise _unknown(score_mod, f"it could not be evaluated ({type(error).__name__}: {error})") from error
    if out.requires_grad:
        raise _unknown(score_mod, "it has a learned parameter, which would get no gradient")
    if torch.equal(out, grid):
        return None
    value = cap.item()
    capped = value * torch.tanh(grid / value)
    if not (0 < value < 1e28 and ((out - capped).abs() <= 1e-14 * capped.abs()).all()):
        raise _unknown(score_mod, "without a bias it is neither the score itself nor softcap * tanh(score / softcap)")
    return value


def _unknown(score_mod: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"score_mod {_name(score_mod)} is not what a ring computes: no score_mod, softcap * "
        f"tanh(score / softcap) with a number, and after it ALiBi, - slope[head] * abs(query - key): {why}. Masks go "
        "into block_mask"
    )


def _name(function: object) -> str:
    return repr(getattr(function, "__name__", function))


class _ScoreFunction(PairFunction):
    def __init__(self, score_mod: Callable[..., Tensor], device: torch.device) -> None:
        super().__init__(score_mod, device, lambda reason: _unknown(score_mod, f"it {reason}"))


def _slopes(mod: _ScoreFunction, masks: tuple[FoundMask, ...], length: int, heads: int) -> Tensor:
    """Of each head what the bias of neighbors says, (heads,) float64; 0 where no token meets its neighbor."""
    slopes: Tensor | None = None
    for row, mask in enumerate(masks):
        first, last = mask.ranges(length, mod.device)
        places = torch.arange(length, device=mod.device)
        # Behind or ahead, by what the mask allows: where a query meets any other key, some query meets its neighbor.
        behind, ahead = (first < places).nonzero().flatten(), (last > places + 1).nonzero().flatten()
        if not len(behind) and not len(ahead):
            continue
        q = behind[0] if len(behind) else ahead[0]
        head = torch.arange(heads, device=mod.device)
        q, k = q.expand(heads), (q + (-1 if len(behind) else 1)).expand(heads)
        zeros = torch.zeros(heads, dtype=torch.float64, device=mod.device)
        found = 0 - mod.at(zeros, torch.full_like(head, row), head, q, k).double()
        if slopes is not None and not torch.equal(found, slopes):
            raise _unknown(mod.function, f"row {row} of the batch has other slopes than those before it")
        slopes = found
    return torch.zeros(heads, dtype=torch.float64, device=mod.device) if slopes is None else slopes
