"""The engines that call FlashAttention 3 and 4 obey the engine contract, on stand-ins for the two libraries.

Where flash-attn-4 is installed, its op also calls the compiled kernels, up to the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringattn.engine import aten, flash
from ringattn.engine.aten import CPU, HALF_DTYPES, BlockOp
from ringattn.engine.flash import FA3, FA4, FlashEngine, flash_engine
from ringattn.errors import UnsupportedError
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS
from tests.contract.engine_trial import Trial
from tests.engine.flash_package import KERNELS, fake_rows, launch, recorded_calls
from tests.engine.flash_standins import FA3_BACKWARDS, Calls, fa3_library, fa4_module

BOTH = pytest.mark.parametrize("op", [FA3, FA4], ids=lambda op: op.name)
HOST = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(op: BlockOp) -> Iterator[Calls]:
    """Install the stand-in of `op`."""
    with standin(op) as recorded:
        yield recorded


def standin(op: BlockOp) -> AbstractContextManager[Calls]:
    return fa3_library() if op is FA3 else fa4_module()


@pytest.fixture
def _all_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine also pass float32 and float64 to the stand-ins. The real kernels accept half precision only."""
    monkeypatch.setattr(flash, "HALF_DTYPES", (*HALF_DTYPES, torch.float32, torch.float64))


@pytest.mark.usefixtures("_all_dtypes", "calls")
@BOTH
class TestFlashAttention(EngineContract):
    """The tests of the engine contract. Softcap must be refused, and rows with infinite scores may be NaN.

    What the real kernels return for scores of -inf is unknown.
    """

    softcap = infinite_scores = False

    @pytest.fixture(autouse=True)
    def _take(self, op: BlockOp) -> None:
        self.op = op

    def engine(self) -> FlashEngine:
        return FlashEngine(HOST, self.op)


def operands(dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return [q, k, v, out, dout, lse]. lse is strided, and the others (2, heads, rows, dim) have rows outermost."""
    torch.manual_seed(0)
    heads = (4, 2, 2, 4, 4)
    tensors = [torch.randn(6, 2, head_count, dim).to(dtype).permute(1, 2, 0, 3) for head_count in heads]
    return [*tensors, torch.full((2, 6, 4), 3.0).transpose(1, 2)]


@BOTH
def test_every_rectangle_in_half_precision_goes_to_the_op(
    op: BlockOp, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("another op was chosen")

    monkeypatch.setattr(aten, "choose", fail)
    trial = Trial(SCENARIOS["zigzag"], torch.bfloat16, True)
    s, engine = trial.scenario, FlashEngine(HOST, op)
    works = engine.prepare([step.tiles for step in s.steps], trial.softmax, s.q_rows, s.heads)
    count = sum(len(work.rectangles) for work in works)
    trial.run(engine)
    assert count and len(calls.named("forward")) == len(calls.named("backward")) == count


@BOTH
def test_aligned_operands_are_not_copied(op: BlockOp, calls: Calls) -> None:
    q, k, v, out, dout, lse = operands(64)
    op.forward(q, k, v, False, 0.1)
    op.backward(dout, q, k, v, out, lse, False, 0.1)
    addresses = {x.data_ptr() for x in (q, k, v, out, dout)}
    for called, arguments in calls:
        names = ("q", "k", "v") if called == "forward" else ("q", "k", "v", "out", "dout")
        received = {arguments[name].data_ptr() for name in names}
        assert received <= addresses and len(received) == len(names)


@BOTH
@pytest.mark.parametrize("fault", ["address", "stride", "last stride"])
def test_operands_that_cannot_be_read_are_copied(op: BlockOp, fault: str, calls: Calls) -> None:
    """Operands that TMA cannot read are copied, so that the results are those of contiguous operands.

    TMA needs addresses and strides in multiples of 16 bytes.
    """
    q, k, v, *_ = operands(64)
    k, v = k[:, :1], v[:, :1]
    if fault == "address":
        k = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    elif fault == "stride":
        k = k.contiguous().as_strided((2, 1, 6, 64), (6 * 64, 3, 64, 1))
    else:
        k = k[:1, :1, :1, :1].expand(2, 1, 6, 64)
    actual = op.forward(q, k, v, False, 0.1)
    expected = op.forward(q, k.clone(memory_format=torch.contiguous_format), v, False, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@BOTH
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_op_receives_the_deterministic_flag(
    op: BlockOp, deterministic: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    q, k, v, out, dout, lse = operands(64)
    op.backward(dout, q, k, v, out, lse, False, 0.1)
    assert [arguments["deterministic"] for arguments in calls.named("backward")] == [deterministic]


@pytest.mark.parametrize("margin", [0, 6])
def test_a_margin_reaches_every_kernel_of_an_op_that_supports_it(margin: int) -> None:
    """FlashAttention 3 receives the margin in each call.

    FlashAttention 4 has no argument `sm_margin`, so its engine reports a margin of 0.
    """
    for op, effective in ((FA3, margin), (FA4, 0)):
        trial = Trial(SCENARIOS["zigzag"], torch.bfloat16, True)
        engine = FlashEngine(HOST, op, margin)
        with standin(op) as calls:
            trial.run(engine)
        assert engine.sm_margin == effective
        assert len(calls) > 2 and {arguments.get("sm_margin", 0) for _, arguments in calls} == {effective}


def test_fa3_wide_heads_use_torchs_flash_op_if_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flash op computes a deterministic backward for heads wider than 192, which FlashAttention 3 does not."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    seen = []

    def backward(*arguments: object) -> tuple[str, str, str]:
        seen.append(arguments)
        return "dq", "dk", "dv"

    monkeypatch.setattr(flash, "FLASH", flash.FLASH._replace(backward=backward))
    q, k, v, out, dout, lse = operands(200)
    with fa3_library() as calls:
        assert FA3.backward(dout, q, k, v, out, lse, True, 0.1) == ("dq", "dk", "dv")  # type: ignore[comparison-overlap]
        FA3.backward(*(x[..., :192] for x in (dout, q, k, v, out)), lse, False, 0.1)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        FA3.backward(dout, q, k, v, out, lse, False, 0.1)
    assert [arguments["q"].shape[-1] for arguments in calls.named("backward")] == [192, 200]
    assert [[id(x) for x in arguments[:6]] for arguments in seen] == [[id(x) for x in (dout, q, k, v, out, lse)]]


def test_fa3_takes_one_split() -> None:
    """FlashAttention 3 is called with one split, so that the order of sums does not depend on the GPU."""
    q, k, v, *_ = operands(64)
    with fa3_library() as calls:
        FA3.forward(q, k, v, False, 0.1)
    assert calls.named("forward")[0]["num_splits"] == 1


@BOTH
def test_heads_are_padded_to_a_multiple_of_8(op: BlockOp, calls: Calls) -> None:
    trial = Trial(SCENARIOS["zigzag"]._replace(d_k=13, d_v=13), torch.bfloat16, False)
    trial.run(FlashEngine(HOST, op))
    assert {arguments["v"].shape[-1] for _, arguments in calls} == {16}


@pytest.mark.parametrize("schema", FA3_BACKWARDS)
def test_fa3_gradients_do_not_depend_on_its_return_values(schema: str) -> None:
    q, k, v, out, dout, lse = operands(64)
    with fa3_library(FA3_BACKWARDS[schema]):
        fa3_grads = FA3.backward(dout, q, k, v, out, lse, False, 0.1)
    with fa4_module():
        fa4_grads = FA4.backward(dout, q, k, v, out, lse, False, 0.1)
    assert all(
        torch.equal(a, b) and a.shape == x.shape for a, b, x in zip(fa3_grads, fa4_grads, (q, k, v), strict=True)
    )


@BOTH
def test_other_calls_run_as_in_the_aten_engine(op: BlockOp, calls: Calls) -> None:
    """Calls that FlashAttention does not support, with float32 or too wide heads, run as in the aten engine.

    The second case has heads of 256 dimensions. In backward they are too wide with the additional column for the
    gradient of lse.
    """
    trial = Trial(SCENARIOS["zigzag"], torch.float32, True)
    trial.check(trial.run(FlashEngine(HOST, op)), 1e-5)
    assert not calls
    wide = Trial(SCENARIOS["full"]._replace(d_k=256, d_v=256), torch.bfloat16, True)
    wide.run(FlashEngine(HOST, op))
    assert calls.named("forward") and not calls.named("backward")


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("fa3", (8, 0), "fa3' needs a GPU with sm_90, not sm_8x; use engine='auto'"),
        ("fa3", (10, 0), "fa3' needs a GPU with sm_90, not sm_10x"),
        ("fa4", (12, 0), "fa4' needs a GPU with sm_90 or sm_100, not sm_12x"),
    ],
)
def test_other_gpus_are_refused(
    name: str, capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UnsupportedError, match=why):
        flash_engine(name, CUDA, torch.bfloat16, 128)
    with pytest.raises(UnsupportedError, match=f"'{name}' needs a GPU with sm_90.*, not cpu"):
        flash_engine(name, HOST, torch.bfloat16, 128)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_unsupported_dtypes_and_dimensions_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}' takes float16 and bfloat16, not torch.float32"):
        flash_engine(name, CUDA, torch.float32, 128)
    with pytest.raises(UnsupportedError, match=f"'{name}' takes head dimensions to 256, not 257"):
        flash_engine(name, CUDA, torch.float16, 257)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("name", "package"), [("fa3", r"flash-attn-3 .* or xformers 0\.0\.34"), ("fa4", "flash-attn-4")]
)
def test_without_the_package_the_refusal_names_it(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in flash.NEEDS[name].modules:
        monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    with pytest.raises(UnsupportedError, match=rf"engine='{name}' needs the package {package} \(.*; use engine='auto'"):
        flash_engine(name, CUDA, torch.bfloat16, 128)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("module", ["flash_attn_3._C", "xformers.flash_attn_3._C"])
def test_either_library_of_fa3_suffices(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in flash.FA3_LIBRARIES:
        monkeypatch.setitem(sys.modules, library.split(".")[0], None)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    engine = flash_engine("fa3", CUDA, torch.bfloat16, 256)
    assert (engine.name, engine._choose_op(CUDA, torch.bfloat16, 256)) == ("fa3", FA3)


def test_fa4_takes_narrower_heads_on_sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_100, FlashAttention 4 gets heads of up to 128 dimensions.

    This is the limit of `_validate_head_dims` in flash_attn/cute/interface.py.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(aten, "choose", lambda *_: CPU)
    with fa4_module():
        engine = flash_engine("fa4", CUDA, torch.bfloat16, 128)
        assert engine._choose_op(CUDA, torch.bfloat16, 136) is CPU
        assert engine._choose_op(CUDA, torch.bfloat16, 128) == FA4._replace(max_dim=128)
        with pytest.raises(UnsupportedError, match="to 128, not 129"):
            flash_engine("fa4", CUDA, torch.bfloat16, 129)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_arguments_reach_the_compiled_kernels_of_fa4(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels get the engine's views, and their compiled functions accept them and refuse other dtypes.

    Not covered: the deterministic backward, whose semaphores the package exports by a torch with CUDA.
    """
    rows, heads, kv_heads, dim, scale = 256, 8, 2, 64, 0.3
    with recorded_calls(monkeypatch) as calls, FakeTensorMode():
        counts = (heads, 4), (kv_heads, 1), (kv_heads, 2), (heads, 3)
        q, k, v, dout = (fake_rows(rows, count, dim, others) for count, others in counts)
        out, lse = FA4.forward(q, k, v, causal, scale)
        grads = FA4.backward(dout, q, k, v, out, lse, causal, scale)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert [type(call.kernel).__name__ for call in calls] == KERNELS

    forward, preprocess, backward = calls[:3]
    assert forward.kernel.is_causal == causal and backward.kernel.is_causal == causal
    assert not backward.kernel.deterministic
    for call, operands in ((forward, (q, k, v)), (backward, (q, k, v, dout)), (preprocess, (out, dout))):
        for passed, operand in zip(call.arguments, operands, strict=False):
            view = operand.transpose(1, 2)
            assert passed.shape == view.shape and passed.stride() == view.stride() and passed.dtype == torch.bfloat16
    assert forward.arguments[4].shape == backward.arguments[4].shape == (1, heads, rows)
    assert forward.arguments[4].dtype == backward.arguments[4].dtype == torch.float32
    assert forward.arguments[5] == backward.arguments[9] == scale

    for call in calls:
        with pytest.raises(RuntimeError, match="Cuda Runtime Error"):
            launch(call)
    for call in (forward, backward):
        with pytest.raises((TypeError, ValueError), match="argument #1"):
            launch(call, {1: torch.empty_like(call.arguments[1], dtype=torch.float32, device="meta")})
