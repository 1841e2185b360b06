"""Options of a command as a dataclass: defaults, units, limits and help lines.

Not covered: which commands there are, how values are given; needs nothing beyond the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from importlib import resources
from math import isfinite
from typing import Any, get_type_hints

from ringattn.errors import InputError
from ringattn.launch.outputs import check_output

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


def group(make: Callable[[], Any], presets: Mapping[str, Any]) -> Any:
    """A field that is a nested dataclass, `make()` by default; `presets` are the instances that its names select."""
    return field(default_factory=make, metadata={"presets": presets})


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
    named = [f"{group}={','.join(presets_of(schema, group))}" for group in groups(schema) if presets_of(schema, group)]
    if named:
        lines += ["", "presets, one of each list:", *(f"  {one}" for one in named)]
    return "\n".join([f"usage: ringattn {command} [key=value ...]", "", purpose, "", *lines])


def is_numbered(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a value is one of the numbered choices with its number."""
    name, _, number = str(value).partition(":")
    return name in limits.get("numbered", ()) and number.isdecimal()


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
    """The nested dataclasses of a schema; each may have a folder of presets."""
    hints = get_type_hints(schema)
    return [described.name for described in fields(schema) if is_dataclass(hints[described.name])]


def coded_presets(schema: Any) -> dict[str, Mapping[str, Any]]:
    """By group: the presets that its field names (see `group`)."""
    return {one.name: one.metadata["presets"] for one in fields(schema) if "presets" in one.metadata}


def presets_of(schema: Any, group: str) -> list[str]:
    """The names that a group of `schema` can be set to: those of its field, then the files of its folder."""
    folder = resources.files(CONF) / group
    files = (file.name.removesuffix(".yaml") for file in folder.iterdir()) if folder.is_dir() else ()
    return [*coded_presets(schema).get(group, ()), *sorted(files)]
