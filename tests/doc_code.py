"""The Python of a documentation page, run as its reader would run it.

Does not know: what the pages say.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def code_of(page: str) -> str:
    """All ```python blocks of docs/`page` in order, with the page's line numbers."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        first = text[: block.start(1)].count("\n")
        for number, line in enumerate(block[1].splitlines()):
            lines[first + number] = line
    assert any(lines), f"docs/{page} holds no Python"
    return "\n".join(lines)


def run_page(page: str, folder: Path, ranks: int, timeout_s: float = 240.0) -> str:
    """Run the page as one script on `ranks` processes of torchrun; returns what all of them printed."""
    script = folder / page.replace(".md", ".py")
    script.write_text(code_of(page), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
