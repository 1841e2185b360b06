"""`ringattn check`: every schedule x layout x mask against a dense float64 truth, forward and all gradients.

Rank 0 prints a row as soon as its case is done, so the table is also the progress. Bounds are those of the project:
float64 1e-10 and float32 1e-5 (largest absolute error on unit normal inputs); half types 1.25 x the error that the same
engine has alone, on one device (relative Frobenius norm).
Does not know: how ranks are started.
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
from ringattn.launch.options import help_text, option
from ringattn.launch.ranks import agreed_ranks, place_in_torchrun, run_ranks_in_processes
from ringattn.schedule.routes import ROUTES
from ringattn.testing import dense_attention, dense_dilated_attention, run_ranks
from ringattn.transport.local import LocalWorld

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ABSOLUTE_BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}
OVER_ONE_DEVICE = 1.25
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
    engine: str = option("auto", "which kernels attend", choices=ringattn.ring.ENGINES)
    dtype: str = option("fp32", "of the inputs", choices=tuple(DTYPES))
    length_tokens: int = option(203, "tokens; odd by default, so that the ranks' counts differ", least=1)
    batch: int = option(2, "sequences", least=1)
    heads: int = option(4, "query heads", least=1)
    kv_heads: int = option(2, "key and value heads", least=1)
    head_dim: int = option(32, "of queries and keys", least=1)
    value_dim: int = option(32, "of values", least=1)
    seed: int = option(0, "of the inputs", least=0)
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
        print(help_text("check", "Compare every schedule, layout and mask with a dense float64 truth.", CheckConfig))
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
        result = run_ranks_in_processes("ringattn.launch.check:worker", spec, ranks, JOB_TIMEOUT_S, 1)[0]
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
    inputs = tuple(x.to(ring.device) for x in _inputs(spec, dtype))
    say: Callable[[str], None] = print if ring.rank == 0 else lambda _: None
    bound = f"{ABSOLUTE_BOUND[dtype]:.0e}" if dtype in ABSOLUTE_BOUND else f"{OVER_ONE_DEVICE} x one device"
    say(f"{ring.world_size} ranks over {ring.transport.name}, {length} tokens, {spec['dtype']}, bound {bound}")
    say(f"{'mask':<26}{'layout':<14}{'schedule':<12}" + "".join(f"{name:>10}" for name in NAMES))
    failed = torch.zeros(1, dtype=torch.int64, device=ring.device)
    truths: dict[str, tuple[list[Tensor], list[float]]] = {}
    everything = list(cases())
    for case in everything:
        got = _attend(ring, case, inputs, length)
        if ring.rank == 0:
            if case.mask not in truths:
                truths[case.mask] = _truth_and_bounds(case, inputs, length, spec)
            truth, bounds = truths[case.mask]
            errors = [_error(x, y) for x, y in zip(got, truth, strict=True)]
            wrong = [not error <= limit for error, limit in zip(errors, bounds, strict=True)]
            failed += any(wrong)
            marks = "".join(f"{error:>10.1e}" for error in errors)
            say(f"{case.mask:<26}{case.layout:<14}{case.schedule:<12}{marks}{'  OVER' if any(wrong) else ''}")
    ring.all_reduce([failed])  # only rank 0 has counted
    return {"cases": len(everything), "failed": int(failed)}


def _inputs(spec: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(spec["seed"])
    shapes = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "value_dim"), ("heads", "value_dim"))
    return tuple(
        torch.randn(
            spec["batch"], spec["length_tokens"], spec[heads], spec[dim], generator=generator, dtype=torch.float64
        ).to(dtype)
        for heads, dim in shapes
    )


def _attend(ring: ringattn.Ring, case: Case, inputs: tuple[Tensor, ...], length: int) -> list[Tensor]:
    """out, dQ, dK, dV of the whole sequence, gathered."""
    seq = ring.sequence(length, cu_seqlens=case.documents(length), layout=case.layout)
    q, k, v, dout = (seq.shard(x) for x in inputs)
    q, k, v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attend = ring.dilated_attention if case.dilated else ring.attention
    out: Tensor = attend(q, k, v, seq, schedule=case.schedule, **case.options(length))
    grads = torch.autograd.grad(out, leaves, dout)
    return [seq.gather(x) for x in (out.detach(), *grads)]


def _truth_and_bounds(
    case: Case, inputs: tuple[Tensor, ...], length: int, spec: dict[str, Any]
) -> tuple[list[Tensor], list[float]]:
    """The dense float64 results, and what each may differ from them."""
    leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in inputs[:3]]
    dense = dense_dilated_attention if case.dilated else dense_attention
    out, _ = dense(*leaves, cu_seqlens=case.documents(length), **case.options(length))
    truth = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())]
    dtype = inputs[0].dtype
    if dtype in ABSOLUTE_BOUND:
        return truth, [ABSOLUTE_BOUND[dtype]] * 4
    with ringattn.Ring(transport=LocalWorld(1).transport(0), engine=spec["engine"]) as alone:
        one_device = _attend(alone, Case(case.mask, "contiguous", "ring"), inputs, length)
    return truth, [OVER_ONE_DEVICE * _error(x, y) for x, y in zip(one_device, truth, strict=True)]


def _error(got: Tensor, truth: Tensor) -> float:
    """Largest absolute difference; for half types the relative Frobenius norm of the difference."""
    difference = got.double() - truth
    if got.dtype in ABSOLUTE_BOUND:
        return float(difference.abs().max()) if difference.numel() else 0.0
    return float(difference.norm() / truth.norm())
