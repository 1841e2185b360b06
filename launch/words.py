"""The words of a command line, without Hydra: how keys, names and lengths are spelled, and what a wrong word should be.

Counts of tokens can be written 128k, 1M, 1B, 1e6 or 128Ki: k, M, G are powers of 1000, B is a billion, Ki, Mi, Gi are
powers of 1024. Names are read in any case. Commands that run without Hydra use `load_plain`.
Guarantees: nothing is guessed. A word without a meaning is refused, and the message names the word to write instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ringattn.errors import InputError
from ringattn.launch.options import check_limits, groups, leaves, presets_of

T = TypeVar("T")

WORD = re.compile(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
"""`key=value`, as Hydra has it; its flags are other words."""
NUMBER = re.compile(r"(?<![\w.])\d[\w.]*(?:(?<=[eE])[+-]\d+)?")
"""A number with everything that is attached to it."""
LENGTH = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMgG]i?|[bB])?(?![\w.])")
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
COUNTS = ("segment_lengths", "cu_seqlens", "window", "mask")
"""Keys without `tokens` in their name whose numbers count tokens."""
REPLACED = {
    "nproc": "ranks", "ring": "ranks", "length_tokens": "tokens", "q_heads": "heads", "attention": "mask",
    "left": "window=[LEFT,RIGHT]", "right": "window=[LEFT,RIGHT]",
    **dict.fromkeys(("window_tokens", "mask.window_tokens"),
                    "window=[LEFT,RIGHT] without the query's own key, as window=[511,0] for 512 keys"),
    "mask.kind": "mask", "mask.documents": "documents",
    **dict.fromkeys(("mask.branches", "mask.segment_tokens", "mask.ratio"),
                    "segment_lengths=[2048,8192] dilation_rates=[1,4]"),
    "hardware": "cluster", "cluster": "hardware", "precision": "dtype", "dtype": "precision",
    "out_dir": "out", "warm_ups": "warmup",
}  # fmt: skip
"""Keys of other commands or of former versions: what to write where a command has the new key and not the old one."""
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Every command takes either name of a dtype, and keeps the name that is among its choices."""
KINDS = {int: "a whole number", float: "a number"}

PLAIN = "write options as key=value; --help lists the keys"
HYDRA = ("--cfg", "-c", "--info", "-i", "--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp",
         "--hydra-help", "--package", "-p", "--resolve", "--run", "-r", "--experimental-rerun")  # fmt: skip
MULTIRUN = ("--multirun", "-m")
TORCHRUN = {"nproc-per-node": "ranks", "np": "ranks", "nproc": "ranks", "nnodes": "nnodes", "node-rank": "node_rank",
            "rdzv-endpoint": "rdzv_endpoint"}  # fmt: skip
"""Flags of torchrun and mpirun, without dashes before them, as keys of `ringattn run`."""
INSTEAD = {
    "--version": "`ringattn --version` says it",
    "--dry-run": "`ringattn run` and `ringattn sweep` have it, this command has not",
    **dict.fromkeys(HYDRA, "of all commands `ringattn run` takes Hydra's flags; here --help lists keys and defaults"),
    **dict.fromkeys(MULTIRUN, "of all commands `ringattn run` takes it; `ringattn sweep` measures every combination of "
                              "key=1,2 without it"),
}  # fmt: skip
EXTRAS = {
    **dict.fromkeys(("hydra", "omegaconf", "rich", "matplotlib", "jinja2"), "launch"),
    **dict.fromkeys(("submitit", "hydra_plugins"), "slurm"),
    **dict.fromkeys(("transformers", "accelerate"), "hf"),
}
"""The extra of ringattn that installs each imported package."""


# --- keys and names --------------------------------------------------------------------------------------------------


def load_plain(words: Sequence[str], schema: type[T]) -> T:
    """Make an instance of the dataclass `schema` from its defaults and the words `key=value`, as `config.load` does.

    Its fields are numbers, texts, true or false, lists of whole numbers, or None (`null`). Raises `InputError` that
    begins with the key.
    """
    kinds, values = get_type_hints(schema), {}
    words = spelled(words, schema)
    for at, word in enumerate(words):
        key, equals, text = word.partition("=")
        if not equals or not key or word.startswith("-"):
            raise no_option(words, at, kinds)
        if key not in kinds:
            raise no_such_key(key, list(kinds))
        values[key] = _read(key, text, kinds[key])
    config = schema(**values)
    check_limits(config)
    return config


def _read(key: str, text: str, kind: Any) -> Any:
    """Read `text` as a value of `kind`. Quotes around it are those that Hydra asks for."""
    if type(None) in (kinds := get_args(kind)):
        if text in ("null", "None", ""):
            return None
        kind = next(option for option in kinds if option is not type(None))
    if get_origin(kind) is list:
        if not re.fullmatch(r"\[.*\]", text):
            raise InputError(f"{key}: should be a list, as [1,2]")
        return [_read(key, number.strip(), get_args(kind)[0]) for number in filter(None, text[1:-1].split(","))]
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
    """Return the words as a command with the keys of `schemas` spells them: names as declared, lengths as numbers.

    Words that are no `key=value` are left alone. Raises `InputError` for a key that another key has replaced.
    """
    options = {leaf: field.metadata for schema in schemas for leaf, _, field in leaves(schema())}
    presets = {group: presets_of(group) for schema in schemas for group in groups(schema)}
    result = []
    for word in words:
        match = WORD.fullmatch(word)
        if match is None or match[2].startswith("hydra"):
            result.append(word)
            continue
        key, value = match[2], match[3]
        if key not in options and key not in presets:
            refuse_replaced(key, value, options)
        names = presets.get(key) or _names(options.get(key, {}))
        counted = counts_tokens(key) and not names
        value = with_lengths(key, value) if counted else _named(value, names, options.get(key, {}))
        if (ends := [name for name in names if name.lower().endswith(f"-{value.lower()}")]) and value not in names:
            raise InputError(f"{key}={value}: did you mean {ends[0]}? one of {', '.join(names)}")
        result.append(f"{match[1]}{key}={value}")
    return result


def refuse_replaced(key: str, value: str, known: Collection[str]) -> None:
    """Raise `InputError` if a key of `known` has replaced `key`."""
    new = REPLACED.get(key, key.removesuffix(".name").removeprefix("shape.").removeprefix("transport."))
    if new == key or re.split(r"\W", new)[0] not in known:
        return
    if new in known and key not in ("mask.kind", "attention"):  # whose values have changed too
        new = f"{new}={value}"
    raise InputError(f"{key}={value}: this key has another name here; write {new}")


def _names(limits: Mapping[str, Any]) -> Sequence[str]:
    """Return the names that an option can have. `names` are those of an option that can also be a file, for example."""
    return limits.get("choices") or limits.get("names") or ()


def _named(value: str, names: Sequence[str], limits: Mapping[str, Any]) -> str:
    """Return `value` with each of its names, whatever their case, as it is declared in `names`."""
    return ",".join(_name(name, names, limits) for name in value.split(",")) if names else value


def _name(name: str, names: Sequence[str], limits: Mapping[str, Any]) -> str:
    word, colon, number = name.partition(":")
    if colon and word.lower() in limits.get("numbered", ()):
        return f"{word.lower()}:{number}"
    if alias := limits.get("aliases", {}).get(name.lower()):
        return str(alias)
    short = DTYPES.get(name.lower(), name.lower())
    same = {name.lower(), short, *(long for long, other in DTYPES.items() if other == short)}
    return name if name in names else next((declared for declared in names if declared.lower() in same), name)


def no_such_key(key: str, known: Sequence[str]) -> InputError:
    """Make the error for a key that is not among those known; it names the nearest."""
    last_parts = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2]]
    near = last_parts if len(last_parts) == 1 else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return InputError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "; --help lists the keys"))


# --- lengths ---------------------------------------------------------------------------------------------------------


def counts_tokens(key: str) -> bool:
    """Whether the numbers in the values of this key count tokens."""
    last = key.rpartition(".")[2]
    return "tokens" in last or last in COUNTS


def with_lengths(key: str, value: str) -> str:
    """Return the value of a key that counts tokens, each count in it as a plain number.

    Raises `InputError` for a count that is not a whole number, and for an unknown unit.
    """
    if re.fullmatch(r"\d{1,3}(,\d{3})*,0\d\d(,\d{3})*", value):
        raise InputError(f"{key}={value}: write {value.replace(',', '')}, without commas")
    for number in NUMBER.findall(value):
        if not LENGTH.fullmatch(number) and any(map(str.isalpha, number)):
            raise no_length(key, number)

    def plain(match: re.Match[str]) -> str:
        size = float(match[1]) * SIZES[(match[2] or "").lower()]
        if match[0].isdecimal() or (size != int(size) and match[2] is None):
            return match[0]
        if size != int(size):
            raise InputError(f"{key}={match[0]}: is {size:g} tokens; write a whole number of them")
        return str(int(size))

    return LENGTH.sub(plain, value)


def no_length(key: str, value: Any) -> InputError:
    """Make the error for a value that is no length, of a key that counts tokens."""
    return InputError(f"{key}={value}: is no length; write 131072, 128k, 128Ki, 1M, 1Mi, 1e6 or 1B")


def lengths_told(words: Sequence[str]) -> Iterator[str]:
    """Yield a line for each count with a unit: `tokens=128k is 128,000 tokens (128Ki: 131,072)`."""
    for word in words:
        match = WORD.fullmatch(word)
        if match is None or not counts_tokens(match[2]):
            continue
        for length in LENGTH.finditer(match[3]):
            if length[2] is None:
                continue
            line = f"{match[2]}={length[0]} is {int(with_lengths(match[2], length[0])):,} tokens"
            if not length[2].endswith("i"):
                letter = {"k": "K", "b": "G", "B": "G"}.get(length[2], length[2])
                binary = f"{length[1]}{letter}i"
                line += f" ({binary}: {float(length[1]) * SIZES[letter.lower() + 'i']:,.0f})"
            yield line


# --- words that are no key=value -------------------------------------------------------------------------------------


def no_option(words: Sequence[str], at: int, known: Collection[str], otherwise: str = PLAIN) -> InputError:
    """Make the error for the word at index `at`, which is no `key=value`. `known`: the command's keys and groups.

    `otherwise`: the advice if nothing better is known.
    """
    word, after = words[at], words[at + 1] if at + 1 < len(words) else ""
    name, equals, value = word.partition("=")
    if word.startswith("-"):
        if advice_for_flag := INSTEAD.get(name):
            return InputError(f"{word}: {advice_for_flag}")
        key = name.lstrip("-").replace("_", "-")
        key = TORCHRUN.get(key, key.replace("-", "_"))
        follows = not equals and bool(after) and not after.startswith("-") and WORD.fullmatch(after) is None
        if key in known:
            flag = f"{word} {after}" if follows else word
            return InputError(f"{flag}: write {key}={value if equals else after if follows else 'VALUE'}")
        return InputError(f"{word}: {otherwise}")
    before = words[at - 1] if at else ""
    if before.endswith("=") and WORD.fullmatch(before):
        return InputError(f"{before} {word}: write {before}{word}, without a space")
    if after.startswith("="):
        value = after[1:] or "".join(words[at + 2 : at + 3])
        return InputError(f"{' '.join(words[at : at + 3])}: write {word}={value}, without spaces")
    if after and (key := word.rstrip(":")) in known and WORD.fullmatch(after) is None:
        return InputError(f"{word} {after}: write {key}={after}")
    return InputError(f"{word}: {otherwise}")


def given_twice(words: Sequence[str]) -> Iterator[str]:
    """Yield a line for each key with several words, with the value that counts: `tokens is given twice: ...`."""
    last = _last_of_each(words)
    keys = [match[2] for word in words if (match := WORD.fullmatch(word))]
    for key in last:
        if (count := keys.count(key)) > 1:
            yield f"{key} is given {'twice' if count == 2 else f'{count} times'}: {last[key]} counts"


def that_count(words: Sequence[str]) -> list[str]:
    """Return the words `key=value` without those that a later word of the same key replaces."""
    return list(_last_of_each(words).values())


def _last_of_each(words: Sequence[str]) -> dict[str, str]:
    return {match[2]: word for word in words if (match := WORD.fullmatch(word))}


def advice(error: ModuleNotFoundError) -> str | None:
    """Return what to install for the package that `error` names; None if no extra installs it."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    return extra and f"needs {package}, which is not installed: pip install 'ringattn[{extra}]'"
