"""How the words of a command are spelled: keys, names and lengths that mean the same, and the nearest to a wrong one.

Guarantees: what has one meaning is taken in all its spellings by every command that has it; two spellings of one key
are refused. Also `load_plain`, for commands that must run where there is no Hydra.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from ringattn.errors import InputError
from ringattn.launch.lengths import WORD, counts_tokens, with_lengths
from ringattn.launch.masks import mask_words
from ringattn.launch.options import check_limits, groups, is_numbered, leaves, presets_of
from ringattn.launch.words import no_option

T = TypeVar("T")

ALIASES = {"nproc": "ranks", "ring": "ranks", "length_tokens": "tokens", "q_heads": "heads", "attention": "mask"}
"""Keys as earlier versions spelled them: read as the new key by a command that has this one and not the old one."""
SYNONYMS = {"hardware": "cluster", "cluster": "hardware", "precision": "dtype", "dtype": "precision"}
"""Keys that some commands have and others call otherwise."""
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Every command takes either name of a dtype, and keeps the one that is among its choices."""
KINDS = {int: "a whole number", float: "a number"}
CASTS = {("precision", "bf16"): "bf16_cast", ("dtype", "bf16_cast"): "bf16"}
"""`ringattn train dtype=bf16`, where weights stay fp32, is what `ringattn plan` calls precision=bf16_cast."""


def load_plain(words: Sequence[str], schema: type[T]) -> T:
    """An instance of the dataclass `schema` from its defaults and the words `key=value`, as `config.load` makes it.

    Its fields are numbers, texts, true or false, or None (`null`), and no lists. Raises `InputError` that begins with
    the key.
    """
    kinds, given = get_type_hints(schema), {}
    words = spelled(words, schema)
    for at, word in enumerate(words):
        key, equals, text = word.partition("=")
        if not equals or not key or word.startswith("-"):
            raise no_option(words, at, kinds)
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
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{key}={text}: should be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{key}={text}: should be {KINDS.get(kind, kind.__name__)}") from None


def spelled(words: Sequence[str], *schemas: Any) -> list[str]:
    """The words in the spelling of a command that takes the keys of `schemas`.

    Keys: see `ALIASES`, `SYNONYMS`, and `shape.heads` is `heads` where there is one of the two; masks: see `masks`.
    Names are taken in any case, and counts of tokens as `with_lengths` reads them. Words that are no `key=value` are
    left alone. Raises `InputError` for a key that is given in two spellings.
    """
    known = {leaf: field.metadata for schema in schemas for leaf, _, field in leaves(schema())}
    chosen = {group: presets_of(schema, group) for schema in schemas for group in groups(schema)}
    words = mask_words(words, known)
    keys = {match[2]: _key(match[2], known, chosen) for word in words if (match := WORD.fullmatch(word))}
    for key, new in keys.items():
        if key != new and (other := next((one for one in sorted(keys) if one != key and keys[one] == new), None)):
            raise InputError(f"{key}: is another spelling of {new}, and {other} is given too; give only {new}")
    found = []
    for word in words:
        match = WORD.fullmatch(word)
        if match is None or keys[match[2]].startswith("hydra"):
            found.append(word)
            continue
        key = keys[match[2]]
        names = chosen.get(key) or _names(known.get(key, {}))
        limits: Mapping[str, Any] = known.get(f"{key}.name" if key in chosen else key, {})
        value = with_lengths(key, match[3]) if counts_tokens(key) else _named(match[3], names, limits)
        if key in chosen and any(is_numbered(one, limits) for one in value.split(",")):
            # A name with a number is no preset of the group, and a value of its name.
            key = f"{key}.name"
        if (ends := [name for name in names if name.lower().endswith(f"-{value.lower()}")]) and value not in names:
            raise InputError(f"{key}={value}: did you mean {ends[0]}? one of {', '.join(names)}")
        if key != match[2]:
            value = CASTS.get((key, value), value)
        found.append(f"{match[1]}{key}={value}")
    return found


def _key(key: str, known: Collection[str], chosen: Collection[str]) -> str:
    """The spelling of `key` that a command knows, or `key` itself."""
    for one in (key, ALIASES.get(key, key), SYNONYMS.get(key, key)):
        if one in known or (one in chosen and one == key):
            return one
        last = one.rpartition(".")[2]
        same = [other for other in known if other.rpartition(".")[2] == last]
        if len(same) == 1 and ("." in one) != ("." in same[0]):
            return same[0]
    return key


def _names(metadata: Mapping[str, Any]) -> Sequence[str]:
    """The names that an option can have. `names`: those of an option that can also be something else, as a file."""
    return metadata.get("choices") or metadata.get("names") or ()


def _named(value: str, names: Sequence[str], limits: Mapping[str, Any]) -> str:
    """`value`, where each of its names, whatever their case, is as it stands among `names`."""
    return ",".join(_name(one, names, limits) for one in value.split(",")) if names else value


def _name(name: str, names: Sequence[str], limits: Mapping[str, Any]) -> str:
    word, colon, number = name.partition(":")
    if colon and word.lower() in limits.get("numbered", ()):
        return f"{word.lower()}:{number}"
    if alias := limits.get("aliases", {}).get(name.lower()):
        return str(alias)
    short = DTYPES.get(name.lower(), name.lower())
    same = {name.lower(), short, *(long for long, other in DTYPES.items() if other == short)}
    return name if name in names else next((one for one in names if one.lower() in same), name)


def no_such_key(key: str, known: Sequence[str]) -> InputError:
    """The error for a key that is not among those known; it names the nearest."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return InputError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "; --help lists the keys"))
