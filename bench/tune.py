"""Finds the fastest block sizes of the attention kernels on this GPU, and writes them into the table.

`python -m ringattn.bench.tune [key=value ...]`: the most promising candidates of every kernel, compiled by many
processes at once and then timed alone, for half precision and the head dimensions and forms asked for; `write=true`
puts the winners into kernels/configs.json, which the compile gate then proves anew
(`python -m tests.kernels.compile_gate.compiling renew`).
Guarantees: times alone decide, and no candidate wins that does not fit or fails the gate of the kernel benchmark; each
candidate is kept when it is timed, and the same command goes on from there while kernels, device and sizes are the
same; one that hangs or breaks its CUDA context costs itself alone. Nothing is tuned in the library itself.
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

from ringattn.bench.crash_proof import Budget, JobFailed, Worker, run_all, told
from ringattn.bench.device_clock import device_facts, device_us
from ringattn.bench.kernel_baselines import DEVICE, made_inputs, ours, passes
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, keep, progress
from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, BackwardInputs, Softmax
from ringattn.engine.triton import TritonEngine, architecture, kept
from ringattn.kernels import configs as configs_module
from ringattn.kernels.configs import Configs, configs_for, put_config
from ringattn.kernels.launch import Config


def with_config(case: Case, config: Config) -> TritonEngine:
    """An engine that takes `config` for the kernel of the case, and the table's for the others."""
    configs: Configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    return TritonEngine(configs._replace(**{case.kernel: config}), deterministic=case.kernel != "grad_fused")


def run(case: Case, config: Config, options: TuneOptions, timed: bool) -> Timed:
    """Compile the call and, if `timed`, time it."""
    try:
        inputs = made_inputs(options.batch, options.tokens, options.heads, case.dim, options.dtype)
        q, k, v, dout = (x.transpose(0, 1) for x in inputs)
        engine, us = with_config(case, config), []
        strip = TokenRange(StridedRange(0, options.tokens), StridedRange(0, options.tokens))
        for band in (FULL, CAUSAL):
            tile = Tile(strip, strip, band, StridedRange(0, options.heads))
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
        own = {"grad_fused": "grad_kv"}.get(case.kernel, case.kernel)  # one kernel does both
        spills = max((handle.spills for handle in kept.handles() if own in handle.name), default=0)
        return Timed(config, tuple(us), spills=spills)
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises where the CUDA context is broken, and so ends this process
        return Timed(config, (), told(error))
    finally:
        kept.clear()


def wrong(case: Case, config: Config, dtype: str) -> str | None:
    """Why a candidate's results are not right."""
    return passes(ours(case.form, with_config(case, config)), case.dim, dtype)


def tune(case: Case, todo: list[Config], found: Found, budget: Budget, say: Callable[[str], None]) -> None:
    """Compile, time and prove the candidates of one case. Raises JobFailed when the budget is spent."""
    options = found.options
    if options.workers:
        # The timed sizes: a kernel is compiled anew for counts of blocks and batches of another divisibility.
        jobs = [(case, config, options, False) for config in todo]
        for index, compiled in run_all(run, jobs, options.workers, options.limit_s, budget):
            budget.limit(1.0)  # one that ran out of the budget's time has not failed
            failed = str(compiled) if isinstance(compiled, JobFailed) else compiled.failed
            if failed:
                found.add(case, Timed(todo[index], (), f"to compile: {failed}"))
    with Worker() as worker:
        failed_before = {row.config for row in found.rows.get(case, ())}
        for config in (config for config in todo if config not in failed_before):
            limit_s = budget.limit(options.limit_s)
            try:
                row = worker.ask(run, case, config, options, True, limit_s=limit_s)
            except JobFailed as error:
                budget.limit(1.0)
                row = Timed(config, (), str(error))
            found.add(case, row)
            say(f"{case.kernel} {case.dim} {case.form}, {sized(config)}: {row.failed or f'{row.total_us:.0f} us'}")
        for row in sorted(found.rows[case], key=lambda row: row.total_us):
            if row.right or not row.us:
                break
            limit_s = budget.limit(options.limit_s)
            try:
                why = worker.ask(wrong, case, row.config, options.dtype, limit_s=limit_s)
            except JobFailed as error:
                budget.limit(1.0)
                why = str(error)
            found.add(case, row._replace(us=() if why else row.us, failed=why or "", right=not why))
            if not why:
                break


def main(words: list[str]) -> None:
    """Tune, keep, print, and write the table if asked to."""
    options = parse(TuneOptions(), words)
    budget = Budget(options.budget_s)
    with progress("tune") as say:
        say(f"{options.budget_s:.0f} s at most, {options.limit_s:.0f} s for each candidate")
        found = Found(options)
        todo = found.todo()
        known = sum(len(rows) for rows in found.rows.values())
        say(f"{sum(map(len, todo.values()))} candidates of {len(todo)} kernels to try, {known} known")
        try:
            for case, these in todo.items():
                tune(case, these, found, budget, say)
        except JobFailed as error:
            say(f"{error}; the same command goes on")
    if options.write:
        arch = architecture(torch.device(DEVICE))
        for case in found.rows:
            if best := found.best(case):
                put_config(arch, case.dim, case.form, case.kernel, best.config)
    found.keep(finish)


# --- what was tried ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TuneOptions:
    """`tokens`, `heads`, `batch`: of the timed call; `workers`: compiling processes; `limit`: candidates a kernel.

    `limit_s`: for one candidate to compile, and for one to be timed; `budget_s`: for all.
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
        """Times of other sizes say nothing about these."""
        return self.tokens, self.heads, self.batch, self.dtype, self.ms


class Case(NamedTuple):
    """One kernel's entry of the table."""

    kernel: str
    dim: int
    form: str


class Timed(NamedTuple):
    """A candidate: microseconds of the full and of the causal call, or why it has none.

    `spills`: of its own kernel, wherever these are: they reject nothing. `right`: it has passed the gate.
    """

    config: Config
    us: tuple[float, ...]
    failed: str = ""
    spills: int = 0
    right: bool = False

    @property
    def total_us(self) -> float:
        """What candidates are compared by; infinite for one that failed."""
        return sum(self.us) if self.us else float("inf")


def cases(options: TuneOptions) -> Iterator[Case]:
    """The entries that there are, of those asked for."""
    for form in options.forms:
        for dim in options.dims:
            try:
                configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, dim, form)
            except LookupError:
                continue
            yield from (Case(kernel, dim, form) for kernel in options.kernels)


def candidates(case: Case, limit: int) -> list[Config]:
    """What is tried: the table's own entry first, then what promises most."""
    own = entry(case)
    return [own, *(config for config in promising(*case) if config != own)][:limit]


def entry(case: Case) -> Config:
    """The table's."""
    configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    found: Config = getattr(configs, case.kernel)
    return found


class Found:
    """The candidates tried so far, by case, in the order in which they were."""

    def __init__(self, options: TuneOptions) -> None:
        """With those of the kept results, where these are of the same device, sizes and kernels."""
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
        """What is still to be tried of the cases asked for."""
        found = {}
        for case in cases(self.options):
            tried = {row.config for row in self.rows.get(case, ())}
            found[case] = [config for config in candidates(case, self.options.limit) if config not in tried]
        return found

    def add(self, case: Case, row: Timed) -> None:
        """One more, or new facts about one."""
        rows = self.rows.setdefault(case, [])
        at = next((at for at, one in enumerate(rows) if one.config == row.config), len(rows))
        rows[at : at + 1] = [row]
        self.keep()

    def best(self, case: Case) -> Timed | None:
        """The fastest that has proved right."""
        return min((row for row in self.rows.get(case, ()) if row.right), key=lambda row: row.total_us, default=None)

    def keep(self, how: Callable[..., None] = keep) -> None:
        """By `how`: to files, or to the screen as well."""
        table = Table("block sizes", ["kernel", "dim", "form", "tried", "best", "full us", "causal us", "before", "us"])
        for case, rows in self.rows.items():
            best, own = self.best(case), entry(case)
            before = next((f"{row.total_us:.0f}" for row in rows if row.config == own), "-")
            cells = [sized(best.config), *(f"{us:.0f}" for us in best.us)] if best else ["-", "-", "-"]
            table.rows.append([case.kernel, str(case.dim), case.form, str(len(rows)), *cells, sized(own), before])
        written = {"/".join(map(str, case)): [row._asdict() for row in rows] for case, rows in self.rows.items()}
        data = {"measured on": self.facts, "candidates": written, "processors": os.cpu_count()}
        how("tune", self.options, [table], data, self.options.results)


def sized(config: Config) -> str:
    """Rows, warps and stages."""
    return "x".join(map(str, config[:4]))


def sources() -> str:
    """A digest of the attention kernels: times of others are not gone on from."""
    files = sorted(Path(configs_module.__file__).parent.glob("attention_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# --- the order of candidates ------------------------------------------------------------------------------------------


REGISTERS, SHARED_BYTES = 208, 232_448
"""Of a thread, less what addresses, masks and row sums take; of a block."""


def promising(kernel: str, dim: int, form: str) -> list[Config]:
    """All candidates, the most promising first."""
    found = [
        Config(m, n, warps, stages, form)
        for m in (32, 64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (1, 2, 3, 4)
        if m * n >= 32 * 64
    ]
    return sorted(found, key=lambda config: cost(kernel, dim, config))


def cost(kernel: str, dim: int, config: Config) -> float:
    """An estimate of the time of one pair, in units of its own: less is better."""
    own, other, warps, stages = *config[:2], *config[2:4]
    if kernel in ("grad_kv", "grad_fused"):
        own, other = other, own
    held, streamed = {"forward": (1, 2), "grad_q": (2, 2), "grad_kv": (2, 2), "grad_fused": (2, 2)}[kernel]
    accumulators = own * dim * (1 if kernel in ("forward", "grad_q") else 2)
    logits = own * other * (1 if kernel == "forward" else 2)
    registers = (accumulators + logits) / (32 * warps)
    if kernel == "grad_fused":
        registers += other * dim / (32 * warps)
    crossing = own * other * (2 if kernel in ("grad_kv", "grad_fused") else 0)
    shared = 2 * (own * dim * held + stages * other * dim * streamed + crossing)
    return (
        (1 / own + 1 / other)  # of an operand's row: how many pairs share its reading
        * max(1.0, 64 * warps / 4 / own) ** 0.5  # groups of warps with less than 64 rows split the columns
        * max(1.0, registers / REGISTERS) ** 2  # spills
        * (1.0 if shared <= SHARED_BYTES else 4.0)  # may not fit
        * {1: 1.3, 2: 1.0, 3: 1.0, 4: 1.05}[stages]  # 1: loads are waited for
        * (1.15 if warps == 4 else 1.0)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
