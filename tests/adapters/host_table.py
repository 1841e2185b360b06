"""Run the adapters with every version of their hosts, and write what each feature does into the documentation.

`make hosts` runs all versions, which takes 80 minutes. `python -m tests.adapters.host_table NAME...` runs some of them
(`transformers-5.24.0`, `diffusers-0.41.0`), and without a match only writes the page again. Each version is installed
in a separate folder of `build/environments`, next to the packages of the tests. A version that needs a newer Python
runs with one of PATH or pyenv. If a version cannot run, its former results stay in the table, and the version and the
reason are printed and written.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.adapters import other_hosts
from tests.adapters.other_hosts import FAILED, IMPOSSIBLE, OTHERS, run_features
from tests.adapters.processes import ROOT
from tests.adapters.versions import TOLERANCE, VERSIONS, Verdict, cells

DATA = ROOT / "docs" / "host-versions.json"
PAGE = ROOT / "docs" / "host-versions.md"
EXACT, REFUSED, NOT_POSSIBLE, WRONG = "✓", "✗", "–", "WRONG"
Results = dict[str, dict[str, Verdict]]
"""By version and feature: the worst error, or the text of the refusal."""


@dataclass
class Table:
    """The results of all versions.

    `others`: for each host in `OTHERS`. `passed`: the number of their tests that passed, by "accelerate-1.12.0".
    `skipped`: the versions that could not run, with the reason.
    """

    transformers: Results
    others: dict[str, Results] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """Write the data file and the page of the documentation."""
        self.transformers = {name: self.transformers[name] for name in VERSIONS if name in self.transformers}
        self.others = {
            host: {
                version: self.others[host][version] for version in described.versions if version in self.others[host]
            }
            for host, described in OTHERS.items()
            if host in self.others
        }
        names = [f"{OTHERS[host].package}-{version}" for host, results in self.others.items() for version in results]
        self.passed = {name: self.passed[name] for name in names}
        DATA.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page(self), encoding="utf-8")

    def measure(self, version: str) -> str:
        """Run all cells with a version of transformers. Return the number of cells by outcome, as text.

        Raises `AssertionError` if the version cannot run.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.transformers[version] = cells(version, Path(folder))
        outcomes = [outcome(verdict) for verdict in self.transformers[version].values()]
        return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in (EXACT, REFUSED, WRONG) if kind in outcomes)

    def measure_other(self, host: str, version: str) -> str:
        """Run the tests of another host with this version. Return the number of features by outcome, as text."""
        verdicts, passed = run_features(OTHERS[host], version)
        self.others.setdefault(host, {})[version] = verdicts
        self.passed[f"{OTHERS[host].package}-{version}"] = passed
        outcomes = [cell(verdict)[0] for verdict in verdicts.values()]
        return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(outcomes)) + f"; {passed} tests"


def outcome(verdict: Verdict) -> str:
    """Return the symbol that the page shows for a verdict."""
    if isinstance(verdict, str):
        return REFUSED
    return EXACT if verdict <= TOLERANCE else WRONG


def cell(verdict: Verdict) -> str:
    """Return what the page shows for a verdict of another host."""
    if isinstance(verdict, str):
        kinds = {other_hosts.REFUSED: REFUSED, IMPOSSIBLE: NOT_POSSIBLE, FAILED: WRONG}
        return next(symbol for beginning, symbol in kinds.items() if verdict.startswith(beginning))
    return f"{EXACT} {verdict:.0e}" if verdict else EXACT


def read() -> Table:
    """Return the table that was written before, or an empty table if there is none."""
    return Table(**json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else Table({})


TEXT = """\
# Tested versions of hosts

## transformers

Each of the {cells} cells comes from a run of that version over two ranks, compared with one process of the same
version with eager attention, in float64: the logits, the loss and all gradients of a model; of a Trainer, the weights
after two or three steps, and the losses of the steps and of an evaluation.

- ✓ is exact: no value differs by more than 1e-9.
- ✗ is refused: an error says what to do instead ([all reasons](#what-is-refused)).

`make hosts` installs each version in a separate folder of `build/environments`, runs all cells again and writes this
page. It takes 80 minutes. The tests repeat the oldest and the newest version. A version that is not in the table
runs if the functions that the adapter relies on are unchanged, see [versions](embedding-transformers.md#versions).

Versions with the same results share a column. The largest error of all ✓ is {worst:.0e}.

{table}

### What is refused

{reasons}

## Other hosts

Each cell comes from a run of the tests of that feature with that version.

- ✓ is exact: the tests passed. A number is their largest error in float32 or float64, relative to the largest number of
  the reference, or absolute if that is below 1. A test that compares in other processes shows none, and a test of
  autocast compares numbers that were rounded to bfloat16.
- ✗ is refused, and – is not possible, for the reason below the table.

All tests of all adapters run with the versions in the [table of hosts](embedding.md#hosts).

{others}

### Versions that could not run

{skipped}

This newer version is refused, because a function that the adapter relies on differs:

| host | function | difference |
|---|---|---|
| torchtitan, its main branch of August 2026 | `apply_cp_to_forward` | does not exist; batches are one row |
"""


def page(written: Table) -> str:
    """Return the text of docs/host-versions.md for these results."""
    results = written.transformers
    versions = list(results)
    features = list(next(iter(results.values()), {}))
    numbers = [str(number) for number in range(1, len(features) + 1)]
    columns: list[tuple[list[str], list[str]]] = []  # versions, and an outcome for each feature
    refused: dict[tuple[str, str], list[str]] = {}
    for version, verdicts in results.items():
        outcomes = [outcome(verdicts[name]) for name in features]
        if columns and columns[-1][1] == outcomes:
            columns[-1][0].append(version)
        else:
            columns.append(([version], outcomes))
        for number, verdict in zip(numbers, verdicts.values(), strict=True):
            if isinstance(verdict, str):
                refused.setdefault((first_sentence(verdict, version), number), []).append(version)
    # Features that are refused for the same reason in the same versions share a row.
    reasons: dict[tuple[str, str], list[str]] = {}
    for (reason, number), among in refused.items():
        reasons.setdefault((reason, span(among, versions)), []).append(number)
    return TEXT.format(
        cells=len(results) * len(features),
        worst=max((verdict for row in results.values() for verdict in row.values() if not isinstance(verdict, str)),
                  default=0.0),
        table=markdown([
            ["", "feature", *(span(alike, versions) for alike, _ in columns)],
            *([number, name, *(outcomes[row] for _, outcomes in columns)]
              for row, (number, name) in enumerate(zip(numbers, features, strict=True))),
        ]),
        reasons=markdown([
            ["features", "versions", "reason"],
            *([span(alike, numbers), among_versions, reason] for (reason, among_versions), alike in reasons.items()),
        ]),
        others="\n\n".join(other(host, written) for host in written.others),
        skipped=markdown([["version", "reason"], *map(list, written.skipped.items())]) if written.skipped else "None.",
    )  # fmt: skip


def other(host: str, written: Table) -> str:
    """Return the section of a host other than transformers."""
    results, described = written.others[host], OTHERS[host]
    versions = list(results)
    rows = [["feature", *versions]]
    rows += [[name, *(cell(results[version][name]) for version in versions)] for name in described.features]
    rows.append(["tests that passed", *(str(written.passed[f"{described.package}-{name}"]) for name in versions)])
    reasons: dict[str, tuple[list[str], list[str]]] = {}
    for version, verdicts in results.items():
        for name, verdict in verdicts.items():
            if isinstance(verdict, str):
                among, features = reasons.setdefault(first_sentence(verdict, version), ([], []))
                among += [version] if version not in among else []
                features += [name] if name not in features else []
    section = f"### {host}\n\n{markdown(rows)}"
    if not reasons:
        return section
    table = [["features", "versions", "reason"]]
    table += [["; ".join(features), span(among, versions), reason] for reason, (among, features) in reasons.items()]
    return f"{section}\n\n{markdown(table)}"


def markdown(rows: list[list[str]]) -> str:
    """Return a Markdown table whose header is the first row."""
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


def first_sentence(refusal: str, version: str) -> str:
    """Return the part of a refusal before its advice, without the version, so that equal reasons share a row."""
    start = refusal.removeprefix("rank 0: ").split("; ")[0].split(": prepare the model")[0]
    return start.split(": transformers.")[0].replace(version, "…").replace("|", "\\|")


def span(names: Sequence[str], every: Sequence[str]) -> str:
    """Return names as text, in ranges of consecutive names in `every`: "4.57.6", "5.0.0 to 5.4.0", or "all"."""
    if len(names) == len(every):
        return "all"
    runs: list[list[str]] = []
    for name in names:
        if runs and every.index(name) == every.index(runs[-1][-1]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def main(arguments: Sequence[str]) -> int:
    """Run the versions named in `arguments`, or all. Return 1 if a result is wrong or a version could not run."""
    table, skipped = read(), 0
    runs: dict[str, Callable[[], str]] = {
        f"transformers-{version}": partial(table.measure, version) for version in VERSIONS
    } | {
        f"{described.package}-{version}": partial(table.measure_other, host, version)
        for host, described in OTHERS.items()
        for version in described.versions
    }
    for name, run in runs.items():
        if arguments and name not in arguments:
            continue
        start = time.monotonic()
        try:
            print(f"{name}: {run()}, {time.monotonic() - start:.0f} s", flush=True)
            table.skipped.pop(name, None)
        except (AssertionError, RuntimeError, pytest.skip.Exception) as error:
            table.skipped[name] = str(error).strip().splitlines()[-1][:200]
            print(f"{name}: could not run, {table.skipped[name]}", flush=True)
            skipped += 1
        table.write()
    table.write()
    print(f"written: {PAGE.relative_to(ROOT)}; {len(table.skipped)} versions could not run")
    for name, reason in table.skipped.items():
        print(f"  {name}: {reason}")
    wrong = any(outcome(verdict) == WRONG for row in table.transformers.values() for verdict in row.values())
    wrong |= any(
        cell(verdict) == WRONG
        for results in table.others.values()
        for row in results.values()
        for verdict in row.values()
    )
    return int(wrong or bool(skipped))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
