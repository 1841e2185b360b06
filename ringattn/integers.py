"""The check of options that are whole numbers."""

from __future__ import annotations

import operator
from contextlib import suppress

from ringattn.errors import InputError


def whole_number(value: object, needed: str, least: int | None = None, most: int | None = None) -> int:
    """Return `value`, an integer of Python, NumPy or torch from `least` to `most`, as an int.

    Raises `InputError` for any other value, also for a boolean. `needed`: the beginning of its message, for example
    "width must be a number of rows".
    """
    number = None
    if not isinstance(value, bool) and not str(getattr(value, "dtype", "")).endswith("bool"):
        with suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise InputError(f"{needed}, got {value!r}")
    return number
