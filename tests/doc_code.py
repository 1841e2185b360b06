"""Runs the Python of a documentation page: its ```python blocks in order, in one namespace, as a reader would.

A block with a word after `python` is not run. Errors name the line of the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(page: str) -> str:
    """Return the code of `docs/<page>` as one script in which each line has the line number of the page.

    Raises ValueError if the page has no code.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for match in _BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(1))
        block = match[1].splitlines()
        lines[first : first + len(block)] = block
    if not any(lines):
        raise ValueError(f"docs/{page} has no ```python block")
    return "\n".join(lines)


def block_of(page: str, word: str) -> str:
    """Return the code of the single block of `docs/<page>` that begins with ```python and `word`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```python {word}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


def run_page(page: str, **variables: Any) -> dict[str, Any]:
    """Run the code of `docs/<page>` in this process with these global variables; return all its global names."""
    names: dict[str, Any] = {"__name__": "__docs__", **variables}
    exec(compile(code_of(page), str(DOCS / page), "exec"), names)
    return names


def run_page_under_torchrun(page: str, folder: Path, ranks: int, timeout_s: float = 240.0) -> str:
    """Run the page's code as one script on `ranks` processes; return their outputs, concatenated by rank."""
    script = folder / page.replace(".md", ".py")
    script.write_text(code_of(page), encoding="utf-8")
    return run_under_torchrun([str(script)], folder, ranks, timeout_s)


def run_under_torchrun(
    program: Sequence[str], folder: Path, ranks: int, timeout_s: float = 240.0, cwd: Path = ROOT, **env: str
) -> str:
    """Run a Python program on `ranks` processes; return their outputs, concatenated by rank.

    `env`: additional environment variables.
    """
    logs = folder / "logs"  # one file per rank, because lines of ranks would mix on one pipe
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects=1", f"--log-dir={logs}"]
    command = [*launcher, f"--nproc-per-node={ranks}", *program]
    ended = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    printed = {int(file.parent.name): file.read_text(encoding="utf-8") for file in logs.rglob("stdout.log")}
    assert ended.returncode == 0, (printed, ended.stderr)
    assert set(printed) == set(range(ranks)), printed
    return "".join(printed[rank] for rank in range(ranks))


def example(name: str) -> dict[str, Any]:
    """Execute the code block of CONTRIBUTING.md that defines the class or function `name`; return its global names."""
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if re.search(rf"^ *(class|def) {name}\(", block, re.MULTILINE))
    names: dict[str, Any] = {"__name__": "tests.doc_code"}
    exec(compile(textwrap.dedent(block), str(CONTRIBUTING), "exec", dont_inherit=True), names)
    return names
