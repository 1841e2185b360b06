"""What a score_mod of torch's flex_attention says, in the words of `Ring.attention`: a softcap, ALiBi, or both.

A score_mod may be any code, so nothing is read off its name. First it is evaluated on a grid of scores, with places
that nothing can be made of: what stands this is a softcap, or nothing. One that reads places can only be ALiBi. Its
softcap is found where a query meets itself, and its slopes are those between neighbors. It has to agree at the pairs
that the mask lets meet: at all of a short sequence; of a long one at all keys, in every head, of the queries that see
the most, at the ends of every row's keys, and at a drawn sample.
Guarantees: what is not proven is refused, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from ringattn.adapters import flex_masks
from ringattn.adapters.flex_masks import FoundMask, compared
from ringattn.errors import UnsupportedError

ROUNDING = 2.0**-22
"""How far a bias may be from slope * distance, relative: score_mods compute it in float32, in two steps or three."""


class FoundScore(NamedTuple):
    """A score_mod in the words of `Ring.attention`; `alibi_slopes`: one for each query head."""

    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


def found_score(
    score_mod: Callable[..., Tensor] | None, masks: tuple[FoundMask, ...], length: int, heads: int, device: torch.device
) -> FoundScore:
    """What a score_mod is under these masks, one of each row of the batch. Raises `UnsupportedError` for any other."""
    if score_mod is None or length == 0 or not masks:
        return FoundScore()
    nowhere = torch.zeros((), dtype=torch.int64).as_subclass(_Unread)
    try:
        return FoundScore(_softcap(score_mod, nowhere))
    except _ReadError:
        pass
    mod = _Scores(score_mod, device)
    # Where a query meets itself, ALiBi adds nothing.
    softcap = _softcap(score_mod, torch.zeros((), dtype=torch.int64, device=device))
    slopes = _slopes(mod, masks, length, heads)
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    for mask in dict.fromkeys(masks):
        rows = torch.tensor([row for row, one in enumerate(masks) if one == mask])
        for head, q, k in _pairs(mask, length, heads, device, generator):
            row = rows[torch.randint(len(rows), (len(q),), generator=generator)].to(device)
            score = (12 * torch.rand(len(q), generator=generator, dtype=torch.float64) - 6).to(device)
            bias = -slopes[head] * (q - k).abs()
            wanted = (score if softcap is None else softcap * torch.tanh(score / softcap)) + bias
            said = mod(score, row, head, q, k)
            # slope * key - slope * query, where that is how it is written, rounds each of the two.
            apart = 2.0**-50 * (slopes[head] * (q + k)).abs()
            wrong = ~((said - wanted).abs() <= ROUNDING * bias.abs() + 1e-14 * wanted.abs() + apart)
            if wrong.any():
                at = int(wrong.nonzero()[0])
                raise _unknown(
                    score_mod,
                    f"of the score {score[at]:.6g} it makes {said[at]:.6g} at query {int(q[at])}, key {int(k[at])} of "
                    f"row {int(row[at])}, head {int(head[at])}, where ALiBi with its slope between neighbors, "
                    f"{slopes[head[at]]:.6g}, makes {wanted[at]:.6g}",
                )
    return FoundScore(softcap, tuple(slopes.tolist()) if slopes.any() else None)


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
        except _ReadError:
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


class _ReadError(Exception):
    """A score_mod has made something of the place of a score."""


class _Unread(Tensor):
    """A number that every function of torch refuses."""

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        """Of whatever gets one among its arguments."""
        raise _ReadError


def _unknown(score_mod: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"score_mod {getattr(score_mod, '__name__', score_mod)!r} is not what a ring computes: no score_mod, softcap * "
        f"tanh(score / softcap) with a number, and after it ALiBi, - slope[head] * abs(query - key): {why}. Masks go "
        "into block_mask"
    )


class _Scores:
    """A score_mod at scores and their places."""

    def __init__(self, score_mod: Callable[..., Tensor], device: torch.device) -> None:
        self.score_mod, self.device = score_mod, device

    def __call__(self, score: Tensor, row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """(pairs,) float64; each argument is one number of each pair."""
        if not len(q):
            return score
        try:
            with torch.no_grad(), TransformGetItemToIndex():
                said = torch.vmap(self.score_mod)(score, row, head, q, k)
        except Exception as error:
            raise _unknown(self.score_mod, f"it could not be evaluated ({type(error).__name__}: {error})") from error
        if not isinstance(said, Tensor) or said.shape != score.shape:
            raise _unknown(self.score_mod, f"it gives {said!r:.80}, not one number for each score")
        return said.double()


def _slopes(mod: _Scores, masks: tuple[FoundMask, ...], length: int, heads: int) -> Tensor:
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
        found = 0 - mod(
            torch.zeros(heads, dtype=torch.float64, device=mod.device), torch.full_like(head, row), head, q, k
        )
        if slopes is not None and not torch.equal(found, slopes):
            raise _unknown(mod.score_mod, f"row {row} of the batch has other slopes than those before it")
        slopes = found
    return torch.zeros(heads, dtype=torch.float64, device=mod.device) if slopes is None else slopes


def _pairs(
    mask: FoundMask, length: int, heads: int, device: torch.device, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Heads, queries and keys that the mask lets meet, a part at a time."""
    first, last = mask.ranges(length, device)
    if length**2 <= flex_masks.EVERY_PAIR:
        for head, q, k in compared(first, last, heads, generator):
            met = (k >= first[q]) & (k < last[q])
            yield head[met], q[met], k[met]
        return
    # Every distance that occurs, in every head: what the first and the last of the queries with the most keys see.
    counts = last - first
    most = (counts == counts.max()).nonzero().flatten()
    for query in (most[0], most[-1]):
        keys = torch.arange(int(first[query]), int(last[query]), device=device)
        for one in range(heads):
            for k in keys.split(flex_masks.EVERY_PAIR):
                yield torch.full_like(k, one), query.expand(len(k)), k

    def drawn(bound: int, count: int) -> Tensor:
        return torch.randint(bound, (count,), generator=generator).to(device)

    places = torch.arange(length, device=device)
    for ends in (first, last - 1):
        for q, k in zip(places.split(flex_masks.EVERY_PAIR), ends.split(flex_masks.EVERY_PAIR), strict=True):
            yield drawn(heads, len(q)), q, k
    q = drawn(length, flex_masks.DRAWN)
    share = torch.rand(len(q), generator=generator, dtype=torch.float64).to(device)
    yield drawn(heads, len(q)), q, first[q] + (share * counts[q]).long()
