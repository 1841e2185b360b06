"""What `ringattn.bench.many` shows of its figures: a table for each kind of case, and one page of all parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringattn.bench.report import Table, finish
from ringattn.errors import InputError

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
