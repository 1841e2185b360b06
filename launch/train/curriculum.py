"""Short sequences first: how long the sequences of a step are, and how many.

The length doubles from stage to stage until it is the whole one, all stages but the last take equally many steps, and
a step has as many tokens throughout: half as long, twice as many.
"""

from __future__ import annotations

from ringattn.errors import InputError


def doublings(start_tokens: int, tokens: int) -> int:
    """How often `start_tokens` must double to give `tokens`. Raises `InputError` if no number of times does."""
    times = (tokens // start_tokens).bit_length() - 1
    if times < 0 or start_tokens << times != tokens:
        raise InputError(f"curriculum_start_tokens={start_tokens}: must be tokens={tokens}, its half, a quarter, ...")
    return times


def shortened(step: int, start_tokens: int | None, tokens: int, grow_steps: int) -> int:
    """By what power of two the sequences of `step` are shorter than `tokens`, and more.

    `grow_steps`: steps until the length is whole; None for `start_tokens` is whole from the start.
    """
    if start_tokens is None or step >= grow_steps:
        return 1
    stages = doublings(start_tokens, tokens)
    return 1 << (stages - step * stages // grow_steps)
