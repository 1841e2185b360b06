"""README and the pages of docs: their code and commands run, the results are exact, and the links are valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.cli import COMMANDS, main
from ringattn.launch.train import train
from ringattn.launch.train.checkpoints import MAY_CHANGE
from ringattn.launch.train.config import load_train
from ringattn.testing import dense_attention, run_ranks
from tests.doc_code import block_of, run_page, run_page_under_torchrun, run_under_torchrun

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def readme_scripts() -> tuple[str, str]:
    """Return the README's two Python blocks, for threads and for torchrun. Fails if there is a third block."""
    threads, processes = re.findall(r"^```python.*?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return threads, processes


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_threads_script_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__readme__"}
    exec(compile(readme_scripts()[0], "README.md", "exec"), names)
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
    script.write_text(readme_scripts()[1], encoding="utf-8")
    printed = run_under_torchrun([str(script)], tmp_path, 2)
    assert re.findall(r"rank \d of 2: \d+ of \d+ tokens", printed) == [
        "rank 0 of 2: 4096 of 8192 tokens",
        "rank 1 of 2: 4096 of 8192 tokens",
    ]


def test_commands_are_those_of_the_program() -> None:
    assert set(re.findall(r"^ringattn ([\w-]+)", README, re.MULTILINE)) == set(COMMANDS)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub and Sphinx give the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#{1,4} +(.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that do not exist."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" in target:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


def test_links_lead_to_files_and_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](page.md#one-two) [c](page.md#two) [d](#three) [e](other.md)\n")
    assert broken_links(page) == ["page.md#two", "#three", "other.md"]
    assert {page.name: broken for page in PAGES if (broken := broken_links(page))} == {}


FORMER = {"runtime/spec.py"}
"""Files that no longer exist, but that a decision record names."""


def test_files_that_pages_name_exist() -> None:
    folders = [
        ROOT,
        *(ROOT / name for name in ("ringattn", "launch", "kernels", "bench", "tests", "tests/transport", "docs")),
    ]
    missing = []
    for page in PAGES:
        if page.name in ("log.md", "CHANGELOG.md") or page.parent.name == "decisions":
            continue
        for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|json|yaml|png))`", page.read_text(encoding="utf-8")):
            if "HOST" not in name and not any((folder / name).exists() for folder in (page.parent, *folders)):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


def test_decisions_have_a_status_and_name_files_that_exist() -> None:
    status = re.compile(
        r"# (\d{4})  .*\n\nDate: 2026-\d\d-\d\d\. Status: (current\. Described in \[|superseded by \[\d{4}\])"
    )
    folders = (ROOT, *(ROOT / name for name in ("ringattn", "launch", "kernels", "bench")))
    wrong = []
    for record in sorted((ROOT / "docs" / "internals" / "decisions").glob("0*.md")):
        text = record.read_text(encoding="utf-8")
        match = status.match(text)
        if match is None or match[1] != record.name[:4]:
            wrong.append(f"{record.name}: no status")
        elif match[2].startswith("current"):
            names = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|json))`", text)
            wrong += [
                f"{record.name}: {name}" for name in names
                if name not in FORMER and not any((folder / name).exists() for folder in folders)
            ]  # fmt: skip
    assert wrong == []


def test_index_lists_every_page() -> None:
    """docs/embedding.md lists the pages of hosts; the index lists all others."""
    docs = ROOT / "docs"
    index, hosts = (
        set(re.findall(r"\]\(((?:internals/|reference/)?[\w-]+\.md)\)", (docs / page).read_text(encoding="utf-8")))
        for page in ("README.md", "embedding.md")
    )
    listed = index | {page for page in hosts if page.startswith("embedding-")}
    pages = {
        page.relative_to(docs).as_posix()
        for page in (*docs.glob("*.md"), *docs.glob("internals/*.md"), *docs.glob("reference/*.md"))
    }
    assert listed == pages - {"README.md", "index.md"}


def test_no_page_outside_the_repository_is_cited() -> None:
    files = [*PAGES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "ringattn").rglob("*.py")]
    cites = re.compile("DESIGN" + r"(\.md|,? §)")
    assert [file.name for file in files if cites.search(file.read_text(encoding="utf-8"))] == []


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("masks.md", ""),
        ("concepts.md", r"^merged state: error [0-9]e-1[5-9]$"),
        ("packing.md", r"^packed documents: error [0-9]e-1[5-9]$"),
        ("mixed-precision.md", r"^bf16: error [0-9.]+e-0[34] on one rank, [0-9.]+e-0[34] on four$"),
        ("embedding.md", r"equal to one process \(loss "),
        ("training.md", r"^\S+e-(1[5-9]|\d{3})$|^0\.0$"),
    ],
)
def test_the_page_runs_alone(page: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page)
    assert re.search(printed, capsys.readouterr().out, re.MULTILINE)


def test_the_page_for_users_of_other_packages() -> None:
    """The last example of the page computes the exact attention of its documents, whole on every rank."""
    names = run_page("embedding-coming-from.md")
    q, k, v = (names[name].detach() for name in "qkv")
    expected, lse = dense_attention(q, k, v, causal=True, cu_seqlens=[0, 200, 601])
    torch.testing.assert_close(names["whole"].double(), expected, rtol=1e-5, atol=1e-5)
    assert names["lse"].shape == lse.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "lines"), [("embedding.md", "equal to one process (loss "), ("embedding-coming-from.md", "")]
)
def test_the_page_runs_on_two_ranks(page: str, lines: str, tmp_path: Path) -> None:
    printed = run_page_under_torchrun(page, tmp_path, 2)
    assert not lines or printed.count(lines) == 2


@pytest.mark.slow
def test_replicas_of_rings_train_like_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run_page_under_torchrun("embedding-fsdp.md", tmp_path, 4)
    assert printed.count("FSDP2: ") == 4 and printed.count("accelerate: the same gradients") == 4
    losses = [(float(loss), float(true)) for loss, true in re.findall(r"FSDP2: (\S+), one process: (\S+)", printed)]
    assert len(losses) == 4 and all(loss == pytest.approx(true, rel=1e-5) for loss, true in losses)


@pytest.mark.slow
def test_the_llama_script_has_the_losses_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "train_llama.py"
    script.write_text(block_of("train-llama-128k.md", "llama"), encoding="utf-8")
    page = (ROOT / "docs" / "train-llama-128k.md").read_text(encoding="utf-8")
    pattern = r"^step \d: loss ([\d.]+), gradient norm ([\d.]+)$"
    documented = [tuple(map(float, line)) for line in re.findall(pattern, page, re.MULTILINE)]
    assert len(documented) == 3
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        printed = run_under_torchrun([str(script), "tiny", "515", "3"], tmp_path / str(ranks), ranks)
        losses = [tuple(map(float, line)) for line in re.findall(pattern, printed, re.MULTILINE)]
        assert losses == [pytest.approx(line, rel=1e-2) for line in documented], ranks


def test_the_plan_of_the_llama_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "train-llama-128k.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"^ringattn (plan .*)$", page, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(131,072 tokens over.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert main(shlex.split(words)) == 0
    printed = capsys.readouterr().out
    component = re.compile(r"^(\w+(?: \w+)?) +(\d+\.\d\d) ", re.MULTILINE)
    assert len(component.findall(shown)) == 11
    assert component.findall(shown) == component.findall(printed)
    figures = r"longest sequence on a ring of 8: ([\d,]+) tokens; smallest ring: (\d+)"
    assert re.findall(figures, shown) == re.findall(figures, printed)


@pytest.mark.slow
def test_the_hung_script_ends_with_the_errors_that_the_page_shows(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(block_of("hung-job.md", "script"), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RINGATTN_FLIGHT_DIR": str(tmp_path / "flight")}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    records = subprocess.run(
        [sys.executable, "-m", "ringattn", "flight", "flight"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert records.returncode == 1, records.stderr
    page = (ROOT / "docs" / "hung-job.md").read_text(encoding="utf-8")
    error, divergence = (" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S))
    assert error in " ".join(done.stderr.split())
    assert divergence in " ".join(records.stdout.split())


def test_a_batch_that_one_rank_cannot_load_is_skipped_on_all() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(block_of("hung-job.md", "skip"), names)

    def body(ring: Ring) -> list[int]:
        def load(number: int) -> int:
            if number == 1 + ring.rank:
                raise OSError("truncated file")
            return number

        return list(names["batches"](ring, load, 5))

    assert run_ranks(2, body) == [[0, 3, 4]] * 2


# --- the commands of docs/training.md --------------------------------------------------------------------------------

TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TRAINING, re.MULTILINE | re.DOTALL)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
TRAININGS = [shlex.split(line.partition(" train ")[2]) for line in LINES]
SMALL = ["model=tiny", "tokens=64", "transport=gloo", "timeout_s=120"]


def test_every_command_is_valid() -> None:
    assert len(TRAININGS) == 11
    for arguments in TRAININGS:
        assert arguments
        load_train(arguments)


@pytest.mark.slow
def test_the_commands_of_one_process_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("a word and another<|endoftext|>" * 9)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # without it, a document would be a single token
    tokenizer.save("tokenizer.json")
    smaller = {"segment_lengths=[64,512]": "segment_lengths=[16,64]", "curriculum_start_tokens=256":
               "curriculum_start_tokens=16"}  # fmt: skip
    for arguments in TRAININGS:
        small = [smaller.get(word, word) for word in arguments if not word.startswith(("tokens=", "ranks="))]
        if not any(word.startswith(("replicas=", "restarts=")) for word in arguments):
            assert train.main([*small, *SMALL]) == 0, arguments
    assert "in 40 steps, 20 of them in earlier runs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_of_a_mesh_run(tmp_path: Path) -> None:
    starts = {"ringattn": ["-m", "ringattn"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    lines = [shlex.split(line) for line in LINES if "replicas=" in line]
    assert [program for program, *_ in lines] == ["ringattn", "torchrun"]
    for program, *arguments in lines:
        done = subprocess.run(
            [sys.executable, *starts[program], *arguments, *SMALL, "steps=2"], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = tmp_path / "outputs" / "mesh" / "result.json"
        assert len(json.loads(result.read_text())["losses"]) == 2
        result.unlink()


def test_the_table_of_the_page_lists_what_resuming_refuses() -> None:
    table = TRAINING.partition("| may differ from the run before | must not |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if "`" in row]
    may, must_not = (set(re.findall(r"`(\w+)`", " ".join(row[side] for row in rows))) for side in (0, 1))
    assert may < MAY_CHANGE and not must_not & MAY_CHANGE


@pytest.mark.slow
def test_the_script_of_the_page_of_verify_trainer_has_the_fault_that_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    (tmp_path / "train.py").write_text(block_of("verify-trainer.md", "script"), encoding="utf-8")
    command = [sys.executable, "-m", "ringattn", "verify-trainer", "steps=1", "train.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    (shown,) = re.findall(
        r"^```text\n(.*?)^```$", (ROOT / "docs" / "verify-trainer.md").read_text(encoding="utf-8"), re.M | re.S
    )
    for text in (shown, done.stdout):
        assert "21 of 21 parameters differ by more than rounding" in text
    assert shown.partition("DIFFERENT")[2].split() == done.stdout.partition("DIFFERENT")[2].split()
