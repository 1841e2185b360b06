"""`ringattn check`: every schedule x layout x mask against a dense float64 reference, forward and all gradients.

Rank 0 prints a row as soon as its case is done, so the table is also the progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import ringattn
from ringattn.errors import InputError
from ringattn.launch.measure.exactness import (
    ABSOLUTE_BOUND,
    DTYPES,
    OVER_ONE_DEVICE,
    attended,
    drawn,
    error_of,
    reference_and_bounds,
    sequence_of,
)
from ringattn.launch.options import MOST_SEED, help_text, option
from ringattn.launch.ranks import agreed_ranks, place_in_torchrun, run_ranks_in_processes
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks

DEFAULT_RANKS = 4
JOB_TIMEOUT_S = 1800.0
NAMES = ("out", "dQ", "dK", "dV")


@dataclass
class CheckConfig:
    """One check. Sizes count the whole sequence."""

    ranks: int | None = option(None, "ranks to start; default torchrun's, else 4", least=1)
    transport: str = option(
        "gloo", "processes on CPU, threads of this process, or processes with a GPU each",
        choices=("gloo", "local", "nccl"),
    )  # fmt: skip
    engine: str = option("auto", "which kernels attend", choices=ringattn.engine.select.ENGINES)
    dtype: str = option("fp32", "of the inputs", choices=tuple(DTYPES))
    length_tokens: int = option(203, "tokens; odd by default, so that the ranks' counts differ", least=1)
    batch: int = option(2, "sequences", least=1)
    heads: int = option(4, "query heads", least=1)
    kv_heads: int = option(2, "key and value heads", least=1)
    head_dim: int = option(32, "of queries and keys", least=1)
    value_dim: int = option(32, "of values", least=1)
    seed: int = option(0, "of the inputs", least=0, most=MOST_SEED)
    timeout_s: float = option(120.0, "deadline of every wait", least=1.0)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    mask: str
    layout: str
    schedule: str

    def options(self, length: int) -> dict[str, Any]:
        """Keyword arguments of `Ring.attention`, or of `Ring.dilated_attention`."""
        causal = self.mask.startswith("causal")
        if self.dilated:  # ragged segments, some longer than a shard and than the sequence, rates that do not divide
            lengths = [length // 9 + 1, length // 2 + 1, 2 * length + 1]
            return {"causal": causal, "segment_lengths": lengths, "dilation_rates": [1, 3, 4]}
        if "window" in self.mask:
            return {"causal": causal, "window": (length // 5, 0 if causal else length // 9)}
        return {"causal": causal}

    @property
    def dilated(self) -> bool:
        """Whether branches of dilated segments meet."""
        return "dilated" in self.mask

    def documents(self, length: int) -> list[int] | None:
        """cu_seqlens of uneven documents, one of a single token and one empty."""
        if "documents" not in self.mask:
            return None
        return [*sorted({0, length // 3, length // 3 + 1, length // 2, length}), length]


MASKS = ("full", "causal", "window", "causal window", "documents", "causal documents", "causal window documents",
         "dilated", "causal dilated documents")  # fmt: skip


def cases() -> Iterator[Case]:
    """Every mask x layout x schedule that makes sense together."""
    layouts = ("contiguous", "zigzag", "striped", "per_document")
    for mask, layout, schedule in product(MASKS, layouts, ROUTES):
        segments = "documents" in mask or "dilated" in mask
        if (layout != "per_document" or "documents" in mask) and (schedule != "sub_rings" or segments):
            yield Case(mask, layout, schedule)


def main(argv: Sequence[str]) -> int:
    """The command: 0 if every error is within its bound, 1 if not. Raises `InputError` for bad options."""
    if "--help" in argv or "-h" in argv:
        print(help_text("check", "Compare schedules, layouts and masks with a dense float64 reference.", CheckConfig))
        return 0
    from ringattn.launch.config import load  # Hydra, which those who call `worker` need not have

    config = load(argv, CheckConfig)
    if config.heads % config.kv_heads:
        raise InputError(f"kv_heads={config.kv_heads}: does not divide heads={config.heads}")
    place = place_in_torchrun()
    ranks = agreed_ranks(config.ranks or (None if place else DEFAULT_RANKS))
    spec = asdict(config)
    if place:
        result = worker(spec)
    elif config.transport == "local":
        result = run_ranks(ranks, lambda ring: check_rank(ring, spec), **_ring_options(spec))[0]
    else:
        result = run_ranks_in_processes("ringattn.launch.measure.check:worker", spec, ranks, JOB_TIMEOUT_S, 1)[0]
    if place is None or place.rank == 0:
        verdict = f"{result['failed']} over their bound" if result["failed"] else "all exact"
        print(f"{result['cases']} cases, {verdict}")
    return 1 if result["failed"] else 0


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    """One process of the check."""
    torch.set_num_threads(1)
    with ringattn.Ring(transport="nccl" if spec["transport"] == "nccl" else "gloo", **_ring_options(spec)) as ring:
        return check_rank(ring, spec)


def _ring_options(spec: dict[str, Any]) -> dict[str, Any]:
    return {"engine": spec["engine"], "timeout_s": spec["timeout_s"], "poison": True}


def check_rank(ring: ringattn.Ring, spec: dict[str, Any]) -> dict[str, Any]:
    """All cases on one rank; rank 0 compares and prints. Returns the number of cases and of failures."""
    dtype, length = DTYPES[spec["dtype"]], spec["length_tokens"]
    heads, dims = (spec["heads"], spec["kv_heads"]), (spec["head_dim"], spec["value_dim"])
    inputs = tuple(x.to(ring.device) for x in drawn(spec["batch"], length, heads, dims, dtype, spec["seed"]))
    say: Callable[[str], None] = print if ring.rank == 0 else lambda _: None
    bound = f"{ABSOLUTE_BOUND[dtype]:.0e}" if dtype in ABSOLUTE_BOUND else f"{OVER_ONE_DEVICE} x one device"
    say(f"{ring.world_size} ranks over {ring.transport.name}, {length} tokens, {spec['dtype']}, bound {bound}")
    say(f"{'mask':<26}{'layout':<14}{'schedule':<12}" + "".join(f"{name:>10}" for name in NAMES))
    failed = torch.zeros(1, dtype=torch.int64, device=ring.device)
    references: dict[str, tuple[list[Tensor], list[float]]] = {}
    everything = list(cases())
    for case in everything:
        got = attended(ring, case, inputs, sequence_of(ring, case, length), case.schedule)
        if ring.rank == 0:
            if case.mask not in references:
                references[case.mask] = reference_and_bounds(case, inputs, spec["engine"])
            reference, bounds = references[case.mask]
            errors = [error_of(x, y) for x, y in zip(got, reference, strict=True)]
            wrong = [not error <= limit for error, limit in zip(errors, bounds, strict=True)]
            failed += any(wrong)
            marks = "".join(f"{error:>10.1e}" for error in errors)
            say(f"{case.mask:<26}{case.layout:<14}{case.schedule:<12}{marks}{'  OVER' if any(wrong) else ''}")
    ring.all_reduce([failed])  # only rank 0 has counted
    return {"cases": len(everything), "failed": int(failed)}
