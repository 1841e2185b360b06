"""`ringattn check`: compare all schedules, layouts and masks with a dense float64 reference, forward and gradients.

Rank 0 prints a line as soon as a schedule is done, so the summary also shows the progress. The table of all cases is
printed with verbose=true, and for a schedule with a case over its bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple

from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS
from ringattn.errors import InputError
from ringattn.launch.calls import MaskedCallConfig
from ringattn.launch.folders import STANDARD_OUTPUT, json_output
from ringattn.launch.options import DTYPES, ENGINES, MOST_SEED, help_text, json_option, option
from ringattn.launch.ranks import Place, agreed_ranks, place_in_torchrun, run_ranks_in_processes
from ringattn.schedule.routes import NUMBERED, ROUTES

if TYPE_CHECKING:
    from torch import Tensor

    from ringattn.ring import Ring

DEFAULT_RANKS = 4
NAMES = ("out", "dQ", "dK", "dV")


@dataclass
class CheckConfig:
    """One check. Sizes count the whole sequence."""

    ranks: int | None = option(None, "ranks to start; those of torchrun if not set, else 4", least=1)
    transport: str = option(
        "shm", "processes on the CPUs of this machine, processes on CPUs of any machines, threads of this process, or "
            "processes with a GPU each",
        choices=("shm", "gloo", "local", "nccl", "peer"),
    )  # fmt: skip
    engine: str = option("auto", "attention kernels", choices=ENGINES)
    dtype: str = option("fp32", "dtype of the inputs", choices=DTYPES)
    tokens: int = option(203, "tokens; odd by default, so that the ranks' counts differ", least=1)
    batch: int = option(2, "sequences", least=1)
    heads: int = option(4, "query heads", least=1)
    kv_heads: int = option(2, "key and value heads", least=1)
    head_dim: int = option(32, "elements of a head of queries and keys", least=1)
    value_dim: int = option(32, "elements of a head of values", least=1)
    seed: int = option(0, "seed of the inputs", least=0, most=MOST_SEED)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)
    combinations: str = option(
        "all",
        "which combinations of masks, layouts and schedules: all, or every pair of values",
        choices=("all", "pairs"),
    )
    verbose: bool = option(False, "print each case, not only a line for each schedule")
    json: str = json_option()


class Case(NamedTuple):
    """One combination of mask, layout and schedule, which is a row of the table."""

    mask: str
    layout: str
    schedule: str

    def call(self, tokens: int) -> MaskedCallConfig:
        """Return the call with the mask that the words of `mask` describe. Its sizes do not divide the sequence."""
        causal = self.mask.startswith("causal")
        keys: dict[str, Any] = {"tokens": tokens, "causal": causal, "layout": self.layout, "schedule": self.schedule}
        lengths = [tokens // 9 + 1, tokens // 2 + 1, 2 * tokens + 1]
        quarter, half = tokens // 4, tokens // 2
        sizes: dict[str, dict[str, Any]] = {
            "window": {"window": [tokens // 5, 0 if causal else tokens // 9]},
            "chunk": {"mask": f"chunked:{tokens // 7 + 1}"},
            "prefix": {"mask": f"prefix:{tokens // 8}"},
            "blocks": {"mask": f"bidirectional_blocks:0,{tokens // 4},{tokens // 2},{tokens}"},
            "global": {"mask": f"global_tokens:{tokens // 20 + 1}"},
            # A root with two children, of which one has a child.
            "tree": {"mask": f"tree:{tokens - 3 * quarter}({quarter},{quarter}({quarter}))"},
            # The first quarter attends to all keys of the first half, and the second quarter to none. The last half
            # attends to a triangle of the first half and to later keys.
            "slices": {
                "mask": f"slices:0-{quarter}x0-{half}f,{half}-{tokens}x0-{half}c,{half}-{tokens}x{half}-{tokens}i"
            },
            # The segments are ragged, one is longer than a shard, and one is longer than the sequence. Not all rates
            # divide their segments.
            "dilated": {"segment_lengths": lengths, "dilation_rates": [1, 3, 4]},
            # One document is a single token, and one is empty.
            "documents": {"cu_seqlens": [*sorted({0, tokens // 3, tokens // 3 + 1, tokens // 2, tokens}), tokens]},
        }
        for word in sizes:
            keys |= sizes[word] if word in self.mask else {}
        return MaskedCallConfig(**keys)


MASKS = ("full", "causal", "window", "causal window", "documents", "causal documents", "causal window documents",
         "causal chunk documents", "causal prefix documents", "causal blocks documents", "window global",
         "causal tree", "slices", "dilated", "causal dilated documents")  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every valid combination of mask, layout and schedule, schedule by schedule."""
    for schedule, mask in product(ROUTES, MASKS):
        if schedule != "sub_rings" or "documents" in mask or "dilated" in mask:
            yield from (Case(mask, layout, schedule) for layout in layouts_for(mask))


def paired_cases() -> Iterator[Case]:
    """Yield a subset of `cases` that covers every pair of mask and schedule, mask and layout, layout and schedule."""
    # Each mask occurs once with each schedule. The index of its layout is that of the schedule plus that of the mask.
    # Only two masks have the layout "mask", which occurs with all schedules.
    for case in cases():
        layouts, turn = layouts_for(case.mask), list(ROUTES).index(case.schedule) + MASKS.index(case.mask)
        if case.layout in ("mask", layouts[turn % len(layouts)]):
            yield case


def layouts_for(mask: str) -> list[str]:
    """Return the layouts that are valid with a mask."""
    layouts = [layout for layout in LAYOUTS if layout not in OF_DOCUMENTS or "documents" in mask]
    return [*layouts, "mask"] if "tree" in mask or "slices" in mask else layouts


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if every error is within its bound, else 1. Raises `InputError` for bad options."""
    if "--help" in argv or "-h" in argv:
        print(help_text("check", "Compare schedules, layouts and masks with a dense float64 reference.", CheckConfig))
        return 0
    from ringattn.launch.config import load  # imports Hydra, which callers of `worker` do not need

    config = load(argv, CheckConfig)
    if config.heads % config.kv_heads:
        raise InputError(f"kv_heads={config.kv_heads}: must divide heads={config.heads}")
    place = place_in_torchrun()
    with json_output(config.json if place is None or place.rank == 0 else "") as write:
        result = checked(config, place)
        if place is None or place.rank == 0:
            verdict = f"{result['failed']} exceed their bound" if result["failed"] else "all exact"
            print(f"{result['cases']} cases, {verdict}")
            write(result)
    return 1 if result["failed"] else 0


def checked(config: CheckConfig, place: Place | None) -> dict[str, Any]:
    """Compare all cases on the ranks that `config` names, and return the figures of rank 0."""
    ranks = agreed_ranks(config.ranks or (None if place else DEFAULT_RANKS))
    spec = asdict(config)
    if place:
        return worker(spec)
    if config.transport == "local":
        from ringattn.testing import run_ranks

        return run_ranks(ranks, lambda ring: check_rank(ring, spec), **_ring_options(spec))[0]
    return run_ranks_in_processes("ringattn.launch.measure.check:worker", spec, ranks, None, 1)[0]


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one process of the check."""
    import torch

    import ringattn

    torch.set_num_threads(1)
    # The transport "local" is for ranks that are threads of one process, but here each rank is a process.
    transport = "shm" if spec["transport"] == "local" else spec["transport"]
    with ringattn.Ring(transport=transport, **_ring_options(spec)) as ring:
        return check_rank(ring, spec)


def _ring_options(spec: dict[str, Any]) -> dict[str, Any]:
    return {"engine": spec["engine"], "timeout_s": spec["timeout_s"], "poison": True}


def check_rank(ring: Ring, spec: dict[str, Any]) -> dict[str, Any]:
    """Compute all cases on one rank. Rank 0 also compares them with the reference and prints the results.

    Return the numbers of cases and failures, the schedules left out, and on rank 0 the errors and bounds of each case.
    """
    import torch

    from ringattn.launch.measure.exactness import DTYPES as TORCH_DTYPES
    from ringattn.launch.measure.exactness import (
        FULL_PRECISION_BOUND,
        OVER_ONE_DEVICE,
        attended,
        drawn,
        error_of,
        reference_and_bounds,
    )

    dtype, length = TORCH_DTYPES[spec["dtype"]], spec["tokens"]
    heads, dims = (spec["heads"], spec["kv_heads"]), (spec["head_dim"], spec["value_dim"])
    inputs = tuple(x.to(ring.device) for x in drawn(spec["batch"], length, heads, dims, dtype, spec["seed"]))
    # With json=-, standard output is reserved for JSON.
    stream = sys.stderr if spec["json"] == STANDARD_OUTPUT else sys.stdout
    say: Callable[[str], None] = partial(print, flush=True, file=stream) if ring.rank == 0 else lambda _: None
    bound = f"{OVER_ONE_DEVICE} x the error of one device"
    if dtype in FULL_PRECISION_BOUND:
        bound = f"{FULL_PRECISION_BOUND[dtype]:.0e} x the largest value"
    say(f"{ring.world_size} ranks over {ring.transport.name}, {length} tokens, {spec['dtype']}, bound {bound}")
    say(CASE_HEADING if spec["verbose"] else SUMMARY_HEADING)
    failed = torch.zeros(1, dtype=torch.int64, device=ring.device)
    references: dict[str, tuple[list[Tensor], list[float]]] = {}
    figures: list[dict[str, Any]] = []
    refused = refused_schedules(ring)
    for why in refused.values():
        say(f"not checked: {why}")
    every = cases() if spec["combinations"] == "all" else paired_cases()
    everything = [case for case in every if case.schedule not in refused]
    for schedule, of_schedule in groupby(everything, key=lambda case: case.schedule):
        results: list[Result] = []
        for case in of_schedule:
            call = case.call(length)
            got = attended(ring, call, inputs, call.sequence_on(ring, length), schedule)
            if ring.rank == 0:
                if case.mask not in references:
                    references[case.mask] = reference_and_bounds(call, inputs, spec["engine"])
                reference, bounds = references[case.mask]
                errors = [error_of(x, y) for x, y in zip(got, reference, strict=True)]
                results.append(Result(case, errors, bounds))
                if spec["verbose"]:
                    say(results[-1].row())
        figures += [result.figures() for result in results]
        if ring.rank == 0:
            wrong = sum(not result.exact for result in results)
            failed += wrong
            if not spec["verbose"]:
                say(summary(results))
                if wrong:
                    say("\n".join([CASE_HEADING, *(result.row() for result in results)]))
    ring.all_reduce([failed])  # only rank 0 has counted
    return {"cases": len(everything), "failed": int(failed), "ranks": ring.world_size, "left_out": refused,
            "results": figures}  # fmt: skip


def refused_schedules(ring: Ring) -> dict[str, str]:
    """Return the schedules that this ring refuses, by name, with the reason."""
    from ringattn.schedule.route import grid_of

    refused = {}
    for name in NUMBERED:
        try:
            grid_of(tuple(map(ring.cluster.node_of, range(ring.world_size))), name)
        except InputError as error:
            refused[name] = str(error)
    return refused


class Result(NamedTuple):
    """The difference of a case from the reference: an error and its bound for each of `NAMES`."""

    case: Case
    errors: list[float]
    bounds: list[float]

    @property
    def exact(self) -> bool:
        # Not `error > bound`: an error that is not a number must fail.
        return all(error <= bound for error, bound in zip(self.errors, self.bounds, strict=True))

    def figures(self) -> dict[str, Any]:
        """Return the case and its errors as plain data."""
        errors, bounds = (dict(zip(NAMES, values, strict=True)) for values in (self.errors, self.bounds))
        return {**self.case._asdict(), "errors": errors, "bounds": bounds, "exact": self.exact}

    def row(self) -> str:
        """Return the case's line of the table."""
        marks = "".join(f"{error:>10.1e}" for error in self.errors)
        return (
            f"{self.case.mask:<26}{self.case.layout:<14}{self.case.schedule:<12}{marks}{'' if self.exact else '  OVER'}"
        )


CASE_HEADING = f"{'mask':<26}{'layout':<14}{'schedule':<12}" + "".join(f"{name:>10}" for name in NAMES)
SUMMARY_HEADING = f"{'schedule':<12}{'masks':>6}{'layouts':>9}{'cases':>7}  largest error of " + "".join(
    f"{name:>10}" for name in NAMES
)


def summary(results: Sequence[Result]) -> str:
    """Return a line about the cases of a schedule: their number, and the largest error of each of `NAMES`."""
    masks, layouts = ({getattr(result.case, name) for result in results} for name in ("mask", "layout"))
    # `max` alone could ignore a NaN, which must be shown.
    largest = (
        max(errors, key=lambda error: (error != error, error))
        for errors in zip(*(result.errors for result in results), strict=True)
    )
    over = sum(not result.exact for result in results)
    counts = f"{results[0].case.schedule:<12}{len(masks):>6}{len(layouts):>9}{len(results):>7}"
    verdict = f"  {over} OVER THEIR BOUND" if over else "  exact"
    return f"{counts}{'':<19}" + "".join(f"{error:>10.1e}" for error in largest) + verdict
