"""The table of hosts in docs/embedding.md: each cell is of a test that there is; and the pages of hosts run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.testing import dense_attention, run_ranks
from tests.adapters.hosts import MODES, NONE, PAGE, ROOT, read, renewed, shown, table
from tests.adapters.processes import worst_error
from tests.contract.processes import free_port
from tests.contributing import example
from tests.doc_code import run_page, run_page_under_torchrun


def test_each_cell_is_of_a_test_and_on_the_page() -> None:
    functions: dict[str, set[str]] = {}
    for cell in read():
        file, test = cell.test.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        known = functions.setdefault(file, {one.name for one in tree.body if isinstance(one, ast.FunctionDef)})
        assert test in known, f"{cell.test} is gone; run what took its place, then python -m tests.adapters.hosts"
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page, read()) == page, "run python -m tests.adapters.hosts"
    assert table(read()) in page


@pytest.mark.parametrize("host", sorted({cell.host for cell in read()}))
def test_no_cell_is_empty(host: str) -> None:
    """Each is exact or refused, or a dash with its reason."""
    rows = {version: row for (of, version), row in shown(read()).items() if of == host}
    empty = [(version, mode) for version, row in rows.items() for mode, said in row.items() if not said]
    assert not empty, f"{host}: compare or refuse these and record it, or give the reason in hosts.NONE: {empty}"


def test_a_dash_is_of_a_host_that_there_is_and_has_a_reason() -> None:
    assert set(NONE) <= {cell.host for cell in read()}
    assert all(mode in MODES and reason for modes in NONE.values() for mode, reason in modes.items())


def test_the_adapter_of_contributing_is_exact_and_refuses_what_it_cannot() -> None:
    attention = example("memory_efficient_attention")["memory_efficient_attention"]
    q, k, v = (torch.randn(1, 13, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def body(ring: Ring) -> tuple[Tensor, ...]:
        seq = ring.sequence(13, layout="zigzag")
        shards = [seq.shard(x.detach()).requires_grad_() for x in (q, k, v)]
        with ring.activate(seq):
            out = attention(*shards, scale=0.3)
            for refused in ({"attn_bias": torch.zeros(13, 13)}, {"p": 0.1}):
                with pytest.raises(InputError, match="attn_bias and p"):
                    attention(*shards, **(refused if ring.rank == 1 else {}))
        out.sin().sum().backward()
        return tuple(seq.gather(x.detach()) for x in (out, *(shard.grad for shard in shards)))

    expected = dense_attention(q, k, v, scale=0.3)[0]
    expected.sin().sum().backward()
    for values in run_ranks(2, body, timeout_s=10.0):
        for value, reference in zip(values, (expected.detach(), q.grad, k.grad, v.grad), strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=1e-10)


def test_a_nan_is_infinitely_far_off() -> None:
    one, nan, zero = torch.ones(2), torch.tensor([1.0, torch.nan]), torch.zeros(2)
    assert worst_error([(1.5 * one, one), (one, one), (zero, zero)]) == 0.5
    assert worst_error([(one, one), (nan, one)]) == worst_error([(one, zero)]) == torch.inf
    assert worst_error([(one, zero)], floor=4.0) == 0.25


# --- pages -----------------------------------------------------------------------------------------------------------

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
