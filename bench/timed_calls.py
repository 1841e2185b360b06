"""Attention calls for comparing measured and predicted times: calls on random inputs, and the plans that they run.

Guarantees: no shape is timed unless all are exact at a small size on the same ranks. Shapes are timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.bench.clock import Lap, Sample, lap, samples
from ringattn.bench.gate import BOUND, GateError
from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import REFERENCE, Cluster
from ringattn.planner.plan import Plan
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.testing import dense_attention, dense_dilated_attention

PASSES = ("forward", "backward")
GATE_TOKENS_PER_RANK = 64


class Shape(NamedTuple):
    """One attention call in float32.

    `window` is the number of keys before the query, 0 for all. `dilated` selects LongNet's branches. `documents` has
    the number of tokens of each packed document; it is empty for a single sequence.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str
    schedule: str
    causal: bool = True
    window: int = 0
    dilated: bool = False
    documents: tuple[int, ...] = ()

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Shape:
        """Return the shape whose fields were read from JSON, which has lists instead of tuples."""
        values: list[Any] = [*fields[:-1], tuple(fields[-1])]
        return cls._make(values)

    def small(self, ranks: int) -> Shape:
        """Return a small version of the shape for the gate."""
        tokens = GATE_TOKENS_PER_RANK * ranks
        cuts = [cut * tokens // self.tokens for cut in self.cuts or ()]
        documents = tuple(stop - start for start, stop in pairwise(cuts))
        return self._replace(tokens=tokens, window=self.window * tokens // self.tokens, documents=documents)

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """Return the boundaries of the documents, or None for a single sequence."""
        return tuple(accumulate(self.documents, initial=0)) if self.documents else None

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the call, which its reference takes too."""
        if self.dilated:
            lengths = [self.tokens // 8, self.tokens // 2, self.tokens]
            return {"segment_lengths": lengths, "dilation_rates": [1, 2, 4], "causal": self.causal}
        return {"causal": self.causal, "window": (self.window, 0) if self.window else None}

    @property
    def call(self) -> str:
        """Return a text that describes the call without its schedule."""
        mask = "dilated" if self.dilated else "full" if not self.causal else "causal"
        mask += f", window {self.window}" if self.window else ""
        mask += f", {len(self.documents)} documents" if self.documents else ""
        return f"{self.tokens}, {self.heads}:{self.kv_heads} of {self.head_dim}, {mask}, {self.layout}"

    def __str__(self) -> str:
        return f"{self.call}, {self.schedule}"


class TimedCall:
    """A call of a given shape on random inputs, on this rank."""

    def __init__(self, ring: Ring, shape: Shape) -> None:
        self.ring, self.shape = ring, shape
        self.seq = ring.sequence(shape.tokens, cu_seqlens=shape.cuts, layout=shape.layout)
        generator = torch.Generator().manual_seed(0)
        counts = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
        self.whole = [torch.randn(1, shape.tokens, n, shape.head_dim, generator=generator) for n in counts]
        *qkv, self.dout = (self.seq.shard(x) for x in self.whole)
        self.qkv = [x.requires_grad_() for x in qkv]

    def forward(self) -> None:
        """Run the forward pass and keep its output."""
        attend: Callable[..., Tensor] = self.ring.dilated_attention if self.shape.dilated else self.ring.attention
        self.out = attend(*self.qkv, self.seq, schedule=self.shape.schedule, **self.shape.options)

    def backward(self) -> None:
        """Compute the gradients of the last forward pass."""
        self.grads = torch.autograd.grad(self.out, self.qkv, self.dout)

    def gate(self) -> float:
        """Run both passes, and return the largest error of this rank compared with a dense float64 reference.

        Raises `GateError` if the error exceeds the bound.
        """
        self.forward()
        self.backward()
        dense = dense_dilated_attention if self.shape.dilated else dense_attention
        leaves = [x.double().requires_grad_() for x in self.whole[:3]]
        options = {**self.shape.options, **({"cu_seqlens": self.shape.cuts} if self.shape.documents else {})}
        out, _ = dense(*leaves, **options)
        reference = [out.detach(), *torch.autograd.grad(out, leaves, self.whole[3].double())]
        pairs = zip((self.out.detach(), *self.grads), reference, strict=True)
        error = max(float((got.double() - self.seq.shard(want)).abs().max()) for got, want in pairs)
        if not error <= BOUND[torch.float32]:
            raise GateError(f"{self.shape} is off by {error:.1e}; nothing is measured")
        return error


def timed(ring: Ring, shapes: Sequence[Shape], repeats: int) -> dict[str, Any]:
    """Run this rank: the gate, then all shapes in turns. Return the laps by shape, pass and round, and the error."""
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if ring.rank == 0 else (lambda line: None)
    say(f"{ring.world_size} ranks, gate: small problems against a dense float64 softmax")
    error = max(TimedCall(ring, shape.small(ring.world_size)).gate() for shape in shapes)
    laps: list[dict[str, list[Lap]]] = [{name: [] for name in PASSES} for _ in shapes]
    for turn in range(repeats + 1):
        for number, shape in enumerate(shapes):
            say(f"{ring.world_size} ranks, round {turn} of {repeats}: {shape}")
            call = TimedCall(ring, shape)
            for name in PASSES:
                measured_lap = lap(ring.barrier, getattr(call, name))
                if turn:  # the first round plans and binds
                    laps[number][name].append(measured_lap)
    return {"laps": laps, "error": error}


def samples_of(by_rank: Sequence[dict[str, Any]]) -> list[dict[str, list[Sample]]]:
    """Return samples by shape and pass, from the results of `timed` on all ranks."""
    return [
        {name: samples([rank["laps"][number][name] for rank in by_rank]) for name in PASSES}
        for number in range(len(by_rank[0]["laps"]))
    ]


def plans_of(shape: Shape, ranks: int, backward: bool, cluster: Cluster = REFERENCE) -> tuple[Plan, ...]:
    """Return the plans that the ranks run. Raises `InputError` if the schedule does not support the shape."""
    layout = make_layout(shape.layout, shape.tokens, ranks, shape.cuts)
    pairs: Dilated | Banded = Banded(shape.causal, (shape.window, 0) if shape.window else None)
    if shape.dilated:
        pairs = Dilated(tuple(shape.options["segment_lengths"]), tuple(shape.options["dilation_rates"]), shape.causal)
    mask = pairs.mask(shape.tokens, shape.tokens, shape.cuts, shape.cuts, shape.heads, shape.kv_heads)
    sizes = 1, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim
    problem = Problem(layout, layout, mask, *sizes, "float32")
    route = choose_route(problem, shape.schedule, cluster)
    return tuple(plan_of(problem, route, rank, backward) for rank in range(ranks))


def processor_s(plans: tuple[Plan, ...], cluster: Cluster) -> float:
    """Return the predicted processor seconds of the busiest rank: compute at full speed, and copies of sent bytes."""
    busy = simulate(plans, replace(cluster, cores=None)).busy_us
    carried = (plan.bytes_sent / cluster.bandwidth * cluster.wire_cores for plan in plans)
    return max(us / 1e6 + s for us, s in zip(busy, carried, strict=True))
