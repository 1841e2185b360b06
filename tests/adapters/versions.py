"""Versions of transformers, each in a separate environment, and the claims of the documentation about them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.adapters.environments import environment
from tests.adapters.processes import ROOT, call_in_program

PAGE = ROOT / "docs" / "embedding-transformers.md"
TABLE = re.compile(r"(^<!-- versions -->\n).*?(^<!-- end of versions -->$)", re.MULTILINE | re.DOTALL)
TOLERANCE = 1e-9
EVERY_CELL = "TESTS_EVERY_CELL"
"""A variable: whether the tests run every cell of every version."""
TRL, PEFT = "1.16.0", "0.21.2"
WITH_TRL = (
    f"trl=={TRL}", f"peft=={PEFT}", "datasets==5.2.0", "pyarrow==24.0.0", "pandas==3.1.1", "dill==0.4.1",
    "multiprocess==0.70.19", "xxhash==4.1.0", "python-dateutil==4.0.0", "six==1.17.0", "pytz==2026.6", "tzdata==2026.6",
)  # fmt: skip
"""TRL, and what of its requirements the tests' own environment lacks."""
BEFORE_TRL = {"4.57.6": ("datasets==4.7.0", "httpx==0.28.1", "httpcore==1.0.9")}
"""What TRL needs otherwise with a version: datasets that run with its huggingface_hub."""
VERSIONS: dict[str, tuple[str, ...]] = {
    "4.57.6": ("huggingface_hub==0.36.2", "tokenizers==0.22.2"),
    "5.18.0": (),
    "5.19.0": (),
    "5.20.2": (),
    "5.21.1": (),
    "5.22.2": (),
    "5.23.0": (),
}
"""The newest patch of each minor version, and its requirements that the tests' environment does not satisfy."""
Verdict = float | str
"""The worst error, or the words of a refusal."""


def packages(version: str) -> Path:
    """The folder of this version of transformers and of PEFT; skips the test where no package index is reached."""
    return environment(f"transformers=={version}", *VERSIONS[version], f"peft=={PEFT}")


def cells(version: str, folder: Path, *names: str) -> dict[str, Verdict]:
    """What this version does, by cell, of these or of all; `folder` is for files. Raises where the script fails."""
    besides = [str(environment(*extra)) for extra in (BEFORE_TRL.get(version, ()), WITH_TRL) if extra]
    path = os.pathsep.join([str(packages(version)), *besides, str(ROOT)])
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    variables["PYTHONDONTWRITEBYTECODE"] = ""  # pip has not compiled these packages
    verdicts: dict[str, Verdict] = call_in_program(
        "tests.adapters.version_cells:verdicts", str(folder), *names, **variables
    )
    return verdicts


def documented(version: str) -> dict[str, str]:
    """What the page says of a version, by cell, without errors: "exact" or "refused"."""
    block = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert block is not None
    head, _, *rows = [line.strip("| ").split(" | ") for line in block[0].splitlines() if line.startswith("|")]
    column = head.index(version)
    return {row[0]: row[column].split()[0] for row in rows if row[0] != "worst error"}
