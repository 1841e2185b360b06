"""Finds the fastest block sizes of the attention kernels on this GPU, and writes them into the table.

`python -m ringattn.bench.tune [key=value ...]`: every candidate of every kernel, compiled by many processes at once
and then timed alone, for half precision and the head dimensions and forms asked for; `write=true` puts the winners into
kernels/configs.json, which the compile gate then proves anew (`python -m tests.compile_gate.compiling renew`).
Promises: no candidate wins that spills, does not fit, or fails the gate of the kernel benchmark; nothing is tuned in
the library itself.
Does not know: float32 (its products run without matrix units), several GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ringattn.bench.contestants import DEVICE, made_inputs, ours, passes
from ringattn.bench.crash_proof import run_all
from ringattn.bench.device_clock import device_facts, device_us
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, progress
from ringattn.engine.base import KV, Seed, Softmax
from ringattn.engine.triton import TritonEngine, architecture, kept
from ringattn.geometry import CAUSAL, FULL, Run, Strip, Tile
from ringattn.kernels.configs import Configs, configs_for, put_config
from ringattn.kernels.launch_call import Config


@dataclass(frozen=True)
class Options:
    """`tokens`, `heads`, `batch`: of the timed call; `workers`: compiling processes; `limit`: candidates a kernel."""

    dims: tuple[int, ...] = (128, 64)
    forms: tuple[str, ...] = ("descriptors", "pointers", "specialized")
    kernels: tuple[str, ...] = ("forward", "grad_q", "grad_kv", "grad_fused")
    tokens: int = 8192
    heads: int = 16
    batch: int = 2
    dtype: str = "bfloat16"
    ms: int = 20
    workers: int = 14
    limit: int = 1000
    write: bool = False
    results: str = "bench/results/gpu"


class Case(NamedTuple):
    """One kernel's entry of the table."""

    kernel: str
    dim: int
    form: str


class Timed(NamedTuple):
    """A candidate: microseconds of the full and of the causal call, or why it has none."""

    config: Config
    us: tuple[float, ...]
    failed: str = ""

    @property
    def total_us(self) -> float:
        """What candidates are compared by; infinite for one that failed."""
        return sum(self.us) if self.us else float("inf")


def cases(options: Options) -> Iterator[Case]:
    """The entries that there are, of those asked for."""
    for form in options.forms:
        for dim in options.dims:
            try:
                configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, dim, form)
            except LookupError:
                continue
            kernels = ("forward",) if form == "specialized" else options.kernels
            yield from (Case(kernel, dim, form) for kernel in options.kernels if kernel in kernels)


def candidates(case: Case, limit: int) -> list[Config]:
    """What is tried: the table's own entry first."""
    own = entry(case)
    if case.form == "specialized":  # the compiler splits four warps and 128 rows into two groups, and nothing else
        tried = [Config(128, n, 4, stages, case.form) for n in (64, 128) for stages in (2, 3)]
    else:
        tried = [
            Config(m, n, warps, stages, case.form)
            for m in (32, 64, 128)
            for n in (32, 64, 128)
            for warps in (4, 8)
            for stages in (1, 2, 3, 4)
            if m * n >= 32 * 64
        ]
    return [own, *(config for config in tried if config != own)][:limit]


def entry(case: Case) -> Config:
    """The table's."""
    configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    found: Config = getattr(configs, case.kernel)
    return found


def with_config(case: Case, config: Config) -> TritonEngine:
    """An engine that takes `config` for the kernel of the case, and the table's for the others."""
    configs: Configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    return TritonEngine(configs._replace(**{case.kernel: config}), deterministic=case.kernel != "grad_fused")


def run(case: Case, config: Config, options: Options, timed: bool) -> Timed:
    """Compile the call and, if `timed`, time it."""
    try:
        inputs = made_inputs(options.batch, options.tokens, options.heads, case.dim, options.dtype)
        q, k, v, dout = (x.transpose(0, 1) for x in inputs)
        engine, us = with_config(case, config), []
        strip = Strip(Run(0, options.tokens), Run(0, options.tokens))
        for band in (FULL, CAUSAL):
            tile = Tile(strip, strip, band, Run(0, options.heads))
            works = [engine.prepare([(tile,)], Softmax(case.dim**-0.5), options.tokens, options.heads) for _ in "fb"]
            carry = engine.begin(works[0], q, case.dim, None)
            engine.attend(q, KV(k, v), carry, works[0][0])
            work: Any = lambda: engine.attend(q, KV(k, v), carry, works[0][0])  # noqa: B023, E731
            if case.kernel != "forward":
                out = carry.out.settled(q.dtype)
                seed = Seed(dout, out, carry.lse, None, engine.delta(dout, out, None))
                dq = engine.begin_grad(works[1], q, case.dim)
                dkv = KV(torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
                work = lambda: engine.attend_grad(q, KV(k, v), seed, dq, dkv, works[1][0])  # noqa: B023, E731
                work()
            us.append(device_us(work, options.ms) if timed else 0.0)
        spills = max((handle.spills for handle in kept.handles()), default=0)
        return Timed(config, () if spills else tuple(us), f"{spills} spills" if spills else "")
    except Exception as error:
        return Timed(config, (), f"{type(error).__name__}: {error}".splitlines()[0][:120])
    finally:
        kept.clear()


def warm(case: Case, config: Config, options: Options) -> None:
    """Compile in a process of its own, which leaves the result in Triton's cache and may crash."""
    run(case, config, options, timed=False)


def tuned(options: Options) -> dict[Case, list[Timed]]:
    """Each case's candidates, the fastest first."""
    todo = [(case, config) for case in cases(options) for config in candidates(case, options.limit)]
    small = Options(**{**vars(options), "tokens": 256, "batch": 1})
    found: dict[Case, list[Timed]] = {}
    with progress("tune") as say:
        died = set()
        compiled = run_all(warm, [(*one, small) for one in todo], options.workers) if options.workers else iter(())
        for done, (index, lived) in enumerate(compiled, 1):
            died |= set() if lived else {index}
            if done % 20 == 0 or done == len(todo):
                say(f"compiled {done} of {len(todo)}")
        for index, (case, config) in enumerate(todo):
            crashed = Timed(config, (), "the compiler crashed")
            found.setdefault(case, []).append(crashed if index in died else run(case, config, options, timed=True))
            if index % 20 == 19 or index + 1 == len(todo):
                say(f"timed {index + 1} of {len(todo)}")
        say("the winners' correctness")
        return {case: ranked(case, rows, options.dtype) for case, rows in found.items()}


def ranked(case: Case, rows: list[Timed], dtype: str) -> list[Timed]:
    """The fastest first, once it has proved right; one that is wrong has failed, and the next is asked."""
    rows = sorted(rows, key=lambda row: row.total_us)
    while rows[0].us and (wrong := passes(ours(case.form, with_config(case, rows[0].config)), case.dim, dtype)):
        rows = [*rows[1:], Timed(rows[0].config, (), wrong)]
    return rows


def main(words: list[str]) -> None:
    """Tune, print, keep, and write the table if asked to."""
    options = parse(Options(), words)
    found = tuned(options)
    table = Table("block sizes", ["kernel", "dim", "form", "best", "full us", "causal us", "before", "us"])
    for case, rows in found.items():
        best, before = rows[0], next(row for row in rows if row.config == entry(case))
        cells = [f"{us:.0f}" for us in best.us] or ["-", best.failed]
        sizes = ["x".join(map(str, row.config[:4])) for row in (best, before)]
        table.rows.append([case.kernel, str(case.dim), case.form, sizes[0], *cells, sizes[1], f"{before.total_us:.0f}"])
    if options.write:
        arch = architecture(torch.device(DEVICE))
        for case, rows in found.items():
            if rows[0].us:
                put_config(arch, case.dim, case.form, case.kernel, rows[0].config)
    data = {
        "measured on": device_facts(),
        "candidates": {"/".join(map(str, case)): [row._asdict() for row in rows] for case, rows in found.items()},
        "processors": os.cpu_count(),
    }
    finish("tune", options, [table], data, options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
