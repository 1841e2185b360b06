"""The lines that a script changes to train over a ring: counted, and compared with the script on one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from tests.adapters.environments import environment, search_path
from tests.adapters.host_diffs import changed_lines, diffs
from tests.adapters.processes import ROOT, call_in_program
from tests.adapters.test_deepspeed import with_deepspeed
from tests.adapters.versions import WITH_TRL

LIMITS = {"Trainer": 2, "SFTTrainer": 2, "accelerate": 2, "DeepSpeed": 2, "Lightning": 5, "torchtitan": 5}


def test_the_table_counts_the_lines_of_the_diffs() -> None:
    counts = {host: changed_lines(diff) for host, diff in diffs().items()}
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(embedding-diffs\.md#\w+\) \| (\d+) \|", page, re.MULTILINE)
    assert {host: int(count) for host, count in rows} == counts
    assert counts.keys() == LIMITS.keys() and all(counts[host] <= limit for host, limit in LIMITS.items())


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("Trainer", "SFTTrainer", "accelerate"), ("DeepSpeed",), ("Lightning",)], ids=str)
def test_a_changed_script_equals_the_script_on_one_process(hosts: tuple[str, ...], tmp_path: Path) -> None:
    variables = {"PYTHONPATH": search_path()}
    if "SFTTrainer" in hosts:
        variables["PYTHONPATH"] = search_path(environment(*WITH_TRL))
    if "DeepSpeed" in hosts:
        variables = with_deepspeed()
    errors = call_in_program("tests.adapters.host_diffs:errors", str(tmp_path), *hosts, **variables)
    assert len(errors) == len(hosts) + ("DeepSpeed" in hosts)
    assert all(error <= 1e-9 for error in errors.values()), errors
