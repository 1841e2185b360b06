"""The order in which a pipeline rank runs its stages, and the layers of each stage.

The schedules are torch's 1F1B and interleaved 1F1B (torch 2.13, distributed/pipelining/schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringattn.errors import InputError


class Step(NamedTuple):
    """One pass of a stage: `chunk` is the stage among those of the rank."""

    is_backward: bool
    chunk: int
    micro_batch: int


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage if those that do not divide evenly go to the stages after the first."""
    least, more = divmod(layers, stages)
    return [least + (0 < stage <= more) for stage in range(stages)]


def schedule(rank: int, ranks: int, chunks: int, micro_batches: int) -> Iterator[Step]:
    """Yield the passes of one rank in their order.

    Raises `InputError` if the micro batches cannot be divided into rounds of `ranks`, which torch requires of
    interleaved stages.
    """
    rounds = max(1, micro_batches // ranks) if chunks > 1 else 1
    if micro_batches % rounds:
        raise InputError(f"micro_batches={micro_batches}: must be a multiple of {rounds} rounds of interleaved stages")
    of_round, count = micro_batches // rounds, micro_batches * chunks

    def step(index: int, is_backward: bool) -> Step:
        chunk = index // of_round % chunks
        micro_batch = index // (of_round * chunks) * of_round + index % of_round
        return Step(is_backward, chunks - 1 - chunk if is_backward else chunk, micro_batch)

    ahead = (chunks - 1) * of_round + 2 * (ranks - 1 - rank) if chunks > 1 else ranks - 1 - rank
    ahead = min(ahead, count - (chunks == 1))
    for index in range(count + ahead):
        if index < count:
            yield step(index, is_backward=False)
        if index >= ahead:
            yield step(index - ahead, is_backward=True)


class Passing(NamedTuple):
    """The state of a rank when a stage starts (`is_start`) or ends a backward pass.

    `kept` has the number of micro batches whose activations each chunk keeps; that of the pass counts at its start.
    `forwards` and `backwards` count the passes of each chunk that have ended, and a forward in progress.
    """

    is_start: bool
    chunk: int
    kept: tuple[int, ...]
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


def backward_states(rank: int, ranks: int, chunks: int, micro_batches: int) -> Iterator[Passing]:
    """Yield the states of a rank at the start and the end of each backward pass."""
    forwards, backwards = [0] * chunks, [0] * chunks
    for step in schedule(rank, ranks, chunks, micro_batches):
        if not step.is_backward:
            forwards[step.chunk] += 1
            continue
        for is_start in (True, False):
            backwards[step.chunk] += not is_start
            kept = tuple(forward - backward for forward, backward in zip(forwards, backwards, strict=True))
            yield Passing(is_start, step.chunk, kept, tuple(forwards), tuple(backwards))
