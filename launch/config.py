"""Options of a command: one dataclass, from which come the schema, the checks and the help.

Overrides are Hydra's `key=value`. Defaults, units, limits and help lines live in the dataclass; presets in `conf/`.
Promises: a wrong key, type or value raises `InputError` with a message that begins with the key.
Does not know: which commands there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import Field, field, fields, is_dataclass
from importlib import resources
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringattn.errors import InputError

CONF = "ringattn.launch.conf"

T = TypeVar("T")


def option(default: Any, about: str, **limits: Any) -> Any:
    """A field with its help line and its limits: `least` and `above` (inclusive, exclusive), `choices`."""
    return field(default=default, metadata={"about": about, **limits})


def load(overrides: Sequence[str], schema: type[T], name: str | None = None) -> T:
    """An instance of the dataclass `schema`, from its defaults, `conf/<name>.yaml` if `name` is given, and `overrides`.

    That file lists `<name of the schema>` among its defaults. Raises `InputError` for an unknown key, a value of the
    wrong type or out of range, and a sweep (`key=1,2`).
    """
    for override in _parse(overrides):
        _check_key(override, schema)
    ConfigStore.instance().store(name=schema.__name__, node=schema, provider="ringattn")
    try:
        with initialize_config_module(CONF, version_base="1.3"):
            config = OmegaConf.to_object(compose(name or schema.__name__, list(overrides)))
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    except HydraException as error:
        culprit = next((f"{word}: " for word in overrides if word in str(error)), "")
        raise InputError(culprit + _first_line(error.__cause__ or error)) from error
    assert isinstance(config, schema)
    check_limits(config)
    return config


def check_limits(config: Any) -> None:
    """Raise `InputError`, with the key first, if a value is not within the limits of its field."""
    for key, value, described in _leaves(config):
        limits = described.metadata
        if value is None:
            continue
        if "least" in limits and not value >= limits["least"]:
            raise InputError(f"{key}={value}: must be at least {limits['least']}")
        if "above" in limits and not value > limits["above"]:
            raise InputError(f"{key}={value}: must be more than {limits['above']}")
        if "choices" in limits and value not in limits["choices"]:
            raise InputError(f"{key}={value}: choose one of {', '.join(limits['choices'])}")


def help_text(command: str, purpose: str, schema: type) -> str:
    """The text of `--help`: every key with its default and its meaning, from the fields of the dataclass `schema`."""
    rows = [("key", "default", "meaning")]
    for key, value, described in _leaves(schema()):
        choices = described.metadata.get("choices")
        about = described.metadata["about"] + (f" ({', '.join(choices)})" if choices else "")
        rows.append((key, "" if value in (None, "") else str(value), about))
    # A default that is much longer than the others must not push the meanings off the screen.
    wide, middle = max(len(row[0]) for row in rows), min(24, max(len(row[1]) for row in rows))
    lines = [f"  {key:<{wide}}  {default:<{middle}}  {about}" for key, default, about in rows]
    presets = [f"{group}={name}" for group in _groups(schema) for name in _presets(group)]
    if presets:
        lines += ["", f"presets: {', '.join(presets)}"]
    return "\n".join([f"usage: ringattn {command} [key=value ...]", "", purpose, "", *lines])


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """(dotted key, value, field) of each option, nested ones included."""
    for described in fields(config):
        value = getattr(config, described.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{described.name}.")
        else:
            yield f"{prefix}{described.name}", value, described


def _groups(schema: Any) -> list[str]:
    """The nested dataclasses of a schema; each may have a folder of presets."""
    hints = get_type_hints(schema)
    return [described.name for described in fields(schema) if is_dataclass(hints[described.name])]


def _presets(group: str) -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in (resources.files(CONF) / group).iterdir())


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        if "=" not in word or word.startswith("-"):
            raise InputError(f"{word}: write options as key=value; --help lists the keys")
        try:
            parsed.append(parser.parse_override(word))
        except HydraException as error:
            raise InputError(f"{word}: {_first_line(error)}; put the value in quotes if it is text") from error
    return parsed


def _check_key(override: Override, schema: Any) -> None:
    """Hydra's own message for a wrong key speaks of structs and defaults lists; this one names the nearest key."""
    key, known = override.key_or_group, [leaf for leaf, _, _ in _leaves(schema())]
    if override.is_add() or override.is_delete() or override.is_force_add() or override.package is not None:
        raise InputError(f"{override.input_line}: keys can be set, not added, removed or moved")
    if override.is_sweep_override():
        raise InputError(f"{key}: one value at a time; {override.get_value_string()} is a sweep")
    if key in _groups(schema):
        if override.value() not in _presets(key):
            raise InputError(f"{override.input_line}: choose one of {', '.join(_presets(key))}")
    elif key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        raise InputError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "; --help lists the keys"))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
