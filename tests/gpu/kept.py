"""Record the figures that the GPU checks measure, and the machine that measured them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "gpu"


@cache
def facts() -> dict[str, str]:
    """Return device, driver, versions, commit and date. `GPU_CHECK_COMMIT`, if set, is used instead of git's commit."""
    from ringattn.transport.nccl.binding import version_text
    from ringattn.transport.nccl.library import load_library

    if not torch.cuda.is_available():
        return {"device": "none: a rehearsal"}
    library = load_library()
    commit = os.environ.get("GPU_CHECK_COMMIT") or _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": version_text(library.version),
        "libnccl": Path(library.path).name,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
    }


def keep(file: str, name: str, figures: Any) -> None:
    """Write `figures` under `name` to `bench/results/gpu/<file>.json`.

    If the file has figures of another machine, version, commit or day, they are dropped. If GPU_CHECK_COPY names a
    folder, a copy of the file is written there.
    """
    now = facts()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{file}.json", "a+", encoding="utf-8") as file_of_results:
        fcntl.flock(file_of_results, fcntl.LOCK_EX)  # parts of the tests run in several processes
        file_of_results.seek(0)
        kept = json.loads(file_of_results.read() or "{}")
        if kept.get("measured on") != now:
            kept = {"measured on": now}
        kept[name] = figures
        file_of_results.truncate(0)
        text = json.dumps(kept, indent=1) + "\n"
        file_of_results.write(text)
        if copy := os.environ.get("GPU_CHECK_COPY"):
            Path(copy).mkdir(parents=True, exist_ok=True)
            Path(copy, f"{file}.json").write_text(text, encoding="utf-8")


def _first_line(*command: str) -> str:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    return (output.splitlines() or ["unknown"])[0].strip()
