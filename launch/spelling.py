"""How the words of a command are spelled: keys and names of dtypes that mean the same, and the nearest to a wrong one.

Also `load_plain`, for commands that must run where there is no Hydra.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from ringattn.errors import InputError
from ringattn.launch.options import check_limits, leaves

T = TypeVar("T")

ALIASES = {"nproc": "ranks", "ring": "ranks", "length_tokens": "tokens", "q_heads": "heads", "attention": "mask"}
"""Keys as earlier versions spelled them: read as the new key by a command that has this one and not the old one."""
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Every command takes either name of a dtype, and keeps the one that is among its choices."""


def load_plain(words: Sequence[str], schema: type[T]) -> T:
    """An instance of the dataclass `schema` from its defaults and the words `key=value`, as `config.load` makes it.

    Its fields are numbers, texts or None (`null`), and no lists. Raises `InputError` that begins with the key.
    """
    kinds, given = get_type_hints(schema), {}
    for word in spelled(words, schema):
        key, equals, text = word.partition("=")
        if not equals or word.startswith("-"):
            raise InputError(f"{word}: write options as key=value; --help lists the keys")
        if key not in kinds:
            raise no_such_key(key, list(kinds))
        given[key] = _read(key, text, kinds[key])
    made = schema(**given)
    check_limits(made)
    return made


def _read(key: str, text: str, kind: Any) -> Any:
    """`text` as a value of `kind`; quotes around it are those that Hydra asks for."""
    if type(None) in (kinds := get_args(kind)):
        if text in ("null", "None", ""):
            return None
        kind = next(one for one in kinds if one is not type(None))
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{key}={text}: should be {kind.__name__}") from None


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


def no_such_key(key: str, known: Sequence[str]) -> InputError:
    """The error for a key that is not among those known; it names the nearest."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return InputError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "; --help lists the keys"))
