"""The aten engine obeys the engine contract, and torch's CUDA ops behave as it expects, where no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.engine import aten
from ringattn.engine.aten import CPU, CUDNN, FLASH, AtenEngine, BlockOp, choose
from ringattn.engine.base import KV, Softmax, Visit
from ringattn.errors import UnsupportedError
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS
from tests.contract.engine_trial import SCALE, Trial

HOST = torch.device("cpu")
CUDA = torch.device("cuda", 0)


class TestAtenOnCpu(EngineContract):
    """The tests of the engine contract for the CPU op. Softcap must be refused."""

    softcap = False

    def engine(self) -> AtenEngine:
        return AtenEngine(HOST)


class TestAtenWithSquareCausalOnly(EngineContract):
    """The tests of the engine contract with tiles cut as for the CUDA ops, whose causal rectangles must be square.

    The CPU op computes them.
    """

    softcap = False

    def engine(self) -> AtenEngine:
        return AtenEngine(CUDA)


@pytest.mark.parametrize("name", ["zigzag", "window", "dilated", "wider-keys", "wider-values", "odd-dims"])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("scale", [SCALE, -SCALE, 0.0])
def test_an_op_with_the_requirements_of_cuda(
    name: str, scale: float, with_dlse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine calls an op only with operands that the CUDA ops accept.

    A stand-in asserts the requirements of the CUDA ops, and computes on the CPU.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        assert (not causal or q.shape[2] == k.shape[2]) and scale >= torch.finfo(torch.float32).tiny
        out, lse = CPU.forward(q, k, v, causal, scale)
        return out, lse.contiguous()

    def backward(*operands: Tensor | bool | float) -> tuple[Tensor, Tensor, Tensor]:
        assert all(x.shape[-1] % 8 == 0 for x in operands[:5] if isinstance(x, Tensor))
        assert isinstance(operands[-1], float) and operands[-1] >= torch.finfo(torch.float32).tiny
        return CPU.backward(*operands)  # type: ignore[arg-type]

    strict = BlockOp("strict", forward, backward, True, True, 8, 256)
    monkeypatch.setattr(aten, "OPS", {"cpu": (strict,)})
    monkeypatch.setattr(aten, "choose", lambda device, dtype, dim: strict)
    odd_dims = SCENARIOS["causal-more-queries"]._replace(d_k=13, d_v=13)
    trial = Trial(SCENARIOS.get(name, odd_dims), torch.float64, with_dlse, scale=scale)
    trial.check(trial.run(AtenEngine(HOST)), 1e-10)


@pytest.mark.parametrize("flag", [False, True], ids=["missing", "too late"])
def test_a_wrong_first_flag_gives_a_wrong_result(flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests detect wrong flags for the first step on a row.

    A missing flag leaves NaN in uninitialized rows. A flag that is set again by a later step overwrites earlier sums.
    """
    trial = Trial(SCENARIOS["whole-zigzag-pass"], torch.float64, False)
    trial.check(trial.run(AtenEngine(HOST), Visit(overwrite=True)), 1e-10)
    monkeypatch.setattr(aten, "first_pieces", lambda steps, _: [(flag,) * len(step) for step in steps])
    for visit in (Visit(), Visit(overwrite=True)):
        with pytest.raises(AssertionError):
            trial.check(trial.run(AtenEngine(HOST), visit), 1e-10)


@pytest.mark.parametrize("sinks", [False, True])
def test_falls_back_to_plain_in_a_pass_with_an_uninitialized_state(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no op supports a call, the plain engine computes it in the same pass, with the same results.

    It initialises the rows that no step has set yet, with their sinks.
    """
    trial, runs = Trial(SCENARIOS["whole-pass"], torch.float64, True), []
    trial.sinks = torch.linspace(-1.0, 2.0, trial.scenario.heads) if sinks else None
    for op in (CPU, None):
        monkeypatch.setattr(aten, "choose", lambda device, dtype, dim, op=op: op)
        runs.append(trial.run(AtenEngine(HOST)))
    for name, x in runs[0].items():
        torch.testing.assert_close(runs[1][name], x, rtol=0, atol=1e-10, equal_nan=True)
        assert x.nan_to_num(0.0).abs().sum() > 0


@pytest.mark.parametrize(
    ("capability", "cudnn", "dtype", "dim", "op"),
    [
        ((9, 0), 91900, torch.bfloat16, 128, CUDNN),
        ((10, 0), 91900, torch.float16, 64, CUDNN),
        ((9, 0), 91500, torch.bfloat16, 128, FLASH),
        ((9, 0), None, torch.bfloat16, 128, FLASH),
        ((9, 0), 91900, torch.bfloat16, 136, FLASH),
        ((8, 0), 91900, torch.bfloat16, 128, FLASH),
        ((12, 0), 91900, torch.bfloat16, 128, FLASH),
        ((8, 0), 91900, torch.bfloat16, 264, None),
        ((7, 5), 91900, torch.float16, 64, None),
        ((6, 1), 91900, torch.float16, 64, None),
        ((9, 0), 91900, torch.float32, 64, None),
        ((9, 0), 91900, torch.float64, 64, None),
    ],
)
def test_choice_of_op(
    capability: tuple[int, int],
    cudnn: int | None,
    dtype: torch.dtype,
    dim: int,
    op: BlockOp | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aten, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    assert choose(CUDA, dtype, dim) is op
    assert choose(HOST, dtype, dim) is CPU


def test_cudnn_is_not_chosen_under_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic algorithms the flash op is chosen, because cuDNN's backward pass adds in no fixed order."""
    monkeypatch.setattr(aten, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose(CUDA, torch.bfloat16, 128) is FLASH
    assert choose(HOST, torch.bfloat16, 128) is CPU


def test_single_keys_do_not_go_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rectangle with a single key is computed by the flash op, because torch does not run cuDNN's attention on it."""
    lengths = []

    def recording(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        lengths.append(k.shape[2])
        return CPU.forward(q, k, v, causal, scale)

    monkeypatch.setattr(aten, "FLASH", FLASH._replace(forward=recording, backward=CPU.backward))
    monkeypatch.setattr(aten, "choose", lambda *_: CUDNN._replace(forward=CPU.forward, backward=CPU.backward))
    Trial(SCENARIOS["one-pair"], torch.float32, False).run(AtenEngine(CUDA))
    assert lengths == [1]
    Trial(SCENARIOS["full"], torch.float32, False).run(AtenEngine(CUDA))
    assert lengths == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32_on_the_cpu(dtype: torch.dtype) -> None:
    half, single = (Trial(SCENARIOS["zigzag"], x, False) for x in (dtype, torch.float32))
    single.q, single.kvs = half.q.float(), [KV(kv.k.float(), kv.v.float(), kv.first_head) for kv in half.kvs]
    ours, theirs = (trial.run(AtenEngine(HOST))["out"].nan_to_num(7.0) for trial in (half, single))
    assert torch.equal(ours, theirs.to(dtype))


def test_strided_operands_are_not_copied() -> None:
    """For float32 and equal head dimensions, the op receives views of the caller's memory."""
    seen: list[int] = []
    engine, trial = AtenEngine(HOST), Trial(SCENARIOS["zigzag"], torch.float32, False)

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        seen.extend(x.untyped_storage().data_ptr() for x in (q, k, v))
        return CPU.forward(q, k, v, causal, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten, "choose", lambda *_: CPU._replace(forward=forward))
        trial.run(engine)
    storages = {x.untyped_storage().data_ptr() for x in (trial.q, *(x for kv in trial.kvs for x in kv[:2]))}
    assert seen and set(seen) <= storages


@pytest.mark.parametrize(("d_k", "d_v"), [(8, 1), (2, 1), (1, 1), (1, 8)])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_a_single_column_with_batches_innermost_is_padded_correctly(d_k: int, d_v: int, with_dlse: bool) -> None:
    """Operands with a head dimension of 1 and batches innermost in memory are padded without error.

    They look like channels_last tensors. Torch's `pad` and `cat` would keep these strides, which the op misreads.
    """
    scenario = SCENARIOS["causal"]._replace(d_k=d_k, d_v=d_v, batch=3, memory="batches")
    trial = Trial(scenario, torch.float64, with_dlse)
    trial.check(trial.run(AtenEngine(HOST)), 1e-10)


def test_softcap_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"softcap=30\.0.*plain"):
        AtenEngine(HOST).prepare([()], Softmax(0.125, 1, 30.0), 1, 1)


# --- torch's block ops on its meta kernels: shapes, strides and dtypes that the aten engine relies on ----------------


ops = torch.ops.aten
BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 37, 53, 64
HALF, SINGLE = torch.bfloat16, torch.float32
LSE = BATCH, HEADS, ROWS
# The order of the axes of (batch, heads, rows, dim) in memory: contiguous, as in a user's tensor, as in a message.
MEMORY = {"heads first": (0, 1, 2, 3), "tokens": (0, 2, 1, 3), "records": (2, 0, 1, 3)}


def meta(*shape: int, dtype: torch.dtype = HALF, memory: str = "heads first") -> Tensor:
    """Return a tensor (batch, heads, rows, dim) without data, with the strides of the memory order `memory`."""
    order = MEMORY[memory]
    tensor = torch.empty([shape[axis] for axis in order], dtype=dtype, device="meta")
    return tensor.permute([order.index(axis) for axis in range(4)])


def operands(memory: str = "heads first", dtype: torch.dtype = HALF) -> list[Tensor]:
    """Return q, k and v without data; several query heads share a K/V head."""
    shapes = (BATCH, HEADS, ROWS, DIM), *[(BATCH, KV_HEADS, KEYS, DIM)] * 2
    return [meta(*shape, dtype=dtype, memory=memory) for shape in shapes]


def shape_of(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.dtype


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("op", [CPU, FLASH, CUDNN], ids=lambda op: op.name)
def test_every_block_op_returns_the_same_shapes_dtypes_and_strides(op: BlockOp, memory: str) -> None:
    """Each op's out has the shape and strides of q, and its gradients have the shapes of q, k and v.

    So gradients of K/V heads are already summed over the query heads of the group.
    """
    q, k, v = operands(memory)
    out, lse = op.forward(q, k, v, False, 0.1)
    assert shape_of(out) == (q.shape, HALF) and out.stride() == q.stride() and shape_of(lse) == (LSE, SINGLE)
    if op is CPU:
        q, k, v = operands(memory, SINGLE)
    grads = op.backward(q, q, k, v, q, torch.empty(LSE, device="meta"), False, 0.1)
    assert [shape_of(x) for x in grads] == [shape_of(x) for x in (q, k, v)]
    assert op is CPU or [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]


@pytest.mark.parametrize("op", [FLASH, CUDNN], ids=lambda op: op.name)
def test_backward_receives_tensors_like_those_of_forward(op: BlockOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's backward receives an lse and a random state as the op's forward returns them.

    Their shapes and dtypes are equal, and lse also has the strides of forward's, although the engine's merged lse has
    other strides.
    """
    arguments: list[Any] = []

    def backward(*positional: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        arguments.extend(positional)
        return q, k, v

    q, k, v = operands()
    if op is FLASH:
        forward_results = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=0.1)
    else:
        forward_results = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, scale=0.1)
    recording = SimpleNamespace(
        _scaled_dot_product_flash_attention_backward=backward, _scaled_dot_product_cudnn_attention_backward=backward
    )
    monkeypatch.setattr(aten, "ops", recording)
    op.backward(q, q, k, v, q, torch.empty(ROWS, BATCH, HEADS, device="meta").permute(1, 2, 0), False, 0.1)
    assert (shape_of(arguments[5]), arguments[5].stride()) == (
        shape_of(forward_results[1]),
        forward_results[1].stride(),
    )
    states = [x for x in arguments[6:] if isinstance(x, Tensor)]
    assert [shape_of(x) for x in states] == [shape_of(x) for x in forward_results[6:8]]


@pytest.mark.parametrize("memory", MEMORY)
def test_cudnns_backward_receives_out_and_dout_in_a_layout_that_follows_from_q(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's backward receives out and dout in the same layout for all layouts of the caller's tensors.

    Torch reuses a cuDNN graph for calls that differ only in the strides of out and dout, but the graph was compiled for
    the strides of the first call.
    """
    received: list[Tensor] = []

    def backward(*positional: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        received.extend((positional[0], positional[4]))
        return q, k, v

    monkeypatch.setattr(aten, "ops", SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward))
    q, k, v = operands(memory)
    lse, values = torch.empty(LSE, device="meta"), torch.arange(q.numel(), dtype=HALF).reshape(q.shape)
    orders = [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)]
    layouts = [values.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3) for order in orders]
    gaps = torch.stack([values, values], -1)[..., 0]
    for dout in (*layouts, gaps):
        for out in (*layouts, gaps):
            CUDNN.backward(dout, q, k, v, out, lse, False, 0.1)
    assert {x.stride() for x in received} == {received[0].stride()} and all(torch.equal(x, values) for x in received)
