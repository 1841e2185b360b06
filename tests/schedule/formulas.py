"""What each schedule sends under a full mask over shards of equal length, as formulas that docs and tests share.

P ranks; of one shard: M bytes of keys and values, Q of queries, O of partial outputs with their lse; in the backward
G of key and value gradients, D of output gradients with lse and delta, R of query gradients. A double ring has N nodes
of L ranks, Ulysses x ring N groups of L ranks. Source: the counts of Ring Attention, Ulysses and ring pass-Q in their
papers.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.core.problem import ITEM_BYTES, Problem


class Formulas(NamedTuple):
    """Bytes and messages that a rank sends, in the mean over the ranks."""

    forward_bytes: str
    forward_messages: str
    backward_bytes: str
    backward_messages: str


RING = Formulas("(P - 1) * M", "P - 1", "(P - 1) * (M + G)", "2 * (P - 1)")
"""Whether blocks are relayed, go straight, at once or both ways round."""

FORMULAS = {
    "ring": RING,
    "all_gather": RING,
    "direct": RING,
    "sub_rings": RING,
    "ulysses": Formulas("(P - 1) / P * (M + Q + O)", "3 * (P - 1)", "(P - 1) / P * (M + Q + D + R + G)", "5 * (P - 1)"),
    "bidirectional": RING,
    "double_ring": RING._replace(
        forward_messages="N * (L - 1) + (N - 1) * L",
        backward_messages="N * (L - 1) + (N - 1) * L + P - 1 + max(0, N - 2) * (L - 1)",
    ),
    "ulysses_ring": Formulas(
        "(L - 1) / L * (M + Q + O) + (N - 1) * M",
        "3 * (L - 1) + (N - 1) * L",
        "(L - 1) / L * (M + Q + D + R + G) + (N - 1) * (M + G)",
        "5 * (L - 1) + 2 * (N - 1) * L",
    ),
    "pass_q": Formulas("(P - 1) * (Q + O)", "2 * (P - 1)", "(P - 1) * (Q + D + R)", "3 * (P - 1)"),
    "balanced": Formulas(
        "P // 2 * M + (P - 1) // 2 * (Q + O)",
        "P // 2 + 2 * ((P - 1) // 2)",
        "P // 2 * (M + G) + (P - 1) // 2 * (Q + D + R)",
        "2 * (P // 2) + 3 * ((P - 1) // 2)",
    ),
}


def quantities(problem: Problem, nodes: int) -> dict[str, int]:
    """The letters of the formulas."""
    rows = problem.batch * problem.q_layout.counts[0]
    item, sums = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.accumulator_dtype]
    wire = ITEM_BYTES[problem.wire_dtype or problem.accumulator_dtype]
    out = ITEM_BYTES[problem.out_wire_dtype or problem.accumulator_dtype]
    queries, pair = rows * problem.q_heads, rows * problem.kv_heads * (problem.head_dim + problem.value_dim)
    return {
        "P": problem.world_size,
        "N": nodes,
        "L": problem.world_size // nodes,
        "M": pair * item,
        "G": pair * wire,
        "Q": queries * problem.head_dim * item,
        "O": queries * (problem.value_dim * out + sums),
        "D": queries * (problem.value_dim * item + 2 * sums),
        "R": queries * problem.head_dim * sums,
    }


def table() -> str:
    """For the page of schedules."""
    lines = [
        "| schedule | forward: bytes | messages | backward: bytes | messages |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| `{name}` | {' | '.join(f'`{one}`' for one in formulas)} |" for name, formulas in FORMULAS.items()]
    return "\n".join(lines)
