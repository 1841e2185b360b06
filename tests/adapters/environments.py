"""Folders of packages in other versions, to be put first on PYTHONPATH; created once, kept in build/environments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest

KEPT = Path(__file__).resolve().parents[2] / "build" / "environments" / "site-packages"
"""Named site-packages, because dill, which hashes data sets, takes modules in other folders for the user's code."""
_UNREACHABLE = "connection", "temporary failure", "timed out", "name or service not known", "proxy"


def environment(*requirements: str) -> Path:
    """Return a folder with these packages, without their dependencies, which pip installs if the folder does not exist.

    Skips the test if no package index can be reached.
    """
    folder = KEPT / "-".join([requirements[0].replace("==", "-"), sha256(repr(requirements).encode()).hexdigest()[:8]])
    if folder.exists():
        return folder
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as fresh:
        target = Path(fresh) / "packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1",
                   "--no-compile", "--no-deps", "--target", str(target), *requirements]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        message = done.stderr.strip()
        if done.returncode and any(word in message.lower() for word in _UNREACHABLE):
            pytest.skip(f"no package index can be reached for {', '.join(requirements)}: {message[-300:]}")
        if done.returncode:
            raise RuntimeError(f"pip cannot install {', '.join(requirements)}: {message}")
        if not folder.exists():  # another process may have made it meanwhile
            target.rename(folder)
    return folder
