"""Attention kernels on one GPU: TFLOP/s of ours beside cuDNN, FlashAttention 2 and 3, and what a ring step costs.

`python -m ringattn.bench.kernels [key=value ...]`. Three tables: forward and backward by sequence length; eight ring
steps against one launch of the same work, updated in the kernel and merged outside; and the host's cost of a launch.
Guarantees: an implementation is timed only after its out, dQ, dK and dV have passed a dense float64 reference at 1.25
times the error of torch's own kernel; device time by events, the median of the repetitions. Each implementation runs in
a process of its own, every answer has a time limit and is kept when it is there: one that fails, hangs or breaks its
CUDA context costs its own figures. What is missing or refuses is listed with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ringattn.bench.crash_proof import Budget, JobFailed, Worker
from ringattn.bench.device_clock import device_facts
from ringattn.bench.kernel_baselines import KernelBaseline, kernel_baselines
from ringattn.bench.kernel_jobs import KernelJobsOptions, gate, launch_costs, ring_steps, speed
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, keep, progress

MOST_FAILURES = 2
"""Sizes at which an implementation fails before its other sizes are left out: each may cost a whole time limit."""


class Found:
    """What is known so far; `keep` writes it."""

    def __init__(self, options: KernelJobsOptions) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.ring: dict[str, dict[str, float]] = {}
        self.costs: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.facts = device_facts()

    def keep(self, how: Callable[..., None] = keep, complete: bool = False) -> None:
        """By `how`: to files, or to the screen as well."""
        data = {
            "measured on": self.facts, "complete": complete, "speed": self.rows, "ring steps": self.ring,
            "launch": self.costs, "refused": self.refused,
        }  # fmt: skip
        shown = tables(self.options, self.rows, self.ring, self.costs, self.refused)
        how("kernels", self.options, shown, data, self.options.results, self.options.file)


def measure(one: KernelBaseline, found: Found, budget: Budget, say: Callable[[str], None]) -> None:
    """Gate and time an implementation in a process of its own; what has no result says why."""
    options, failures = found.options, 0

    def ask(job: Callable[..., Any], *given: Any) -> Any:
        return worker.ask(job, *given, limit_s=budget.limit(options.limit_s))

    with Worker() as worker:
        say(f"gate: {one.name}")
        try:
            why = ask(gate, options, one.name)
        except JobFailed as error:
            why = str(error)
        if why:
            found.refused[one.name] = why
            found.keep()
            return
        for mask in options.masks:
            for tokens in options.tokens:
                say(f"{mask}, {tokens} tokens: {one.name}")
                row = {"mask": mask, "tokens": tokens, "engine": one.name}
                try:
                    if failures == MOST_FAILURES:
                        raise JobFailed(f"not tried: {failures} sizes have failed")
                    for part in ("forward", "backward"):
                        row |= ask(speed, options, one.name, mask, tokens, part)
                except JobFailed as error:  # one that cannot do a size is a result, not an end
                    row["failed"] = str(error)
                    failures = min(failures + 1, MOST_FAILURES)
                found.rows.append(row)
                found.keep()
        if one.engine is not None and not one.name.startswith("engine "):
            say(f"ring steps: {one.name}")
            try:
                found.ring[one.name] = ask(ring_steps, options, one.name)
            except JobFailed as error:
                found.refused[f"ring steps, {one.name}"] = str(error)
            found.keep()


def tables(
    options: KernelJobsOptions,
    rows: list[dict[str, Any]],
    ring: dict[str, dict[str, float]],
    costs: dict[str, float],
    refused: dict[str, str],
) -> list[Table]:
    """What a person reads."""
    speed = Table("TFLOP/s, and the share of cuDNN's", ["mask", "tokens", "engine", "forward", "", "backward", ""])
    base = {(row["mask"], row["tokens"]): row for row in rows if row["engine"] == "cudnn"}
    speed.notes += [f"failed: {row['engine']}, {row['mask']}, {row['tokens']}: {row['failed']}"
                    for row in rows if "failed" in row]  # fmt: skip
    for row in rows:
        cudnn = base.get((row["mask"], row["tokens"]), {})
        cells = []
        for name in ("forward_tflops", "backward_tflops"):
            share = row[name] / cudnn[name] if name in row and name in cudnn else None
            cells += [f"{row[name]:.0f}" if name in row else "-", f"{share:.2f}" if share else ""]
        speed.rows.append([row["mask"], str(row["tokens"]), row["engine"], *cells])
    speed.notes += [f"not timed: {name}: {why}" for name, why in refused.items()]
    steps = Table(
        f"{options.steps} ring steps of {options.step_tokens} tokens, full mask",
        ["form", "one launch us", "carried us", "merged outside us", "efficiency carried", "merged outside"],
        [[form, *(f"{found[name]:.0f}" for name in ("one_launch", "steps_carried", "steps_merged")),
          *(f"{found[name]:.3f}" for name in ("efficiency_carried", "efficiency_merged"))]
         for form, found in ring.items()],
    )  # fmt: skip
    launches = Table("launch cost", ["what", "us"], [[name, f"{cost:.2f}"] for name, cost in costs.items()])
    return [speed, steps, launches]


def main(words: list[str]) -> None:
    """Gate, time, keep, print."""
    options = parse(KernelJobsOptions(), words)
    budget, found = Budget(options.budget_s), Found(options)
    with progress("kernels") as say:
        say(f"{options.budget_s:.0f} s at most, {options.limit_s:.0f} s for each figure")
        baselines, found.refused = kernel_baselines(
            options.head_dim, options.dtype, tuple(name for name in options.only if name)
        )
        for one in baselines:
            measure(one, found, budget, say)
        say("launch cost")
        with Worker() as worker:
            try:
                found.costs = worker.ask(launch_costs, limit_s=budget.limit(options.limit_s))
            except JobFailed as error:
                found.refused["launch cost"] = str(error)
    found.keep(finish, complete=True)


if __name__ == "__main__":
    main(sys.argv[1:])
