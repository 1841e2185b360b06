"""The pages of hosts, pasted as they stand into a file: torchrun with two processes prints what one process does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.processes import free_port
from tests.doc_code import run_page, run_page_under_torchrun

_LINE = re.compile(r"^(?:loss|image|block|gradients) .*\d$", re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+")


def said(printed: str) -> list[tuple[str, list[float]]]:
    """Words and numbers of each line that a page prints."""
    return [(_NUMBER.sub("#", line), [float(one) for one in _NUMBER.findall(line)]) for line in _LINE.findall(printed)]


@pytest.mark.parametrize(
    ("package", "page"),
    [
        ("diffusers", "embedding-diffusers.md"),
        ("lightning", "embedding-lightning.md"),
        ("torchtitan", "embedding-torchtitan.md"),
        ("torch", "embedding-flash-attn.md"),
    ],
)
def test_a_page_runs_in_one_process(package: str, page: str) -> None:
    pytest.importorskip(package)
    run_page(page)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "page", "lines"),
    [
        ("lightning", "embedding-lightning.md", 1),
        ("megatron.core", "embedding-megatron.md", 1),
        ("diffusers", "embedding-diffusers.md", 2),
    ],
)
def test_two_processes_print_what_one_does(
    package: str,
    page: str,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(package)
    if package == "megatron.core":  # which asks for torchrun's environment, alone too
        alone_in = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in alone_in.items():
            monkeypatch.setenv(name, value)
    run_page(page)
    monkeypatch.undo()
    alone = said(capsys.readouterr().out)
    both = said(run_page_under_torchrun(page, tmp_path, 2))
    assert len(alone) == lines and len(both) == 2 * lines, (alone, both)
    expected = dict(alone)
    for words, numbers in both:
        assert numbers == pytest.approx(expected[words], rel=1e-5, abs=1e-5)  # float32, five digits printed
