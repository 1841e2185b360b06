"""Functions over tiles of tokens give equal values and gradients, with the memory of one tile and no extra calls."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError
from ringattn.layers import tiled as offload
from ringattn.layers.tiled import Tiling, inputs_on_host, tiled


class FeedForward(nn.Module):
    """A feed-forward layer like Llama's, with dropout, which counts its calls."""

    def __init__(self, dim: int = 8, inner: int = 24, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(dim, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, dim, dtype=dtype)
        self.drop = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(part: nn.Module, x: Tensor, out: Tensor) -> list[Tensor | None]:
    """Return the gradients of `x` and the parameters for a loss that weights the output elements randomly."""
    part.zero_grad(), x.grad is None or x.grad.zero_()
    (out * drawn(*out.shape).to(out.dtype)).sum().backward(retain_graph=True)
    return [None if x.grad is None else x.grad.clone(), *(weight.grad for weight in part.parameters())]


@pytest.mark.parametrize("tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("again", [False, True])
def test_tiles_change_nothing(tokens: int, again: bool) -> None:
    part, x = FeedForward(), drawn(2, 7, 8).requires_grad_()
    tiled_part = copy.deepcopy(part)
    expected = part(x)
    reference = gradients(part, x, expected)

    def run(x: Tensor) -> Tensor:
        return tiled(Tiling(tiled_part, tokens), x, list(tiled_part.parameters()))

    actual = checkpoint(run, x, use_reentrant=False) if again else run(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    for grad, true_grad in zip(gradients(tiled_part, x, actual), reference, strict=True):
        torch.testing.assert_close(grad, true_grad, rtol=1e-12, atol=1e-13)
    # Each tile runs once in forward and once in backward. A checkpoint around `tiled` adds no third run, because its
    # recomputation stops before the function.
    assert tiled_part.calls == 2 * -(-14 // tokens)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    part, x = FeedForward(), drawn(9, 8)
    part.up.weight.requires_grad_(False)
    reference = gradients(part, x, part(x))
    actual = gradients(part, x, tiled(Tiling(part, 4), x, list(part.parameters())))
    assert actual[0] is None and actual[2] is None
    for grad, true_grad in zip(actual, reference, strict=True):
        torch.testing.assert_close(grad, true_grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rows", [0, 3, 11])
def test_sums_of_tiles(rows: int) -> None:
    head, x, labels = nn.Linear(8, 5, dtype=torch.float64), drawn(rows, 8).requires_grad_(), torch.arange(rows) % 5
    labels[::3] = -100  # every tile has a row without a label

    def loss(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(rows), labels, reduction="sum")

    expected = loss(x, labels)
    reference = torch.autograd.grad(expected, [x, *head.parameters()])
    actual = tiled(Tiling(loss, 3, summed=True), x, list(head.parameters()), [labels])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    for grad, true_grad in zip(torch.autograd.grad(actual, [x, *head.parameters()]), reference, strict=True):
        torch.testing.assert_close(grad, true_grad, rtol=1e-12, atol=1e-14)


def test_backward_draws_what_forward_drew() -> None:
    part, x = FeedForward(dropout=0.5), drawn(11, 8).requires_grad_()
    actual = tiled(Tiling(part, 4, draws=True), x, list(part.parameters()))
    state = torch.get_rng_state()
    got = gradients(part, x, actual)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    FeedForward(dropout=0.5)  # draws its weights, so that the generator has the same state as before `tiled`
    expected = torch.cat([part(rows) for rows in x.split(4)])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    for grad, true_grad in zip(got, gradients(part, x, expected), strict=True):
        torch.testing.assert_close(grad, true_grad, rtol=1e-12, atol=1e-13)


def test_autocast_is_that_of_the_forward() -> None:
    part, x = FeedForward(dtype=torch.float32), drawn(11, 8, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = x * 1  # no leaf: its cast would be cached, and the gradients of two uses added in bfloat16
        expected, actual = part(rows), tiled(Tiling(part, 16), rows, list(part.parameters()))
    assert actual.dtype == expected.dtype == torch.bfloat16 and torch.equal(actual, expected)
    reference = gradients(part, x, expected)
    for grad, true_grad in zip(
        gradients(part, x, actual), [w.clone() for w in reference if w is not None], strict=True
    ):
        torch.testing.assert_close(grad, true_grad, rtol=1e-6, atol=1e-6)


def test_sums_of_many_tiles_are_rounded_once() -> None:
    # Each of 512 tiles adds 1 to the gradient. A sum in bfloat16 would stop growing at 256.
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    tiled(Tiling(lambda rows: rows * weight, 1), x, [weight]).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 512


def test_a_tile_is_all_that_lives() -> None:
    part, x = FeedForward(8, 512, dtype=torch.float32), torch.zeros(4096, 8, requires_grad=True)
    peaks = []
    for tokens in (4096, 256):
        with StorageMeter() as meter:
            tiled(Tiling(part, tokens), x, list(part.parameters())).sum().backward()
        peaks.append(meter.peak_bytes)
        part.zero_grad(), setattr(x, "grad", None)
    inner = 4096 * 512 * 4
    assert peaks[0] > 4 * inner and peaks[1] < inner / 2 + 5 * x.nbytes


def test_a_function_that_returns_other_rows_is_an_error() -> None:
    with pytest.raises(InputError, match=r"^a tile of 4 rows became 1 rows"):
        tiled(Tiling(lambda rows: rows[:1], 4), drawn(8, 3), [])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_changed_meanwhile_is_an_error(frozen: bool) -> None:
    part, x = FeedForward(), drawn(9, 8)
    part.up.weight.requires_grad_(not frozen)
    out = tiled(Tiling(part, 4), x, list(part.parameters()))
    with torch.no_grad():
        part.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_state_changed_meanwhile_is_an_error() -> None:
    part, x, values = FeedForward(), drawn(9, 8).requires_grad_(), {"scale": 1, "training": True}

    def backward(**changes: object) -> None:
        tiling = Tiling(part, 4, state=lambda: {**values, "calls": part.calls})
        out = tiled(tiling, x, list(part.parameters()))
        values.update(changes)  # type: ignore[arg-type]
        out.sum().backward()

    backward()  # the function itself counts its calls
    with pytest.raises(RuntimeError, match=r"^scale, more changed between forward and backward of a function"):
        backward(scale=2, more=0)
    with pytest.raises(RuntimeError, match=r"^training changed"):
        backward(training=False)


@pytest.mark.parametrize("again", [False, True])
def test_hooks_of_weights_run_once_with_the_sum_of_all_tiles(again: bool) -> None:
    part, x = FeedForward(), drawn(9, 8).requires_grad_()
    tiled_part = copy.deepcopy(part)
    calls: list[str] = []
    for name, weight in tiled_part.named_parameters():
        weight.register_hook(lambda grad, name=name: calls.append(name))  # returns None, which keeps the gradient
    for module in (part, tiled_part):
        for weight in module.parameters():
            weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    reference = gradients(part, x, part(x))

    def run(x: Tensor) -> Tensor:
        return tiled(Tiling(tiled_part, 4), x, list(tiled_part.parameters()))

    actual = gradients(tiled_part, x, checkpoint(run, x, use_reentrant=False) if again else run(x))
    assert all(grad is not None and grad.abs().max() == 0.1 for grad in actual[1:])
    assert sorted(calls) == sorted(name for name, _ in tiled_part.named_parameters())
    for grad, true_grad in zip(actual, reference, strict=True):
        torch.testing.assert_close(grad, true_grad, rtol=1e-12, atol=1e-13)


def test_hooks_of_weights_stay_after_an_error() -> None:
    part, x = FeedForward(), drawn(9, 8)
    handle = part.up.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(RuntimeError, match="shape"), offload._without_hooks([part.up.weight]):
        torch.autograd.grad(part(x), [part.up.weight], drawn(1))
    true = torch.autograd.grad(part(x).sum(), [part.up.weight])[0]
    handle.remove()
    torch.testing.assert_close(true, 2 * torch.autograd.grad(part(x).sum(), [part.up.weight])[0])


def test_weights_without_version_counters_run_in_inference() -> None:
    with torch.inference_mode():
        part = FeedForward()
    part.requires_grad_(False)
    x = drawn(9, 8)
    assert torch.equal(tiled(Tiling(part, 9), x, list(part.parameters())), part(x))


# --- inputs on the host ----------------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which copies add "to N" and "from N", where N is the first number of the tensor."""
    events: list[str] = []
    to_host, from_host = offload.to_host, offload.from_host

    def logged_to(x: Tensor) -> offload.HostCopy:
        events.append(f"to {x.flatten()[0].item():g}")
        return to_host(x)

    def logged_from(copied: offload.HostCopy) -> offload.DeviceCopy:
        events.append(f"from {copied.host.flatten()[0].item():g}")
        return from_host(copied)

    monkeypatch.setattr(offload, "to_host", logged_to)
    monkeypatch.setattr(offload, "from_host", logged_from)
    monkeypatch.setattr(offload, "_latest", {})
    return events


def chain_of_three(first: int, events: list[str]) -> Tensor:
    """Return the output of three layers that square their input, each with its input on the host."""

    def layer(x: Tensor) -> Tensor:
        events.append(f"run {x.flatten()[0].item():g}")
        return x * x

    x = torch.full((2, 2), float(first), requires_grad=True)
    for _ in range(3):
        with inputs_on_host():
            x = checkpoint(layer, x, use_reentrant=False)
    return x


def test_an_input_is_copied_back_while_the_next_layer_runs_backward(copies: list[str]) -> None:
    out = chain_of_three(2, copies)
    assert copies == ["to 2", "run 2", "to 4", "run 4", "to 16", "run 16"]
    copies.clear()
    out.sum().backward(retain_graph=True)
    assert copies == ["from 16", "from 4", "run 16", "from 2", "run 4", "run 2"]
    copies.clear()
    out.sum().backward()  # a second pass copies all of them again
    assert copies == ["from 16", "from 4", "run 16", "from 2", "run 4", "run 2"]


def test_inputs_of_a_graph_without_a_backward_pass_are_not_copied_back(copies: list[str]) -> None:
    dropped = chain_of_three(2, copies)
    kept = chain_of_three(3, copies)
    del dropped
    gc.collect()
    copies.clear()
    kept.sum().backward()
    assert [event for event in copies if event.startswith("from")] == ["from 81", "from 9", "from 3"]


def test_graphs_of_two_micro_batches_copy_each_input_once(copies: list[str]) -> None:
    first, second = chain_of_three(2, copies), chain_of_three(3, copies)
    copies.clear()
    second.sum().backward()
    first.sum().backward()
    assert sorted(event for event in copies if event.startswith("from")) == sorted(
        f"from {number}" for number in (81, 9, 3, 16, 4, 2)
    )


def test_a_large_input_is_copied_back_when_it_is_used(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = chain_of_three(2, copies)
    monkeypatch.setattr(offload, "PREFETCH_BYTES", 15)  # an input has 16 bytes
    large = chain_of_three(3, copies)
    copies.clear()
    (out + large).sum().backward()
    of_large = [event for event in copies if event[-1] in "139"]
    assert of_large == ["from 81", "run 81", "from 9", "run 9", "from 3", "run 3"]
