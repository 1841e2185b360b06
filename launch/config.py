"""Values for the options of a command: Hydra's `key=value` words laid over the defaults of a dataclass.

Guarantees: a wrong key, type or value raises `InputError` with a message that begins with the key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from ringattn.errors import InputError
from ringattn.launch.lengths import counts_tokens, no_length
from ringattn.launch.options import CONF, check_limits, coded_presets, groups, leaves, presets_of
from ringattn.launch.spelling import no_such_key, spelled
from ringattn.launch.words import no_option

if TYPE_CHECKING:  # Hydra takes half a second to import, which `--help` need not wait for
    from hydra.core.override_parser.types import Override
    from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")

KINDS = (
    (r"Value '(.*)' of type .* to Integer$", "should be a whole number"),
    (r"Value '(.*)' of type .* to Float$", "should be a number"),
    (r"Value '(.*)' is not a valid bool", "should be true or false"),
    (r"Invalid value assigned: .* is not a ListConfig", "should be a list, as [1,2]"),
    (r"field '.*' is not Optional", "has to have a value"),
)
"""How OmegaConf 2.3 begins its messages, with the value where it says it, and what the kind of an option is."""


def load(overrides: Sequence[str], schema: type[T], name: str | None = None) -> T:
    """An instance of the dataclass `schema`, from its defaults, `conf/<name>.yaml` if `name` is given, and `overrides`.

    That file lists `<name of the schema>` among its defaults. Raises `InputError` for an unknown key, a value of the
    wrong type or out of range, and a sweep (`key=1,2`).
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides = spelled(overrides, schema)
    for override in parse(overrides, keys_of(schema)):
        check_key(override, schema)
    try:
        with registered(schema), initialize_config_module(CONF, version_base="1.3"):
            config = OmegaConf.to_object(compose(name or schema.__name__, list(overrides)))
    except OmegaConfBaseException as error:
        raise InputError(wrong_value(error)) from error
    except HydraException as error:
        if isinstance(error.__cause__, OmegaConfBaseException):
            raise InputError(wrong_value(error.__cause__)) from error
        culprit = next((f"{word}: " for word in overrides if word in str(error)), "")
        raise InputError(culprit + _first_line(error.__cause__ or error)) from error
    assert isinstance(config, schema)
    check_limits(config)
    return config


@contextmanager
def registered(schema: Any) -> Iterator[None]:
    """`schema` and the presets of its groups are in Hydra's store meanwhile, and no other schema's.

    Hydra has one store, in which the group `schedule` of one command would hide the plain key of another.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    before, store.repo = store.repo, dict(store.repo)
    try:
        store.store(name=schema.__name__, node=schema, provider="ringattn")
        for group, presets in coded_presets(schema).items():
            for name, preset in presets.items():
                store.store(group=group, name=name, node=preset, provider="ringattn")
        yield
    finally:
        store.repo = before


def keys_of(*schemas: Any) -> list[str]:
    """The keys and groups of commands."""
    return [key for schema in schemas for key in (*groups(schema), *(leaf for leaf, _, _ in leaves(schema())))]


def parse(overrides: Sequence[str], known: Collection[str] = ()) -> list[Override]:
    """The words `key=value`, and `~key`, as Hydra reads them. Raises `InputError` for a word that is none.

    `known`: the keys that such a word may be meant for.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed = OverridesParser.create(), []
    for at, word in enumerate(overrides):
        if ("=" not in word[1:] and not word.startswith("~")) or word.startswith("-"):
            raise no_option(overrides, at, known)
        try:
            parsed.append(parser.parse_override(word))
        except HydraException as error:
            raise InputError(f"{word}: {_first_line(error)}; put the value in quotes if it is text") from error
    return parsed


def swept(overrides: Sequence[str], known: Collection[str] = ()) -> list[str]:
    """The keys that are given several values (`key=1,2`), in order. `known`: see `parse`."""
    return [one.key_or_group for one in parse(overrides, known) if one.is_sweep_override()]


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """The words of every combination of the values that are given as `key=1,2`; the last key varies fastest.

    Of a key that is given twice the last counts. Raises `InputError` for values that cannot be counted.
    """
    from hydra.errors import HydraException

    values: dict[str, list[str]] = {}
    for one in parse(overrides):
        try:
            found = one.sweep_string_iterator() if one.is_sweep_override() else [one.get_value_element_as_str()]
            values[one.get_key_element()] = [str(value) for value in found]
        except HydraException as error:  # glob(*), interval(1,2)
            raise InputError(f"{one.input_line}: list the values, as {one.key_or_group}=1,2") from error
    return [
        [f"{key}={value}" for key, value in zip(values, chosen, strict=True)] for chosen in product(*values.values())
    ]


def check_key(override: Override, schema: Any, several: bool = False) -> None:
    """Raise `InputError` for a key that `schema` does not have, and a preset that its group does not have.

    Hydra's own message for a wrong key speaks of structs and defaults lists; this one names the nearest key.
    `several`: the words are for Hydra's own application, where `++` and sweeps have a meaning.
    """
    key, known = override.key_or_group, [leaf for leaf, _, _ in leaves(schema())]
    forced = override.is_force_add() and not several
    if override.is_add() or override.is_delete() or forced or override.package is not None:
        raise InputError(f"{override.input_line}: keys can be set, not added, removed or moved")
    if override.is_sweep_override() and not several:
        raise InputError(f"{key}: one value at a time; {override.get_value_string()} is a sweep")
    presets = presets_of(schema, key) if key in groups(schema) else []
    if presets:
        if not override.is_sweep_override() and override.value() not in presets:
            raise InputError(f"{override.input_line}: choose one of {', '.join(presets)}")
    elif key not in known:
        raise no_such_key(key, [*(group for group in groups(schema) if presets_of(schema, group)), *known])


def wrong_value(error: OmegaConfBaseException) -> str:
    """OmegaConf's message on a value of the wrong kind in the commands' words: key, value, and what it should be."""
    key, text = str(error.full_key), _first_line(error)
    for pattern, words in KINDS:
        if match := re.match(pattern, text):
            value = "".join(f"={one}" for one in match.groups() or ("null",) * ("Optional" in text))
            return str(no_length(key, match[1])) if counts_tokens(key) and match.groups() else f"{key}{value}: {words}"
    return f"{key}: {text}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
