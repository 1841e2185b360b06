"""The digest of a group of tests: what it depends on, when it is recorded, and what `make test` then skips."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import unchanged

TREE = {
    "ringattn/kernels/product.py": "from ringattn.kernels import tiles\n",
    "ringattn/kernels/tiles.py": "def later():\n    import ringattn.engine.base\n",
    "ringattn/kernels/configs.json": "{}",
    "ringattn/engine/__init__.py": "",
    "ringattn/engine/base.py": "",
    "ringattn/other.py": "",
    "tests/test_product.py": "from ringattn.kernels.product import product\nfrom tests.gate.reading import read\n"
    'PROGRAM = "tests.gate.running"\n',
    "tests/conftest.py": "",
    "tests/gate/reading.py": "import json\n",
    "tests/gate/running.py": "",
    "tests/gate/golden/3.json": "{}",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `tests.unchanged` use a small repository with one group, `product`. Return its folder."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setattr(unchanged, "RECORD", tmp_path / "tests/unchanged.json")
    monkeypatch.setattr(unchanged, "GROUPS", {"product": ("tests/test_product.py",)})
    return tmp_path


def digest() -> str:
    return unchanged.digest.__wrapped__("product")


@pytest.mark.parametrize("name", [name for name in TREE if name != "ringattn/other.py"])
def test_whatever_it_reads_changes_the_digest(tree: Path, name: str) -> None:
    before = digest()
    assert digest() == before
    (tree / name).write_text(f"{TREE[name]}other = 1\n")
    assert digest() != before


def test_comments_docstrings_and_other_files_do_not(tree: Path) -> None:
    tiles = tree / "ringattn/kernels/tiles.py"
    tiles.write_text('"""Tiles."""\nSIZE = 3\n"""In rows."""\ndef f(x):\n    """One."""\n    return x + SIZE\n')
    before = digest()
    tiles.write_text(
        '"""All tiles."""\nSIZE = 3  # so\n"""Rows."""\n\n\ndef f(x):\n    """1."""\n    return (x + SIZE)\n'
    )
    (tree / "ringattn/other.py").write_text("1")  # the group does not read this file
    for name in ("unchanged.json", "durations.json"):
        (tree / "tests" / name).write_text("{}")
    assert digest() == before
    tiles.write_text(tiles.read_text().replace("x + SIZE", "x - SIZE"))
    assert digest() != before


def test_another_compiler_changes_the_digest(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    monkeypatch.setattr(unchanged, "version", lambda package: "9.9" if package == "triton" else "1")
    assert digest() != before


@pytest.mark.parametrize(
    ("group", "needed"),
    [
        ("compile gate", ["attention_forward.py", "attention_backward.py", "configs.json", "compiling.py"]),
        ("Gluon kernels", ["attention_gluon_forward.py", "attention_gluon_grad_kv.py", "simulator.py"]),
        (
            "compiled kernels in the PTX interpreter",
            ["attention_gluon_forward.py", "triton.py", "launch.py", "machine.py", "races.py", "mutants.py"],
        ),
        (
            "kernels in the interpreter",
            ["triton.py", "attention_forward.py", "engine_scenarios.py", "rows.py", "qkv.py", "shims.py"],
        ),
    ],
)
def test_groups_read_their_kernels(group: str, needed: list[str]) -> None:
    assert set(needed) <= {file.name for file in unchanged.sources(unchanged.GROUPS[group])}


@pytest.mark.parametrize(
    ("outcomes", "meanwhile", "proven"),
    [
        (["passed", "passed"], "", True),
        (["passed", "failed"], "", False),
        (["passed", "skipped"], "", False),
        (["passed"], "changed", False),
        ([], "", False),
    ],
)
def test_only_a_whole_group_that_passed_is_recorded(
    tree: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[str], meanwhile: str, proven: bool
) -> None:
    def run(words: list[str], plugins: list[unchanged.Tally]) -> None:
        assert words == ["-q", "-m", "unchanged", str(tree / "tests/test_product.py")]
        for outcome in outcomes:
            for when, said in (("setup", "passed"), ("call", outcome), ("teardown", "passed")):
                report = pytest.TestReport("one", ("", 0, ""), {}, said, None, when)  # type: ignore[arg-type]
                plugins[0].pytest_runtest_logreport(report)
        if meanwhile:
            (tree / "ringattn/kernels/tiles.py").write_text(meanwhile)

    monkeypatch.setattr(pytest, "main", run)
    unchanged.digest.cache_clear()
    assert not unchanged.is_unchanged("product")
    assert unchanged.main() == int(not proven)
    assert unchanged.is_unchanged("product") == proven == (unchanged.RECORD.exists())
    unchanged.digest.cache_clear()
