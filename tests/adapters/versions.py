"""Versions of transformers, each in a separate environment."""

from __future__ import annotations

import os
from pathlib import Path

from tests.adapters.environments import environment
from tests.adapters.processes import ROOT, call_in_program

TOLERANCE = 1e-9
EVERY_CELL = "TESTS_EVERY_CELL"
"""The environment variable that makes the tests run every version."""
TRL, PEFT = "1.16.0", "0.21.2"
WITH_TRL = (
    f"trl=={TRL}", f"peft=={PEFT}", "datasets==5.2.0", "pyarrow==24.0.0", "pandas==3.1.1", "dill==0.4.1",
    "multiprocess==0.70.19", "xxhash==4.1.0", "python-dateutil==4.0.0", "six==1.17.0", "pytz==2026.6", "tzdata==2026.6",
)  # fmt: skip
"""TRL, and those of its requirements that the tests' environment lacks."""
BEFORE_TRL = {"4.57.6": ("datasets==4.7.0", "httpx==0.28.1", "httpcore==1.0.9")}
"""By version: packages that replace requirements of TRL, because this `datasets` runs with its huggingface_hub."""
_HUB_1 = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9")
_TOKENIZERS_22 = (*_HUB_1, "tokenizers==0.22.2")
VERSIONS: dict[str, tuple[str, ...]] = {
    "4.57.6": ("huggingface_hub==0.36.2", "tokenizers==0.22.2"),
    "5.0.0": _TOKENIZERS_22,
    "5.1.0": _TOKENIZERS_22,
    "5.2.0": _TOKENIZERS_22,
    "5.3.0": _TOKENIZERS_22,
    "5.4.0": _TOKENIZERS_22,
    "5.5.4": _TOKENIZERS_22,
    "5.6.2": _TOKENIZERS_22,
    "5.7.0": _TOKENIZERS_22,
    "5.8.1": _TOKENIZERS_22,
    "5.9.0": _TOKENIZERS_22,
    "5.10.4": _TOKENIZERS_22,
    "5.11.0": _TOKENIZERS_22,
    "5.12.1": _TOKENIZERS_22,
    "5.13.1": _TOKENIZERS_22,
    "5.14.1": _TOKENIZERS_22,
    "5.15.1": _TOKENIZERS_22,
    "5.16.1": _HUB_1,
    "5.17.0": _HUB_1,
    "5.18.0": (),
    "5.19.0": (),
    "5.20.2": (),
    "5.21.1": (),
    "5.22.2": (),
    "5.23.0": (),
    "5.24.0": (),
}
"""The newest patch of each minor version, and its requirements that the tests' environment does not satisfy."""
Verdict = float | str
"""The worst error, or the text of a refusal."""


def packages(version: str) -> Path:
    """Return a folder with this version of transformers and PEFT. Skips the test if no package index can be reached."""
    return environment(f"transformers=={version}", *VERSIONS[version], f"peft=={PEFT}")


def cells(version: str, folder: Path, *names: str) -> dict[str, Verdict]:
    """Return the verdicts of a version of transformers on the cells in `names`, or on all.

    `folder`: for the files of the runs. Raises `AssertionError` if the program fails.
    """
    besides = [str(environment(*extra)) for extra in (BEFORE_TRL.get(version, ()), WITH_TRL) if extra]
    path = os.pathsep.join([str(packages(version)), *besides, str(ROOT)])
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    variables["PYTHONDONTWRITEBYTECODE"] = ""  # pip has not compiled these packages
    verdicts: dict[str, Verdict] = call_in_program(
        "tests.adapters.version_cells:verdicts", str(folder), *names, **variables
    )
    return verdicts
