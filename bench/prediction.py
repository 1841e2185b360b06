"""How near predicted times of passes are to measured ones, after `ringattn calibrate`: ten shapes, two and four ranks.

`python -m ringattn.bench.prediction repeats=4`, or with `cluster=FILE` and no calibration of its own. All shapes run in
turns in the same processes, one thread each; a time is from barrier to barrier, so the slowest rank's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.bench.clock import Lap, Sample, cpu, kept, lap, samples, wall
from ringattn.bench.gate import BOUND, GateError
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.errors import RingError
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import Cluster, cluster_named
from ringattn.planner.plan import Plan
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.testing import dense_attention, dense_dilated_attention

PROGRAM = "ringattn.bench.prediction:on_rank"
PASSES = ("forward", "backward")
GATE_TOKENS_PER_RANK = 64
BAR = 0.15
"""The median error that is allowed, as a share of the measured time."""


@dataclass(frozen=True)
class PredictionOptions:
    """`cluster`: constants to predict with; empty: measured first, on two ranks, in `rounds` rounds. `shapes`: how
    many."""

    cluster: str = ""
    ranks: tuple[int, ...] = (2, 4)
    shapes: int = 10
    repeats: int = 4
    rounds: int = 30
    results: str = RESULTS


class Shape(NamedTuple):
    """One attention call, float32. `window`: keys before the query, 0 for all; `dilated`: LongNet's branches."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str
    schedule: str
    causal: bool = True
    window: int = 0
    dilated: bool = False

    def small(self, ranks: int) -> Shape:
        """The same for the gate."""
        tokens = GATE_TOKENS_PER_RANK * ranks
        return self._replace(tokens=tokens, window=self.window * tokens // self.tokens)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call, and of its reference."""
        if self.dilated:
            lengths = [self.tokens // 8, self.tokens // 2, self.tokens]
            return {"segment_lengths": lengths, "dilation_rates": [1, 2, 4], "causal": self.causal}
        return {"causal": self.causal, "window": (self.window, 0) if self.window else None}

    def __str__(self) -> str:
        mask = "dilated" if self.dilated else "full" if not self.causal else "causal"
        mask += f", window {self.window}" if self.window else ""
        return f"{self.tokens}, {self.heads}:{self.kv_heads} of {self.head_dim}, {mask}, {self.layout}, {self.schedule}"


SHAPES = (
    Shape(4096, 8, 8, 64, "zigzag", "ring"),
    Shape(8192, 8, 2, 64, "zigzag", "ring"),
    Shape(4096, 8, 2, 64, "contiguous", "ring", causal=False),
    Shape(4096, 4, 4, 128, "contiguous", "ring"),
    Shape(6144, 8, 8, 32, "zigzag", "all_gather"),
    Shape(8192, 8, 8, 64, "contiguous", "direct", window=1024),
    Shape(8192, 8, 8, 64, "contiguous", "auto", causal=False, dilated=True),
    Shape(2048, 16, 4, 64, "zigzag", "direct"),
    Shape(3072, 4, 1, 128, "contiguous", "all_gather", causal=False),
    Shape(4096, 8, 4, 64, "zigzag", "all_to_all"),
)


class PredictedCall:
    """A shape on this rank's random numbers."""

    def __init__(self, ring: Ring, shape: Shape) -> None:
        self.ring, self.shape = ring, shape
        self.seq = ring.sequence(shape.tokens, layout=shape.layout)
        generator = torch.Generator().manual_seed(0)
        counts = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
        self.whole = [torch.randn(1, shape.tokens, n, shape.head_dim, generator=generator) for n in counts]
        *qkv, self.dout = (self.seq.shard(x) for x in self.whole)
        self.qkv = [x.requires_grad_() for x in qkv]

    def forward(self) -> None:
        """Attend."""
        attend: Callable[..., Tensor] = self.ring.dilated_attention if self.shape.dilated else self.ring.attention
        self.out = attend(*self.qkv, self.seq, schedule=self.shape.schedule, **self.shape.options)

    def backward(self) -> None:
        """The gradients of the last forward."""
        self.grads = torch.autograd.grad(self.out, self.qkv, self.dout)

    def gate(self) -> float:
        """The greatest error of this rank against a dense float64 reference. Raises `GateError` beyond the bound."""
        self.forward()
        self.backward()
        dense = dense_dilated_attention if self.shape.dilated else dense_attention
        leaves = [x.double().requires_grad_() for x in self.whole[:3]]
        out, _ = dense(*leaves, **self.shape.options)
        reference = [out.detach(), *torch.autograd.grad(out, leaves, self.whole[3].double())]
        pairs = zip((self.out.detach(), *self.grads), reference, strict=True)
        error = max(float((got.double() - self.seq.shard(want)).abs().max()) for got, want in pairs)
        if not error <= BOUND[torch.float32]:
            raise GateError(f"{self.shape} is off by {error:.1e}; nothing is measured")
        return error


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """One rank's part: the gate, then all shapes in turns. Laps by shape, pass and round."""
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if ring.rank == 0 else (lambda line: None)
    shapes = SHAPES[: spec["shapes"]]
    say(f"{ring.world_size} ranks, gate: small problems against a dense float64 softmax")
    error = max(PredictedCall(ring, shape.small(ring.world_size)).gate() for shape in shapes)
    laps: list[dict[str, list[Lap]]] = [{name: [] for name in PASSES} for _ in shapes]
    for turn in range(spec["repeats"] + 1):
        for number, shape in enumerate(shapes):
            say(f"{ring.world_size} ranks, round {turn} of {spec['repeats']}: {shape}")
            call = PredictedCall(ring, shape)
            for name in PASSES:
                taken = lap(ring.barrier, getattr(call, name))
                if turn:  # the first round plans and binds
                    laps[number][name].append(taken)
    return {"laps": laps, "error": error}


def plans_of(shape: Shape, ranks: int, backward: bool) -> tuple[Plan, ...]:
    """The plans that the ranks run."""
    layout = make_layout(shape.layout, shape.tokens, ranks)
    pairs: Dilated | Banded = Banded(shape.causal, (shape.window, 0) if shape.window else None)
    if shape.dilated:
        pairs = Dilated(tuple(shape.options["segment_lengths"]), tuple(shape.options["dilation_rates"]), shape.causal)
    mask = pairs.mask(shape.tokens, shape.tokens, None, None, shape.heads, shape.kv_heads)
    sizes = 1, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim
    problem = Problem(layout, layout, mask, *sizes, "float32")
    route = choose_route(problem, shape.schedule)
    return tuple(plan_of(problem, route, rank, backward) for rank in range(ranks))


def processor_s(plans: tuple[Plan, ...], cluster: Cluster) -> float:
    """Predicted processor seconds of the busiest rank: its work at full speed, and carrying what it sends."""
    busy = simulate(plans, replace(cluster, cores=None)).busy_us
    carried = (plan.bytes_sent / cluster.bandwidth * cluster.wire_cores for plan in plans)
    return max(us / 1e6 + s for us, s in zip(busy, carried, strict=True))


def calibrated(options: PredictionOptions, say: Callable[[str], None]) -> Cluster:
    """The constants in `options.cluster`, or what `ringattn calibrate` measures now. Raises `RingError` if it fails."""
    if options.cluster:
        return cluster_named(options.cluster)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calibrated.json")
        words = ["calibrate", "nproc=2", f"rounds={options.rounds}", "transport=gloo", f"out='{file}'"]
        command = [sys.executable, "-m", "ringattn", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip())
        if process.returncode:
            raise RingError("ringattn calibrate failed; its message is above")
        return cluster_named(str(file))


def table_of(options: PredictionOptions, cluster: Cluster, found: dict[int, list[dict[str, list[Sample]]]]) -> Table:
    """A row for each shape, pass and number of ranks; the verdict below."""
    table = Table(
        f"Predicted and measured, {options.repeats} rounds, constants: {cluster.name}",
        ("ranks", "tokens, heads, mask, layout, schedule", "pass", "predicted, ms", "measured, ms", "error",
         "by processor", "foreign"),
        notes=[
            "- error: predicted over measured, less one. By processor: the same for processor seconds of the busiest "
            "rank, where other programs hardly count.",
            "- foreign: processors that other programs took in the kept rounds, median.",
        ],
    )  # fmt: skip
    for ranks, by_shape in found.items():
        errors, busy_errors = [], []
        for shape, by_pass in zip(SHAPES, by_shape, strict=False):
            for name, taken in by_pass.items():
                plans = plans_of(shape, ranks, name == "backward")
                said_s = simulate(plans, cluster).total_us / 1e6
                errors.append(said_s / wall(taken) - 1)
                busy_errors.append(processor_s(plans, cluster) / cpu(taken) - 1)
                table.rows.append((
                    str(ranks), str(shape), name, f"{1e3 * said_s:.1f}", f"{1e3 * wall(taken):.1f}",
                    f"{errors[-1]:+.1%}", f"{busy_errors[-1]:+.1%}", f"{median(s.foreign for s in kept(taken)):.2f}",
                ))  # fmt: skip
        off, busy_off = (median(map(abs, some)) for some in (errors, busy_errors))
        table.notes.append(
            f"- {ranks} ranks: median error {off:.1%}; the bar is {BAR:.0%}: {'met' if off <= BAR else 'MISSED'}. "
            f"By processor time: {busy_off:.1%}."
        )
    return table


def main(words: Sequence[str]) -> dict[str, Any]:
    """Calibrate, run, print, keep; returns what is kept."""
    options = parse(PredictionOptions(), words)
    with progress("prediction") as say:
        cluster = calibrated(options, say)
        answers = {ranks: run_in_processes(ranks, PROGRAM, asdict(options), say) for ranks in options.ranks}
    found = {
        ranks: [
            {name: samples([rank["laps"][number][name] for rank in by_rank]) for name in PASSES}
            for number in range(len(by_rank[0]["laps"]))
        ]
        for ranks, by_rank in answers.items()
    }
    data: dict[str, Any] = {
        "cluster": asdict(cluster),
        "samples": found,
        "sample_fields": Sample._fields,
        "largest_error": max(rank["error"] for by_rank in answers.values() for rank in by_rank),
    }
    finish("prediction", options, [table_of(options, cluster, found)], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
