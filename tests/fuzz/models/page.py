"""The counts of a walk, and its tables for the documentation."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from tests.fuzz.models.walk import Record

VERDICTS = ("exact", "refused", "not buildable", "wrong")


def counts(records: Sequence[Record]) -> str:
    """How many classes were tried, and what became of them: numbers that add up."""
    by = Counter(record["verdict"] for record in records)
    return f"{len(records)} tried: " + ", ".join(f"{by[one]} {one}" for one in VERDICTS)


def summary(records: Sequence[Record]) -> str:
    """For the end of a walk."""
    lines = [counts(records), f"calls: {_calls(records)}"]
    for what in ("refused", "not buildable"):
        for reason, names in grouped(records, what):
            lines.append(f"{what}, {len(names)}: {reason} ({_names(names, 4)})")
    return "\n".join(lines)


def grouped(records: Iterable[Record], what: str) -> list[tuple[str, list[str]]]:
    """Reasons, and the classes of each, the commonest first."""
    found: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record["verdict"] == what:
            found[_general(record["reason"], record["class"])].append(record["class"])
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def _general(reason: str, name: str) -> str:
    """What a reason says was wrong, without what differs between classes and without what to do about it."""
    reason = re.sub(r"^(InputError|UnsupportedError|_NoTableError|NotBuilt): ", "", reason).replace(name, "this class")
    reason = reason.replace("zigzag", "contiguous")
    reason = re.sub(r"rank \d+: ", "", reason.split("; ")[0].split(": leave ")[0])
    reason = re.sub(r"the models of \w+", "the models of this attention", reason)
    reason = re.sub(r"\b[A-Z][A-Za-z0-9_]*(Attention|Config|Model|Encoder|Decoder)\d*\b", r"…\1", reason)
    return re.sub(r"(?<!minimax_m)\d+([.,]\d+)*", "N", reason).replace("|", "/")


def _names(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_HEAD = """# Models of transformers, one after the other

Written by `python -m tests.fuzz.models page=docs/embedding-transformers-models.md seed={seed}`, with transformers
{transformers} and torch {torch}: every class of its mappings for text, also beside images and sound, whose `forward`
takes `input_ids`. The smallest model that its configuration makes, two layers or more, with random float64 weights, is
called over a ring of two ranks as [the documentation](embedding-transformers.md) says, and the unmodified one with
`attn_implementation="eager"` in one process: plain, padded before, after and on both sides, packed, with positions,
labels, `inputs_embeds` and each other argument of text that it takes, with what asks for other outputs, and as drawn.
All outputs, the loss and every parameter's gradient are compared, to 1e-8. Images and sound are not given.

Where the files of a model know kinds of layers that its default configuration has not (`conv`, `sliding_attention`,
`minimax_m3_sparse`, ...), the same calls are made of a model with a layer of each such kind. The worst verdict counts.

| | classes |
|---|---|
| tried, of {types} model types | {tried} |
| exact: each call exact, or refused by name | {exact} |
| refused by name in every call, or in every call with a kind of layer | {refused} |
| not buildable here | {not_buildable} |
| wrong: silently, or refused without a name | {wrong} |

Calls: {calls}.
"""


def text(records: Sequence[Record], seed: int) -> str:
    """The page of the documentation."""
    records = sorted(records, key=lambda record: str(record["class"]))
    by = Counter(record["verdict"] for record in records)
    exact = [record for record in records if record["verdict"] == "exact"]
    head = _HEAD.format(
        seed=seed, transformers=version("transformers"), torch=version("torch").partition("+")[0], tried=len(records),
        types=len({record["type"] for record in records}), exact=by["exact"], refused=by["refused"],
        not_buildable=by["not buildable"], wrong=by["wrong"], calls=_calls(records),
    )  # fmt: skip
    refusals = Counter(
        _general(why, record["class"])
        for record in exact
        for what, why in record["cases"].values()
        if what == "refused"
    )
    parts = [head, "## Exact\n", _wrapped(", ".join(record["class"] for record in exact)),
             "\nCalls of these that are refused (N: a number):\n",
             _table("calls", ((str(count), reason) for reason, count in refusals.most_common()))]  # fmt: skip
    for what, title in (("refused", "Refused"), ("not buildable", "Not buildable"), ("wrong", "Wrong")):
        rows = [(f"{len(names)}: {', '.join(names)}", reason) for reason, names in grouped(records, what)]
        parts += [f"\n## {title}\n", _table("classes", rows)] if rows else []
    missing = Counter(one for record in records for one in record.get("not_given", ()))
    parts += ["\n## Arguments that no call had\n",
              "Of images, sound and caches, mostly; each with its number of classes.\n",
              _wrapped(", ".join(f"`{name}` {count}" for name, count in sorted(missing.items())))]  # fmt: skip
    return "\n".join(parts) + "\n"


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"| reason | {head} |", "|---|---|", *(f"| {reason} | {which} |" for which, reason in rows)])


def _calls(records: Sequence[Record]) -> str:
    by = Counter(verdict[0] for record in records for verdict in record["cases"].values())
    named = {"exact": "exact", "refused": "refused by name", "wrong": "wrong",
             "no reference": "that one process cannot answer either"}  # fmt: skip
    return ", ".join(f"{by[what]} {words}" for what, words in named.items())


def _wrapped(words: str) -> str:
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)
