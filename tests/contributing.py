"""The worked examples of CONTRIBUTING.md, which tests execute."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def example(name: str) -> dict[str, Any]:
    """Execute the code block that defines `name`, a class or a function; return its names."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if re.search(rf"^ *(class|def) {name}\(", block, re.MULTILINE))
    names: dict[str, Any] = {"__name__": "tests.contributing"}
    exec(compile(textwrap.dedent(block), str(PAGE), "exec", dont_inherit=True), names)
    return names
