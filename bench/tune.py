"""Find the fastest block sizes of the attention kernels on this GPU, and write them into the table.

Run `python -m ringattn.bench.tune [key=value ...]`. The most promising candidates of every kernel are compiled by many
processes at once and then timed one by one, for half precision and the selected head dimensions and forms. `write=true`
writes the winners into kernels/configs.json, which the compile gate must then verify again
(`python -m tests.kernels.compile_gate.compiling renew`).
Guarantees: only times decide, and no candidate wins that does not fit or that fails the gate of the kernel benchmark.
Each candidate is saved once it is timed. The same command then resumes after it, as long as kernels, device and sizes
are the same. A candidate that hangs or breaks its CUDA context loses only its own figures. The library itself tunes
nothing.
Not covered: float32 (its products run without matrix units), several GPUs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringattn.bench.crash_proof import Budget, JobFailed, Worker, one_line, run_all
from ringattn.bench.device_clock import device_facts, device_us
from ringattn.bench.kernel_baselines import DEVICE, check_baseline, make_inputs, ours
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, keep, progress
from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, BackwardInputs, Softmax
from ringattn.engine.triton import TritonEngine, architecture, kept
from ringattn.kernels import configs as configs_module
from ringattn.kernels.configs import Configs, configs_for, put_config
from ringattn.kernels.launch import Config


def with_config(case: Case, config: Config) -> TritonEngine:
    """Return an engine that uses `config` for the kernel of the case, and the table's entries for the others."""
    configs: Configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    return TritonEngine(configs._replace(**{case.kernel: config}), deterministic=case.kernel != "grad_fused")


def run(case: Case, config: Config, options: TuneOptions, timed: bool) -> Timed:
    """Compile the kernel of the case with `config` and, if `timed`, time it. Return the figures or the error."""
    try:
        inputs = make_inputs(options.batch, options.tokens, options.heads, case.dim, options.dtype)
        q, k, v, dout = (x.transpose(0, 1) for x in inputs)
        engine, us = with_config(case, config), []
        token_range = TokenRange(StridedRange(0, options.tokens), StridedRange(0, options.tokens))
        for band in (FULL, CAUSAL):
            tile = Tile(token_range, token_range, band, StridedRange(0, options.heads))
            works = [engine.prepare([(tile,)], Softmax(case.dim**-0.5), options.tokens, options.heads) for _ in "fb"]
            state = engine.begin(works[0], q, case.dim, None)
            engine.attend(q, KV(k, v), state, works[0][0])
            work: Any = lambda: engine.attend(q, KV(k, v), state, works[0][0])  # noqa: B023, E731
            if case.kernel != "forward":
                out = state.out.finalized(q.dtype)
                backward_inputs = BackwardInputs(dout, out, state.lse, None, engine.delta(dout, out, None))
                dq = engine.begin_grad(works[1], q, case.dim)
                dkv = KV(torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
                work = lambda: engine.attend_grad(q, KV(k, v), backward_inputs, dq, dkv, works[1][0])  # noqa: B023, E731
                work()
            us.append(device_us(work, options.ms) if timed else 0.0)
        kernel_name = {"grad_fused": "grad_kv"}.get(case.kernel, case.kernel)  # one kernel computes both
        loaded = (handle.kernel for handle in kept.handles())
        spills = max((kernel.n_spills for kernel in loaded if kernel_name in kernel.name), default=0)
        return Timed(config, tuple(us), spills=spills)
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises if the CUDA context is broken, which ends this process
        return Timed(config, (), one_line(error))
    finally:
        kept.clear()


def why_wrong(case: Case, config: Config, dtype: str) -> str | None:
    """Return why a candidate's results are wrong, or None."""
    return check_baseline(ours(case.form, with_config(case, config)), case.dim, dtype)


def tune(case: Case, remaining: list[Config], results: Results, budget: Budget, say: Callable[[str], None]) -> None:
    """Compile, time and check the candidates of one case. Raises JobFailed when the budget is spent."""
    options = results.options
    if options.workers:
        # Compile with the timed sizes, because Triton compiles a kernel again if the divisibility of its counts
        # differs.
        jobs = [(case, config, options, False) for config in remaining]
        for index, compiled in run_all(run, jobs, options.workers, options.limit_s, budget):
            budget.limit(1.0)  # a candidate that ran out of the budget has not failed
            failed = str(compiled) if isinstance(compiled, JobFailed) else compiled.failed
            if failed:
                results.add(case, Timed(remaining[index], (), f"to compile: {failed}"))
    with Worker() as worker:
        failed_before = {row.config for row in results.rows.get(case, ())}
        for config in (config for config in remaining if config not in failed_before):
            limit_s = budget.limit(options.limit_s)
            try:
                row = worker.ask(run, case, config, options, True, limit_s=limit_s)
            except JobFailed as error:
                budget.limit(1.0)
                row = Timed(config, (), str(error))
            results.add(case, row)
            outcome = row.failed or f"{row.total_us:.0f} us"
            say(f"{case.kernel} {case.dim} {case.form}, {format_config(config)}: {outcome}")
        for row in sorted(results.rows[case], key=lambda row: row.total_us):
            if row.right or not row.us:
                break
            limit_s = budget.limit(options.limit_s)
            try:
                reason = worker.ask(why_wrong, case, row.config, options.dtype, limit_s=limit_s)
            except JobFailed as error:
                budget.limit(1.0)
                reason = str(error)
            results.add(case, row._replace(us=() if reason else row.us, failed=reason or "", right=not reason))
            if not reason:
                break


def main(arguments: list[str]) -> None:
    """Tune the kernels, save and print the results, and write the winners into the table if `write` is set."""
    options = parse(TuneOptions(), arguments)
    budget = Budget(options.budget_s)
    with progress("tune") as say:
        say(f"{options.budget_s:.0f} s at most, {options.limit_s:.0f} s for each candidate")
        results = Results(options)
        todo = results.todo()
        known_count = sum(len(rows) for rows in results.rows.values())
        say(f"{sum(map(len, todo.values()))} candidates of {len(todo)} kernels to try, {known_count} already timed")
        try:
            for case, remaining in todo.items():
                tune(case, remaining, results, budget, say)
        except JobFailed as error:
            say(f"{error}; run the same command to continue")
    if options.write:
        arch = architecture(torch.device(DEVICE))
        for case in results.rows:
            if best := results.best(case):
                put_config(arch, case.dim, case.form, case.kernel, best.config)
    results.keep(finish)


# --- the results ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TuneOptions:
    """The options of the benchmark.

    `tokens`, `heads` and `batch` are the sizes of the timed call. `workers` processes compile, and `limit` is the
    number of candidates per kernel. `limit_s` limits the compilation and the timing of one candidate, and `budget_s`
    limits the whole run.
    """

    dims: tuple[int, ...] = (128, 64)
    forms: tuple[str, ...] = ("descriptors", "pointers")
    kernels: tuple[str, ...] = ("forward", "grad_kv", "grad_q", "grad_fused")
    tokens: int = 8192
    heads: int = 16
    batch: int = 2
    dtype: str = "bfloat16"
    ms: int = 20
    workers: int = 14
    limit: int = 25
    limit_s: float = 60.0
    budget_s: float = 420.0
    write: bool = False
    results: str = "bench/results/gpu"

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Return the sizes of the timed call. Saved times of other sizes cannot be reused."""
        return self.tokens, self.heads, self.batch, self.dtype, self.ms


class Case(NamedTuple):
    """One kernel's entry of the table."""

    kernel: str
    dim: int
    form: str


class Timed(NamedTuple):
    """A candidate that was tried.

    `us` has the microseconds of the full and of the causal call; if it is empty, `failed` is the reason. `spills` is
    the number of register spills of the tuned kernel, which reject no candidate. `right` says whether the candidate has
    passed the gate.
    """

    config: Config
    us: tuple[float, ...]
    failed: str = ""
    spills: int = 0
    right: bool = False

    @property
    def total_us(self) -> float:
        """Return the time by which candidates are compared; infinite for a candidate that failed."""
        return sum(self.us) if self.us else float("inf")


def cases(options: TuneOptions) -> Iterator[Case]:
    """Yield the cases that the options select and for which the table has an entry."""
    for form in options.forms:
        for dim in options.dims:
            try:
                configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, dim, form)
            except LookupError:
                continue
            yield from (Case(kernel, dim, form) for kernel in options.kernels)


def candidates(case: Case, limit: int) -> list[Config]:
    """Return at most `limit` candidates: the table's present entry first, then the most promising."""
    table_entry = entry(case)
    return [table_entry, *(config for config in promising(*case) if config != table_entry)][:limit]


def entry(case: Case) -> Config:
    """Return the table's present entry of the case."""
    configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    config: Config = getattr(configs, case.kernel)
    return config


class Results:
    """The candidates tried so far, by case, in the order of the trials."""

    def __init__(self, options: TuneOptions) -> None:
        """Load the saved results if they are of the same device, sizes and kernels."""
        self.options = options
        self.rows: dict[Case, list[Timed]] = {}
        self.facts = device_facts() | {"kernels": sources(), "sizes": list(options.sizes)}
        file = Path(options.results, "tune.json")
        earlier = json.loads(file.read_text(encoding="utf-8")) if options.results and file.exists() else {}
        if earlier.get("measured on") == self.facts:
            for name, rows in earlier["candidates"].items():
                kernel, dim, form = name.split("/")
                read = [Timed(Config(*row.pop("config")), tuple(row.pop("us")), **row) for row in rows]
                self.rows[Case(kernel, int(dim), form)] = read

    def todo(self) -> dict[Case, list[Config]]:
        """Return the selected candidates that have not been tried yet."""
        remaining = {}
        for case in cases(self.options):
            tried = {row.config for row in self.rows.get(case, ())}
            remaining[case] = [config for config in candidates(case, self.options.limit) if config not in tried]
        return remaining

    def add(self, case: Case, row: Timed) -> None:
        """Add a candidate, or replace its earlier row."""
        rows = self.rows.setdefault(case, [])
        index = next((index for index, earlier in enumerate(rows) if earlier.config == row.config), len(rows))
        rows[index : index + 1] = [row]
        self.keep()

    def best(self, case: Case) -> Timed | None:
        """Return the fastest candidate that passed the gate."""
        return min((row for row in self.rows.get(case, ()) if row.right), key=lambda row: row.total_us, default=None)

    def keep(self, write: Callable[..., None] = keep) -> None:
        """Save the results with `write`: `report.keep` writes only files, and `report.finish` also prints them."""
        table = Table("block sizes", ["kernel", "dim", "form", "tried", "best", "full us", "causal us", "before", "us"])
        for case, rows in self.rows.items():
            best, table_entry = self.best(case), entry(case)
            before = next((f"{row.total_us:.0f}" for row in rows if row.config == table_entry), "-")
            cells = [format_config(best.config), *(f"{us:.0f}" for us in best.us)] if best else ["-", "-", "-"]
            table.rows.append(
                [case.kernel, str(case.dim), case.form, str(len(rows)), *cells, format_config(table_entry), before]
            )
        written = {"/".join(map(str, case)): [row._asdict() for row in rows] for case, rows in self.rows.items()}
        data = {"measured on": self.facts, "candidates": written, "processors": os.cpu_count()}
        write("tune", self.options, [table], data, self.options.results)


def format_config(config: Config) -> str:
    """Return a text with the rows, warps and stages of a config."""
    return "x".join(map(str, config[:4]))


def sources() -> str:
    """Return a digest of the source of the attention kernels. Saved times of other sources are not reused."""
    files = sorted(Path(configs_module.__file__).parent.glob("attention_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# --- the order of candidates ------------------------------------------------------------------------------------------


REGISTERS, SHARED_BYTES = 208, 232_448
"""Registers of a thread, minus those for addresses, masks and row sums; shared memory of a block."""


def promising(kernel: str, dim: int, form: str) -> list[Config]:
    """Return all candidates, sorted by their estimated cost."""
    configs = [
        Config(m, n, warps, stages, form)
        for m in (32, 64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (1, 2, 3, 4)
        if m * n >= 32 * 64
    ]
    return sorted(configs, key=lambda config: cost(kernel, dim, config))


def cost(kernel: str, dim: int, config: Config) -> float:
    """Return the estimated time of one (query, key) pair, in arbitrary units."""
    held_rows, streamed_rows, warps, stages = *config[:2], *config[2:4]
    if kernel in ("grad_kv", "grad_fused"):
        held_rows, streamed_rows = streamed_rows, held_rows
    held_operands, streamed_operands = {"forward": (1, 2), "grad_q": (2, 2), "grad_kv": (2, 2), "grad_fused": (2, 2)}[
        kernel
    ]
    accumulators = held_rows * dim * (1 if kernel in ("forward", "grad_q") else 2)
    logits = held_rows * streamed_rows * (1 if kernel == "forward" else 2)
    registers = (accumulators + logits) / (32 * warps)
    if kernel == "grad_fused":
        registers += streamed_rows * dim / (32 * warps)
    crossing = held_rows * streamed_rows * (2 if kernel in ("grad_kv", "grad_fused") else 0)
    shared = 2 * (held_rows * dim * held_operands + stages * streamed_rows * dim * streamed_operands + crossing)
    return (
        (1 / held_rows + 1 / streamed_rows)  # of an operand's row: how many pairs share its load
        * max(1.0, 64 * warps / 4 / held_rows) ** 0.5  # groups of warps with less than 64 rows split the columns
        * max(1.0, registers / REGISTERS) ** 2  # spills
        * (1.0 if shared <= SHARED_BYTES else 4.0)  # may not fit
        * {1: 1.3, 2: 1.0, 3: 1.0, 4: 1.05}[stages]  # 1: the kernel waits for its loads
        * (1.15 if warps == 4 else 1.0)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
