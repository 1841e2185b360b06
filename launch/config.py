"""The options of a command: Hydra composes them from a dataclass, the files in `conf` and the words `key=value`.

`load` returns an instance of the dataclass. `run_application` runs Hydra's own main, which also accepts Hydra's flags,
`hydra.*`, `+`, `++` and `~`, configs of the user, sweepers and launchers. Hydra takes half a second to import, so
functions import it.
Guarantees: a wrong key, type or value raises `InputError`, and its message begins with the key.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from ringattn.errors import InputError
from ringattn.launch.options import (
    CONF,
    MULTIRUN,
    VALUED,
    check_choice,
    check_limits,
    counts_tokens,
    groups,
    leaves,
    no_length,
    no_option,
    no_such_key,
    presets_of,
    spelled,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

T = TypeVar("T")

KINDS = (
    (r"Value '(.*)' of type .* to Integer$", "should be a whole number"),
    (r"Value '(.*)' of type .* to Float$", "should be a number"),
    (r"Value '(.*)' is not a valid bool", "should be true or false"),
    (r"Invalid value assigned: .* is not a ListConfig", "should be a list, as [1,2]"),
    (r"field '.*' is not Optional", "has to have a value"),
)
"""Patterns of the messages of OmegaConf 2.3, with a group for the value if a message contains it, and what the value
should be."""
MODES = ("--run", "-r", *MULTIRUN, "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
FLAGS = (*VALUED, *MODES, "--resolve", "--hydra-help", "--version")
USER_CONFIGS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
NO_FLAG = "no such flag; write options as key=value. --hydra-help lists Hydra's flags"
PLUGINS = {"submitit": "'ringattn[slurm]'", "joblib": "hydra-joblib-launcher", "optuna": "hydra-optuna-sweeper"}
"""The package to install for each family of Hydra's launchers and sweepers, by the beginning of their names."""
FULL_ERROR = "HYDRA_FULL_ERROR"
"""If this variable is 1, Hydra raises errors instead of printing them."""


def load(overrides: Sequence[str], schema: type[T], name: str | None = None) -> T:
    """Return an instance of the dataclass `schema` from its defaults, `conf/<name>.yaml` and `overrides`.

    The file must list the name of the schema among its defaults. Without a `name`, only the dataclass is used. Raises
    `InputError` for an unknown key, a value of the wrong type or out of range, and a sweep (`key=1,2`).
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    overrides = spelled(overrides, schema)
    for override in parse(overrides, keys_of(schema)):
        check_key(override, schema)
    _store(schema)
    try:
        with initialize_config_module(CONF, version_base="1.3"):
            return composed_as(schema, compose(name or schema.__name__, list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        culprit = next((f"{word}: " for word in overrides if word in str(error)), "")
        raise InputError(_wrong_value(error) or culprit + _first_line(error.__cause__ or error)) from error


def composed_as(schema: type[T], composed: DictConfig) -> T:
    """Return the composed config as an instance of `schema`. Raises `InputError`, with the key first."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), composed))
    except OmegaConfBaseException as error:
        raise InputError(_wrong_value(error)) from error
    assert isinstance(config, schema)
    check_limits(config)
    return config


def _store(schema: Any) -> None:
    """Register `schema` with Hydra as a config under the name of its class."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=schema.__name__, node=schema, provider="ringattn")


def keys_of(*schemas: Any) -> list[str]:
    """Return the names of all keys and groups of `schemas`."""
    return [key for schema in schemas for key in (*groups(schema), *(leaf for leaf, _, _ in leaves(schema())))]


def parse(overrides: Sequence[str], known: Collection[str] = ()) -> list[Override]:
    """Parse the words `key=value` and `~key` with Hydra. Raises `InputError` for any other word.

    `known`: the keys of the command, from which the message suggests one.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed = OverridesParser.create(), []
    for index, word in enumerate(overrides):
        if ("=" not in word[1:] and not word.startswith("~")) or word.startswith("-"):
            raise no_option(overrides, index, known)
        try:
            parsed.append(parser.parse_override(word))
        except HydraException as error:
            raise InputError(f"{word}: {_first_line(error)}; put the value in quotes if it is text") from error
    return parsed


def swept(overrides: Sequence[str], known: Collection[str] = ()) -> list[str]:
    """Return the keys that have several values (`key=1,2`), in order. `known`: see `parse`."""
    return [override.key_or_group for override in parse(overrides, known) if override.is_sweep_override()]


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the words of each combination of the values that are given as `key=1,2`. The last key varies fastest.

    If a key is given twice, its last word counts. Raises `InputError` for values that are not a list, as interval(1,2).
    """
    from hydra.errors import HydraException

    words: dict[str, list[str]] = {}
    for override in parse(overrides):
        sweeps, key = override.is_sweep_override(), override.get_key_element()
        try:
            values = override.sweep_string_iterator() if sweeps else [override.get_value_element_as_str()]
            words[key] = [f"{key}={value}" for value in values]
        except HydraException as error:  # glob(*), interval(1,2)
            raise InputError(f"{override.input_line}: list the values, as {override.key_or_group}=1,2") from error
    return [list(combination) for combination in product(*words.values())]


def check_key(override: Override, schema: Any, several: bool = False) -> None:
    """Raise `InputError` if `schema` does not have the key, or if its group does not have the preset.

    Hydra's own message for a wrong key speaks of structs and defaults lists; this message names the nearest key.
    `several`: the word is for Hydra's own application, where `+`, `++`, `~` and sweeps have a meaning.
    """
    key, limits = override.key_or_group, {leaf: described.metadata for leaf, _, described in leaves(schema())}
    values = override.sweep_string_iterator() if override.is_discrete_sweep() else [override.value()]
    if not several:
        changes = override.is_add() or override.is_force_add() or override.is_delete()
        if changes or override.package is not None:
            raise InputError(f"{override.input_line}: keys can be set, not added, removed or moved")
        if override.is_sweep_override():
            raise InputError(f"{key}: one value at a time; {override.get_value_string()} is a sweep")
    presets = presets_of(key) if key in groups(schema) else []
    if presets:
        if not override.is_sweep_override() and not override.is_delete() and override.value() not in presets:
            raise InputError(f"{override.input_line}: choose one of {', '.join(presets)}")
    elif key not in limits:
        raise no_such_key(key, [*(group for group in groups(schema) if presets_of(group)), *limits])
    elif several and (override.is_discrete_sweep() or not override.is_sweep_override()):
        # Hydra does not know the choices. It would print a config with a wrong value, or run the jobs that precede it.
        for value in values:
            if value is not None:
                check_choice(key, str(value), limits[key])


# --- Hydra's own application -----------------------------------------------------------------------------------------


def is_for_hydra(words: Sequence[str]) -> bool:
    """Return whether one of the words is a flag, or has a meaning only in Hydra's own application."""
    return any(word.startswith(("-", "+", "~", "hydra.", "hydra/")) for word in words)


def run_application(words: Sequence[str], schema: Any, name: str, task: Callable[[DictConfig], Any]) -> None:
    """Run Hydra's main with `words`, `conf/<name>.yaml` and the dataclass `schema`.

    Hydra calls `task` with the composed config, or prints what a flag asks for. `task` must be a function of a module;
    `composed_as` turns its config into an instance of the schema. The config is checked against the schema, so a wrong
    key is refused wherever it comes from. Raises `InputError` for words, keys and values that Hydra or the schema
    refuses, `SystemExit` for wrong flags, and the errors of `task`.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    flags, overrides = _divided(words, keys_of(schema))
    overrides = spelled(overrides, schema)
    has_configs = any(flag.partition("=")[0] in USER_CONFIGS for flag in flags)
    if not has_configs and not any(word.startswith("hydra.searchpath=") for word in overrides):
        # Without configs of the user, all groups and presets are known here.
        for override in parse(overrides, keys_of(schema)):
            if not override.is_hydra_override():
                check_key(override, schema, several=True)
    arguments, full = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv, os.environ[FULL_ERROR] = [arguments[0], *flags, *overrides], "1"
    _store(schema)
    try:
        hydra.main(config_path=f"pkg://{CONF}", config_name=name, version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        if full == "1":
            raise
        text = str(error)
        for start, package in PLUGINS.items():
            if f"'hydra/launcher/{start}" in text or f"'hydra/sweeper/{start}" in text:
                text += f"\ninstall it with: pip install {package}"
        raise InputError(_wrong_key(error, schema) or _wrong_value(error) or text) from error
    except YAMLError as error:
        where = getattr(error, "problem_mark", None)
        file = f"{where.name}, line {where.line + 1}" if where else "a file of --config-dir"
        raise InputError(
            f"{file}: is not valid YAML: {getattr(error, 'problem', None) or _first_line(error)}"
        ) from error
    finally:
        sys.argv = arguments
        del os.environ[FULL_ERROR]
        if full is not None:
            os.environ[FULL_ERROR] = full


def _divided(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the flags with their values, and the overrides. Raises `InputError` for a flag unknown to Hydra."""
    flags: list[str] = []
    overrides: list[str] = []
    for index, word in enumerate(words):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            if flag not in FLAGS:
                raise no_option(words, index, known, NO_FLAG)
            if equals and flag not in VALUED:
                raise InputError(f"{word}: {flag} takes no value; remove ={value}")
            flags.append(word)
        elif index and words[index - 1] in VALUED and "=" not in word:
            flags.append(word)
        else:
            overrides.append(word)
    modes = [word for word in flags if word.partition("=")[0] in MODES]
    if len(modes) > 1:
        raise InputError(f"{modes[1]}: cannot be combined with {modes[0]}; give one of them")
    return flags, overrides


def _wrong_key(error: BaseException, schema: Any) -> str:
    """Return a message about a key that `schema` does not have, with the nearest one. Empty for other errors."""
    match = re.search(r"Key '(.+)' not in ", f"{error} {error.__cause__}")
    return str(no_such_key(match[1], keys_of(schema))) if match else ""


def _wrong_value(error: BaseException) -> str:
    """Return a plain message for OmegaConf's error about a value: key, value and the type that it should have.

    The message is empty if the error is not one of OmegaConf.
    """
    from omegaconf.errors import OmegaConfBaseException

    error = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if not isinstance(error, OmegaConfBaseException):
        return ""
    key, text = str(error.full_key), _first_line(error)
    for pattern, should_be in KINDS:
        if match := re.match(pattern, text):
            value = "".join(f"={group}" for group in match.groups() or ("null",) * ("Optional" in text))
            if counts_tokens(key) and match.groups():
                return str(no_length(key, match[1]))
            return f"{key}{value}: {should_be}"
    return f"{key}: {text}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
