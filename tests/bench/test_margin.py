"""What a ring loses to the multiprocessors that it leaves to exchanges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringattn.bench import margin
from ringattn.bench.gate import GateError
from ringattn.planner.cluster import Cluster


def test_a_long_ring_loses_its_share_and_a_short_one_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On 8 of 132 multiprocessors; hops that nothing hides cost a short ring more than any margin."""
    margin.main(["clusters=h100", "masks=causal", "tokens=8192,1048576", f"results={tmp_path}"])
    short, long = json.loads((tmp_path / "margin.json").read_text())["rows"]
    lost = [[row["margins_ms"][of] / row["free_ms"] - 1 for of in ("4", "8")] for row in (short, long)]
    shares = 132 / 128 - 1, 132 / 124 - 1
    assert lost[1] == pytest.approx(shares, rel=0.01)
    assert all(0.3 * share < one < 0.8 * share for one, share in zip(lost[0], shares, strict=True))
    assert short["serial_ms"] > 1.5 * short["free_ms"] and long["serial_ms"] < 1.01 * long["free_ms"]
    assert "| h100    | causal | 8192" in capsys.readouterr().out


@pytest.mark.parametrize(("by", "words"), [(2.0, "a margin of 4"), (0.5, "a margin of 4")])
def test_the_gate_bites(by: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin that makes a pass faster, or slower than its share, is a fault of the model."""
    leaving = Cluster.leaving
    wrong = {"flops": 648e12 * by, "backward_flops": 561e12 * by}
    told = iter([None])  # the first question, for the time; what may be is asked of the true one

    def spoiled(self: Cluster, sm_margin: int) -> Cluster:
        made = leaving(self, sm_margin)
        return made if next(told, True) else Cluster(**{**vars(made), **wrong})

    monkeypatch.setattr(Cluster, "leaving", spoiled)
    with pytest.raises(GateError, match=words):
        margin.main(["clusters=h100", "masks=full", "tokens=1048576", "margins=4", f"results={tmp_path}"])
    assert not list(tmp_path.iterdir())
