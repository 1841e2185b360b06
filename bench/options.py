"""Command-line options of the benchmarks: a frozen dataclass of defaults, changed by words `key=value`.

Guarantees: an unknown key or a value of the wrong type raises `InputError` that begins with the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from ringattn.errors import InputError

T = TypeVar("T")


def parse(defaults: T, words: Sequence[str]) -> T:
    """`defaults` with the values of `words` in it; each value is read as the type of its default."""
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}  # type: ignore[arg-type]
    changed: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if key not in known or not equals:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            listed = ", ".join(f"{name}={_written(value)}" for name, value in known.items())
            raise InputError(f"{key}: not an option{hint} Options with their defaults: {listed}")
        changed[key] = _read(key, text, known[key])
    return replace(defaults, **changed)  # type: ignore[type-var]


def _read(key: str, text: str, default: Any) -> Any:
    """`text` as the type of `default`; tuples are separated by commas."""
    if isinstance(default, tuple):
        return tuple(_read(key, one, default[0]) for one in text.split(",") if one)
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise InputError(f"{key}: expected true or false, got {text!r}")
        return text == "true"
    try:
        return type(default)(text)
    except ValueError:
        raise InputError(f"{key}: expected {type(default).__name__}, got {text!r}") from None


def _written(value: Any) -> str:
    """A default as one would type it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
