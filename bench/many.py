"""The transport on 2 to 8 GPUs: hops, overlap, a full ring against one GPU, FSDP2 beside it, openings and aborts.

`python -m ringattn.bench.many [part=hops|overlap|ring|life|report] [key=value ...]`; `make gpu-check-many` runs all of
them. A part keeps `many_<part>.json` and `.md` as its figures come; `report` makes one page of those that are there.
Guarantees: a case that fails, hangs or breaks its CUDA context costs its own figures, which say why; what is timed has
answered right before (`ringattn.bench.many_ranks`). With transports=gloo the same runs on CPU, as a rehearsal.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ringattn.bench.crash_proof import Budget, JobFailed
from ringattn.bench.many_ranks import Case
from ringattn.bench.options import parse
from ringattn.bench.processes import run_torchrun
from ringattn.bench.report import Table, finish, keep, progress
from ringattn.errors import InputError, RingError

PARTS = ("hops", "overlap", "ring", "life")
PROGRAM = "ringattn.bench.many_ranks"
LAST_CHARACTERS = 300


@dataclass(frozen=True)
class ManyOptions:
    """`ranks`: 0 for all GPUs. `margins`: `sm_margin`, thus thread blocks of an exchange; `cgas`: of them in a cluster.

    `bytes`: of a hop; `rows`: of a rank in a step; `tokens`: of a pass; `count`: repetitions. `limit_s`: for one case,
    the start of its processes included; `budget_s`: for the part.
    """

    part: str = "hops"
    ranks: int = 0
    transports: tuple[str, ...] = ("nccl", "peer")
    bytes: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
    margins: tuple[int, ...] = (0, 4, 8, 16)
    cgas: tuple[int, ...] = (1, 4)
    engines: tuple[str, ...] = ("triton", "fa3", "aten")
    rows: int = 8192
    tokens: tuple[int, ...] = (16384, 65536)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    count: int = 20
    cycles: int = 20
    limit_s: float = 90.0
    budget_s: float = 420.0
    results: str = "bench/results/gpu"


def main(words: Sequence[str] = ()) -> None:
    """Measure a part, or write the page of all. Raises `InputError` for an unknown part, or fewer than two ranks."""
    options = parse(ManyOptions(), words)
    if options.part == "report":
        page(options, PARTS)
        return
    if options.part not in PARTS:
        raise InputError(f"part={options.part}: choose one of {', '.join(PARTS)}, report")
    ranks = options.ranks or torch.cuda.device_count()
    if ranks < 2:
        raise InputError(f"ranks={ranks}: this measures what ranks do together; it takes two GPUs, or ranks=2 with "
                         "transports that need none")  # fmt: skip
    cases, kept = list(cases_of(options)), list[dict[str, Any]]()

    def told(how: Callable[..., None]) -> None:
        data = {"ranks": ranks, "complete": len(kept) == len(cases), "cases": kept}
        how("many", options, tables(options.part, data), data, options.results, f"many_{options.part}")

    with progress(f"many {options.part}") as say:

        def found(case: Case, answer: dict[str, Any]) -> None:
            kept.append({**case, "found": answer})
            say(f"{len(kept)} of {len(cases)}: {case['kind']}, {name_of(case)}{': failed' * ('failed' in answer)}")
            told(keep)

        measure(cases, ranks, options, found)
    told(finish)


def cases_of(options: ManyOptions) -> Iterator[Case]:
    """What a part measures, by what decides most: every transport's own choice, then what NCCL can be told."""
    shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "count")}
    plain = [{"transport": transport, "nccl": {}} for transport in options.transports]
    chosen: list[dict[str, Any]] = []
    if "nccl" in options.transports:
        chosen = [{"sm_margin": margin, "cga_cluster_size": cga} for cga in options.cgas for margin in options.margins]
    varied = [{"transport": "nccl", "nccl": one} for one in chosen]
    if options.part == "hops":
        for one in ({"register": False}, {"blocking": True}) if chosen else ():
            varied.append({"transport": "nccl", "nccl": one})
        for case in (*plain, *varied):
            yield {"kind": "hop", **case, "bytes": options.bytes, "count": options.count}
    elif options.part == "overlap":
        for case, engine in product((*plain, *varied), options.engines):
            yield {"kind": "overlap", **case, "engine": engine, "rows": options.rows, **shape}
    elif options.part == "ring":
        for tokens, case, engine in product(options.tokens, plain, options.engines):
            yield {"kind": "ring", **case, "engine": engine, "tokens": tokens, **shape}
        for case in plain:
            small = {"tokens": min(options.tokens), "heads": 4, "head_dim": 64, "count": options.count}
            yield {"kind": "fsdp", **case, "engine": "plain", **small}
    else:
        yield from ({"kind": "life", **case, "cycles": options.cycles} for case in plain)
        yield from ({"kind": "abort", **case} for case in plain)


class _Over(Exception):
    """The processes of a job must end: a case has failed, or has had its time."""


def measure(
    cases: Sequence[Case], ranks: int, options: ManyOptions, found: Callable[[Case, dict[str, Any]], None]
) -> None:
    """`found(case, answer)` of each case as it is there; an answer without figures says `failed` and why.

    Processes do one case after another; after one that fails come new ones.
    """
    budget, todo = Budget(options.budget_s), list(cases)
    while todo:
        try:
            with tempfile.TemporaryDirectory(prefix="ringattn-many-") as name:
                done, why = _run(Path(name, "job.json"), todo, ranks, options, budget, found)
            if why and done < len(todo):
                found(todo[done], {"failed": why})
                done += 1
            todo = todo[done:]
        except JobFailed as error:  # the budget is spent, which is noticed between two cases
            for case in todo:
                found(case, {"failed": str(error)})
            return


def _run(
    job: Path, todo: list[Case], ranks: int, options: ManyOptions, budget: Budget,
    found: Callable[[Case, dict[str, Any]], None],
) -> tuple[int, str]:  # fmt: skip
    """Let new processes do cases. How many have answered, and why the next one has not, if it was begun."""
    job.write_text(json.dumps(todo), encoding="utf-8")
    done, why = 0, ""
    until = time.monotonic() + budget.limit(options.limit_s)

    def meanwhile() -> None:
        nonlocal done, why, until
        while done < len(todo) and (answer := _answer(job.parent, done, ranks)) is not None:
            found(todo[done], answer)
            done += 1
            if "failed" in answer and not answer.get("goes on"):
                raise _Over
            if done < len(todo):
                until = time.monotonic() + min(options.limit_s, budget.left_s)
        if done < len(todo) and time.monotonic() > until:
            why = f"no answer within {options.limit_s:.0f} s, or within what was left of budget_s"
            raise _Over

    try:
        ended = run_torchrun(["-m", PROGRAM, str(job)], job, meanwhile, ranks, job_s=options.budget_s + options.limit_s)
        meanwhile()
    except _Over:
        return done, why
    except RingError as error:
        return done, str(error)[-LAST_CHARACTERS:]
    if done < len(todo):
        said = [line for line in ended.printed.splitlines() if re.match(r"(\[rank\d+\]: )?\w*Error: ", line)]
        words = (said or [ended.printed.strip()[-LAST_CHARACTERS:]])[0]
        why = f"its processes ended with exit code {ended.code}: {words}"
    return done, why


def _answer(folder: Path, number: int, ranks: int) -> dict[str, Any] | None:
    """What the ranks found in a case; None until all have answered or one has failed, or refused as all ranks do."""
    files = [folder / f"answer-{number}-{rank}.json" for rank in range(ranks)]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    failed = next((one for one in found if "failed" in one), None)
    return failed or (found[0] if len(found) == ranks else None)


# --- tables and pages -------------------------------------------------------------------------------------------------


PAGE = "many"


def tables(part: str, data: dict[str, Any]) -> list[Table]:
    """The tables of a part, of what is there so far."""
    made = {
        "hops": (_hops,), "overlap": (_overlap,), "ring": (_rings, _fsdp), "life": (_lives, _aborts),
    }[part]  # fmt: skip
    cases = data["cases"]
    shown = [table for make in made if (table := make([case for case in cases if "failed" not in case["found"]])).rows]
    failed = [f"failed: {case['kind']}, {name_of(case)}: {case['found']['failed']}" for case in cases
              if "failed" in case["found"]]  # fmt: skip
    if failed and not shown:
        shown = [Table(f"{part}: nothing measured", ["", ""])]
    if failed:
        shown[-1].notes += failed
    for table in shown:
        table.title += f", {data['ranks']} ranks" + ("" if data["complete"] else " (not complete)")
    return shown


def page(options: Any, parts: Sequence[str]) -> None:
    """`many.md` and `many.json`: all parts that have files, and which have none. Raises `InputError` without any."""
    shown, found, missing = [], {}, []
    for part in parts:
        file = Path(options.results, f"many_{part}.json")
        if not file.exists():
            missing.append(part)
            continue
        found[part] = json.loads(file.read_text(encoding="utf-8"))
        shown += tables(part, found[part])
    if faults := _faults(Path(options.results)):
        shown.append(faults)
    else:
        missing.append("faults")
    if not found:
        raise InputError(f"results={options.results}: no part has been measured there; run `make gpu-check-many`")
    if missing:
        shown[-1].notes.append(f"not measured: {', '.join(missing)}")
    finish("many", options, shown, {"parts": found}, options.results, PAGE)


def _faults(folder: Path) -> Table | None:
    """What the tests between processes have kept of faults and aborts (`tests/gpu/kept.py`)."""
    rows: list[Sequence[str]] = []
    for transport in ("nccl", "peer"):
        file = folder / f"{transport}_processes.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        device = kept.get("measured on", {}).get("device", "")
        rows += [
            [transport, device, what, "; ".join(f"{key}: {value}" for key, value in figures.items())]
            for what, figures in kept.items()
            if what.startswith(("seconds to the named error", "abort with")) and isinstance(figures, dict)
        ]
    return Table("Faults between processes", ["transport", "on", "what", "found"], rows) if rows else None


def name_of(case: dict[str, Any]) -> str:
    """Transport, engine and options of a case in words."""
    chosen = (f"{key} {value}" for key, value in case["nccl"].items())
    return ", ".join([case["transport"], *([case["engine"]] if "engine" in case else []), *chosen])


def _hops(cases: list[dict[str, Any]]) -> Table:
    of = [case for case in cases if case["kind"] == "hop"]
    sizes = list(of[0]["found"]) if of else []
    rows: list[Sequence[str]] = [
        [name_of(case), *(f"{case['found'][n]['gb_s']:.1f} ({case['found'][n]['us']:.0f} us)" for n in sizes)]
        for case in of
    ]
    return Table("A hop, GB/s each way", ["transport", *(f"{int(n) >> 10} KiB" for n in sizes)], rows)


def _overlap(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), str(it["sm_margin"]), *(f"{it[key]:.0f}" for key in ("attend_us", "hop_us", "both_us")),
         f"{it['hidden']:.0%}"]
        for case in cases if case["kind"] == "overlap" for it in [case["found"]]
    ]  # fmt: skip
    columns = ["transport, engine", "SMs left", "attention us", "hop us", "both us", "hidden"]
    return Table("A hop beside a step's attention", columns, rows)


def _rings(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), str(case["tokens"]), f"{it['ring_us'] / 1e3:.2f}", f"{it['one_us'] / 1e3:.2f}",
         f"{it['efficiency']:.1%}", f"{it['error']:.1e}"]
        for case in cases if case["kind"] == "ring" for it in [case["found"]]
    ]  # fmt: skip
    columns = ["transport, engine", "tokens", "ring ms", "one GPU ms", "efficiency", "difference"]
    return Table("A causal pass forward and backward, beside torch's own on one GPU", columns, rows)


def _fsdp(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), *(f"{case['found'][f'{name}, us'] / 1e3:.2f}" for name in ("alone", "beside FSDP2"))]
        for case in cases
        if case["kind"] == "fsdp"
    ]
    return Table("A training step, the same loss with and without FSDP2", ["transport", "alone ms", "FSDP2 ms"], rows)


def _lives(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), str(it["cycles"]), f"{it['open_ms']:.0f}", f"{it['close_ms']:.0f}", str(it["lost_bytes"])]
        for case in cases if case["kind"] == "life" for it in [case["found"]]
    ]  # fmt: skip
    return Table("Openings and closings", ["transport", "cycles", "open ms", "close ms", "bytes lost"], rows)


def _aborts(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), *(f"{case['found'][key]:.2f}" for key in ("abort_s", "device_free_s"))]
        for case in cases
        if case["kind"] == "abort"
    ]
    return Table("An abort with a waiting exchange", ["transport", "abort s", "until the device is free s"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
