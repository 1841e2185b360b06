"""Answers to one prompt as a tree, compared with separate rows: pairs, tokens, bytes and processor time of attention.

Run `python -m ringattn.bench.rollouts [key=value ...]`. All separate rows have the same length, so one of them is
measured, and its time and bytes count once for each answer.
The gate: at a small size, output and gradients of the tree are those of separate rows, in dense float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from ringattn import masks
from ringattn.bench.clock import Lap, lap
from ringattn.bench.gate import BOUND, GateError
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.core.areas import fewest_rows
from ringattn.core.mask import make_mask
from ringattn.core.placement import EVEN
from ringattn.ring import Ring
from ringattn.sequence import Sequence as RingSequence
from ringattn.testing import dense_attention

PASSES = ("forward", "backward")
ROW = "row"
FLOAT32_BYTES = 4
SMALL = (40, 5, 7)
"""The prompt's tokens, the answers and their tokens in the gate."""


@dataclass(frozen=True)
class RolloutsOptions:
    """The options of the benchmark, in float32 with one thread for each rank."""

    prompt_tokens: int = 32_768
    answers: int = 64
    answer_tokens: int = 1024
    heads: int = 1
    head_dim: int = 64
    ranks: tuple[int, ...] = (2, 4)
    schedules: tuple[str, ...] = ("auto", "all_gather")
    repeats: int = 3
    results: str = RESULTS


def tree_of(prompt_tokens: int, answers: int, answer_tokens: int) -> masks.Tree:
    """Return the tree: the prompt, and the answers as its children."""
    return masks.tree([-1, *[0] * answers], [prompt_tokens, *[answer_tokens] * answers])


def whole_tree(options: RolloutsOptions) -> masks.Tree:
    """Return the tree of the options."""
    return tree_of(options.prompt_tokens, options.answers, options.answer_tokens)


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """Run this rank: the gate, then the rounds.

    Return the pairs that this rank computes, the bytes and the rows of keys and values that it sends, and its laps: of
    one separate row, and of the tree with each schedule.
    """
    options = RolloutsOptions(**spec)
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if ring.rank == 0 else (lambda line: None)
    check(ring)
    say("gate: green")
    row_tokens = options.prompt_tokens + options.answer_tokens
    sequences = {
        **{
            schedule: ring.sequence(mask=whole_tree(options), layout="mask", schedule=schedule)
            for schedule in options.schedules
        },
        ROW: ring.sequence(row_tokens, layout="zigzag"),
    }
    laps: dict[str, list[list[Lap]]] = {name: [] for name in sequences}
    for turn in range(options.repeats):
        for name, seq in sequences.items():
            say(f"round {turn + 1} of {options.repeats}: {name}")
            laps[name].append(laps_of(ring, seq, options, "auto" if name == ROW else name))
    explained = {
        name: ring.explain(
            seq,
            q_heads=options.heads,
            head_dim=options.head_dim,
            dtype="float32",
            causal=True,
            schedule="auto" if name == ROW else name,
        )
        for name, seq in sequences.items()
    }
    return {
        "laps": laps,
        "pairs": {name: explanation.pairs[ring.rank] for name, explanation in explained.items()},
        "bytes": {name: explanation.bytes_sent[ring.rank] for name, explanation in explained.items()},
        "rows": {
            name: explanation.plans[0][ring.rank].bytes_sent // (2 * options.heads * options.head_dim * FLOAT32_BYTES)
            for name, explanation in explained.items()
        },
    }


def laps_of(ring: Ring, seq: RingSequence, options: RolloutsOptions, schedule: str) -> list[Lap]:
    """Time a forward and a backward pass on random inputs."""
    shape = 1, seq.counts[ring.rank], options.heads, options.head_dim
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    results = []
    forward = lap(ring.barrier, lambda: results.append(ring.attention(q, k, v, seq, causal=True, schedule=schedule)))
    dout = torch.randn_like(results[0])
    return [forward, lap(ring.barrier, lambda: results[0].backward(dout))]


def check(ring: Ring) -> None:
    """Compare the tree with separate rows at a small size. Raises `GateError` if a result is wrong."""
    prompt, answers, answer_tokens = SMALL
    seq = ring.sequence(mask=tree_of(*SMALL), layout="mask")
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, seq.length, 2, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    dout[:, :prompt] = 0  # the prompt is in each of the rows
    inputs = [x.requires_grad_() for x in (q, k, v)]
    outs = []
    for answer in range(answers):
        start = prompt + answer * answer_tokens
        row = torch.cat([torch.arange(prompt), torch.arange(start, start + answer_tokens)])
        outs.append(dense_attention(*(x[:, row] for x in inputs), causal=True)[0][:, prompt:])
    expected = torch.cat(outs, 1)
    expected.backward(dout[:, prompt:])
    shards = [seq.shard(x.detach()).requires_grad_() for x in inputs]
    out = ring.attention(shards[0], shards[1], shards[2], seq, causal=True)
    out.backward(seq.shard(dout))
    whole = seq.gather(out.detach())[:, prompt:]
    pairs = [("out", whole, expected.detach())]
    for name, shard, x in zip(("dq", "dk", "dv"), shards, inputs, strict=True):
        assert shard.grad is not None and x.grad is not None
        pairs.append((name, shard.grad, seq.shard(x.grad)))
    for name, actual, reference in pairs:
        error = float((actual - reference).abs().max()) if actual.numel() else 0.0
        if not error <= BOUND[torch.float64]:
            raise GateError(f"{name} of a tree differs from separate rows by {error:.1e}")


def row_of(options: RolloutsOptions, by_rank: Sequence[dict[str, Any]], schedule: str) -> list[str]:
    """Return the cells of one number of ranks and one schedule."""

    def cpu_s(name: str, number: int) -> float:
        """Return the processor seconds of all ranks in a pass, the median of the rounds."""
        rounds = zip(*(rank["laps"][name] for rank in by_rank), strict=True)
        return median(sum(Lap(*laps[number]).cpu_s for laps in ranks) for ranks in rounds)

    def fewer(what: str) -> float:
        return (
            options.answers * sum(rank[what][ROW] for rank in by_rank) / sum(rank[what][schedule] for rank in by_rank)
        )

    row_s, tree_s = ([cpu_s(name, number) for number in range(len(PASSES))] for name in (ROW, schedule))
    faster = [
        options.answers * row / tree for row, tree in zip([*row_s, sum(row_s)], [*tree_s, sum(tree_s)], strict=True)
    ]
    pairs = [rank["pairs"][schedule] for rank in by_rank]
    tree = whole_tree(options)
    tokens = sum(tree.lengths)
    bound = fewest_rows(make_mask(tokens, tokens, mask=tree), tokens, len(by_rank), EVEN)
    over_bound = sum(rank["rows"][schedule] for rank in by_rank) / bound
    return [
        str(len(by_rank)), schedule, f"{fewer('pairs'):.2f}", f"{fewer('bytes'):.1f}", f"{over_bound:.3f}",
        f"{max(pairs) * len(pairs) / sum(pairs):.3f}", *(f"{ratio:.2f}" for ratio in faster),
        f"{faster[-1] / fewer('pairs'):.2f}", f"{sum(tree_s):.1f}", f"{options.answers * sum(row_s):.0f}",
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record."""
    options = parse(RolloutsOptions(), arguments)
    data: dict[str, Any] = {}
    with progress("rollouts") as say:
        for ranks in options.ranks:
            data[str(ranks)] = run_in_processes(ranks, "ringattn.bench.rollouts:on_rank", asdict(options), say)
    row_tokens = options.prompt_tokens + options.answer_tokens
    tree_tokens = sum(whole_tree(options).lengths)
    table = Table(
        f"{options.answers} answers of {options.answer_tokens} tokens to a prompt of {options.prompt_tokens}: separate "
        f"rows over a tree; {options.heads} heads of {options.head_dim}, float32, forward and backward",
        ("ranks", "schedule", "pairs", "bytes", "rows over the bound", "busiest rank", "time, forward",
         "time, backward", "time", "time over pairs", "tree, s", "separate, s"),
        [row_of(options, by_rank, schedule) for by_rank in data.values() for schedule in options.schedules],
        [
            f"Tokens: {options.answers * row_tokens / tree_tokens:.1f} times as many in separate rows.",
            f"Time: processor seconds of attention, all ranks, medians of {options.repeats} rounds. One separate row "
            f"is measured, over zigzag shards, and counted {options.answers} times.",
            "Rows over the bound: rows of keys that ranks of the tree send in forward, over the bound of masks.md.",
            "Busiest rank: its pairs over the mean, in the tree.",
        ],
    )  # fmt: skip
    finish("rollouts", options, [table], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
