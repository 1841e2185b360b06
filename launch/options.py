"""Options of a command as a dataclass, and the words `key=value` that set them, without Hydra and torch.

Counts of tokens can be written 128k, 1M, 1B, 1e6 or 128Ki: k, M and G are powers of 1000, B is a billion, and Ki, Mi
and Gi are powers of 1024. Names can be written in any case. `config.load` composes options with Hydra; `load_plain`
reads the same words without Hydra.
Guarantees: nothing is guessed. A word without a meaning is refused, and the message names the word to write instead.
The names of engines, transports and dtypes are listed here, because the modules that define them import torch;
tests/launch/test_options.py compares the lists.
"""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from importlib import resources
from itertools import groupby
from math import isfinite
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ringattn.errors import InputError
from ringattn.launch.folders import check_output

T = TypeVar("T")

ENGINES = ("auto", "aten", "plain", "triton", "fa3", "fa4")
TRANSPORTS = ("auto", "local", "shm", "gloo", "nccl", "peer")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
CONF = "ringattn.launch.conf"
MOST_SEED = 2**32 - 1
"""The largest seed: multiplied by 1,000,003 for the seeds of batches, it fits into the 64 bits that torch accepts."""
MOST = 2**50
"""The largest value of a count or size: products of several of them stay far inside the range of a float."""


# --- declarations ----------------------------------------------------------------------------------------------------


def option(default: Any, about: str, **limits: Any) -> Any:
    """Declare an option: a dataclass field with the help line `about` and limits.

    The limits are `least`, `most` and `above` (exclusive) for numbers, and `choices`. A choice that ends in `:N` stands
    for the name with a number, such as double_ring:2. `names` lists special values that are allowed in addition to
    other values. `writes` is "file", "picture" or "data" if the option names a file that the command writes;
    `check_limits` then checks that the file can be written. Each option refuses a number that is not finite.
    """
    return field(default=default, metadata={"about": about, **limits})


def json_option() -> Any:
    """Declare the option `json` of a command; see `folders.json_output`."""
    return option("", "file to write the figures into; - for the standard output, with nothing else", writes="data")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield (dotted key, value, field) of each option, nested ones included."""
    for described in fields(config):
        value = getattr(config, described.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{described.name}.")
        else:
            yield f"{prefix}{described.name}", value, described


def groups(schema: Any) -> list[str]:
    """Return the groups of a schema: its nested dataclasses and its `GROUPS`, whose preset files set several keys."""
    hints = get_type_hints(schema)
    nested = [described.name for described in fields(schema) if is_dataclass(hints[described.name])]
    return [*nested, *getattr(schema, "GROUPS", ())]


def presets_of(group: str) -> list[str]:
    """Return the presets of a group, which are the files of its folder. The list is empty if it has no folder."""
    folder = resources.files(CONF) / group
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()) if folder.is_dir() else []


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
    if choices := limits.get("choices"):
        form = re.sub(r":(N|[1-9][0-9]*)$", lambda number: ":" if number[1] == "N" else ":N", str(value))
        if form not in choices:
            raise InputError(f"{key}={value}: choose one of {', '.join(choices)}")


def help_text(command: str, purpose: str, *schemas: type) -> str:
    """Return the wrapped text of `--help`: each key of `schemas` with its default and its meaning."""
    rows = [("key", "default", "meaning")]
    for key, value, described in (leaf for schema in schemas for leaf in leaves(schema())):
        choices = described.metadata.get("choices")
        about = described.metadata["about"] + (f" ({', '.join(choices)})" if choices else "")
        rows.append((key, "" if value in (None, "") else str(value).replace("\n", r"\n"), about))
    presets = {group: presets_of(group) for schema in schemas for group in groups(schema)}
    lists = [f"  {group}={','.join(names)}" for group, names in presets.items() if names]
    notes = ["", *wrapped("\n".join(["presets; choose one from each list:", *lists]))] if lists else []
    return "\n".join([f"usage: ringattn {command} [key=value ...]", "", *wrapped(purpose), "", *_columns(rows), *notes])


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a table of keys, defaults and meanings. If the terminal is narrow, meanings get own lines."""
    width, wide = _help_width(), max(len(key) for key, _, _ in rows)
    # Limit the column of defaults, so that one long default does not push all meanings to the right.
    middle = min(LONGEST_DEFAULT, max(len(default) for _, default, _ in rows))
    stacked = width - wide - middle - 6 < LEAST_MEANING
    lines = []
    for key, default, about in rows:
        start = f"  {key:<{wide}}  {default:<{middle}}  "
        if stacked or len(default) > middle:
            indent = " " * (6 if stacked else wide + middle + 6)
            lines += _filled(f"  {key:<{wide}}  {default}".rstrip(), width, " " * (wide + 4))
            lines += _filled(indent + about, width, indent)
        else:
            lines += _filled(start + about, width, " " * len(start))
    return lines


HELP_WIDTH = 100
"""Columns of a help text that is not printed on a terminal."""
MOST_HELP_WIDTH, LEAST_HELP_WIDTH = 120, 40
LONGEST_DEFAULT, LEAST_MEANING = 24, 30
"""Limits of the columns in a table of keys, in characters: the largest width of the defaults, and the smallest width of
the meanings."""
HANGING = re.compile(r" +\S+  +|[A-Z]\w+: +")
"""Matches the start of a table row, or of a line with a label such as `Examples: `. Continuation lines are indented by
the length of the match."""
PROSE = re.compile(r"(?![A-Z]\w+: )\S")


def _help_width() -> int:
    """Return the width of a help text: COLUMNS or the width of the terminal, within limits."""
    return min(MOST_HELP_WIDTH, max(LEAST_HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 24)).columns))


def wrapped(text: str) -> list[str]:
    """Return the lines of a text for `--help`, wrapped at the width of the terminal.

    Consecutive lines of prose are joined first. An indented line, or a line that begins with a label, is wrapped alone.
    If it contains a command, each break is marked with a backslash.
    """
    width = _help_width()
    lines: list[str] = []
    for is_prose, block in groupby(text.split("\n"), key=lambda line: bool(PROSE.match(line))):
        if is_prose:
            lines += _filled(" ".join(block), width)
            continue
        for line in block:
            label = HANGING.match(line)
            indent = " " * (label.end() if label else len(line) - len(line.lstrip()))
            lines += _command(line, width, indent) if "ringattn " in line else _filled(line, width, indent) or [""]
    return lines


def _command(line: str, width: int, indent: str) -> list[str]:
    """Return the lines of a command, each but the last with a backslash at its end."""
    if len(line) <= width:
        return [line]
    *first, last = _filled(line, width - 2, indent)
    return [*(f"{part} \\" for part in first), last]


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    """Return `text` in lines of at most `width` columns. All lines except the first are indented; no word is cut."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# --- words -----------------------------------------------------------------------------------------------------------


WORD = re.compile(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
"""Matches `key=value` in the syntax of Hydra, but no flag of Hydra."""
SAME_NAMES = (("fp64", "float64"), ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"),
              ("ulysses", "all_to_all"))  # fmt: skip
"""Pairs of equivalent names. Every command accepts both, and uses the one that is among its choices."""
ELSEWHERE = {
    "nproc": "ranks", "q_heads": "heads", "attention": "mask", "hardware": "cluster", "cluster": "hardware",
    "precision": "dtype", "dtype": "precision",
    "window_tokens": "window=[LEFT,RIGHT] without the query's own key, as window=[511,0] for 512 keys",
}  # fmt: skip
"""Keys of other commands and programs, and what to write instead in a command that has only the new key."""
KINDS = {int: "a whole number", float: "a number"}


def load_plain(words: Sequence[str], schema: type[T]) -> T:
    """Return an instance of the dataclass `schema` from its defaults and the words `key=value`, as `config.load` does.

    The fields of `schema` can be numbers, texts, booleans, lists of whole numbers, and None (`null`). Raises
    `InputError`, with the key first, for a wrong word, key or value.
    """
    kinds, values = get_type_hints(schema), {}
    words = spelled(words, schema)
    for index, word in enumerate(words):
        key, equals, text = word.partition("=")
        if not equals or not key or word.startswith("-"):
            raise no_option(words, index, kinds)
        if key not in kinds:
            raise no_such_key(key, list(kinds))
        values[key] = _read(key, text, kinds[key])
    config = schema(**values)
    check_limits(config)
    return config


def _read(key: str, text: str, kind: Any) -> Any:
    """Parse `text` as a value of `kind`. Quotes around a text are dropped, because Hydra would need them."""
    if type(None) in get_args(kind):
        if text in ("null", "None", ""):
            return None
        kind = next(other for other in get_args(kind) if other is not type(None))
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
    """Return the words in the spelling of a command with the keys of `schemas`: names as declared, lengths as numbers.

    Words that are not `key=value` are unchanged. Raises `InputError` for a key that has another name in this command.
    """
    names: dict[str, Sequence[str]] = {group: presets_of(group) for schema in schemas for group in groups(schema)}
    for schema in schemas:
        for key, _, described in leaves(schema()):
            names[key] = described.metadata.get("choices") or described.metadata.get("names") or ()
    result = []
    for word in words:
        match = WORD.fullmatch(word)
        if match is None or match[2].startswith("hydra"):
            result.append(word)
            continue
        key, value = match[2], match[3]
        new = ELSEWHERE.get(key, key)
        if key not in names and new.partition("=")[0] in names:
            new = f"{new}={value}" if new in names and key != "attention" else new
            raise InputError(f"{key}={value}: this command calls the key differently; write {new}")
        if known := names.get(key):
            value = ",".join(_declared(name, known) for name in value.split(","))
            if (ends := [name for name in known if name.lower().endswith(f"-{value.lower()}")]) and value not in known:
                raise InputError(f"{key}={value}: did you mean {ends[0]}? one of {', '.join(known)}")
        elif counts_tokens(key, value):
            value = with_lengths(key, value)
        result.append(f"{match[1]}{key}={value}")
    return result


def _declared(name: str, known: Sequence[str]) -> str:
    """Return `name` in the spelling that `known` declares, whatever its case. An unknown name is unchanged."""
    word, colon, number = name.partition(":")
    if f"{word.lower()}:N" in known:
        return f"{word.lower()}{colon}{number}"
    same = {name.lower(), *(other for pair in SAME_NAMES if name.lower() in pair for other in pair)}
    return name if name in known else next((declared for declared in known if declared.lower() in same), name)


def no_such_key(key: str, known: Sequence[str]) -> InputError:
    """Return the error for a key that is not among `known`. Its message names the most similar key."""
    last_parts = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2]]
    near = last_parts if len(last_parts) == 1 else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return InputError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else "; --help lists the keys"))


# --- lengths ---------------------------------------------------------------------------------------------------------


NUMBER = re.compile(r"(?<![\w.])\d[\w.]*(?:(?<=[eE])[+-]\d+)?")
"""A number with everything that is attached to it."""
LENGTH = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMgG]i?|[bB])?(?![\w.])")
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
COUNTS = ("segment_lengths", "cu_seqlens", "window", "mask")
"""Keys without `tokens` in their name whose numbers count tokens."""


def counts_tokens(key: str, value: str = "") -> bool:
    """Return whether the numbers in this value of the key count tokens, and letters behind them are units.

    In the text of slices, the letters are kinds: `slices:0-64x0-32b`.
    """
    last = key.rpartition(".")[2]
    return ("tokens" in last or last in COUNTS) and not value.strip("'\"").startswith("slices:")


def with_lengths(key: str, value: str) -> str:
    """Return the value of a key that counts tokens, with each count as a plain number, such as 128000 for 128k.

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
    """Return the error for a key that counts tokens, if its value is not a length."""
    return InputError(f"{key}={value}: is not a length; write 131072, 128k, 128Ki, 1M, 1Mi, 1e6 or 1B")


def notes_on(words: Sequence[str]) -> Iterator[str]:
    """Yield a note for each key that is given several times, and one for each count with a unit that states its value.

    For example: `tokens=128k is 128,000 tokens (128Ki: 131,072)`.
    """
    pairs = [match for word in words if (match := WORD.fullmatch(word))]
    keys, last = [match[2] for match in pairs], {match[2]: match for match in pairs}
    for key, match in last.items():
        if (count := keys.count(key)) > 1:
            yield f"{key} is given {'twice' if count == 2 else f'{count} times'}: {match[0]} is used"
    for key, match in last.items():
        for length in LENGTH.finditer(match[3]) if counts_tokens(key, match[3]) else ():
            if length[2] is not None:
                line = f"{key}={length[0]} is {int(with_lengths(key, length[0])):,} tokens"
                letter = {"k": "K", "b": "G", "B": "G"}.get(length[2], length[2])
                if not letter.endswith("i"):
                    line += f" ({length[1]}{letter}i: {float(length[1]) * SIZES[f'{letter.lower()}i']:,.0f})"
                yield line


# --- words that are not key=value ------------------------------------------------------------------------------------


PLAIN = "write options as key=value; --help lists the keys"
VALUED = ("--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
          "--experimental-rerun", "--cfg", "-c", "--info", "-i")  # fmt: skip
"""Flags of Hydra whose value may be the next word."""
MULTIRUN = ("--multirun", "-m")
TORCHRUN = {"nproc-per-node": "ranks", "np": "ranks", "nproc": "ranks"}
"""Flags of torchrun and mpirun, without dashes before them, as keys of `ringattn run`."""
INSTEAD = {
    "--version": "`ringattn --version` prints the version",
    "--dry-run": "only `ringattn run` and `ringattn sweep` have this flag",
    **dict.fromkeys((*VALUED, "--hydra-help", "--resolve", "--run", "-r"),
                    "only `ringattn run` accepts Hydra's flags; --help lists the keys and defaults of this command"),
    **dict.fromkeys(MULTIRUN, (
        "only `ringattn run` accepts it; `ringattn sweep` measures every combination of key=1,2 without it"
    )),
}  # fmt: skip
EXTRAS = {
    **dict.fromkeys(("hydra", "omegaconf", "rich", "matplotlib", "jinja2"), "launch"),
    **dict.fromkeys(("submitit", "hydra_plugins"), "slurm"),
    **dict.fromkeys(("transformers", "accelerate"), "hf"),
}
"""The extra of ringattn that installs each imported package."""


def no_option(words: Sequence[str], index: int, known: Collection[str], otherwise: str = PLAIN) -> InputError:
    """Return the error for the word at `index`, which is not `key=value`. `known`: the command's keys and groups.

    `otherwise`: the advice of the message if the likely mistake is unknown.
    """
    word, after = words[index], words[index + 1] if index + 1 < len(words) else ""
    name, equals, value = word.partition("=")
    if word.startswith("-"):
        key = name.lstrip("-").replace("_", "-")
        key = TORCHRUN.get(key, key.replace("-", "_"))
        if name in INSTEAD:
            otherwise = INSTEAD[name]
        elif key in known:
            follows = not equals and bool(after) and not after.startswith("-") and WORD.fullmatch(after) is None
            word = f"{word} {after}" if follows else word
            otherwise = f"write {key}={value if equals else after if follows else 'VALUE'}"
        return InputError(f"{word}: {otherwise}")
    before = words[index - 1] if index else ""
    if before.endswith("=") and WORD.fullmatch(before):
        return InputError(f"{before} {word}: write {before}{word}, without a space")
    if after.startswith("="):
        value = after[1:] or "".join(words[index + 2 : index + 3])
        return InputError(f"{' '.join(words[index : index + 3])}: write {word}={value}, without spaces")
    if after and (key := word.rstrip(":")) in known and WORD.fullmatch(after) is None:
        return InputError(f"{word} {after}: write {key}={after}")
    return InputError(f"{word}: {otherwise}")


def advice(error: ModuleNotFoundError) -> str | None:
    """Return a message that names the extra to install for the missing package; None if no extra installs it."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    return extra and f"needs {package}, which is not installed: pip install 'ringattn[{extra}]'"
