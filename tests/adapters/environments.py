"""Folders of packages in other versions, to be put first on PYTHONPATH; created once, kept in build/environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "environments" / "site-packages"
"""Named site-packages, because dill, which hashes data sets, takes modules in other folders for the user's code."""
FIRST = "TESTS_HOST_PACKAGES"
"""The environment variable with the folders of the version of a host that is being tested."""
_UNREACHABLE = "connection", "temporary failure", "timed out", "name or service not known", "proxy"


def search_path(*folders: Path) -> str:
    """Return the PYTHONPATH of a test's program: the tested version of a host if there is one, `folders`, ringattn."""
    first = [os.environ[FIRST]] if os.environ.get(FIRST) else []
    return os.pathsep.join([*first, *map(str, folders), str(ROOT)])


def environment(*requirements: str, python: str = sys.executable) -> Path:
    """Return a folder with these packages, without their dependencies, which pip installs if the folder does not exist.

    `python`: the interpreter that they are for. Skips the test if no package index can be reached.
    """
    key = requirements if python == sys.executable else (*requirements, python)
    folder = KEPT / "-".join([requirements[0].replace("==", "-"), sha256(repr(key).encode()).hexdigest()[:8]])
    if folder.exists():
        return folder
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as fresh:
        target = Path(fresh) / "packages"
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1",
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


def interpreters() -> dict[tuple[int, int], str]:
    """Return the interpreters by version: this one, those on PATH, and those of pyenv."""
    names = [sys.executable, *filter(None, map(shutil.which, ("python3.12", "python3.13", "python3.14")))]
    names += map(str, sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")))
    program = "import sys; print(*sys.version_info[:2])"
    found: dict[tuple[int, int], str] = {}
    for name in names:
        done = subprocess.run([name, "-c", program], capture_output=True, text=True)
        if done.returncode == 0:  # a shim of pyenv fails if its version is not selected
            major, minor = map(int, done.stdout.split())
            found.setdefault((major, minor), name)
    return found


def python_of_tests(least: tuple[int, int]) -> str:
    """Return an interpreter of at least this version that has the packages of the tests, which pip installs once.

    Raises `RuntimeError` if there is no interpreter, or pip fails.
    """
    if sys.version_info[:2] >= least:
        return sys.executable
    found = interpreters()
    suitable = [version for version in found if version >= least]
    if not suitable:
        names = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
        raise RuntimeError(f"needs Python {least[0]}.{least[1]} or later, and this machine has {names}")
    folder = KEPT.parent / f"python{min(suitable)[0]}.{min(suitable)[1]}"
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        subprocess.run([found[min(suitable)], "-m", "venv", "--clear", str(folder)], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
                   "-c", "constraints.txt", "-e", ".[test]"]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip cannot install the packages of the tests: {done.stderr.strip()}")
        (folder / "complete").touch()
    return python
