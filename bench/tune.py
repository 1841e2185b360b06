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

import sys
from collections.abc import Callable
from typing import Any

import torch

from ringattn.bench.crash_proof import Budget, JobFailed, Worker, run_all, told
from ringattn.bench.device_clock import device_us
from ringattn.bench.kernel_baselines import DEVICE, made_inputs, ours, passes
from ringattn.bench.options import parse
from ringattn.bench.report import finish, progress
from ringattn.bench.tune_kept import Case, Found, Timed, TuneKeptOptions, sized
from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, BackwardInputs, Softmax
from ringattn.engine.triton import TritonEngine, architecture, kept
from ringattn.kernels.configs import Configs, configs_for, put_config
from ringattn.kernels.launch import Config


def with_config(case: Case, config: Config) -> TritonEngine:
    """An engine that takes `config` for the kernel of the case, and the table's for the others."""
    configs: Configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    return TritonEngine(configs._replace(**{case.kernel: config}), deterministic=case.kernel != "grad_fused")


def run(case: Case, config: Config, options: TuneKeptOptions, timed: bool) -> Timed:
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
                seed = BackwardInputs(dout, out, state.lse, None, engine.delta(dout, out, None))
                dq = engine.begin_grad(works[1], q, case.dim)
                dkv = KV(torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
                work = lambda: engine.attend_grad(q, KV(k, v), seed, dq, dkv, works[1][0])  # noqa: B023, E731
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
    options = parse(TuneKeptOptions(), words)
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


if __name__ == "__main__":
    main(sys.argv[1:])
