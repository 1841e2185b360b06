"""The list of files in docs/architecture.md: each with the first line of its docstring.

`python -m tests.file_map` writes it anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("ringattn", "kernels", "launch", "bench")
BLOCK = re.compile(r"(^## Files$.*?^```text\n).*?(^```$)", re.MULTILINE | re.DOTALL)
WIDTH = 120


def file_map() -> str:
    """One line for each folder and module, a folder's own modules before its folders."""
    return "".join(line for name in FOLDERS for line in _lines(ROOT / name, 0))


def _lines(folder: Path, depth: int) -> list[str]:
    own = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    below = [line for path in inner for line in _lines(path, depth + 1)]
    if not own and not below:
        return []
    indent = "  " * (depth + 1)
    return ["  " * depth + f"{folder.name}/\n", *(_line(indent + file.name, file) for file in own), *below]


def _line(entry: str, file: Path) -> str:
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = f"{entry:<28} {said.splitlines()[0].rstrip('.') if said else ''}".rstrip()
    return (line if len(line) <= WIDTH else line[: WIDTH - 2].rsplit(" ", 1)[0] + " …") + "\n"


def renewed(page: str) -> str:
    """The page with the list as it should be."""
    return BLOCK.sub(lambda found: found[1] + file_map() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
