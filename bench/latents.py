"""Latents or keys on the wire: the bytes and the predicted time of multi-head latent attention, from its plans.

Run `python -m ringattn.bench.latents [key=value ...]`. One causal bfloat16 call, forward and backward, is simulated on
a cluster of GPUs; nothing runs. Times include the products with the weights that expand latents.
The gate: the bytes of both are the same number of records, each of the size of the formula.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, mib
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.planner.choose import expansion_s, latents_are_faster, plan_of
from ringattn.planner.cluster import cluster_named
from ringattn.planner.simulate import simulate
from ringattn.schedule.routes import ROUTES


@dataclass(frozen=True)
class LatentsOptions:
    """The options of the benchmark: by default DeepSeek-V3's attention on 8 GPUs, on one node and on eight."""

    cluster: str = "h100"
    ranks: int = 8
    per_node: tuple[int, ...] = (8, 1)
    tokens: tuple[int, ...] = (4096, 16384, 65536, 262144, 1048576)
    heads: int = 128
    head_dim: int = 192
    value_dim: int = 128
    rotary: int = 64
    latent: int = 512
    results: str = RESULTS


def main(arguments: Sequence[str] = ()) -> None:
    """Predict, print and save the table. Raises `GateError` if bytes are not those of the formula."""
    options = parse(LatentsOptions(), arguments)
    rows: list[Sequence[str]] = [
        row_of(options, per_node, tokens) for per_node, tokens in product(options.per_node, options.tokens)
    ]
    table = Table(
        f"A ring of {options.ranks}, {options.heads} heads, causal, zigzag, bfloat16, forward and backward",
        ("ranks per node", "tokens", "latents, MiB sent", "keys, MiB sent", "latents, ms", "keys, ms", "auto sends"),
        rows,
        ["MiB: of one rank. The constants of the cluster are published ones; not measured on a GPU."],
    )
    finish("latents", options, [table], {"rows": rows}, options.results)


def row_of(options: LatentsOptions, per_node: int, tokens: int) -> list[str]:
    """Return the cells of a row."""
    cluster = replace(cluster_named(options.cluster), ranks_per_node=per_node)
    latent = problem_of(options, tokens)
    problems = latent, replace(latent, kv_heads=options.heads, latent_dims=None)
    sent, milliseconds, records = [], [], []
    for problem in problems:
        passes = [
            [plan_of(problem, ROUTES["ring"], rank, backward) for rank in range(options.ranks)]
            for backward in (False, True)
        ]
        nbytes = sum(plans[0].bytes_sent for plans in passes)
        # d_latent + d_rope numbers, or heads * (d_k + d_v).
        size = (options.latent, options.rotary) if problem is latent else (options.head_dim, options.value_dim)
        records.append(nbytes / (sum(size) * problem.kv_heads))
        sent.append(mib(nbytes))
        seconds = sum(simulate(tuple(plans), cluster).total_us for plans in passes) / 1e6
        milliseconds.append(f"{1e3 * (seconds + expansion_s(problem, latent, cluster)):.2f}")
    if records[0] != records[1]:
        raise GateError(f"{tokens} tokens: {records} records of a number of one byte")
    auto = "latents" if latents_are_faster(*problems, "ring", cluster) else "keys"
    return [str(per_node), str(tokens), *sent, *milliseconds, auto]


def problem_of(options: LatentsOptions, tokens: int) -> Problem:
    """Return the call with latents on the wire."""
    layout = make_layout("zigzag", tokens, options.ranks)
    mask = Banded(causal=True).mask(tokens, tokens, None, None, options.heads, 1)
    return Problem(
        layout, layout, mask, 1, options.heads, 1, options.head_dim, options.value_dim, "bfloat16",
        latent_dims=(options.rotary, options.latent),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
