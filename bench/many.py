"""The transport on 2 to 8 GPUs: hops, overlap, a full ring compared with one GPU, FSDP2, opening, closing and aborts.

Run `python -m ringattn.bench.many [part=hops|overlap|ring|life|report] [key=value ...]`; `make gpu-check-many` runs all
parts. A part saves `many_<part>.json` and `.md` after every figure; `report` combines the saved parts into one page.
Guarantees: a case that fails, hangs or breaks its CUDA context loses only its own figures, and its record says why. A
case is timed only after its result was right (`ringattn.bench.many_ranks`). With transports=gloo the same runs use the
CPU, as a rehearsal.
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
    """The options of the benchmark.

    `ranks` is 0 for all GPUs. `margins` are values of `sm_margin`, the thread blocks of an exchange, and `cgas` the
    numbers of thread blocks per cluster. `bytes` are the sizes of a hop, `rows` is the number of a rank's rows in a
    step, `tokens` are the lengths of a pass, and `count` is the number of repetitions. `limit_s` limits one case,
    including the start of its processes, and `budget_s` limits the part.
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


def main(arguments: Sequence[str] = ()) -> None:
    """Measure a part, or write the page of all parts.

    Raises `InputError` for an unknown part, or if there are fewer than two ranks.
    """
    options = parse(ManyOptions(), arguments)
    if options.part == "report":
        page(options, PARTS)
        return
    if options.part not in PARTS:
        raise InputError(f"part={options.part}: choose one of {', '.join(PARTS)}, report")
    ranks = options.ranks or torch.cuda.device_count()
    if ranks < 2:
        raise InputError(f"ranks={ranks}: this measures ranks that communicate; use two GPUs, or ranks=2 with "
                         "transports that need no GPU")  # fmt: skip
    cases, records = list(cases_of(options)), list[dict[str, Any]]()

    def save(write: Callable[..., None]) -> None:
        data = {"ranks": ranks, "complete": len(records) == len(cases), "cases": records}
        write("many", options, tables(options.part, data), data, options.results, f"many_{options.part}")

    with progress(f"many {options.part}") as say:

        def record(case: Case, answer: dict[str, Any]) -> None:
            records.append({**case, "found": answer})
            say(f"{len(records)} of {len(cases)}: {case['kind']}, {name_of(case)}{': failed' * ('failed' in answer)}")
            save(keep)

        measure(cases, ranks, options, record)
    save(finish)


def cases_of(options: ManyOptions) -> Iterator[Case]:
    """Yield the cases of a part, most important first: the default of every transport, then the options of NCCL."""
    shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "count")}
    plain = [{"transport": transport, "nccl": {}} for transport in options.transports]
    chosen: list[dict[str, Any]] = []
    if "nccl" in options.transports:
        chosen = [{"sm_margin": margin, "cga_cluster_size": cga} for cga in options.cgas for margin in options.margins]
    varied = [{"transport": "nccl", "nccl": nccl_options} for nccl_options in chosen]
    if options.part == "hops":
        for nccl_options in ({"register": False}, {"blocking": True}) if chosen else ():
            varied.append({"transport": "nccl", "nccl": nccl_options})
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
    """The signal that the processes of a job must end, because a case has failed or has exceeded its time."""


def measure(
    cases: Sequence[Case], ranks: int, options: ManyOptions, record: Callable[[Case, dict[str, Any]], None]
) -> None:
    """Run all cases, and call `record(case, answer)` as soon as a case has an answer.

    An answer without figures has the key `failed` with the reason. The same processes run one case after another; after
    a failed case, new processes are started.
    """
    budget, remaining = Budget(options.budget_s), list(cases)
    while remaining:
        try:
            with tempfile.TemporaryDirectory(prefix="ringattn-many-") as name:
                done, reason = _run(Path(name, "job.json"), remaining, ranks, options, budget, record)
            if reason and done < len(remaining):
                record(remaining[done], {"failed": reason})
                done += 1
            remaining = remaining[done:]
        except JobFailed as error:  # the budget is spent; this is checked between cases
            for case in remaining:
                record(case, {"failed": str(error)})
            return


def _run(
    job: Path, remaining: list[Case], ranks: int, options: ManyOptions, budget: Budget,
    record: Callable[[Case, dict[str, Any]], None],
) -> tuple[int, str]:  # fmt: skip
    """Run the remaining cases in new processes.

    Return the number of cases that have an answer, and the reason why the next case has none; the reason is empty if
    all have one or the last answer was a failure.
    """
    job.write_text(json.dumps(remaining), encoding="utf-8")
    done, reason = 0, ""
    limit_at_s = time.monotonic() + budget.limit(options.limit_s)

    def collect_answers() -> None:
        nonlocal done, reason, limit_at_s
        while done < len(remaining) and (answer := _answer(job.parent, done, ranks)) is not None:
            record(remaining[done], answer)
            done += 1
            if "failed" in answer and not answer.get("goes on"):
                raise _Over
            if done < len(remaining):
                limit_at_s = time.monotonic() + min(options.limit_s, budget.left_s)
        if done < len(remaining) and time.monotonic() > limit_at_s:
            reason = f"no answer within {options.limit_s:.0f} s, or within what was left of budget_s"
            raise _Over

    try:
        ended = run_torchrun(
            ["-m", PROGRAM, str(job)], job, collect_answers, ranks, job_s=options.budget_s + options.limit_s
        )
        collect_answers()
    except _Over:
        return done, reason
    except RingError as error:
        return done, str(error)[-LAST_CHARACTERS:]
    if done < len(remaining):
        errors = [line for line in ended.printed.splitlines() if re.match(r"(\[rank\d+\]: )?\w*Error: ", line)]
        message = (errors or [ended.printed.strip()[-LAST_CHARACTERS:]])[0]
        reason = f"its processes ended with exit code {ended.code}: {message}"
    return done, reason


def _answer(folder: Path, number: int, ranks: int) -> dict[str, Any] | None:
    """Return the answer to case `number`, or None until all ranks have answered or one has failed."""
    files = [folder / f"answer-{number}-{rank}.json" for rank in range(ranks)]
    answers = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    failed = next((answer for answer in answers if "failed" in answer), None)
    return failed or (answers[0] if len(answers) == ranks else None)


# --- tables and pages -------------------------------------------------------------------------------------------------


PAGE = "many"


def tables(part: str, data: dict[str, Any]) -> list[Table]:
    """Return the tables of a part, for the cases that have answers so far."""
    makers = {
        "hops": (_hops,), "overlap": (_overlap,), "ring": (_rings, _fsdp), "life": (_lives, _aborts),
    }[part]  # fmt: skip
    cases = data["cases"]
    shown = [
        table for make in makers if (table := make([case for case in cases if "failed" not in case["found"]])).rows
    ]
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
    """Write `many.md` and `many.json` with all parts that were measured, and a note about the others.

    Raises `InputError` if no part was measured.
    """
    shown, data, missing = [], {}, []
    for part in parts:
        file = Path(options.results, f"many_{part}.json")
        if not file.exists():
            missing.append(part)
            continue
        data[part] = json.loads(file.read_text(encoding="utf-8"))
        shown += tables(part, data[part])
    if faults := _faults(Path(options.results)):
        shown.append(faults)
    else:
        missing.append("faults")
    if not data:
        raise InputError(f"results={options.results}: no part has been measured there; run `make gpu-check-many`")
    if missing:
        shown[-1].notes.append(f"not measured: {', '.join(missing)}")
    finish("many", options, shown, {"parts": data}, options.results, PAGE)


def _faults(folder: Path) -> Table | None:
    """Return a table of the times of faults and aborts that the tests of several processes have saved, or None.

    `tests/gpu/kept.py` writes their files.
    """
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
    """Describe a case: its transport, engine and options."""
    chosen = (f"{key} {value}" for key, value in case["nccl"].items())
    return ", ".join([case["transport"], *([case["engine"]] if "engine" in case else []), *chosen])


def _hops(cases: list[dict[str, Any]]) -> Table:
    hops = [case for case in cases if case["kind"] == "hop"]
    sizes = list(hops[0]["found"]) if hops else []
    rows: list[Sequence[str]] = [
        [name_of(case), *(f"{case['found'][n]['gb_s']:.1f} ({case['found'][n]['us']:.0f} us)" for n in sizes)]
        for case in hops
    ]
    return Table("A hop, GB/s each way", ["transport", *(f"{int(n) >> 10} KiB" for n in sizes)], rows)


def _overlap(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), str(it["sm_margin"]), *(f"{it[key]:.0f}" for key in ("attend_us", "hop_us", "both_us")),
         f"{it['hidden']:.0%}"]
        for case in cases if case["kind"] == "overlap" for it in [case["found"]]
    ]  # fmt: skip
    columns = ["transport, engine", "SMs left", "attention us", "hop us", "both us", "hidden"]
    return Table("A hop during a step's attention", columns, rows)


def _rings(cases: list[dict[str, Any]]) -> Table:
    rows: list[Sequence[str]] = [
        [name_of(case), str(case["tokens"]), f"{it['ring_us'] / 1e3:.2f}", f"{it['one_us'] / 1e3:.2f}",
         f"{it['efficiency']:.1%}", f"{it['error']:.1e}"]
        for case in cases if case["kind"] == "ring" for it in [case["found"]]
    ]  # fmt: skip
    columns = ["transport, engine", "tokens", "ring ms", "one GPU ms", "efficiency", "difference"]
    return Table("A causal pass forward and backward, next to torch's own on one GPU", columns, rows)


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
