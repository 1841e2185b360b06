"""The documentation site: Sphinx builds it without a warning, and the target of every internal link exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import ringattn
from ringattn.cli import COMMANDS
from ringattn.launch.measure.sweep import SweepConfig
from ringattn.launch.pictures.show import ExplainConfig

ROOT = Path(__file__).resolve().parent.parent


class Page(HTMLParser):
    """The links and the anchors of one HTML file, and the text that it shows."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self.words: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" and value:
                self.anchors.add(value)

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def build(folder: Path) -> Path:
    """Build the site in a folder as `make docs` does; return the folder of its pages."""
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    command += ["-d", str(folder / "doctrees"), ".", str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def broken_links(site: Path) -> Iterator[str]:
    """Yield the links inside the site whose target file or anchor does not exist."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file():
                yield f"{file.relative_to(site)}: {link}: no such file"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{file.relative_to(site)}: {link}: no such heading"


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a> <a href="b.html#there">b</a> <a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1> <a href="https://b.org/x">x</a> <a href="#here">up</a>')
    assert list(broken_links(tmp_path)) == ["a.html: b.html#there: no such heading", "a.html: c.html: no such file"]


@pytest.mark.timeout(900)
def test_the_site_has_every_page_of_the_repository_and_no_broken_link(tmp_path: Path) -> None:
    site = build(tmp_path)
    assert list(broken_links(site)) == []
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for file in [*files, *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench" / "results" / "cpu").glob("*.md")]:
        assert (site / file.relative_to(ROOT).with_suffix(".html")).is_file(), file


# --- the reference ---------------------------------------------------------------------------------------------------


VARIABLE = re.compile(
    r"""["']((?:RINGATTN|NCCL|GLOO|CUDA|MASTER|LOCAL|GROUP|OMP|SLURM|HYDRA|TORCHELASTIC|PYTHON)_?[A-Z_]*[A-Z]|RANK|WORLD_SIZE)["']"""
)
NO_VARIABLE = {"CUDA", "NCCL", "GROUP", "GROUPS"}


def described_twice(source: str) -> list[str]:
    """Return the names that a class lists under "Attributes" and also defines with a docstring.

    The site would describe each of them twice, and Sphinx refuses that.
    """
    names = []
    for body in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        listed = re.findall(
            r"^    (\w+): ", (ast.get_docstring(body) or "").partition("Attributes:\n")[2], re.MULTILINE
        )
        methods = {node.name for node in body.body if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}
        names += [f"{body.name}.{name}" for name in listed if name in methods]
    return names


def test_no_attribute_is_described_twice() -> None:
    repeated = """
class Plan:
    \"\"\"A plan.

    Attributes:
        steps: The steps.
        memory: All memory.
    \"\"\"

    steps: int

    @property
    def memory(self):
        \"\"\"All memory.\"\"\"
"""
    assert described_twice(repeated) == ["Plan.memory"]
    files = (file for folder in ("ringattn", "kernels", "launch") for file in (ROOT / folder).rglob("*.py"))
    sources = [source for file in files if "Attributes:" in (source := file.read_text(encoding="utf-8"))]
    assert [name for source in sources for name in described_twice(source)] == []


def test_environment_variables_are_those_that_the_code_names() -> None:
    files = (file for folder in ("ringattn", "launch") for file in (ROOT / folder).rglob("*.py"))
    named = {name for file in files for name in VARIABLE.findall(file.read_text(encoding="utf-8"))} - NO_VARIABLE
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    cells = (line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == named


@pytest.fixture
def reference() -> ModuleType:
    """Import docs/site_reference.py, which is not part of a package, and return the module."""
    spec = importlib.util.spec_from_file_location("site_reference", ROOT / "docs" / "site_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_lists_every_key_of_every_command(reference: ModuleType) -> None:
    text = reference.command_keys()
    sections = dict(re.findall(r"^## ringattn ([\w-]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    for field in fields(ExplainConfig):
        assert f"| `{field.name}` |" in sections["explain"]
    assert all(f"`{field.name}" in sections["sweep"] for field in fields(SweepConfig))
    assert "ringattn flight DIR" in sections["flight"]


def test_the_reference_lists_every_error(reference: ModuleType) -> None:
    listed = re.findall(r"autoexception:: ringattn\.errors\.(\w+)", reference.errors())
    assert sorted(listed) == sorted(name for name in ringattn.__all__ if name.endswith("Error"))


def test_cells_are_escaped(reference: ModuleType) -> None:
    assert reference.escaped("a|b `c|d` <e>") == r"a\|b `c|d` \<e\>"
    assert reference.code("a|b", "c") == r"`a\|b`, `c`"
