"""README and the index of docs: the scripts run and are exact, the commands exist, the links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ringattn.cli import COMMANDS
from ringattn.testing import dense_attention, run_ranks
from tests.doc_code import run_under_torchrun

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def scripts() -> tuple[str, str]:
    """The README's two Python blocks: on threads, and for torchrun. There is no third that nothing runs."""
    threads, processes = re.findall(r"^```python.*?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return threads, processes


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 200


def test_threads_script_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__readme__"}
    exec(compile(scripts()[0], "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "4 ranks" in printed
    assert "KV0" in printed
    x = torch.randn(1, 1000, 8, 64, generator=torch.Generator().manual_seed(0))
    expected, _ = dense_attention(x, x, x, causal=True)
    for out, _ in run_ranks(4, names["on_each_rank"]):  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_torchrun_script_runs_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "attend.py"
    script.write_text(scripts()[1], encoding="utf-8")
    printed = run_under_torchrun([str(script)], tmp_path, 2)
    assert re.findall(r"rank \d of 2: \d+ of \d+ tokens", printed) == [
        "rank 0 of 2: 4096 of 8192 tokens",
        "rank 1 of 2: 4096 of 8192 tokens",
    ]


def test_commands_are_those_of_the_program() -> None:
    assert set(re.findall(r"^ringattn (\w+)", README, re.MULTILINE)) == set(COMMANDS)


def test_links_lead_to_files() -> None:
    broken = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path = target.split("#")[0]
            if path and "://" not in target and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_index_lists_every_page() -> None:
    """Pages of hosts are listed by docs/embedding.md, all others by the index itself."""
    docs = ROOT / "docs"
    index, hosts = (
        set(re.findall(r"\]\(((?:internals/)?[\w-]+\.md)\)", (docs / page).read_text(encoding="utf-8")))
        for page in ("README.md", "embedding.md")
    )
    listed = index | {page for page in hosts if page.startswith("embedding-")}
    pages = {page.relative_to(docs).as_posix() for page in (*docs.glob("*.md"), *docs.glob("internals/*.md"))}
    assert listed == pages - {"README.md"}


def test_no_page_outside_the_repository_is_cited() -> None:
    files = [*PAGES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "ringattn").rglob("*.py")]
    cites = re.compile("DESIGN" + r"(\.md|,? §)")
    assert [file.name for file in files if cites.search(file.read_text(encoding="utf-8"))] == []
