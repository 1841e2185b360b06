"""Blocks side by side in one buffer, every row of a head as a row of its own: one engine call meets them all.

Does not know: lifetimes, what is done with a bundle, torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from ringattn.geometry import Run
from ringattn.schedule.content import Content, Part, size
from ringattn.schedule.ops import Block, Kind

ONE = Run(0, 1)


class Bundle:
    """Blocks of one kind whose contents have a part for every head."""

    def __init__(self, label: str, kind: Kind, contents: Mapping[Block, Content]) -> None:
        """They lie in the order of `contents`."""
        self.label, self.kind, self.contents = label, kind, contents
        rows = list(accumulate(map(size, contents.values()), initial=0))
        self.starts = dict(zip(contents, rows, strict=False))
        self.content: Content = (Part(ONE, (Run(0, rows[-1]),)),)

    def parts(self, block: Block) -> Iterator[tuple[Part, int]]:
        """Each part of a block with its first row in the bundle."""
        start = self.starts[block]
        for part in self.contents[block]:
            yield part, start
            start += part.row_count


def alone(content: Content) -> bool:
    """Whether every part has one head."""
    return all(part.heads.count == 1 for part in content)
