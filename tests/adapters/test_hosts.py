"""The table of hosts in docs/embedding.md: a test exists for each cell. The code of the hosts' pages runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.testing import dense_attention, run_ranks
from tests.adapters.processes import ROOT, worst_error
from tests.contract.processes import free_port
from tests.doc_code import example, run_page, run_page_under_torchrun


def test_each_cell_of_the_table_has_a_test_or_a_reason() -> None:
    """hosts.json has the cells of the table. For each it names an existing test, or the reason why there is none."""
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    head, _, *rows = (line.strip("| ").split(" | ") for line in TABLE.search(page)[0].splitlines())
    cells = {f"{host} {version}": dict(zip(head[2:], row, strict=True)) for host, version, *row in rows}
    sources = json.loads(Path(__file__).with_name("hosts.json").read_text(encoding="utf-8"))
    assert {
        host: {mode: source.split(": ")[0] for mode, source in row.items()} for host, row in sources.items()
    } == cells
    for source in {source for row in sources.values() for source in row.values() if not source.startswith("–: ")}:
        outcome, file, test = re.split(": |::", source)
        assert outcome in ("exact", "refused")
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), source


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
    ones, nan, zero = torch.ones(2), torch.tensor([1.0, torch.nan]), torch.zeros(2)
    assert worst_error([(1.5 * ones, ones), (ones, ones), (zero, zero)]) == 0.5
    assert worst_error([(ones, ones), (nan, ones)]) == worst_error([(ones, zero)]) == torch.inf
    assert worst_error([(ones, zero)], floor=4.0) == 0.25


# --- pages -----------------------------------------------------------------------------------------------------------

TABLE = re.compile(r"^\| host \| version \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^(?:loss|image|block|gradients) .*\d$", re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+")


def parse_output(printed: str) -> list[tuple[str, list[float]]]:
    """Return for each printed line its text, with # for each number, and the numbers."""
    return [(_NUMBER.sub("#", line), [*map(float, _NUMBER.findall(line))]) for line in _LINE.findall(printed)]


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
    if package == "megatron.core":  # Megatron needs torchrun's variables, even in a single process
        alone_in = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in alone_in.items():
            monkeypatch.setenv(name, value)
    run_page(page)
    monkeypatch.undo()
    alone = parse_output(capsys.readouterr().out)
    both = parse_output(run_page_under_torchrun(page, tmp_path, 2))
    assert len(alone) == lines and len(both) == 2 * lines, (alone, both)
    expected = dict(alone)
    for texts, numbers in both:
        assert numbers == pytest.approx(expected[texts], rel=1e-5, abs=1e-5)  # printed with five digits of float32
