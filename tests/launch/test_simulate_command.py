"""`ringattn simulate`: its table, its files, its refusals; nothing of it needs torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError, UnsupportedError
from ringattn.launch.options import load_plain
from ringattn.launch.pictures.charts import work_shares
from ringattn.launch.pictures.simulate import counts, factors, main, shared_out, traced_ranks
from ringattn.launch.pictures.simulation import SimulateConfig, Simulator
from ringattn.planner.cluster import CLUSTERS
from tests.launch.commands import python

SMALL = ["heads=4", "kv_heads=2", "head_dim=64"]


def test_plans_and_classes_meet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep goes from plans to classes; weak scaling of a full mask keeps the work of a rank times its ranks."""
    run, asked = Simulator.run, []
    monkeypatch.setattr(Simulator, "run", lambda self, *call: asked.append(call[:2]) or run(self, *call))
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    words = ["ranks=16,24", "tokens=24Ki", "scaling=both", *SMALL, f"json={file}", f"picture={picture}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "strong scaling" in out and "weak scaling" in out
    assert out.count("by classes of ranks") == out.count("by the plan of each rank") == 2
    found = json.loads(file.read_text())
    assert [one["by"] for one in found["curves"]["strong"]] == ["plans", "classes"]
    assert [one["tokens"] for one in found["curves"]["weak"]] == [16384, 24576]
    assert found["curves"]["strong"][1]["total_s"] == found["curves"]["weak"][1]["total_s"]
    assert asked == [(24576, 16), (24576, 24), (16384, 16)], "what both curves have is simulated once"
    for one in found["curves"]["strong"]:
        assert one["total_s"] == pytest.approx(sum(each["total_s"] for each in one["passes"]))
        for each in one["passes"]:
            least, middle, most = each["busy_s"]
            assert 0 < least <= middle <= most <= each["total_s"]
    assert picture.stat().st_size > 10_000


def test_tokens_are_rounded_up_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks=20", "tokens=10001", "backward=false", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "10,040" in out and "tokens are rounded up, on 20 ranks 10,001 to 10,040, 0.3900% more" in out
    assert "forward   waiting " in out and "backward  work" not in out


def test_rounding_costs_no_more_than_it_says() -> None:
    """Of uneven shards the time lies between those of even shards of as many rows less and more."""
    simulator = Simulator(SimulateConfig(heads=4, kv_heads=2, head_dim=64), CLUSTERS["h100"])
    times = [simulator.run(tokens, 16).total_s for tokens in (32 * 250, 8011, 32 * 251)]
    assert times[0] <= times[1] <= times[2] * (1 + 1e-9)


def test_ranks_that_share_processors_are_measured_by_the_processors() -> None:
    """Four ranks on two processors take twice as long as four on four, and neither is less efficient for that."""
    machines = replace(CLUSTERS["cpu"], cores=4, wire_cores=0.0)
    config = SimulateConfig(heads=4, kv_heads=2, head_dim=64)
    shares = [Simulator(config, replace(machines, cores=cores)).run(8192, 4) for cores in (4, 2)]
    assert shares[1].total_s > 1.9 * shares[0].total_s and shares[1].ideal_s == 2 * shares[0].ideal_s
    assert shares[1].efficiency == pytest.approx(shares[0].efficiency, rel=0.05)


def test_a_timeline_is_drawn_of_one_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.png"
    words = ["ranks=20", "tokens=20Ki", "slow_rank=7:2", "jitter=0.1", "seed=3", f"picture={picture}", *SMALL]
    assert main(words) == 0
    assert picture.stat().st_size > 10_000
    capsys.readouterr()


def test_shares_of_work() -> None:
    spans = [Span("step 0 attend", COMPUTE, 0.0, 4.0), Span("step 0 exchange", COMM, 0.0, 6.0),
             Span("step 1 attend", COMPUTE, 6.0, 8.0)]  # fmt: skip
    assert work_shares(spans, 8.0, 4).tolist() == pytest.approx([1.0, 1.0, 0.0, 1.0])
    assert work_shares(spans, 8.0, 2).tolist() == pytest.approx([1.0, 0.5])


def test_words() -> None:
    assert counts("64,1,8,8") == [1, 8, 64]
    assert factors("slow_rank", "3:1.5,9:2", 1) == [((3,), 1.5), ((9,), 2.0)]
    assert factors("slow_link", "[7-8:4]", 2) == [((7, 8), 4.0)]
    assert traced_ranks(4, [2]) == [0, 1, 2, 3]
    assert shared_out(1000, [1, 3, 10], weak=True) == [100, 300, 1000]
    for wrong, told in ((lambda: counts("8,0"), "ranks=8,0: give numbers from 1 to 16,384"),
                        (lambda: counts("16385"), "ranks=16385"), (lambda: counts("a"), "ranks=a"),
                        (lambda: factors("slow_rank", "3", 1), "slow_rank=3: write 3:1.5"),
                        (lambda: factors("slow_link", "3:2", 2), "slow_link=3:2: write 7-8:4"),
                        (lambda: shared_out(3, [1, 8], True), "ranks=8: 8 ranks are more than tokens=3"),
                        (lambda: shared_out(3, [1, 8], False), "ranks=8: 8 ranks are more than tokens=3")):  # fmt: skip
        with pytest.raises(InputError, match=told):
            wrong()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["schedule=ulysses", "ranks=128"],
            "schedule='ulysses' is simulated with a plan for each rank, up to 64",
        ),
        (
            ["schedule=ulysses", "ranks=4096"],
            "of 32 heads no more than 32 ranks have work: many ranks take schedule='ulysses_ring'",
        ),
        (["cluster=cpu", "ranks=128"], "whose ranks share processors, is simulated with a plan for each rank"),
        (["window=[100,-1]", "layout=striped", "ranks=128"], "layout='striped' with a window"),
        (["window=[8191,-1]", "causal=false", "ranks=128"], "windows bounded on both sides"),
        (["window=[100000,-1]", "ranks=128"], "the window reaches 98 shards"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedError, match=told):
        main(words)
    assert "efficiency" not in capsys.readouterr().out, "no head of a table without rows"


def test_true_and_false_are_read_as_such() -> None:
    for word, wanted in (("causal=false", False), ("causal=True", True)):
        assert load_plain([word], SimulateConfig).causal is wanted
    with pytest.raises(InputError, match="causal=no: should be true or false"):
        load_plain(["causal=no"], SimulateConfig)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="there is no rank 8, with ranks 0 to 7"):
        main(["ranks=8", "slow_rank=8:2"])


def test_it_needs_no_torch() -> None:
    code = ("import sys; from ringattn.cli import main; sys.modules['torch'] = sys.modules['hydra'] = None; "
            "raise SystemExit(main(['simulate', 'ranks=2', 'tokens=64', 'heads=2', 'kv_heads=2']))")  # fmt: skip
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "simulated in" in done.stdout
