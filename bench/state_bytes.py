"""The bytes that layers with a state receive in forward, next to formulas and to other ways to split such layers.

Run `python -m ringattn.bench.state_bytes [page=docs/hybrid.md]`: it prints the tables, and replaces them in the page.
The first table is counted from the exchanges that run (`planner.states`). The others are formulas: all-to-all of heads
as in Ulysses, and a gather of the keys, values and gates of all tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from ringattn.bench.options import parse
from ringattn.bench.report import Table, mib
from ringattn.core.layout import make_layout
from ringattn.errors import InputError
from ringattn.planner.cluster import REFERENCE
from ringattn.planner.states import StateLayer, state_pass

START, END = "<!-- tables of bench/state_bytes.py -->", "<!-- end of the tables -->"


LAYERS = {
    "Qwen3-Next": StateLayer(heads=32, d_k=128, d_v=128, key_heads=16, gates=2, matrix=True),
    "Kimi-Linear": StateLayer(heads=32, d_k=128, d_v=128, key_heads=32, gates=129, matrix=True),
    "Nemotron-H": StateLayer(heads=128, d_k=128, d_v=64, key_heads=8, gates=1, matrix=False),
}
"""Sizes from the default configurations of the models in transformers."""


@dataclass(frozen=True)
class StateBytesOptions:
    """The options of the tables. `page`: the page whose tables are replaced; empty: none."""

    ranks: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    tokens: tuple[int, ...] = (16384, 131072, 1048576)
    token_ranks: tuple[int, ...] = (8, 64)
    page: str = ""


def heads_bytes(layer: StateLayer) -> int:
    """Return the bytes per token that all-to-all of heads moves: queries, keys, values, gates and outputs."""
    return layer.item_bytes * (2 * layer.key_heads * layer.d_k + layer.heads * (2 * layer.d_v + layer.gates))


def inputs_bytes(layer: StateLayer) -> int:
    """Return the bytes per token that every other rank needs if inputs are gathered: keys, values and gates."""
    return layer.item_bytes * (layer.key_heads * layer.d_k + layer.heads * (layer.d_v + layer.gates))


def received(layer: StateLayer, ranks: int, layout: str, halo: bool = False) -> int:
    """Return the bytes that the busiest rank receives in forward: states and transitions, or rows of history."""
    sizes = layer.sizes._replace(state_bytes=0) if halo else layer.sizes._replace(halo_rows=0)
    tokens = 64 * ranks
    placed = make_layout(layout, tokens, ranks)
    counted = state_pass(placed, (0, tokens), (0,) * ranks, REFERENCE, sizes, backward=False)
    return int(counted.received_bytes.max())


def gathered(layer: StateLayer, ranks: int, layout: str) -> int:
    """Return the bytes of an exchange of all fragments at once, by its formula."""
    pair = layer.sizes.state_bytes + layer.sizes.transition_bytes
    return (ranks - 1) * pair - layer.sizes.transition_bytes if layout == "contiguous" else (2 * ranks - 3) * pair


def doubled(layer: StateLayer, ranks: int) -> float:
    """Return the bytes of recursive doubling of two chunks a rank, by its formula."""
    return 2 * log2(ranks) * (layer.sizes.state_bytes + layer.sizes.transition_bytes)


def tables(options: StateBytesOptions) -> list[Table]:
    """Return the tables."""
    states = Table(
        "MiB of states that the busiest rank receives in forward",
        ("layer", "ranks", "contiguous", "zigzag", "all at once, contiguous", "all at once, zigzag",
         "doubling, zigzag", "history, zigzag (KiB)"),
    )  # fmt: skip
    for name, layer in LAYERS.items():
        for ranks in options.ranks:
            states.rows.append((
                name, str(ranks),
                *(mib(received(layer, ranks, layout)) for layout in ("contiguous", "zigzag")),
                *(mib(gathered(layer, ranks, layout)) for layout in ("contiguous", "zigzag")),
                mib(doubled(layer, ranks)), f"{received(layer, ranks, 'zigzag', halo=True) / 1024:.0f}",
            ))  # fmt: skip
    others = Table(
        "MiB that a rank receives in forward, by the tokens of the whole sequence",
        ("layer", "ranks", "tokens", "states, zigzag", "all-to-all of heads", "gather of keys, values and gates"),
    )
    for name, layer in LAYERS.items():
        for ranks in options.token_ranks:
            for tokens in options.tokens:
                share = tokens / ranks * (ranks - 1)
                others.rows.append((
                    name, str(ranks), f"{tokens:,}", mib(received(layer, ranks, "zigzag")),
                    mib(heads_bytes(layer) * share / ranks), mib(inputs_bytes(layer) * share),
                ))  # fmt: skip
    return [states, others]


def replace_tables(page: Path, text: str) -> None:
    """Replace the tables in a page. Raises `InputError` if the page has no place for them."""
    before, start, rest = page.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InputError(f"page={page}: has no lines {START} and {END}")
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Print the tables, and write them to a page if one is named."""
    options = parse(StateBytesOptions(), arguments)
    text = "\n\n".join(table.markdown() for table in tables(options))
    print(text)
    if options.page:
        replace_tables(Path(options.page), text)


if __name__ == "__main__":
    main(sys.argv[1:])
