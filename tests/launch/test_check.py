"""What `ringattn check` prints: a line for each schedule, every case on demand, and all of a schedule that fails."""

import pytest

from ringattn.launch.measure import check, exactness
from ringattn.launch.measure.check import Case
from tests.covering import parts

EVERY, PAIRED = list(check.cases()), list(check.paired_cases())
FEW = [
    Case("full", "contiguous", "ring"),
    Case("causal", "contiguous", "ring"),
    Case("causal", "zigzag", "ring"),
    Case("causal", "zigzag", "direct"),
]
SMALL = ["transport=local", "ranks=2", "tokens=13", "dtype=fp64", "head_dim=8", "value_dim=8"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "cases", lambda: iter(FEW))


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> list[list[str]]:
    assert check.main([*SMALL, *words]) == code
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, code=0)
    assert [line[:4] for line in lines[2:]] == [
        ["ring", "2", "2", "3"],  # masks, layouts, cases
        ["direct", "1", "1", "1"],
        ["4", "cases,", "all", "exact"],
    ]
    for line in lines[2:4]:
        assert all(float(error) < 1e-10 for error in line[4:8]) and line[8] == "exact"


def test_paired_cases_hold_every_two_values_that_the_cases_hold_together() -> None:
    wanted, found = (set().union(*(parts(case, 2) for case in some)) for some in (EVERY, PAIRED))
    assert found == wanted and len(PAIRED) < len(EVERY) / 3


def test_the_paired_cases_are_those_that_are_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "paired_cases", lambda: iter(FEW[:1]))
    assert printed(capsys, "combinations=pairs", code=0)[-1] == ["1", "cases,", "all", "exact"]


def test_verbose_prints_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line[:3] for line in printed(capsys, "verbose=true", code=0)[2:-1]]
    assert rows == [[case.mask, case.layout, case.schedule] for case in FEW]


def test_a_wrong_case_shows_the_cases_of_its_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = exactness.attended

    def wrong_by_direct(ring, case, *rest):  # type: ignore[no-untyped-def]
        out, *grads = right(ring, case, *rest)
        return [out * float("nan") if case.schedule == "direct" else out, *grads]

    monkeypatch.setattr(exactness, "attended", wrong_by_direct)
    lines = printed(capsys, code=1)
    assert lines[2][0] == "ring" and lines[2][-1] == "exact"
    assert lines[3][:5] == ["direct", "1", "1", "1", "nan"] and lines[3][-4:] == ["1", "OVER", "THEIR", "BOUND"]
    assert lines[5][:4] == ["causal", "zigzag", "direct", "nan"] and lines[5][-1] == "OVER"
    assert lines[-1] == ["4", "cases,", "1", "over", "their", "bound"]


@pytest.mark.parametrize(("asked", "opened"), [("nccl", "nccl"), ("peer", "peer"), ("gloo", "gloo"), ("local", "shm")])
def test_processes_are_checked_over_the_transport_that_was_asked_for(
    asked: str, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        pass

    def ring(transport: str, **_: object) -> None:
        raise Opened(transport)

    monkeypatch.setattr("ringattn.Ring", ring)
    with pytest.raises(Opened, match=f"^{opened}$"):
        check.worker({"transport": asked, "engine": "plain", "timeout_s": 5.0})
