"""The memory of one rank's attention pass: predicted from its plans and measured, for random configurations.

`python -m ringattn.bench.attention_memory` measures forward and backward: the storages of the rank's thread, with the
scratch memory of the kernels (`ringattn.bench.storage_meter`); the high-water mark of the pool, compared with the size
that the plan reserves; and the growth of the resident size of the process, which includes pages of Python and of the
allocator.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Say, Table, finish, progress
from ringattn.bench.storage_meter import StorageMeter
from ringattn.engine.aten import kernel_bytes
from ringattn.observe.memory import reset_peak, status_bytes
from ringattn.ring import Ring

PROGRAM = "ringattn.bench.attention_memory:on_rank"
BRANCHES = {"segment_lengths": (256, 1024), "dilation_rates": (1, 4)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (200, 0)}, "dilated": BRANCHES,
}  # fmt: skip


@dataclass(frozen=True)
class AttentionMemoryOptions:
    """The options of the benchmark. `configurations` is the number of configurations drawn from `seed`."""

    configurations: int = 20
    seed: int = 6
    results: str = RESULTS


@dataclass(frozen=True)
class Drawn:
    """One configuration.

    The mask `window` has 200 tokens to the left. The mask `dilated` has segments of 256 and 1024 tokens with rates 1
    and 4.
    """

    ranks: int
    length_tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    mask: str
    layout: str
    schedule: str
    engine: str

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return (
            f"{self.length_tokens} tokens, batch {self.batch}, {self.heads}:{self.kv_heads} of {dims}, {self.dtype}, "
            f"{self.mask}, {self.layout}, {self.schedule}, {self.engine}"
        )


def drawn(count: int, seed: int) -> list[Drawn]:
    """Draw `count` configurations. They depend only on `count` and `seed`."""
    draw = random.Random(seed)
    configurations = []
    for _ in range(count):
        kv_heads, head_dim = draw.choice((1, 2, 4)), draw.choice((32, 64))
        configurations.append(Drawn(
            ranks=draw.choice((1, 2, 3, 4)), length_tokens=draw.randrange(600, 2000), batch=draw.choice((1, 1, 2)),
            heads=kv_heads * draw.choice((1, 2)), kv_heads=kv_heads, head_dim=head_dim,
            value_dim=draw.choice((head_dim, head_dim, 48)), dtype=draw.choice(("float32", "bfloat16", "float64")),
            mask=draw.choice(list(MASKS)), layout=draw.choice(("contiguous", "zigzag", "striped")),
            schedule=draw.choice(("auto", "ring", "all_gather", "direct")),
            engine=draw.choice(("aten", "aten", "plain")),
        ))  # fmt: skip
    return [replace(case, layout="contiguous") if case.mask == "dilated" else case for case in configurations]


def on_rank(ring: Ring, **facts: Any) -> dict[str, int]:
    """Return the bytes of one configuration on this rank, predicted and measured, forward and backward."""
    case, options = Drawn(**facts), MASKS[facts["mask"]]
    ring.engine = case.engine
    seq = ring.sequence(case.length_tokens, layout=case.layout)
    tokens, dtype = seq.counts[ring.rank], getattr(torch, case.dtype)
    shapes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim))
    q, k, v = (torch.randn(case.batch, tokens, *shape, dtype=dtype).requires_grad_() for shape in shapes)
    dout = torch.randn(case.batch, tokens, case.heads, case.value_dim, dtype=dtype)
    attend = ring.dilated_attention if case.mask == "dilated" else ring.attention
    explained = ring.explain(seq, q=q, k=k, v=v, schedule=case.schedule, **options)
    planned, arenas = explained.memory, [plans[ring.rank].arena_bytes for plans in explained.plans]
    gc.collect()
    reset_peak()
    resident = status_bytes("VmRSS")
    with StorageMeter(attention_scratch_bytes) as meter:
        out = attend(q, k, v, seq, schedule=case.schedule, **options)
        forward_bytes, left_bytes, forward_high = meter.peak_bytes, meter.live_bytes, ring.pool.high_water_bytes
        meter.restart()
        torch.autograd.grad(out, (q, k, v), dout)
    return {
        "forward_predicted_bytes": planned.forward[ring.rank].peak_bytes,
        "forward_bytes": forward_bytes,
        "backward_predicted_bytes": planned.backward[ring.rank].peak_bytes,
        "backward_bytes": meter.peak_bytes,
        "saved_predicted_bytes": planned.saved_bytes[ring.rank],
        "saved_bytes": left_bytes - planned.forward[ring.rank].parts["arena"],
        "forward_slots_bytes": arenas[0],
        "forward_high_water_bytes": forward_high,
        "slots_bytes": max(arenas),
        "high_water_bytes": ring.pool.high_water_bytes,
        "resident_growth_bytes": status_bytes("VmHWM") - resident,
    }


# --- comparison ---


def greatest_deviation(by_rank: Sequence[dict[str, int]]) -> float:
    """Return the largest relative deviation of a prediction from its measurement, over all ranks and both passes."""
    return max(
        abs(rank[f"{name}_predicted_bytes"] / rank[f"{name}_bytes"] - 1)
        for rank in by_rank
        for name in ("forward", "backward")
    )


def table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per configuration, for the rank with the highest backward peak."""
    result = Table(
        "Attention pass of one rank, MiB: predicted / measured, largest deviation over all ranks",
        ("ranks", "configuration", "forward", "backward", "off by", "staging planned / used", "resident growth"),
        notes=["- of the rank with the highest peak; the caller's q, k, v and dout are not counted."],
    )
    for record in records:
        most = max(record["ranks"], key=lambda rank: rank["backward_bytes"])
        pairs = [
            " / ".join(f"{most[key] / 2**20:.3f}" for key in keys)
            for keys in (("forward_predicted_bytes", "forward_bytes"), ("backward_predicted_bytes", "backward_bytes"),
                         ("slots_bytes", "high_water_bytes"))
        ]  # fmt: skip
        off = f"{100 * greatest_deviation(record['ranks']):.2f} %"
        resident = f"{most['resident_growth_bytes'] / 2**20:.1f}"
        result.rows.append((str(record["drawn"]["ranks"]), record["name"], pairs[0], pairs[1], off, pairs[2], resident))
    return result


def weigh(options: AttentionMemoryOptions, say: Say) -> list[dict[str, Any]]:
    """Measure every configuration in fresh processes; return one record for each."""
    records = []
    for case in drawn(options.configurations, options.seed):
        say(f"{case.ranks} ranks: {case}")
        records.append({"drawn": asdict(case), "name": str(case),
                        "ranks": run_in_processes(case.ranks, PROGRAM, asdict(case), say)})  # fmt: skip
    return records


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark, print the tables, save the record and return it."""
    options = parse(AttentionMemoryOptions(), arguments)
    with progress("attention_memory") as say:
        data = {"configurations": weigh(options, say)}
    finish("attention_memory", options, [table(data["configurations"])], data, options.results)
    return data


# --- scratch memory of kernels ----------------------------------------------------------------------------------------


def attention_scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return what torch's CPU flash kernels allocate in a call (see `ringattn.engine.aten`); 0 for other operators."""
    aten = torch.ops.aten
    if func == aten._scaled_dot_product_flash_attention_for_cpu.default:
        q, k = args[:2]
        return kernel_bytes(q.shape[2], k.shape[2], q.shape[3], q.element_size(), backward=False)
    if func == aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        dout, q, k = args[:3]
        copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.numel() * dout.element_size()
        return copied + kernel_bytes(q.shape[2], k.shape[2], q.shape[3], q.element_size(), backward=True)
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
