"""Command-line options of the benchmarks: a frozen dataclass of defaults, changed by arguments `key=value`.

Guarantees: an unknown key or a value of the wrong type raises an `InputError` that begins with the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from ringattn.errors import InputError

T = TypeVar("T")


def parse(defaults: T, arguments: Sequence[str]) -> T:
    """Return `defaults` with the values from `arguments`; each value is parsed as the type of its default."""
    defaults_by_key = {field.name: getattr(defaults, field.name) for field in fields(defaults)}  # type: ignore[arg-type]
    changed: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key not in defaults_by_key or not equals:
            near = difflib.get_close_matches(key, defaults_by_key, 1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            listed = ", ".join(f"{name}={_format_value(value)}" for name, value in defaults_by_key.items())
            raise InputError(f"{key}: not an option{hint} Options with their defaults: {listed}")
        changed[key] = _read(key, text, defaults_by_key[key])
    return replace(defaults, **changed)  # type: ignore[type-var]


def _read(key: str, text: str, default: Any) -> Any:
    """Parse `text` as the type of `default`; elements of tuples are separated by commas."""
    if isinstance(default, tuple):
        return tuple(_read(key, item, default[0]) for item in text.split(",") if item)
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise InputError(f"{key}: expected true or false, got {text!r}")
        return text == "true"
    try:
        return type(default)(text)
    except ValueError:
        raise InputError(f"{key}: expected {type(default).__name__}, got {text!r}") from None


def _format_value(value: Any) -> str:
    """Format a default as a user would type it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
