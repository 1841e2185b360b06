"""The names of the package: complete, loaded at their first use, and without torch for `--help`."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import ringattn

INIT = Path(ringattn.__file__)


def test_every_public_name_loads() -> None:
    assert dir(ringattn) == sorted(ringattn.__all__)
    for name in ringattn.__all__:
        assert name == "__version__" or getattr(ringattn, name).__name__ == name
    assert ringattn.__version__[0].isdigit()
    with pytest.raises(AttributeError, match=r"module 'ringattn' has no attribute 'Rings'"):
        _ = ringattn.Rings  # type: ignore[attr-defined]


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse(INIT.read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told | {"__version__"} == set(ringattn.__all__)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_needs_no_torch(word: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from ringattn.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, word], cwd=INIT.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[0] in ("usage:", "ringattn") and not done.stderr


def test_the_logger_is_quiet_until_it_is_asked() -> None:
    assert any(isinstance(one, logging.NullHandler) for one in logging.getLogger("ringattn").handlers)
