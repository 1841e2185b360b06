"""`python -m tests.fuzz.models`: every model class of transformers that takes text, over a ring against one process.

seed=0          which cases are drawn
only=a,b        classes or model types; by default all
every=1         only each n-th class
cases=N         stop after N classes
seconds=3600    stop after this time
jobs=1          processes that examine classes
out=FILE        one JSON object per class, written immediately (build/fuzz-models.jsonl)
data=FILE       write the results there, for the page and the documentation site
page=FILE       write the page of the documentation there
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: ranks are threads

from tests.fuzz.models import page
from tests.fuzz.models.tiny import classes
from tests.fuzz.models.walk import Record, walk

DEFAULTS = {
    "seed": "0", "only": "", "every": "1", "cases": "", "seconds": "3600", "jobs": "1",
    "out": "build/fuzz-models.jsonl", "data": "", "page": "",
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the walk over the classes; return the exit code: 1 if the verdict on any class is "wrong"."""
    given_options = dict(argument.partition("=")[::2] for argument in arguments)
    if set(given_options) - set(DEFAULTS) or not all(given_options.values()):
        print(__doc__)
        return 2
    options = DEFAULTS | given_options
    selected = set(options["only"].split(",")) - {""}
    names = {name: kind for name, kind in classes().items() if not selected or {name, kind} & selected}
    if missing := {
        name_or_kind for name_or_kind in selected if not any(name_or_kind in item for item in names.items())
    }:
        print(f"no class or model type {', '.join(sorted(missing))}")
        return 2
    names = dict(list(names.items())[:: int(options["every"])])
    out = Path(options["out"])
    out.parent.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    began = time.monotonic()
    with out.open("w", encoding="utf-8") as file:

        def report(record: Record) -> None:
            records.append(record)
            print(json.dumps(record), file=file, flush=True)
            if record["verdict"] == "wrong":
                print(_finding(record), flush=True)
            if len(records) % 20 == 0:
                print(f"{time.monotonic() - began:.0f} s: {page.counts(records)}", flush=True)

        walk(
            names, int(options["seed"]), int(options["jobs"]), float(options["seconds"]),
            int(options["cases"]) if options["cases"] else None, report,
        )  # fmt: skip
    print(page.summary(records))
    print(f"{time.monotonic() - began:.0f} s, {out}")
    results = page.data(records, int(options["seed"]))
    for option, content in (("data", page.dumped), ("page", page.text)):
        if options[option]:
            Path(options[option]).write_text(content(results), encoding="utf-8")
    return 1 if any(record["verdict"] == "wrong" for record in records) else 0


def _finding(record: Record) -> str:
    lines = [f"{record['class']}: wrong: {record['reason']}"]
    lines += [f"    {name}: {reason}" for name, (verdict, reason) in record["cases"].items() if verdict == "wrong"]
    return "\n".join([*lines, f"    again: python -m tests.fuzz.models only={record['class']}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
