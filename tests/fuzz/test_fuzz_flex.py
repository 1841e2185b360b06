"""Random functions of flex_attention: masks and biases with holes, over values that change between two calls.

A hole is a small rectangle of pairs that the mask excludes, or to which the bias adds 0.5. Each result is compared with
dense float64 attention, whose mask and bias come from calling the function itself on all positions. A function with a
hole must be refused, or the result must be exact: a mask with a hole is a few slices. Without a hole no refusal is
allowed. Each seed defines a case; RINGATTN_FUZZ_SEED replaces the first seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from ringattn import Ring, UnsupportedError
from ringattn.adapters.flex import flex_attention
from tests.fuzz import session

SECONDS, SLOW_SECONDS, WITHIN = 3.0, 30.0, 1e-10
ROWS = 48  # query positions compared, besides those with holes, because tables of all pairs would be large
Function = Callable[..., Tensor]
STORES = ["class", "module", "function", "object", "closure", "list", "numpy", "data", "method"]


class Store:
    """A float64 tensor that a mask_mod or score_mod reads from a global, a closure, an attribute or the like.

    `read()` returns the tensor, `write` changes it.
    """

    def __init__(self, kind: str, value: Tensor) -> None:
        self.kind, self.value, self.array = kind, value, value.numpy().copy()
        self.shared = torch.from_numpy(self.array)
        holders: dict[str, Any] = {
            "class": type("Config", (), {}), "module": ModuleType("config"), "function": lambda: None,
            "object": SimpleNamespace(), "list": SimpleNamespace(), "data": SimpleNamespace(),
        }  # fmt: skip
        self.holder = holders.get(kind, self)
        self.holder.value = [value] if kind == "list" else value.clone()
        self.read = self.reader()

    def method(self) -> Tensor:
        return self.value

    def reader(self) -> Callable[[], Tensor]:
        holder, shared = self.holder, self.shared
        if self.kind == "method":
            return self.method
        if self.kind == "closure":
            return lambda: self.value
        if self.kind == "list":
            return lambda: holder.value[0]
        return (lambda: shared) if self.kind == "numpy" else (lambda: holder.value)

    def write(self, value: Tensor) -> None:
        if self.kind == "numpy":
            self.array[...] = value.numpy()
        elif self.kind == "list":
            self.holder.value[0] = value
        elif self.kind == "data":
            self.holder.value.data = value
        else:
            self.holder.value = value


def draw_mask(r: Random, length: int, store: Store, hole: Function) -> Function:
    """Draw a mask_mod that reads its window and the document number of each token from the store."""
    is_causal, after, spelling = r.random() < 0.7, r.randint(0, 9), r.randint(0, 2)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        values = store.read()
        left, ids = values[0], values[1:]
        seen = (ids[q] == ids[k]) & ((q >= k) if is_causal else (k - q <= after))
        if spelling == 1:
            seen = torch.where(q - k > left, torch.zeros_like(seen), seen)
        else:
            seen = seen & (q - k <= left)
        return seen & ~hole(b, h, q, k)

    return mod


def draw_score(r: Random, heads: int, store: Store, hole: Function) -> Function:
    """Draw a score_mod that reads its softcap and its slopes from the store."""
    has_cap, spelling = r.random() < 0.5, r.randint(0, 2)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        values = store.read()
        cap, slopes = values[0], values[1:]
        s = cap * torch.tanh(s / cap) if has_cap else s
        distance = [q - k, q.double() - k.double(), k - q][spelling].abs()
        return s - slopes[h] * distance + 0.5 * hole(b, h, q, k)

    return mod


def draw_hole(r: Random, heads: int, length: int) -> tuple[Function, range]:
    """Draw a function that is True in a small rectangle of pairs. Return it with the queries of the rectangle.

    The rectangle is often empty.
    """
    if r.random() < 0.6:
        return lambda b, h, q, k: torch.zeros_like(q + k, dtype=torch.bool), range(0)
    query, head = r.randrange(length), r.choice([None, None, r.randrange(heads)])
    key = max(0, query - int(length ** r.random()))
    queries = range(query, min(length, query + r.choice([1, 1, 8, 100])))
    keys = range(key, min(length, key + r.choice([1, 1, 3])))

    def hole(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (q >= queries.start) & (q < queries.stop) & (k >= keys.start) & (k < keys.stop)
        return inside if head is None else inside & (h == head)

    return hole, queries


def mask_values(r: Random, length: int) -> Tensor:
    left = r.choice([length, r.randint(0, length), r.randint(0, 40)])
    lengths = torch.tensor([r.randint(1, length) for _ in range(8)] + [length])
    ids = torch.repeat_interleave(torch.arange(9), lengths)[:length]
    return torch.cat([torch.tensor([left]), ids if r.random() < 0.6 else 0 * ids]).double()


def score_values(r: Random, heads: int) -> Tensor:
    return torch.tensor(
        [r.choice([2.0, 5.0]), *(r.choice([0.5, 0.25, 2.0**-8, -0.125]) for _ in range(heads))]
    ).double()


def dense_attention(qkv: list[Tensor], rows: Tensor, mask_mod: Function, score_mod: Function | None) -> Tensor:
    """Compute dense attention of the queries at `rows`, with the mask_mod and score_mod themselves."""
    q, k, v = qkv
    heads, length = q.shape[1], q.shape[2]
    grid = torch.zeros((), dtype=torch.int64), torch.arange(heads)[:, None, None], rows[:, None], torch.arange(length)
    scores = q[0][:, rows] @ k[0].mT * q.shape[-1] ** -0.5
    scores = scores if score_mod is None else score_mod(scores, *grid)
    seen = mask_mod(*grid).expand_as(scores)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.masked_fill(~seen, 0.0) @ v[0]  # zeros for a query that attends to no key, as in torch


def functions(seed: int, most: int) -> None:
    """Check flex_attention for the case of this seed, while the values that its functions read change.

    The steps are: a call, a change of the score_mod's values and a call, a change of the mask_mod's values, a call with
    a new BlockMask, and a call with the old BlockMask.
    """
    r = Random(seed)
    length = int(most ** r.uniform(0.3, 1.0)) if r.random() < 0.6 else r.randint(most // 2, most)
    heads = r.choice([1, 2])
    block: Any = r.choice([16, 128, (64, 32), length]) if length <= 1500 else r.choice([128, length])
    no_hole: Function = lambda b, h, q, k: torch.zeros_like(q + k, dtype=torch.bool)  # noqa: E731
    hole, queries = draw_hole(r, heads, length)
    in_score = r.random() < 0.4
    has_score = in_score or r.random() < 0.4
    stores = Store(r.choice(STORES), mask_values(r, length)), Store(r.choice(STORES), score_values(r, heads))
    mask_mod = draw_mask(r, length, stores[0], no_hole if in_score else hole)
    score_mod = draw_score(r, heads, stores[1], hole if in_score else no_hole) if has_score else None
    generator = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(1, heads, length, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    rows = torch.tensor(sorted({*r.sample(range(length), min(length, ROWS)), *queries, 0, length - 1}))
    case = {"seed": seed, "length": length, "heads": heads, "block": block, "queries": queries, "in_score": in_score,
            "has_score": has_score, "stores": [store.kind for store in stores]}  # fmt: skip
    separate = r.random() < 0.7

    def call(mask: Any, may_refuse: bool) -> None:
        expected = dense_attention(qkv, rows, mask_mod, score_mod)
        try:
            out = flex_attention(*qkv, score_mod, mask)
        except UnsupportedError as refusal:
            if not may_refuse:
                raise AssertionError(case) from refusal
            return
        assert isinstance(out, Tensor)
        error = float((out[0][:, rows] - expected).abs().max())
        assert error <= WITHIN, (case, error)

    def new_mask() -> Any:
        return create_block_mask(
            mask_mod, 1, heads, length, length, device="cpu", BLOCK_SIZE=block, separate_full_blocks=separate
        )

    with Ring() as ring, ring.activate(ring.sequence(length)):
        mask = new_mask()
        call(mask, bool(queries))
        stores[1].write(score_values(r, heads))
        call(mask, bool(queries))
        stores[0].write(mask_values(r, length))
        call(new_mask(), bool(queries))
        # The block tables of the old mask follow the old values, so the call may be refused. With a single block, the
        # tables do not depend on the values.
        call(mask, bool(queries) or block != length)


def run(seconds: float, most: int) -> None:
    start = session.seed_of_commit()
    print(f"RINGATTN_FUZZ_SEED={start}")
    began, seed = time.monotonic(), start
    while seed == start or time.monotonic() - began < seconds:
        functions(seed, most)
        seed += 1


def test_fresh_seeds() -> None:
    run(SECONDS, 1200)


@pytest.mark.slow
def test_long_masks() -> None:
    """The cases hold for masks of all sizes up to 8,192 tokens."""
    run(SLOW_SECONDS, 8192)
