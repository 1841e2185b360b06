"""Positions inside context_parallel: those from the caller are exact, local ones that a model counts are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn import InputError, Ring
from ringattn.adapters.context_parallel import context_parallel
from ringattn.testing import run_ranks

TOKENS = 26


class Model(nn.Module):
    """One layer with rotary positions. Without `positions` it counts them from 0, as x-transformers does."""

    def __init__(self, make_range: Callable[[int], Tensor] = torch.arange) -> None:
        super().__init__()
        self.make_range = make_range
        generator = torch.Generator().manual_seed(0)
        self.qkv = nn.Parameter(torch.randn(8, 3, 2, 8, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = self.make_range(x.shape[1])
        q, k, v = torch.einsum("btd,dchf->cbhtf", x, self.qkv)
        angles = positions[:, None] / 10.0 ** (torch.arange(0, 8, 2).double() / 8)
        q, k = (torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
                for a, b in (x.chunk(2, -1) for x in (q, k)))  # fmt: skip
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(1, count, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expected(count: int = TOKENS) -> Tensor:
    """Return the gradient of the weight in one process."""
    model = Model()
    model(tokens(count), torch.arange(count)).sin().sum().backward()
    assert model.qkv.grad is not None
    return model.qkv.grad


def over_ranks(call: Callable[[Model, Tensor, Tensor, Any], Tensor], provided: bool, count: int = TOKENS,
               model: Callable[[], Model] = Model) -> list[Tensor]:  # fmt: skip
    """Return the gradient over two ranks, by rank.

    `call`: calls the model, (model, tokens, positions, sequence) -> output. `provided`: add positions to the buffers.
    """

    def body(ring: Ring) -> Tensor:
        ours, x, positions = model(), tokens(count), torch.arange(count)
        buffers, dims = ([x, positions], [1, 0]) if provided else ([x], [1])
        with context_parallel(ring, buffers=buffers, buffer_seq_dims=dims) as seq:
            call(ours, x, positions, seq).sin().sum().backward()
        assert ours.qkv.grad is not None
        ring.all_reduce([ours.qkv.grad])
        return ours.qkv.grad

    return run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("count", [TOKENS, 27])
def test_positions_among_the_buffers(count: int) -> None:
    for grad in over_ranks(lambda model, x, positions, seq: model(x, positions), True, count):
        torch.testing.assert_close(grad, expected(count), rtol=1e-9, atol=1e-10)
    for grad in over_ranks(lambda model, x, positions, seq: model(x, seq.positions()), False, count):
        torch.testing.assert_close(grad, expected(count), rtol=1e-9, atol=1e-10)


RANGES: dict[str, Callable[[int], Tensor]] = {
    "end": torch.arange,
    "start and end": lambda count: torch.arange(0, count),
    "names": lambda count: torch.arange(start=0, end=count, step=1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", RANGES)
def test_positions_of_a_local_length_are_refused(name: str) -> None:
    """`torch.arange` of the local length is refused, also if the ranks have different numbers of tokens."""
    for count in (TOKENS, 27):
        message = rf"torch.arange\(1[34]\) inside .* add torch.arange\({count}\) to the buffers"
        with pytest.raises(InputError, match=message):
            over_ranks(lambda model, x, positions, seq: model(x), False, count, lambda: Model(RANGES[name]))


def test_positions_that_compiled_code_makes_are_refused() -> None:
    def call(model: Model, x: Tensor, positions: Tensor, seq: Any) -> Tensor:
        out: Tensor = torch.compile(model, backend="eager")(x)
        return out

    with pytest.raises(InputError, match=r"Model.forward calls torch.arange\(13\)"):
        over_ranks(call, False)


def test_other_ranges_stay() -> None:
    """Ranges are unchanged if their length differs, attention is local, one rank runs, or positions are provided."""

    def call(model: Model, x: Tensor, positions: Tensor, seq: Any) -> Tensor:
        for start, end, step in ((0, TOKENS, 1), (0, 14, 1), (1, 13, 1), (1, 14, 1), (0, 13, 2)):
            torch.arange(start, end, step)
        with seq.ring.activate(None):
            torch.arange(x.shape[1])
        return model(x, seq.positions())

    def with_positions(model: Model, x: Tensor, positions: Tensor, seq: Any) -> Tensor:
        return model(x[:, torch.arange(x.shape[1])], positions)

    for grad in (*over_ranks(call, False), *over_ranks(with_positions, True)):
        torch.testing.assert_close(grad, expected(), rtol=1e-9, atol=1e-10)
    model, x = Model(), tokens()
    with Ring() as ring, context_parallel(ring, buffers=[x], buffer_seq_dims=[1]):
        model(x).sin().sum().backward()
    torch.testing.assert_close(model.qkv.grad, expected(), rtol=1e-9, atol=1e-10)


def test_positions_of_documents_among_the_buffers() -> None:
    """A buffer of positions that restart in each document is accepted. A buffer of other integers is no substitute."""
    cuts = [0, 10, TOKENS]
    places = torch.cat([torch.arange(10), torch.arange(TOKENS - 10)])

    def body(ring: Ring, numbers: Tensor, is_refused: bool) -> None:
        x, buffer = tokens(), numbers.clone()
        with context_parallel(ring, buffers=[x, buffer], buffer_seq_dims=[1, 1], cu_seqlens=cuts):
            for _ in range(2):  # the second call is refused too, after the first refusal was caught
                message = r"add torch.arange\(26\) to the buffers"
                with pytest.raises(InputError, match=message) if is_refused else nullcontext():
                    torch.arange(x.shape[1])

    run_ranks(2, lambda ring: body(ring, places.expand(2, -1), False), timeout_s=10.0)
    run_ranks(2, lambda ring: body(ring, torch.ones(2, TOKENS, dtype=torch.long), True), timeout_s=10.0)
