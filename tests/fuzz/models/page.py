"""The counts of a walk, its data for the documentation site, and the page of the documentation."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tests.fuzz.models.walk import Record

VERDICTS = ("exact", "refused", "not buildable", "wrong")


def counts(records: Sequence[Record]) -> str:
    """Return as text how many classes were tried and how many had each verdict."""
    by = Counter(record["verdict"] for record in records)
    return f"{len(records)} tried: " + ", ".join(f"{by[one]} {one}" for one in VERDICTS)


def summary(records: Sequence[Record]) -> str:
    """Return the text that is printed at the end of a walk: counts, and the reasons with their classes."""
    lines = [counts(records), "calls: " + ", ".join(f"{count} {what}" for what, count in _calls(records).items())]
    for what in ("refused", "not buildable"):
        for reason, names in grouped(records, what):
            lines.append(f"{what}, {len(names)}: {reason} ({_names(names, 4)})")
    return "\n".join(lines)


def grouped(records: Iterable[Record], what: str) -> list[tuple[str, list[str]]]:
    """Return the reasons for the verdict `what` with their classes, the most frequent reason first."""
    found: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record["verdict"] == what:
            found[_general(record["reason"], record["class"])].append(record["class"])
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def _general(reason: str, name: str) -> str:
    """Return the cause in a reason, without the parts that differ between classes and without the advice."""
    reason = re.sub(r"^(InputError|UnsupportedError|_NoTableError|NotBuilt): ", "", reason).replace(name, "this class")
    reason = reason.replace("zigzag", "contiguous")
    reason = re.sub(r"rank \d+: ", "", reason.split("; ")[0].split(": leave ")[0])
    reason = re.sub(r"the models of \w+", "the models of this attention", reason)
    reason = re.sub(
        r"\b[A-Z][A-Za-z0-9_]*(Attention|Config|Model|Encoder|Decoder|Indexer|Compressor)\d*\b", r"…\1", reason
    )
    return re.sub(r"(?<!minimax_m)\d+([.,]\d+)*", "N", reason).replace("|", "/")


def _names(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_PAGE = """# Models of transformers, class by class

This page was generated with transformers {transformers} and torch {torch} by this command:

```
python -m tests.fuzz.models data={file} page={page} seed={seed}
```

It tested {tried:,} classes of {model_types} model types: every class whose `forward` takes `input_ids`, including
classes that also take images or sound.

- Each model is the smallest that its configuration allows, with at least two layers and random float64 weights.
- It is prepared and called over a ring of two ranks as described in [transformers](embedding-transformers.md). The
  unmodified model is called with `attn_implementation="eager"` in one process.
- The calls are plain; padded before, after and on both sides; packed; with positions, labels, `inputs_embeds` and every
  other text argument; with arguments that request other outputs; and with randomly drawn arguments. No call passes
  images or sound.
- All outputs, the loss and the gradient of every parameter are compared, to 1e-8.
- Some models have kinds of layers that their default configuration does not use, such as `conv` or `sliding_attention`.
  The same calls are made with a layer of each such kind, and the worst result counts.

| result | classes | meaning |
|---|---|---|
| exact | {exact} | every call is exact, or is refused with a reason |
| refused | {refused} | every call is refused with a reason, or every call with one kind of layer |
| not buildable | {not_buildable} | the model cannot be built in the tests |
| wrong | {wrong} | a wrong result, or an error without a reason |

*Refused* means that every rank raises an error that names the reason.

| calls | number |
|---|---|
{calls}

[{file_name}]({file_name}) has the result of each class, with its message. The
documentation site shows these results below, as a table with a filter.

## Why classes are refused

{refused_topics}

## Why classes cannot be built

{unbuildable_topics}

## Refused calls of exact classes

| call | number |
|---|---|
{refused_calls}

## Arguments that no call passed

No call passed {arguments} of the arguments, mostly those of images, sound and caches. The data file lists them all.
The most frequent are:

{frequent}

<!-- generated: models -->
"""
FILE, FREQUENT = "docs/transformers-models.json", 8

Topics = tuple[tuple[str, str], ...]
REFUSED: Topics = (
    ("is an encoder-decoder of type", "encoder-decoders of other types"),
    ("the tokens of a decoder", "encoder-decoders that do not predict tokens"),
    ("the attention of .* cannot be set", "attention cannot be replaced"),
    ("from a whole row", "an output of the whole row"),
    ("carry a state", "layers with a state, or that choose tokens"),
    ("must be \\(rows, tokens\\)", "multiple choice: input of three dimensions"),
    ("ALiBi|adds a position bias", "a bias inside the model's own attention"),
    ("a separate configuration", "encoder and decoder with separate configurations"),
    ("position_ids|\\bpositions", "positions that the model counts itself"),
    ("mask", "a mask that the model makes or reads itself"),
    ("", "other"),
)
"""Patterns of reasons, and the topic of each; the first that matches counts."""
UNBUILDABLE: Topics = (
    ("parameters at its smallest", "too large at its smallest"),
    ("ImportError|ModuleNotFoundError", "a library is missing"),
    ("pixel|visual|vision|image|audio|speech|input_features|input_values", "needs images or sound"),
    ("", "the smallest configuration does not work"),
)
CALLS: Topics = (
    ("return_dict", "`return_dict=False`"),
    (
        "cannot shard|decoder_input_ids|itself over a ring|sequence has no|labels that were shifted",
        "inputs that an encoder-decoder does not take or needs",
    ),
    ("loss", "a loss of this rank's tokens only"),
    ("padded attention_mask", "`position_ids` that contradict the padding"),
    ("but for whole rows", "`position_ids` that differ from the model's count"),
    ("logits_to_keep", "`logits_to_keep`"),
    ("neither those of whole rows", "`position_ids` neither of rows nor of packed documents"),
    ("blocks of tokens", "packed documents or padding before the tokens, in models that count blocks of tokens"),
    ("", "a mask that the model makes itself"),
)


def data(records: Sequence[Record], seed: int) -> dict[str, Any]:
    """Return the results of a walk as JSON values, from which the page and the documentation site are made."""
    refused_calls = Counter(
        _general(why, record["class"])
        for record in records
        if record["verdict"] == "exact"
        for what, why in record["cases"].values()
        if what == "refused"
    )
    classes = {
        record["class"]: {
            "verdict": record["verdict"],
            "reason": "" if record["verdict"] == "exact" else _general(record["reason"], record["class"]),
        }
        for record in records
    }
    return {
        "transformers": version("transformers"),
        "torch": version("torch").partition("+")[0],
        "seed": seed,
        "model_types": len({record["type"] for record in records}),
        "calls": _calls(records),
        "refused_calls": dict(refused_calls.most_common()),
        "arguments_not_given": dict(sorted(Counter(a for r in records for a in r.get("not_given", ())).items())),
        "classes": dict(sorted(classes.items())),
    }


def dumped(results: Mapping[str, Any]) -> str:
    """Return the text of the data file, with one line per class."""
    return (
        re.sub(r"\{\n\s+(\"verdict\".*),\n\s+(\"reason\".*)\n\s+\}", r"{\1, \2}", json.dumps(results, indent=1)) + "\n"
    )


def text(results: Mapping[str, Any]) -> str:
    """Return the page of the documentation."""
    by = Counter(result["verdict"] for result in results["classes"].values())
    missing = results["arguments_not_given"]
    frequent = sorted(missing, key=lambda name: (-missing[name], name))[:FREQUENT]
    return _PAGE.format(
        **results | {
            "file": FILE, "page": "docs/embedding-transformers-models.md", "file_name": FILE.rpartition("/")[2],
            "tried": len(results["classes"]), "exact": by["exact"], "refused": by["refused"],
            "not_buildable": by["not buildable"], "wrong": by["wrong"],
            "calls": "\n".join(f"| {CALL_NAMES[what]} | {count:,} |" for what, count in results["calls"].items()),
            "refused_topics": _topics(results, "refused", REFUSED),
            "unbuildable_topics": _topics(results, "not buildable", UNBUILDABLE),
            "refused_calls": _by_topic(results["refused_calls"], CALLS),
            "arguments": len(missing),
            "frequent": "\n".join(f"- `{name}`: {missing[name]} classes" for name in frequent),
        }
    )  # fmt: skip


def topic_of(result: Mapping[str, str]) -> str:
    """Return the topic of the reason why a class is not exact, in a few words; an empty string for an exact class."""
    topics = {"refused": REFUSED, "not buildable": UNBUILDABLE}.get(result["verdict"], ())
    return next((topic for pattern, topic in topics if re.search(pattern, result["reason"])), result["reason"])


def _topics(results: Mapping[str, Any], verdict: str, topics: Topics) -> str:
    """Return a Markdown table of topics with the number of classes and two examples."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, result in results["classes"].items():
        if result["verdict"] == verdict:
            names[topic_of(result)].append(name)
    rows = [(topic, str(len(names[topic])), ", ".join(names[topic][:2])) for _, topic in topics if topic in names]
    return "\n".join(
        ["| reason | classes | for example |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _by_topic(numbers: Mapping[str, int], topics: Topics) -> str:
    """Return the rows of a Markdown table of topics and numbers, summed over the reasons of each topic."""
    by: Counter[str] = Counter()
    for reason, count in numbers.items():
        by[next(topic for pattern, topic in topics if re.search(pattern, reason))] += count
    return "\n".join(f"| {topic} | {count} |" for topic, count in by.most_common())


CALL_NAMES = {
    "exact": "exact",
    "refused": "refused",
    "wrong": "wrong",
    "no reference": "not possible in one process",
}


def _calls(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of calls by result."""
    by = Counter(verdict[0] for record in records for verdict in record["cases"].values())
    return {what: by[what] for what in CALL_NAMES}
