"""The Triton engine in Triton's interpreter: the engine contract, and what the kernels guarantee beyond it.

Triton decides on import whether a kernel is interpreted. So tests/kernels/test_interpreted.py passes this file by name
to a separate pytest process with TRITON_INTERPRET=1. Blocks are small, so that every scenario has borders, incomplete
blocks and diagonals.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile
from ringattn.engine.base import KV, BackwardInputs, Engine, Softmax
from ringattn.engine.plain import PlainEngine
from ringattn.engine.select import choose
from ringattn.engine.triton import TritonEngine
from ringattn.errors import UnsupportedError
from ringattn.kernels import attention_tiles
from ringattn.kernels.configs import Configs
from ringattn.kernels.launch import Config
from tests import philox
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS, Scenario, random_scenario, simple, strip
from tests.contract.engine_trial import SCALE, TOLERANCE, Trial
from tests.gpu import kernel_checks
from tests.kernels.interpreter.shims import corrected

SMALL = Configs(Config(32, 16, 4, 1), Config(16, 32, 4, 1), Config(32, 16, 4, 1))


@pytest.fixture(autouse=True)
def _bfloat16() -> Iterator[None]:
    with corrected():
        yield


@pytest.fixture(autouse=True)
def _order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vary from test to test how many heads the kernel processes together: the fewest, some, or all heads."""
    gpu = attention_tiles.Gpu(Random(request.node.name).choice((1, 9_000, 1 << 30)), 1)
    monkeypatch.setattr(attention_tiles, "gpu_of", lambda device: gpu)


class TestTriton(EngineContract):
    """The tests of the engine contract, except that float64 must be refused by name and random tiles are float32."""

    places = True

    def engine(self) -> TritonEngine:
        return TritonEngine(SMALL)

    def tried(self, scenario: Scenario, dtype: torch.dtype, with_dlse: bool, seed: int = 0) -> None:
        if dtype == torch.float64:
            with pytest.raises(UnsupportedError, match=r"float64.*engine='plain'"):
                super().tried(scenario, dtype, with_dlse, seed)
        else:
            super().tried(scenario, dtype, with_dlse, seed)

    @pytest.mark.parametrize("seed", range(40))
    def test_random_tiles(self, seed: int) -> None:
        self.tried(random_scenario(seed, self.places), torch.float32, with_dlse=seed % 2 == 1, seed=seed)


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("form", ["pointers", "descriptors"])
def test_the_gpu_check_of_more_steps(form: str, steps: int) -> None:
    """The check `ring_errors` of tests/gpu/test_kernels.py passes: several ring steps are as exact as a single step."""
    engine = TritonEngine(SMALL._replace(forward=Config(16, 16, 4, 1, form)))
    errors = kernel_checks.ring_errors(engine, torch.bfloat16, "cpu", 128, 16, steps)
    assert 0 < errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
def test_the_gpu_check_of_a_whole_pass(form: str) -> None:
    """The pass that the GPU tests capture in a graph has the same bits each time and is correct."""
    config, rows = Config(16, 16, 4, 1, form), kernel_checks.inputs(torch.float16, "cpu", 64, 16)
    engines: list[Engine] = [TritonEngine(Configs(config, config, config)), PlainEngine()]
    works = [
        engine.prepare(kernel_checks.ring_tiles(64, 1), Softmax(kernel_checks.SCALE), 64, kernel_checks.HEADS)
        for engine in engines
    ]
    first, again = (kernel_checks.whole_pass(engines[0], works[0], *rows) for _ in "12")
    exact = kernel_checks.whole_pass(engines[1], works[1], *(x.double() for x in rows))
    for actual, same, expected in zip(first, again, exact, strict=True):
        assert torch.equal(actual, same) and float((actual - expected).norm() / expected.norm()) < 2**-10


def test_steep_slopes_are_refused() -> None:
    engine, tiles = TritonEngine(SMALL), [Tile(strip(0, 4), strip(0, 4), CAUSAL, StridedRange(0, 1))]
    with pytest.raises(UnsupportedError, match=r"slopes to .*plain"):
        engine.prepare([tiles], Softmax(SCALE, alibi_slopes=(1e10,)), 4, 1)


def test_offsets_beyond_int32() -> None:
    """Rows of q, K and V may be 2^30 elements apart; the third row needs an offset of more than 32 bits."""
    q, *kv = (torch.randn(3, 1, 2, 16).half() for _ in range(3))
    shape, strides = q.shape, (1 << 30, 32, 16, 1)
    far = [torch.empty((1 << 31) + 32, dtype=torch.float16).as_strided(shape, strides) for _ in range(3)]
    for near, far_tensor in zip((q, *kv), far, strict=True):
        far_tensor.copy_(near)
    engine, results = TritonEngine(SMALL), []
    tiles = [Tile(strip(10, 3), strip(0, 3), CAUSAL, StridedRange(0, 2))]
    for queries, k, v in ((q, *kv), far):
        works = engine.prepare([tiles], Softmax(SCALE), 3, 2)
        state, dq = engine.begin(works, queries, 16, None), engine.begin_grad(works, queries, 16)
        engine.attend(queries, KV(k, v), state, works[0])
        out, dk, dv = state.out.finalized(q.dtype), *(torch.zeros(shape) for _ in range(2))
        engine.attend_grad(
            queries,
            KV(k, v),
            BackwardInputs(q, out, state.lse, None, torch.zeros_like(state.lse)),
            dq,
            KV(dk, dv),
            works[0],
        )
        results.append((out, state.lse, dq.finalized(q.dtype), dk, dv))
    assert all(torch.equal(near_result, beyond) for near_result, beyond in zip(*results, strict=True))
    assert all(x.abs().sum() > 0 for x in results[0])


@pytest.mark.parametrize("dims", [(80, 96), (256, 256), (1, 40)])
def test_wide_and_odd_head_dimensions(dims: tuple[int, int]) -> None:
    """float32 is right for these dimensions with the engine's default blocks and the usual scale."""
    scenario = simple(((strip(0, 40), strip(0, 40), CAUSAL),), StridedRange(0, 2), 1, group=2, d_k=dims[0], d_v=dims[1])
    trial = Trial(scenario, torch.float32, True, scale=dims[0] ** -0.5)
    trial.check(trial.run(TritonEngine()), TOLERANCE[torch.float32])
    trial.check_margins()


@pytest.mark.parametrize("scale", [-SCALE, 0.0])
def test_a_bias_beside_any_scale(scale: float) -> None:
    """ALiBi slopes work with a negative scale and with a scale of 0, for which the kernel adds the bias elsewhere."""
    trial = Trial(SCENARIOS["alibi-documents"], torch.float32, True, scale=scale)
    trial.check(trial.run(TritonEngine(SMALL)), TOLERANCE[torch.float32])


def test_a_steep_bias_over_many_blocks() -> None:
    """Steep slopes of both signs are right for queries with keys before and after them, in some blocks both."""
    scenario = simple(((strip(40, 70, 2), strip(0, 90), FULL),), StridedRange(0, 2), 1, group=2, alibi=True)
    trial = Trial(scenario, torch.float32, True)
    trial.softmax = trial.softmax._replace(alibi_slopes=(0.25, -0.125))
    trial.check(trial.run(TritonEngine(SMALL)), TOLERANCE[torch.float32])


def test_queries_far_from_all_keys() -> None:
    """Weights are right even if ALiBi lowers all logits of a row so much that their exp falls by a factor of 2^325.

    The tolerance of lse is four roundings in float32.
    """
    scenario = simple(((strip(900, 20), strip(0, 40), FULL),), StridedRange(0, 2), 1, group=2, alibi=True)
    trial = Trial(scenario, torch.float32, False)
    trial.softmax = trial.softmax._replace(alibi_slopes=(0.25, -0.25))
    actual, expected = trial.run(TritonEngine(SMALL)), trial.reference()
    assert (actual["out"].double() - expected["out"])[:20].abs().max() <= TOLERANCE[torch.float32]
    torch.testing.assert_close(actual["lse"][..., :20].double(), expected["lse"][..., :20], rtol=2**-22, atol=0)


def test_a_fused_backward_with_a_bias() -> None:
    trial = Trial(SCENARIOS["alibi"], torch.float32, True)
    trial.check(trial.run(TritonEngine(SMALL, deterministic=False)), TOLERANCE[torch.float32])


WORD = 1 << 32
DRAWN = {
    "together": (strip(WORD - 21, 21), strip(WORD - 40, 40)),
    "unaligned": (strip(5, 21), strip(WORD - 39, 39)),
    "strided": (strip(3, 21, 3), strip(0, 40, 2)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_which_pairs_are_dropped(name: str) -> None:
    """Dropout drops exactly the pairs that `philox.kept_at` drops, in out and dV, also after the seed changes.

    The values are unit vectors, a different one for each key, so column j of out shows whether key j is dropped.
    Likewise the rows of dout are unit vectors, so that dV shows which queries are dropped.
    """
    queries, keys = DRAWN[name]
    n, m, p = queries.rows.count, keys.rows.count, 0.375
    tile = Tile(queries, keys, FULL, StridedRange(0, 2), 5)
    q, k = (torch.randn(rows, 2, heads, 16) for rows, heads in ((n, 2), (m, 1)))
    v = torch.eye(m, 64)[:, None, None].expand(m, 2, 1, 64)
    dout = torch.eye(n, 64)[:, None, None].expand(n, 2, 2, 64)
    for deterministic in (True, False):
        engine = TritonEngine(SMALL, deterministic=deterministic)
        works = engine.prepare([[tile]], Softmax(SCALE, 2, dropout_p=p), n, 2)
        for seed in (3, 2**64 - 2**31 - 7)[not deterministic :]:
            kept = philox.kept_at(range(2), range(5, 7), queries.positions.members(), keys.positions.members(), seed, p)
            state = engine.begin(works, q, 64, None)._replace(dropout_seed=seed)
            engine.attend(q, KV(k, v), state, works[0])
            out, dq = state.out.finalized(q.dtype), engine.begin_grad(works, q, 64)
            assert torch.equal(out.permute(1, 2, 0, 3)[..., :m] > 0, kept > 0)
            sums = KV(torch.zeros(m, 2, 1, 16), torch.zeros(m, 2, 1, 64))
            delta = engine.delta(dout, out, None)
            engine.attend_grad(
                q, KV(k, v), BackwardInputs(dout, out, state.lse, None, delta, seed), dq, sums, works[0]
            )  # fmt: skip
            # dV of a K/V head is the sum over the query heads of its group.
            assert torch.equal(sums.v.permute(1, 2, 3, 0)[..., :n, :] > 0, (kept > 0).any(1, keepdim=True))


def test_a_fused_backward_with_dropout() -> None:
    trial = Trial(SCENARIOS["dropout-apart"], torch.float32, True)
    trial.check(trial.run(TritonEngine(SMALL, deterministic=False)), TOLERANCE[torch.float32])


def test_a_strong_softcap() -> None:
    """The results are right if the scores are far beyond the softcap, so that tanh saturates."""
    trial = Trial(SCENARIOS["softcap"]._replace(softcap=0.01), torch.float32, True)
    trial.check(trial.run(TritonEngine(SMALL)), TOLERANCE[torch.float32])


def test_wider_heads_than_the_kernels_hold_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 257)
    works = TritonEngine().prepare([()], Softmax(1.0), 1, 1)
    with pytest.raises(UnsupportedError, match=r"256, not 257.*engine='plain'"):
        TritonEngine().begin(works, q, 257, None)


def test_the_interpreter_is_enough_to_be_chosen_by_name() -> None:
    assert choose("triton", torch.device("cpu"), torch.float32, 64, 64, None).engine.name == "triton"
