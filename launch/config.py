"""Values for the options of a command: Hydra's `key=value` words laid over the defaults of a dataclass.

Guarantees: a wrong key, type or value raises `InputError` with a message that begins with the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringattn.errors import InputError
from ringattn.launch.options import CONF, check_limits, coded_presets, groups, leaves, presets_of

T = TypeVar("T")

ALIASES = {"nproc": "ranks", "ring": "ranks", "length_tokens": "tokens", "q_heads": "heads", "attention": "mask"}
"""Keys as earlier versions spelled them: read as the new key by a command that has this one and not the old one."""
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Every command takes either name of a dtype, and keeps the one that is among its choices."""


def load(overrides: Sequence[str], schema: type[T], name: str | None = None) -> T:
    """An instance of the dataclass `schema`, from its defaults, `conf/<name>.yaml` if `name` is given, and `overrides`.

    That file lists `<name of the schema>` among its defaults. Raises `InputError` for an unknown key, a value of the
    wrong type or out of range, and a sweep (`key=1,2`).
    """
    overrides = spelled(overrides, schema)
    for override in parse(overrides):
        _check_key(override, schema)
    try:
        with registered(schema), initialize_config_module(CONF, version_base="1.3"):
            config = OmegaConf.to_object(compose(name or schema.__name__, list(overrides)))
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    except HydraException as error:
        culprit = next((f"{word}: " for word in overrides if word in str(error)), "")
        raise InputError(culprit + _first_line(error.__cause__ or error)) from error
    assert isinstance(config, schema)
    check_limits(config)
    return config


def spelled(words: Sequence[str], *schemas: Any) -> list[str]:
    """The words in the spelling of a command that takes the keys of `schemas`: see `ALIASES` and `DTYPES`.

    Raises `InputError` for a key that is given in two spellings.
    """
    known = {leaf: field.metadata.get("choices") for schema in schemas for leaf, _, field in leaves(schema())}
    given = {word.partition("=")[0] for word in words}
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        new = ALIASES.get(key)
        if key == "dtype" and (choices := known.get(key)):
            found.append(f"{key}{equals}{','.join(_dtype(one, choices) for one in value.split(','))}")
            continue
        if new is None or key in known or new not in known:
            found.append(word)
            continue
        if other := next((one for one in sorted(given - {key}) if ALIASES.get(one, one) == new), None):
            raise InputError(f"{key}: is another spelling of {new}, and {other} is given too; give only {new}")
        found.append(f"{new}{equals}{value}")
    return found


def _dtype(name: str, choices: Sequence[str]) -> str:
    """The other name of a dtype, where a command knows it by that one."""
    other = DTYPES.get(name) or next((long for long, short in DTYPES.items() if short == name), name)
    return other if name not in choices and other in choices else name


@contextmanager
def registered(schema: Any) -> Iterator[None]:
    """`schema` and the presets of its groups are in Hydra's store meanwhile, and no other schema's.

    Hydra has one store, in which the group `schedule` of one command would hide the plain key of another.
    """
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


def parse(overrides: Iterable[str]) -> list[Override]:
    """The words `key=value` as Hydra reads them. Raises `InputError` for a word that is none."""
    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        if "=" not in word or word.startswith("-"):
            raise InputError(f"{word}: write options as key=value; --help lists the keys")
        try:
            parsed.append(parser.parse_override(word))
        except HydraException as error:
            raise InputError(f"{word}: {_first_line(error)}; put the value in quotes if it is text") from error
    return parsed


def swept(overrides: Iterable[str]) -> list[str]:
    """The keys that are given several values (`key=1,2`), in order."""
    return [one.key_or_group for one in parse(overrides) if one.is_sweep_override()]


def _check_key(override: Override, schema: Any) -> None:
    """Hydra's own message for a wrong key speaks of structs and defaults lists; this one names the nearest key."""
    key, known = override.key_or_group, [leaf for leaf, _, _ in leaves(schema())]
    if override.is_add() or override.is_delete() or override.is_force_add() or override.package is not None:
        raise InputError(f"{override.input_line}: keys can be set, not added, removed or moved")
    if override.is_sweep_override():
        raise InputError(f"{key}: one value at a time; {override.get_value_string()} is a sweep")
    presets = presets_of(schema, key) if key in groups(schema) else []
    if presets:
        if override.value() not in presets:
            raise InputError(f"{override.input_line}: choose one of {', '.join(presets)}")
    elif key not in known:
        raise no_such_key(key, [*(group for group in groups(schema) if presets_of(schema, group)), *known])


def no_such_key(key: str, known: Sequence[str]) -> InputError:
    """The error for a key that is not among those known; it names the nearest."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return InputError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "; --help lists the keys"))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
