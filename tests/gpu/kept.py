"""Where the figures of the GPU checks are kept, with what they were measured on."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "gpu"


def facts() -> dict[str, str]:
    """Device, driver, versions and commit; `GPU_CHECK_COMMIT` stands in where there is no git."""
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


def keep(file: str, name: str, found: Any) -> None:
    """Put `found` under `name` into `bench/results/gpu/<file>.json`; what other machines measured there is dropped.

    The folder that GPU_CHECK_COPY names gets the same.
    """
    now = facts()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{file}.json", "a+", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # parts of the tests run in several processes
        held.seek(0)
        kept = json.loads(held.read() or "{}")
        if kept.get("measured on") != now:
            kept = {"measured on": now}
        kept[name] = found
        held.truncate(0)
        text = json.dumps(kept, indent=1) + "\n"
        held.write(text)
        if copy := os.environ.get("GPU_CHECK_COPY"):
            Path(copy).mkdir(parents=True, exist_ok=True)
            Path(copy, f"{file}.json").write_text(text, encoding="utf-8")


def _first_line(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return (said.splitlines() or ["unknown"])[0].strip()
