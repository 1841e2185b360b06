"""Layers of dilated attention on a ring and on one device: options, equal results, copies, state dicts and warnings."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn import Ring, RingMultiheadAttention
from ringattn.errors import InputError
from ringattn.layers.dilated import (
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)
from ringattn.layers.projection import project_qkv
from ringattn.layers.rotary import Rope
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.executor import Executor
from ringattn.testing import run_ranks
from tests.core.dilated_reference import dilated_reference
from tests.face import errors

TOKENS, EMBED, HEADS = 23, 24, 4
LENGTHS, RATES = (4, 12), (1, 3)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, DOUT = random(2, TOKENS, EMBED, seed=1), random(2, TOKENS, EMBED, seed=2)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-block": {"causal": True, "offset": "block", "scale": 0.3},
    "kv-head-softcap": {"offset": "kv_head", "softcap": 2.0},
    "rotated": {"offset": "layer_rotated", "layer": 3, "causal": True},
    "torchscale": {"offset": "block", "grad": "detached", "tail": "zero_pad"},
}

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "longnet": {"causal": True, "layer_norm": True, "rope": "interleaved", "xpos_scale": 5.0},
    "llm": {"num_kv_heads": 2, "qk_norm": True, "norm_eps": 0.1, "rope": "neox", "rope_base": 500.0, "head_dim": 10},
    "torchscale": {"bias": False, "layer_norm": True, **OPTIONS["torchscale"]},
    "rest": {"causal": True, "offset": "layer_rotated", "layer": 1, "softcap": 2.0, "scale": 0.3, "num_kv_heads": 1},
}


def drawn(module: nn.Module) -> nn.Module:
    """Set the parameters to random numbers, the same in every call, and return the module."""
    generator = torch.Generator().manual_seed(5)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    return module


def single(**options: Any) -> MultiheadDilatedAttention:
    layer = MultiheadDilatedAttention(EMBED, HEADS, LENGTHS, RATES, dtype=torch.float64, **options)
    assert drawn(layer) is layer
    return layer


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def close(leaf_tensors: Any, reference: Any) -> None:
    torch.testing.assert_close(leaf_tensors, reference, rtol=1e-10, atol=1e-10)


# --- attention without projections -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:branch")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_arrive(name: str) -> None:
    q, k, v = random(2, TOKENS, 4, 6, seed=3), random(2, TOKENS, 2, 6, seed=4), random(2, TOKENS, 2, 6, seed=5)
    dout, inputs, reference = random(2, TOKENS, 4, 6, seed=6), leaves(q, k, v), leaves(q, k, v)
    out = DilatedAttention(LENGTHS, RATES, **OPTIONS[name])(*inputs)
    expected, _ = dilated_reference(*reference, segment_lengths=LENGTHS, dilation_rates=RATES, **OPTIONS[name])
    close(out, expected)
    close(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, reference, dout))


@pytest.mark.parametrize("world_size", [2, 3])
def test_attention_over_ranks(world_size: int) -> None:
    q = random(2, TOKENS, 4, 6, seed=3)
    attend = RingDilatedAttention(LENGTHS, RATES, causal=True, schedule="all_gather")
    schedules: list[str] = []

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(TOKENS, layout="striped")
        executor_of = ring.executor_of

        def noted(call: AttentionCall, backward: bool) -> Executor:
            schedules.append(call.route.name)
            return executor_of(call, backward)

        ring.executor_of = noted  # type: ignore[method-assign]
        return seq.gather(attend(*[seq.shard(q)] * 3, seq))

    reference = DilatedAttention(LENGTHS, RATES, causal=True)(q, q, q)
    for out in run_ranks(world_size, body):
        close(out, reference)
    assert schedules == ["all_gather"] * world_size
    assert "segment_lengths=(4, 12)" in repr(attend) and "schedule='all_gather'" in repr(attend)


# --- the layers ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:branch")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_call_between_its_projections(name: str) -> None:
    layer, options = single(**LAYERS[name]), dict(LAYERS[name])
    norm_eps, rope, xpos = options.pop("norm_eps", 1e-6), options.pop("rope", None), options.pop("xpos_scale", None)
    base = options.pop("rope_base", 10_000.0)
    for option in ("num_kv_heads", "head_dim", "bias", "qk_norm", "layer_norm"):
        options.pop(option, None)

    def by_hand(ring: Ring) -> Tensor:
        q, k, v = project_qkv(
            X, layer.in_proj_weight, layer.in_proj_bias, HEADS, layer.num_kv_heads, layer.head_dim,
            q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=norm_eps, rope=Rope(rope, base, xpos) if rope else None,
            positions=torch.arange(TOKENS) if rope else None, length=TOKENS,
        )  # fmt: skip
        seq = ring.sequence(TOKENS)
        heads = ring.dilated_attention(q, k, v, seq, segment_lengths=LENGTHS, dilation_rates=RATES, **options)
        heads = heads.flatten(2)
        if layer.layer_norm is not None:
            heads = F.layer_norm(heads, heads.shape[2:], layer.layer_norm.weight, layer.layer_norm.bias)
        return F.linear(heads, layer.out_proj.weight, layer.out_proj.bias).detach()

    (reference,) = run_ranks(1, by_hand)
    close(layer(X).detach(), reference)


@pytest.mark.filterwarnings("ignore:branch")
@pytest.mark.parametrize(("world_size", "layout"), [(2, "contiguous"), (3, "zigzag"), (2, "striped")])
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_over_ranks_is_the_layer_alone(name: str, world_size: int, layout: str) -> None:
    alone = single(**LAYERS[name])
    (x,) = leaves(X)
    out = alone(x)
    out.backward(DOUT)
    assert x.grad is not None

    def body(ring: Ring) -> dict[str, Tensor]:
        layer = RingMultiheadDilatedAttention(EMBED, HEADS, LENGTHS, RATES, dtype=torch.float64, **LAYERS[name])
        layer.load_state_dict(alone.state_dict(), strict=True)
        seq = ring.sequence(TOKENS, layout=layout)
        (x,) = leaves(X)
        attended = layer(seq.shard(x), seq)
        attended.backward(seq.shard(DOUT))
        grads = {key: weight.grad for key, weight in layer.named_parameters()} | {"x": x.grad}
        actual = {key: grad for key, grad in grads.items() if grad is not None}
        ring.all_reduce(list(actual.values()))
        return {**actual, "out": seq.gather(attended.detach())}

    reference = {key: weight.grad for key, weight in alone.named_parameters()} | {"x": x.grad, "out": out.detach()}
    for actual in run_ranks(world_size, body):
        assert actual.keys() == reference.keys()
        for key, value in reference.items():
            close(actual[key], value)


def test_state_loads_both_ways_and_from_other_layers() -> None:
    options: dict[str, Any] = {"num_kv_heads": 2, "qk_norm": True, "layer_norm": True}
    alone, ring = (
        kind(EMBED, HEADS, LENGTHS, RATES, **options)
        for kind in (MultiheadDilatedAttention, RingMultiheadDilatedAttention)
    )
    alone(X.float())
    ring.load_state_dict(alone.state_dict(), strict=True)
    alone.load_state_dict(ring.state_dict(), strict=True)
    dense = RingMultiheadAttention(EMBED, HEADS, 2, bias=True, qk_norm=True)
    assert set(alone.state_dict()) - set(dense.state_dict()) == {"layer_norm.weight", "layer_norm.bias"}
    alone.load_state_dict(dense.state_dict(), strict=False)
    assert DilatedAttention(LENGTHS, RATES).state_dict() == {}


def test_new_layers_are_drawn_well() -> None:
    module = MultiheadDilatedAttention(EMBED, HEADS, LENGTHS, RATES, num_kv_heads=2, qk_norm=True, layer_norm=True)
    drawn(module)
    module.reset_parameters()
    assert module.in_proj_weight.std().item() == pytest.approx((2 / (48 + EMBED)) ** 0.5, rel=0.1)
    assert module.layer_norm.weight.unique().tolist() == [1] and not module.layer_norm.bias.any()


def test_xpos_too_short_for_the_sequence_is_refused_on_all() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        layer = RingMultiheadDilatedAttention(EMBED, HEADS, LENGTHS, RATES, rope="neox", xpos_scale=0.3)
        layer(seq.shard(X.float()), seq)

    assert all("use an xpos_scale of at least 1" in str(error) for error in errors(body))


# --- layers on one device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_work_and_carry_no_ring(copied: Callable[[Any], Any]) -> None:
    for layer, inputs in (
        (single(causal=True), (X,)),
        (DilatedAttention(LENGTHS, RATES), [X.unflatten(2, (4, 6))] * 3),
    ):
        out = layer(*inputs)
        duplicate = copied(layer)
        assert torch.equal(duplicate(*inputs), out)
        assert duplicate.ring is not layer.ring and duplicate.ring.memory_info()["plans"] == 1
        layer.ring.close()
        assert torch.equal(copied(layer)(*inputs), out), "a copy opens its ring"


def test_a_layer_works_after_an_interrupted_call() -> None:
    layer = single(causal=True)
    expected = layer(X)
    with pytest.raises(KeyboardInterrupt), layer.ring.guarded():
        raise KeyboardInterrupt
    assert torch.equal(layer(X), expected)


def test_each_thread_has_a_ring() -> None:
    """A ring computes one pass at a time, and threads may call the layer at the same time."""
    layer = single(causal=True)
    expected = layer(X)

    def results(_: int) -> list[Tensor]:
        return [layer(X) for _ in range(10)]

    with ThreadPoolExecutor(3) as threads:
        assert threads.submit(lambda: layer.ring).result() is not layer.ring
        assert all(torch.equal(out, expected) for outs in threads.map(results, range(3)) for out in outs)


def test_a_layer_alone_joins_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    layer = single()
    assert layer(X).shape == X.shape and layer.ring.world_size == 1


def test_memory_info() -> None:
    layer_bytes = {
        "parameter_bytes": 2 * (48 * EMBED + EMBED * EMBED + 48 + EMBED),
        "kv_bytes_per_token": 2 * 2 * 6 * 2,
    }
    layer = MultiheadDilatedAttention(EMBED, HEADS, LENGTHS, RATES, num_kv_heads=2, dtype=torch.bfloat16)
    layer(X.bfloat16())
    assert (
        layer.get_memory_info() == {**layer_bytes, **layer.ring.memory_info()} and layer.get_memory_info()["plans"] == 1
    )
    with Ring() as ring:
        seq = ring.sequence(TOKENS)
        assert RingDilatedAttention(LENGTHS, RATES).get_memory_info(seq) == ring.memory_info()


# --- warnings and refusals -------------------------------------------------------------------------------------------


def test_branches_that_cannot_reach_every_query_are_warned_of_once() -> None:
    q = X.unflatten(2, (4, 6))
    attend = DilatedAttention((4, 16), (1, 8))
    with pytest.warns(UserWarning, match=r"\(w=16, r=8\): 4 heads have 4 of 8 offsets, so it reaches 50 %") as first:
        attend(q, q, q)
    with pytest.warns(UserWarning, match=r"2 K/V heads have 2 of 8 offsets, so it reaches 25 %") as built:
        layer = MultiheadDilatedAttention(EMBED, HEADS, (4, 16), (1, 8), num_kv_heads=2, offset="kv_head")
    assert len(first) == len(built) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(q, q, q)
        layer(X.float())
        DilatedAttention(LENGTHS, RATES)(q, q, q)  # reaches every query, so it does not warn
    with pytest.warns(UserWarning, match=r"no branch has r=1: 50 % of the rows"):
        RingMultiheadDilatedAttention(EMBED, HEADS, (4,), (2,))


@pytest.mark.parametrize("options", [{}, {"grad": "detached", "rope": "neox"}])
def test_a_wrong_input_of_one_rank_is_refused_on_all(options: dict[str, Any]) -> None:
    wrong: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda x: x[:, 1:], r"rank 1: x must be \(batch, 8, 24\), .* got \(2, 7, 24\); pass seq.shard"),
        (lambda x: x[0], r"rank 1: x must be \(batch, 8, 24\), .* got \(8, 24\)"),
        (lambda x: x.half(), "x is torch.float16, the weight is torch.float32"),
    ]
    for spoil, message in wrong:

        def body(ring: Ring, spoil: Callable[[Tensor], Tensor] = spoil) -> None:
            layer = RingMultiheadDilatedAttention(EMBED, HEADS, LENGTHS, RATES, **options)
            seq = ring.sequence(TOKENS)
            x = seq.shard(X.float())
            layer(spoil(x) if ring.rank == 1 else x, seq)

        raised = errors(body)
        assert all(isinstance(error, InputError) for error in raised)
        assert "rank 1 refused" in str(raised[0]) and re.search(message, str(raised[1]))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[0], r"takes \(batch, tokens, ...\) tensors, got \(23, 24\)"),
        (X[..., 1:], r"x must be \(batch, 23, 24\), .* got \(2, 23, 23\)"),
        ("x", "takes .* got str"),
        (X[None], r"x must be \(batch, 2, 24\)"),
    ],
)
def test_a_wrong_input_of_a_layer_alone(x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        single()(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xpos_scale": 512.0}, "xpos_scale=512.0 needs rotary positions"),
        ({"rope": "neox", "xpos_scale": -1.0}, "xpos_scale must be a positive number"),
        ({"dilation_rates": (1,)}, "every branch needs"),
        ({"offset": "modulo"}, "choose one of mod, block, kv_head, layer_rotated"),
        ({"offset": "layer_rotated"}, "layer"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    fitting = {"embed_dim": EMBED, "num_heads": HEADS, "segment_lengths": LENGTHS, "dilation_rates": RATES}
    with pytest.raises(InputError, match=message):
        MultiheadDilatedAttention(**{**fitting, **options})
