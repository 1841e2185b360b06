"""Run the adapters with every version of their hosts, and write what each feature does into the documentation.

`make hosts` runs all versions, which takes half an hour. `python -m tests.adapters.host_table NAME...` runs some of
them (`transformers-5.24.0`, `diffusers-0.41.0`), and without a match only writes the page again. Each version is
installed in a separate folder of `build/environments`, next to the packages of the tests. If a version cannot be
installed or imported, its former results stay in the table, and the version and the reason are printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.adapters.environments import environment
from tests.adapters.processes import ROOT
from tests.adapters.versions import TOLERANCE, VERSIONS, Verdict, cells

DATA = ROOT / "docs" / "host-versions.json"
PAGE = ROOT / "docs" / "host-versions.md"
EXACT, REFUSED, WRONG = "✓", "✗", "WRONG"
OTHERS = {
    "accelerate-1.12.0": "test_transformers_trainer.py",
    "accelerate-1.14.0": "test_transformers_trainer.py",
    "diffusers-0.40.0": "test_diffusers.py",
    "diffusers-0.41.0": "test_diffusers.py",
    "lightning-2.5.6": "test_lightning.py",
}
"""Earlier versions of other hosts, and the tests that run with them. All tests run with the installed versions."""
Results = dict[str, dict[str, Verdict]]
"""By version and feature: the worst error, or the text of the refusal."""


@dataclass
class Table:
    """The results of all versions. `passed`: the number of passed tests for each version of the hosts in `OTHERS`."""

    transformers: Results
    passed: dict[str, int]

    def write(self) -> None:
        """Write the data file and the page of the documentation."""
        self.transformers = {name: self.transformers[name] for name in VERSIONS if name in self.transformers}
        self.passed = dict(sorted(self.passed.items()))
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

    def measure_other(self, name: str) -> str:
        """Run the tests of another host with this version. Return pytest's last line.

        Raises `AssertionError` if a test fails.
        """
        path = os.pathsep.join([str(environment(name.replace("-", "=="))), str(ROOT)])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
        done = subprocess.run(
            [*command, f"tests/adapters/{OTHERS[name]}"], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        last = done.stdout.strip().splitlines()[-1]
        assert done.returncode == 0, last
        self.passed[name] = int(last.split(" passed")[0].split()[-1])
        return last


def outcome(verdict: Verdict) -> str:
    """Return the symbol that the page shows for a verdict."""
    if isinstance(verdict, str):
        return REFUSED
    return EXACT if verdict <= TOLERANCE else WRONG


def read() -> Table:
    """Return the table that was written before, or an empty table if there is none."""
    return Table(**json.loads(DATA.read_text(encoding="utf-8"))) if DATA.exists() else Table({}, {})


TEXT = """\
# Tested versions of hosts

## transformers

Each of the {cells} cells comes from a run of that version over two ranks, compared with one process of the same
version with eager attention, in float64: the logits, the loss and all gradients of a model; of a Trainer, the weights
after two or three steps, and the losses of the steps and of an evaluation.

- ✓ is exact: no value differs by more than 1e-9.
- ✗ is refused: an error says what to do instead ([all reasons](#what-is-refused)).

`make hosts` installs each version in a separate folder of `build/environments`, runs all cells again and writes this
page. It takes half an hour. The tests repeat the oldest and the newest version. A version that is not in the table
runs if the functions that the adapter relies on are unchanged, see [versions](embedding-transformers.md#versions).

Versions with the same results share a column. The largest error of all ✓ is {worst:.0e}.

{table}

### What is refused

{reasons}

## Other hosts

All tests of all adapters run with the versions in the [table of hosts](embedding.md#hosts). With these earlier
versions, all tests of the host's adapter passed:

{others}
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
        others=markdown([
            ["host", "tests that passed"],
            *([name.replace("-", " "), str(count)] for name, count in written.passed.items()),
        ]),
    )  # fmt: skip


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
    table, skipped = read(), []
    runs: dict[str, Callable[[], str]] = {
        f"transformers-{version}": partial(table.measure, version) for version in VERSIONS
    } | {name: partial(table.measure_other, name) for name in OTHERS}
    for name, run in runs.items():
        if arguments and name not in arguments:
            continue
        start = time.monotonic()
        try:
            print(f"{name}: {run()}, {time.monotonic() - start:.0f} s", flush=True)
        except (AssertionError, RuntimeError, pytest.skip.Exception) as error:
            skipped.append(f"{name}: could not run, {str(error).strip().splitlines()[-1][:200]}")
            print(skipped[-1], flush=True)
        table.write()
    table.write()
    print(f"written: {PAGE.relative_to(ROOT)}; {len(skipped)} versions could not run")
    wrong = any(outcome(verdict) == WRONG for row in table.transformers.values() for verdict in row.values())
    return int(wrong or bool(skipped))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
