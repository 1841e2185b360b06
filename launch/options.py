"""Options of a command as a dataclass: defaults, units, limits and help lines.

The names of engines, transports and dtypes are listed here, because the modules that define them import torch;
tests/launch/test_help.py compares the lists. Nothing beyond the standard library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from importlib import resources
from math import isfinite
from typing import Any, get_type_hints

from ringattn.errors import InputError
from ringattn.launch.outputs import check_output

ENGINES = ("auto", "aten", "plain", "triton", "fa3", "fa4")
TRANSPORTS = ("auto", "local", "shm", "gloo", "nccl", "peer")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
CONF = "ringattn.launch.conf"
MOST_SEED = 2**32 - 1
"""Multiplied by 1,000,003 for a seed of each batch, it is within the 64 bits that torch takes."""
MOST = 2**50
"""Of what is counted: sizes stay far inside a float's range."""


def option(default: Any, about: str, **limits: Any) -> Any:
    """A field with its help line and its limits: `least`, `most` and `above` (the last exclusive), `choices`.

    `aliases`: other names of some choices; `numbered`: choices that may be followed by a number, as name:2.
    `writes`: the option names a "file" or "picture" that the command writes; it must be possible to.
    A number that is not finite is refused for every option.
    """
    return field(default=default, metadata={"about": about, **limits})


def check_limits(config: Any) -> None:
    """Raise `InputError`, with the key first, if a value is not within the limits of its field."""
    for key, value, described in leaves(config):
        limits = described.metadata
        if value is None:
            continue
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not isfinite(number):
                raise InputError(f"{key}={value}: must be a finite number")
        if "least" in limits and not value >= limits["least"]:
            raise InputError(f"{key}={value}: must be at least {limits['least']}")
        if "most" in limits and not value <= limits["most"]:
            raise InputError(f"{key}={value}: must be at most {limits['most']}")
        if "above" in limits and not value > limits["above"]:
            raise InputError(f"{key}={value}: must be more than {limits['above']}")
        if "writes" in limits and value:
            check_output(key, value, limits["writes"])
        check_choice(key, value, limits)


def check_choice(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raise `InputError` if the option has choices, and `value` is not one of them."""
    if "choices" in limits and value not in limits["choices"] and not is_numbered(value, limits):
        raise InputError(f"{key}={value}: choose one of {', '.join(_choices(limits))}")


def help_text(command: str, purpose: str, schema: type) -> str:
    """The text of `--help`: every key with its default and its meaning, from the fields of the dataclass `schema`."""
    rows = [("key", "default", "meaning")]
    for key, value, described in leaves(schema()):
        choices = _choices(described.metadata)
        about = described.metadata["about"] + (f" ({', '.join(choices)})" if choices else "")
        rows.append((key, "" if value in (None, "") else str(value).replace("\n", r"\n"), about))
    # A default that is much longer than the others must not push the meanings off the screen.
    wide, middle = max(len(row[0]) for row in rows), min(24, max(len(row[1]) for row in rows))
    lines = [f"  {key:<{wide}}  {default:<{middle}}  {about}" for key, default, about in rows]
    presets = [f"{group}={','.join(names)}" for group in groups(schema) if (names := presets_of(group))]
    if presets:
        lines += ["", "presets, one of each list:", *(f"  {line}" for line in presets)]
    return "\n".join([f"usage: ringattn {command} [key=value ...]", "", purpose, "", *lines])


def is_numbered(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a value is one of the numbered choices with its number."""
    name, _, number = str(value).partition(":")
    return name in limits.get("numbered", ()) and re.fullmatch("[1-9][0-9]*", number) is not None


def _choices(limits: Mapping[str, Any]) -> list[str]:
    """The choices as people read them."""
    return [*limits.get("choices", ()), *(f"{name}:N" for name in limits.get("numbered", ()))]


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """(dotted key, value, field) of each option, nested ones included."""
    for described in fields(config):
        value = getattr(config, described.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{described.name}.")
        else:
            yield f"{prefix}{described.name}", value, described


def groups(schema: Any) -> list[str]:
    """Return the groups of a schema: its nested dataclasses, and those of `GROUPS`, whose files set several keys."""
    hints = get_type_hints(schema)
    nested = [described.name for described in fields(schema) if is_dataclass(hints[described.name])]
    return [*nested, *getattr(schema, "GROUPS", ())]


def presets_of(group: str) -> list[str]:
    """Return the names that a group can be set to: the files of its folder. Empty if it has no folder."""
    folder = resources.files(CONF) / group
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()) if folder.is_dir() else []
