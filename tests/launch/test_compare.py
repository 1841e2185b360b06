"""`ringattn compare`: which differences count, which points meet, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringattn.cli import main
from tests.launch.sweep_records import Record, folder, record, strong


def compared(tmp_path: Path, before: list[Record], after: list[Record], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    paths = [str(folder(tmp_path / name, records)) for name, records in (("a", before), ("b", after))]
    code = main(["compare", *paths, *words, f"json={tmp_path / 'compared.json'}"])
    return code, json.loads((tmp_path / "compared.json").read_text())


def timed(ms: float, p10: float, p90: float) -> Record:
    """A record whose forward pass takes this long."""
    return {**record(2, 4096), "forward_ms": {"median": ms, "p10": p10, "p90": p90, "samples": 10}}


def test_a_sweep_is_as_good_as_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared(tmp_path, strong(), strong())
    assert code == 0
    assert found["counts"] == {"worse": 0, "better": 0, "same": 10, "no results": 2}
    assert "12 points: 0 worse, 0 better, 10 the same, 2 without results on both sides" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((100, 99, 101), (104, 103, 105), "same"),  # within the threshold
        ((100, 99, 101), (106, 105, 107), "worse"),
        ((100, 99, 101), (94, 93, 95), "better"),
        ((100, 99, 101), (110, 104, 116), "same"),  # its own spread is 12
        ((100, 94, 106), (110, 109, 111), "same"),  # the other's is
        ((100, 96, 104), (110, 107, 113), "worse"),  # 10 is more than 8 and than 6
        ((100, 99, 101), (105, 105, 105), "same"),  # exactly at the threshold
    ],
)
def test_times_count_beyond_threshold_and_spread(
    tmp_path: Path, before: tuple[float, float, float], after: tuple[float, float, float], verdict: str
) -> None:
    code, found = compared(tmp_path, [timed(*before)], [timed(*after)])
    assert found["points"][0]["changes"]["forward_ms"]["verdict"] == verdict == found["points"][0]["verdict"]
    assert code == (verdict == "worse")


def test_the_threshold_can_be_chosen(tmp_path: Path) -> None:
    before, after = [timed(100, 99, 101)], [timed(115, 114, 116)]
    assert compared(tmp_path, before, after)[0] == 1
    assert compared(tmp_path, before, after, "threshold=0.2")[0] == 0


@pytest.mark.parametrize("key", ["peak_bytes", "bytes_sent"])
def test_bytes_count_on_the_rank_that_has_most(tmp_path: Path, key: str) -> None:
    before, after = ({**record(2, 4096), key: by_rank} for by_rank in ([100, 200], [200, 100]))
    assert compared(tmp_path, [before], [after])[0] == 0
    code, found = compared(tmp_path, [before], [{**after, key: [220, 100]}])
    assert code == 1 and found["points"][0]["changes"][key]["verdict"] == "worse"
    assert compared(tmp_path, [{**before, key: [0, 0]}], [{**after, key: [1, 0]}])[0] == 1


def test_worse_outweighs_better(tmp_path: Path) -> None:
    code, found = compared(tmp_path, [timed(100, 99, 101)], [{**timed(50, 49, 51), "peak_bytes": [1 << 40, 1 << 40]}])
    assert code == 1 and found["points"][0]["verdict"] == "worse"


@pytest.mark.parametrize("status", ["oom", "error", "timeout"])
def test_a_point_that_lost_its_results_is_worse(
    tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = record(2, 4096), record(2, 4096, status=status, message="why")
    code, found = compared(tmp_path, [good], [bad])
    assert code == 1 and found["points"][0]["status"] == ["ok", status]
    assert f"worse: ok → {status}" in capsys.readouterr().out
    code, found = compared(tmp_path, [bad], [good])
    assert code == 0 and found["counts"]["better"] == 1


def test_points_of_one_side_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared, old, new = record(2, 4096), record(4, 4096), record(8, 4096)
    code, found = compared(tmp_path, [shared, old], [shared, new])
    assert code == 0 and len(found["points"]) == 1
    assert (found["only_before"], found["only_after"]) == ([old["hash"]], [new["hash"]])
    printed = capsys.readouterr().out
    assert f"only in {tmp_path / 'a'}: 4,096 tokens, 4 ranks, ok" in printed
    assert f"only in {tmp_path / 'b'}: 4,096 tokens, 8 ranks, ok" in printed


def test_one_rank_is_named_as_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank alone has any schedule, layout and transport, whichever was written down."""
    shared = [record(1, 4096, "direct", "contiguous"), record(2, 4096, "ring")]
    old, new = record(1, 8192, "direct"), record(2, 8192, "direct")
    assert compared(tmp_path, [*shared, old], [*shared, new])[0] == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "4,096" in line]
    assert [(row.count("any"), row.count("direct"), row.count("ring")) for row in rows] == [(2, 0, 0), (0, 0, 1)]
    assert f"only in {tmp_path / 'a'}: schedule any, layout any, 8,192 tokens, 1 ranks" in printed
    assert f"only in {tmp_path / 'b'}: schedule direct, layout zigzag, 8,192 tokens, 2 ranks" in printed


def test_different_environments_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [folder(tmp_path / name, [record(2, 4096)]) for name in ("a", "b")]
    (paths[1] / "environments.json").write_text(json.dumps({"e2": {"torch": "2.12.0"}}))
    assert main(["compare", *map(str, paths)]) == 0
    assert "note: the environments differ in hardware, python, torch, variables.OMP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "expected two folders, got a"),
        (["a", "b", "c"], "expected two folders, got a b c"),
        (["a", "none"], "none is not a folder"),
        (["a", "b", "treshold=0.1"], "did you mean threshold"),
        (["a", "b", "threshold=0"], "threshold=0.0: must be more than 0.0"),
        (["a", "c"], "a and c have no configuration in common"),
    ],
)
def test_bad_input_is_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, line in (("a", record(2, 4096)), ("b", record(2, 4096)), ("c", record(4, 4096))):
        folder(tmp_path / name, [line])
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
