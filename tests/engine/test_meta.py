"""What torch's block ops return, read from its meta kernels: each assertion is a trap the engines are built around.

Shapes, strides and dtypes only: the meta kernels compute nothing and check little, so that whether a CUDA kernel takes
grouped heads or how it aligns causal is left to the tests that need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.engine import aten
from ringattn.engine.aten import CPU, CUDNN, FLASH, BlockOp

ops = torch.ops.aten
BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 37, 53, 64
HALF, SINGLE = torch.bfloat16, torch.float32
LSE = BATCH, HEADS, ROWS
# Orders of (batch, heads, rows, dim) in memory: as the op thinks, a user's tensor, a received message.
MEMORY = {"heads first": (0, 1, 2, 3), "tokens": (0, 2, 1, 3), "records": (2, 0, 1, 3)}


def meta(*shape: int, dtype: torch.dtype = HALF, memory: str = "heads first") -> Tensor:
    """(batch, heads, rows, dim) without data, in memory of that order."""
    order = MEMORY[memory]
    made = torch.empty([shape[axis] for axis in order], dtype=dtype, device="meta")
    return made.permute([order.index(axis) for axis in range(4)])


def operands(memory: str = "heads first", dtype: torch.dtype = HALF) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with grouped heads."""
    kv = (BATCH, KV_HEADS, KEYS, DIM)
    return (
        meta(BATCH, HEADS, ROWS, DIM, dtype=dtype, memory=memory),
        meta(*kv, dtype=dtype, memory=memory),
        meta(*kv, dtype=dtype, memory=memory),
    )


def shape_of(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.dtype


def cudnn(*given: Tensor) -> tuple[Any, ...]:
    return ops._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, False, scale=0.1)


def flash(*given: Tensor) -> tuple[Any, ...]:
    return ops._scaled_dot_product_flash_attention(*given, 0.0, False, scale=0.1)


def on_cpu(*given: Tensor) -> tuple[Any, ...]:
    return ops._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, False, scale=0.1)


# --- lse -------------------------------------------------------------------------------------------------------------


def test_cudnn_gives_lse_a_last_axis_of_one() -> None:
    assert shape_of(cudnn(*operands())[1]) == ((*LSE, 1), SINGLE)


def test_flash_gives_lse_as_the_engines_keep_it() -> None:
    lse = flash(*operands())[1]
    assert shape_of(lse) == (LSE, SINGLE) and lse.is_contiguous()


@pytest.mark.parametrize(("dtype", "expected"), [(HALF, SINGLE), (SINGLE, SINGLE), (torch.float64, torch.float64)])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_cpu_op_gives_lse_in_the_accumulator_dtype(device: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    """Rounding a float64 lse would cost the fp64 engine its exactness. The op is here: it is asked itself, too."""
    given = [torch.zeros(x.shape, dtype=dtype, device=device) for x in operands()]
    out, lse = on_cpu(*given)
    assert shape_of(lse) == (LSE, expected) and out.dtype == dtype


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_cpu_op_gives_lse_transposed_in_memory(device: str) -> None:
    """(batch, rows, heads) underneath: whoever reads it flat reads other rows."""
    lse = on_cpu(*(torch.zeros(x.shape, dtype=SINGLE, device=device) for x in operands()))[1]
    assert lse.stride() == (ROWS * HEADS, 1, HEADS)


# --- grouped heads, strides, random state ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", [CPU, FLASH, CUDNN], ids=lambda op: op.name)
def test_gradients_of_grouped_heads_come_grouped(op: BlockOp) -> None:
    """(batch, K/V heads, ...): nothing is left to add up over the group."""
    q, k, v = operands(dtype=SINGLE if op is CPU else HALF)
    lse = torch.empty(LSE, device="meta")
    grads = op.backward(q, q, k, v, q, lse, False, 0.1)
    assert [shape_of(x) for x in grads] == [shape_of(x) for x in (q, k, v)]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("op", [CPU, FLASH, CUDNN], ids=lambda op: op.name)
def test_outputs_lie_in_memory_as_the_queries_do(op: BlockOp, memory: str) -> None:
    q, k, v = operands(memory)
    assert op.forward(q, k, v, False, 0.1)[0].stride() == q.stride()


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("op", [FLASH, CUDNN], ids=lambda op: op.name)
def test_gradients_lie_in_memory_as_their_inputs_do(op: BlockOp, memory: str) -> None:
    q, k, v = operands(memory)
    grads = op.backward(q, q, k, v, q, torch.empty(LSE, device="meta"), False, 0.1)
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]


@pytest.mark.parametrize("memory", MEMORY)
def test_what_lies_rows_first_whatever_it_was_given(memory: str) -> None:
    """Gradients of the CPU op: (batch, rows, heads, dim) underneath."""
    q, k, v = operands(memory)
    rows_first = (ROWS * HEADS * DIM, DIM, HEADS * DIM, 1)
    assert CPU.backward(q, q, k, v, q, torch.empty(LSE, device="meta"), False, 0.1)[0].stride() == rows_first


def test_the_random_state_of_flash_is_two_unsigned_words() -> None:
    found = flash(*operands())
    assert shape_of(found[6]) == ((2,), torch.uint64) and shape_of(found[7]) == ((), torch.uint64)


def test_the_random_state_of_cudnn_is_two_signed_numbers() -> None:
    assert [shape_of(x) for x in cudnn(*operands())[6:8]] == [((), torch.int64)] * 2


# --- what the engines make of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("op", [CPU, FLASH, CUDNN], ids=lambda op: op.name)
def test_every_block_op_gives_out_and_lse_alike(op: BlockOp, memory: str) -> None:
    q, k, v = operands(memory)
    out, lse = op.forward(q, k, v, False, 0.1)
    assert shape_of(out) == ((BATCH, HEADS, ROWS, DIM), HALF) and shape_of(lse) == (LSE, SINGLE)


@pytest.mark.parametrize(("op", "forward"), [(FLASH, flash), (CUDNN, cudnn)], ids=["cuda-flash", "cudnn"])
def test_backward_is_given_what_forward_would_have_kept(
    op: BlockOp, forward: Callable[..., tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged lse, whatever its strides, and a random state: in the shapes, dtypes and strides of forward's."""
    given: list[Any] = []

    def backward(*arguments: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        given.extend(arguments)
        return q, k, v

    q, k, v = operands()
    found = forward(q, k, v)
    recording = SimpleNamespace(
        _scaled_dot_product_flash_attention_backward=backward, _scaled_dot_product_cudnn_attention_backward=backward
    )
    monkeypatch.setattr(aten, "ops", recording)
    op.backward(q, q, k, v, q, torch.empty(ROWS, BATCH, HEADS, device="meta").permute(1, 2, 0), False, 0.1)
    assert (shape_of(given[5]), given[5].stride()) == (shape_of(found[1]), found[1].stride())
    states = [x for x in given[6:] if isinstance(x, Tensor)]
    assert [shape_of(x) for x in states] == [shape_of(x) for x in found[6:8]]


def test_the_cpu_op_refuses_unequal_head_dimensions() -> None:
    """Which is why the narrower operand is padded."""
    q, k, v = (torch.zeros(1, 1, 4, dim) for dim in (8, 8, 16))
    with pytest.raises(RuntimeError, match="same head size"):
        on_cpu(q, k, v)


def test_the_cpu_op_aligns_causal_to_the_top_left() -> None:
    """The CUDA ops align it to the bottom right and are asked for squares only."""
    q, k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8), torch.arange(5.0).view(1, 1, 5, 1).expand(1, 1, 5, 8)
    out, _ = CPU.forward(q, k, v, True, 1.0)
    assert out[0, 0, :, 0].tolist() == [0.0, 0.5]
