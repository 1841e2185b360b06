"""Short sequences first: how long the sequences of a step are, and how many.

The length doubles from stage to stage until it is the whole one, all stages but the last take equally many steps, and
a step has as many tokens throughout: half as long, twice as many.
"""

from __future__ import annotations

from ringattn.errors import InputError


def doublings(start_tokens: int, length_tokens: int) -> int:
    """How often `start_tokens` must double to give `length_tokens`. Raises `InputError` if no number of times does."""
    times = (length_tokens // start_tokens).bit_length() - 1
    if times < 0 or start_tokens << times != length_tokens:
        raise InputError(
            f"curriculum_start_tokens={start_tokens}: must be length_tokens={length_tokens}, its half, a quarter, ..."
        )
    return times


def shortened(step: int, start_tokens: int | None, length_tokens: int, grow_steps: int) -> int:
    """By what power of two the sequences of `step` are shorter than `length_tokens`, and more.

    `grow_steps`: steps until the length is whole; None for `start_tokens` is whole from the start.
    """
    if start_tokens is None or step >= grow_steps:
        return 1
    stages = doublings(start_tokens, length_tokens)
    return 1 << (stages - step * stages // grow_steps)
