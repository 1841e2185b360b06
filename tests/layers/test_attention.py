"""Attention layers give the results of one rank and of torch's layer, send keys early, and raise on all ranks."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringattn import (
    Ring,
    RingAttention,
    RingDilatedAttention,
    RingMultiheadAttention,
    RingMultiheadDilatedAttention,
    ShortConvolution,
    masks,
)
from ringattn.errors import ClosedError, InputError, RingError, UnsupportedError
from ringattn.layers import base
from ringattn.layers.projection import project, project_qkv
from ringattn.layers.rotary import Rope
from ringattn.runtime import executor as executor_module
from ringattn.testing import dense_attention, run_ranks
from tests.face import errors

TOKENS, EMBED, HEADS = 23, 24, 4
X = torch.randn(2, TOKENS, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DOUT = torch.randn(2, TOKENS, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-rope": {"causal": True, "rope": "neox"},
    "llm": {"num_kv_heads": 2, "bias": False, "qk_norm": True, "rope": "neox", "rope_base": 500.0, "causal": True,
            "head_dim": 10},
    "gpt-oss": {"num_kv_heads": 1, "rope": "interleaved", "window": (5, 0), "sinks": True},
    "gemma": {"softcap": 2.0, "scale": 0.3, "causal": True, "qk_norm": True, "norm_eps": 0.1},
}  # fmt: skip


def layer(**options: Any) -> RingMultiheadAttention:
    """Return a float64 layer. Its weights are random, but the same in every call."""
    module = RingMultiheadAttention(EMBED, HEADS, **options).double()
    generator = torch.Generator().manual_seed(5)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    return module


def trained(ring: Ring, options: dict[str, Any], layout: str, tokens: int) -> dict[str, Tensor]:
    """Run a layer forward and backward. Return the gathered output, and the gradients summed over the ranks.

    The gradients are those of the input and of the parameters.
    """
    module = layer(**options)
    seq = ring.sequence(tokens, layout=layout)
    x = X[:, :tokens].clone().requires_grad_()
    out = module(seq.shard(x), seq)
    out.backward(seq.shard(DOUT[:, :tokens]))
    grads = {name: weight.grad for name, weight in module.named_parameters()}
    assert x.grad is not None and all(grad is not None for grad in grads.values())
    ring.all_reduce([x.grad, *(grad for grad in grads.values() if grad is not None)])
    return {"out": seq.gather(out.detach()), "x": x.grad, **{k: grad for k, grad in grads.items() if grad is not None}}


@pytest.mark.parametrize(
    ("world_size", "layout", "tokens"),
    [(2, "contiguous", TOKENS), (3, "zigzag", TOKENS), (2, "striped", TOKENS), (2, "zigzag", 1), (4, "contiguous", 3)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_results_do_not_depend_on_the_number_of_ranks(name: str, world_size: int, layout: str, tokens: int) -> None:
    """Outputs and gradients equal those of one rank, also if ranks have no tokens, or keys that no rank reads."""
    (reference,) = run_ranks(1, lambda ring: trained(ring, LAYERS[name], "contiguous", tokens))
    for actual in run_ranks(world_size, lambda ring: trained(ring, LAYERS[name], layout, tokens), poison=True):
        assert actual.keys() == reference.keys()
        for key, value in reference.items():
            torch.testing.assert_close(actual[key], value, rtol=1e-10, atol=1e-10)


PATHS = [*range(11)], [*range(6), *range(11, TOKENS)]
TREE = masks.tree([-1, 0, 0], [6, 5, TOKENS - 11])
"""Two paths that share their first six tokens."""


@pytest.mark.parametrize("rope", ["neox", "interleaved"])
@pytest.mark.parametrize("mask_of", ["the sequence", "the layer"])
def test_tokens_of_a_tree_are_rotated_by_their_positions_along_the_path(mask_of: str, rope: str) -> None:
    in_layer = mask_of == "the layer"

    def body(ring: Ring) -> None:
        alone, merged = layer(rope=rope, causal=True), layer(rope=rope, causal=True, mask=TREE if in_layer else None)
        seq = ring.sequence(TOKENS).with_mask(None if in_layer else TREE)
        out = seq.gather(merged(seq.shard(X), seq))
        for path in PATHS:
            single = ring.sequence(len(path))
            expected = single.gather(alone(single.shard(X[:, path]), single))
            torch.testing.assert_close(out[:, path], expected, rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_rotation_with_a_tree_for_some_heads_is_refused() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS).with_mask(masks.by_head([(1, TREE), (HEADS - 1, None)]))
        layer(rope="neox", causal=True)(seq.shard(X), seq)

    for error in errors(body):
        assert isinstance(error, InputError) and "rope rotates all heads by the same positions" in str(error)


# --- projections overlap with the transfer of keys -------------------------------------------------------------------


def projected_before(module: RingMultiheadAttention, x: Tensor, seq: Any, rope: Rope) -> Tensor:
    """Return the attention output of a causal layer, computed by projecting q, k and v before attention."""
    q, k, v = project_qkv(
        x, module.in_proj_weight, module.in_proj_bias, HEADS, module.num_kv_heads, module.head_dim,
        q_norm=module.q_norm, k_norm=module.k_norm, rope=rope, positions=seq.positions(), length=seq.length,
    )  # fmt: skip
    schedule, sinks = module.attention.options.schedule, module.attention.sinks
    return seq.ring.attention(q, k, v, seq, causal=True, sinks=sinks, schedule=schedule)


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "direct", "all_to_all"])
@pytest.mark.parametrize(
    ("ranks", "layout", "tokens"),
    [(1, "contiguous", TOKENS), (2, "zigzag", TOKENS), (3, "striped", TOKENS), (2, "zigzag", 1), (4, "contiguous", 3)],
)
def test_overlapped_projections_give_the_results_of_separate_ones(
    ranks: int, layout: str, tokens: int, schedule: str
) -> None:
    rope = Rope(xpos_scale=16.0)

    def body(ring: Ring) -> list[list[Tensor]]:
        module = layer(num_kv_heads=2, qk_norm=True, sinks=True, causal=True, rope="neox", schedule=schedule)
        module.rope = rope
        seq, results = ring.sequence(tokens, layout=layout), []
        for overlaps in (True, False, True):
            x = seq.shard(X[:, :tokens]).clone().requires_grad_()
            out = module(x, seq) if overlaps else module.out_proj(projected_before(module, x, seq, rope).flatten(2))
            results.append([out.detach(), *torch.autograd.grad(out.sum(), [x, *module.parameters()])])
        return results

    for actual, expected, repeated in run_ranks(ranks, body, engine="plain", poison=True):
        assert all(torch.equal(x, y) for x, y in zip(actual, repeated, strict=True))
        for value, reference in zip(actual, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("window", "wire", "straight"), [(None, None, True), ((5, 0), None, False), (None, "int8", False)], ids=str
)
def test_keys_are_sent_before_queries_are_projected(
    window: tuple[int, int] | None, wire: str | None, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer projects keys and values first, and sends them while it projects the queries.

    If a message contains all keys unchanged, they are not packed into a staging buffer first.
    """
    events: dict[int, list[str]] = defaultdict(list)

    def record(function: Any, event: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            events[threading.get_ident()].append(event(*arguments) if callable(event) else event)
            return function(*arguments, **options)

        return wrapped

    recorded = record(project, lambda x, weight, bias, heads, *_: "queries" if heads else "keys")
    monkeypatch.setattr(base, "project", recorded)
    monkeypatch.setattr(executor_module, "pack", record(executor_module.pack, "pack"))

    def body(ring: Ring) -> list[str]:
        seq = ring.sequence(30, layout="contiguous")
        ring.transport.exchange = record(ring.transport.exchange, "send")  # type: ignore[method-assign]
        module = RingMultiheadAttention(16, 2, causal=True, window=window, schedule="ring")
        module(torch.ones(1, 10, 16), seq)
        return events[threading.get_ident()]

    for rank, order in enumerate(run_ranks(3, body, engine="plain", kv_wire_dtype=wire)):
        start = order[: order.index("queries") + 1]
        sends = rank < 2  # with a causal mask, no other rank reads the keys of the last rank
        packs = ["pack"] if sends and not straight else []
        assert start == ["keys", *packs, *(["send"] if rank or sends else []), "queries"], order


@pytest.mark.parametrize("part", ["keys", "queries"])
def test_a_failed_projection_closes_the_ring_on_all_ranks(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a projection fails on one rank, after the ranks have compared their calls, all rings are closed.

    When queries are projected, keys have been sent already.
    """

    def broken(x: Tensor, weight: Tensor, bias: Tensor, q_heads: int, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        if not x.any() and bool(q_heads) == (part == "queries"):
            raise MemoryError(f"no room for the {part}")
        return project(x, weight, bias, q_heads, *rest, **options)

    monkeypatch.setattr(base, "project", broken)

    def body(ring: Ring) -> BaseException:
        seq = ring.sequence(TOKENS)
        with pytest.raises((RingError, MemoryError)) as caught:
            layer()(seq.shard(X) * min(ring.rank, 1), seq)
        with pytest.raises(ClosedError):
            ring.barrier()
        return caught.value

    raised = run_ranks(3, body, engine="plain", timeout_s=20.0)
    assert all(f"no room for the {part}" in str(error) for error in raised)
    assert all("rank 0 failed first" in str(error) for error in raised[1:])


@pytest.mark.parametrize(
    ("weight", "message"),
    [("in_proj_weight", "need a weight"), ("in_proj_bias", "bias must have"), ("k_norm", "norm's weight")],
)
def test_weights_that_do_not_fit_are_refused_on_all_ranks(weight: str, message: str) -> None:
    def body(ring: Ring) -> str:
        module, seq = layer(qk_norm=True), ring.sequence(TOKENS)
        if ring.rank == 1:
            setattr(module, weight, nn.Parameter(getattr(module, weight)[1:].detach()))
        with pytest.raises(InputError) as caught:
            module(seq.shard(X), seq)
        ring.barrier()  # the ring is still usable
        return str(caught.value)

    assert all("rank 1" in error and message in error for error in run_ranks(3, body, engine="plain"))


def test_autocast_does_not_change_float64_layers() -> None:
    module = layer(**LAYERS["llm"])

    def autocast(ring: Ring, enabled: bool) -> Tensor:
        seq = ring.sequence(TOKENS)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert nn.Linear(EMBED, 2).double()(X).dtype == torch.float64
            out: Tensor = module(seq.shard(X), seq)
            return out

    with_autocast, without = (run_ranks(2, lambda ring, on=on: autocast(ring, on)) for on in (True, False))
    assert all(torch.equal(x, y) for x, y in zip(with_autocast, without, strict=True))


# --- comparison with torch.nn.MultiheadAttention ----------------------------------------------------------------------

MASKS: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor | None]] = {
    "full": ({}, {}, None),
    "causal": ({"causal": True}, {}, torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)),
    "is_causal": ({}, {"is_causal": True, "need_weights": False}, torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)),
    "is_causal window": (
        {"window": (4, None)}, {"is_causal": True}, ~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-4)
    ),
    "is_causal prefix": (
        {"mask": masks.prefix(6)}, {"is_causal": True},
        torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) & (torch.arange(TOKENS) >= 6),
    ),
}  # fmt: skip
"""For each mask: options of the layer, options of its call, and the attn_mask for which torch's layer does the same."""


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("bias", [{}, {"bias": False}])
def test_two_ranks_compute_the_same_as_torchs_layer(name: str, bias: dict[str, Any]) -> None:
    """On two ranks, a layer with the state of torch's layer gives its output and all its gradients."""
    options, called, attn_mask = MASKS[name]
    torch_layer = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **bias)
    for weight in torch_layer.parameters():
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    x = X.clone().requires_grad_()
    true = torch_layer(x, x, x, attn_mask=attn_mask, need_weights=False)[0]
    true.backward(DOUT)

    def body(ring: Ring) -> dict[str, Tensor]:
        module = RingMultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **bias, **options)
        module.load_state_dict(torch_layer.state_dict())
        seq, x = ring.sequence(TOKENS), X.clone().requires_grad_()
        out = module(seq.shard(x), seq, **called)
        out.backward(seq.shard(DOUT))
        grads = {key: weight.grad for key, weight in module.named_parameters()} | {"x": x.grad}
        ring.all_reduce([grad for grad in grads.values() if grad is not None])
        return {"out": seq.gather(out.detach()), **{key: grad for key, grad in grads.items() if grad is not None}}

    expected = {
        "out": true.detach(),
        "x": x.grad,
        **{key: weight.grad for key, weight in torch_layer.named_parameters()},
    }
    for actual in run_ranks(2, body):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv: .* leave it out"),
        ({"add_zero_attn": True}, "add_zero_attn: .* sinks=True"),
        ({"kdim": 12}, "kdim: .* ring.attention"),
        ({"vdim": 0}, "vdim: .* ring.attention"),
        ({"batch_first": False}, "batch_first: .* transpose"),
    ],
)
def test_options_of_torchs_layer_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        RingMultiheadAttention(EMBED, HEADS, **options)
    RingMultiheadAttention(EMBED, HEADS, dropout=0.0, kdim=EMBED, vdim=EMBED, add_bias_kv=False, add_zero_attn=False)
    with pytest.raises(InputError, match=r"num_kv_heads must be a number of heads, got 0\.1; pass options by name"):
        RingMultiheadAttention(EMBED, HEADS, 0.1)  # type: ignore[arg-type]  # the position of torch's dropout


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ({"key_padding_mask": torch.zeros(2, 12, dtype=torch.bool)}, "key_padding_mask: .* separate document"),
        ({"attn_mask": torch.zeros(12, 12)}, "attn_mask: .* causal="),
        ({"need_weights": True}, "need_weights: .* need_weights=False"),
        ({"is_causal": "no"}, "causal must be True or False"),
    ],
)
def test_call_options_of_torchs_layer_are_refused_on_all_ranks(called: dict[str, Any], message: str) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        layer()(seq.shard(X), seq, **called if ring.rank else {"average_attn_weights": False})

    for error in errors(body):
        assert isinstance(error, InputError) and re.search(message, str(error))
    with pytest.raises(InputError, match=r"second argument is a Tensor; .*\(x, seq\)"):
        layer()(X, X)


def test_parameters_have_the_expected_names_shapes_and_initial_values() -> None:
    module = RingMultiheadAttention(EMBED, HEADS, 2, bias=True, qk_norm=True, sinks=True)
    shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    assert shapes == {
        "in_proj_weight": (48, EMBED), "in_proj_bias": (48,), "q_norm": (6,), "k_norm": (6,),
        "attention.sinks": (HEADS,), "out_proj.weight": (EMBED, EMBED), "out_proj.bias": (EMBED,),
    }  # fmt: skip
    assert module.in_proj_weight.std().item() == pytest.approx((2 / (48 + EMBED)) ** 0.5, rel=0.1)
    assert all(module.get_parameter(name).unique().tolist() == [1.0] for name in ("q_norm", "k_norm"))
    assert not any(module.get_parameter(name).any() for name in ("in_proj_bias", "out_proj.bias", "attention.sinks"))
    assert set(RingMultiheadAttention(EMBED, HEADS, bias=False).state_dict()) == {"in_proj_weight", "out_proj.weight"}
    on_meta = RingMultiheadAttention(EMBED, HEADS, sinks=True, qk_norm=True, device="meta", dtype=torch.bfloat16)
    assert {(weight.device.type, weight.dtype) for weight in on_meta.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("module", [
    RingAttention(sink_heads=HEADS),
    RingMultiheadAttention(EMBED, HEADS, bias=True, qk_norm=True, sinks=True),
    RingMultiheadDilatedAttention(EMBED, HEADS, [8], [1], qk_norm=True, layer_norm=True),
    ShortConvolution(EMBED, 3),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_every_weight_is_drawn_again_by_reset_parameters(module: Any) -> None:
    """Weights that were created on the device "meta" have no values before, for which NaN stands."""
    for weight in module.parameters():
        nn.init.constant_(weight, torch.nan)
    module.reset_parameters()
    assert [name for name, weight in module.named_parameters() if not weight.isfinite().all()] == []
    assert not any(weight.any() for name, weight in module.named_parameters() if name.endswith("sinks"))


def test_ring_attention_passes_its_options_to_every_call() -> None:
    q, k, v = X.unflatten(-1, (3, 8)).unsqueeze(0).expand(3, -1, -1, -1, -1).contiguous()
    attend = RingAttention(causal=True, window=(4, 0), scale=0.7, schedule="all_gather")

    def attended(ring: Ring) -> Tensor:
        seq = ring.sequence(TOKENS)
        return seq.gather(attend(seq.shard(q), seq.shard(k), seq.shard(v), seq))

    reference, _ = dense_attention(q, k, v, causal=True, window=(4, 0), scale=0.7)
    for out in run_ranks(2, attended):
        torch.testing.assert_close(out, reference, rtol=1e-10, atol=1e-10)
    assert "window=(4, 0)" in repr(attend)


@pytest.mark.parametrize("spoil", [lambda x: x[:, 1:], lambda x: x[..., 1:], lambda x: x[0], lambda x: x[None]])
def test_a_wrong_input_of_one_rank_is_refused_on_all_ranks(spoil: Any) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        x = seq.shard(X)
        layer(rope="neox")(spoil(x) if ring.rank == 1 else x, seq)

    raised = errors(body)
    assert all(isinstance(error, InputError) for error in raised)
    assert "pass seq.shard(x)" in str(raised[1]) and "rank 1 refused" in str(raised[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"window": (-3, 0)}, "window left side must be tokens >= 0, None or -1, got -3"),
        ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
        ({"softcap": float("inf")}, "softcap must be positive and finite"),
        ({"chunk": 8}, "chunk=8 is now a mask"),
    ],
)
def test_wrong_options_are_refused_when_the_layer_is_constructed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        layer(**options)


def test_options_of_the_functional_interface_are_refused_with_their_replacement() -> None:
    with pytest.raises(InputError, match="sinks: they are a parameter of this layer; pass sink_heads"):
        RingAttention(sinks=torch.ones(2))  # type: ignore[call-arg]
    with pytest.raises(InputError, match="dropout_seed: every call needs a different seed"):
        RingAttention(dropout_p=0.1, dropout_seed=1)
    with pytest.raises(InputError, match="in this layer it is called dropout"):
        RingMultiheadAttention(EMBED, HEADS, dropout_p=0.1)
    with pytest.raises(InputError, match=r"this layer has no dropout; call ring\.dilated_attention"):
        RingDilatedAttention([4], [1], dropout_p=0.1)


def test_a_wrong_seed_or_sinks_of_one_rank_are_refused_on_all_ranks() -> None:
    def with_seed(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        layer(dropout=0.1)(seq.shard(X), seq, dropout_seed="1" if ring.rank == 1 else 1)  # type: ignore[arg-type]

    def with_sinks(ring: Ring) -> None:
        module, seq = layer(sinks=True), ring.sequence(TOKENS)
        if ring.rank == 1:
            module.attention.sinks = nn.Parameter(torch.zeros(HEADS, dtype=torch.int64), requires_grad=False)
        module(seq.shard(X), seq)

    for body, message in ((with_seed, "dropout_seed must be a whole number"), (with_sinks, "sinks are torch.int64")):
        assert all(isinstance(error, InputError) and message in str(error) for error in errors(body))


def test_dropout_is_applied_in_training_mode_with_the_seed_of_the_call() -> None:
    # Create the layer only once: the ranks are threads, and would draw different weights from the generator they share.
    module = layer(dropout=0.4, causal=True)

    def body(ring: Ring) -> list[Tensor]:
        seq, drops = ring.sequence(TOKENS), deepcopy(module)
        shard = seq.shard(X)
        outs = [drops(shard, seq, dropout_seed=seed) for seed in (5, 5, 6)]
        with pytest.raises(InputError, match=r"dropout_p=0\.4 needs a dropout_seed, the same on all ranks"):
            drops(shard, seq)
        core, q = RingAttention(causal=True, dropout_p=0.4), shard.unflatten(2, (HEADS, -1))
        dropping = {"causal": True, "dropout_p": 0.4, "dropout_seed": 5}
        outs += [core(q, q, q, seq, dropout_seed=5), ring.attention(q, q, q, seq, **dropping)]
        drops.eval(), core.eval()
        outs += [drops(shard, seq), core(q, q, q, seq), ring.attention(q, q, q, seq, causal=True)]
        return [seq.gather(out.detach().flatten(2)) for out in outs]

    alone, shared = run_ranks(1, body)[0], run_ranks(3, body)[0]
    for out, reference in zip(alone, shared, strict=True):
        torch.testing.assert_close(out, reference, rtol=0, atol=1e-12)
    first, again, another, core, call, off, core_off, call_off = alone
    assert torch.equal(first, again) and not torch.allclose(first, another) and not torch.allclose(first, off)
    assert torch.equal(core, call) and torch.equal(core_off, call_off) and not torch.allclose(core, core_off)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads; got 3 and 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must divide"),
        ({"num_heads": 5}, "embed_dim 24 is not a multiple of num_heads 5"),
        ({"rope": "gptj"}, "use neox or interleaved"),
        ({"rope": "neox", "head_dim": 5}, "even head_dim, got 5"),
    ],
)
def test_incompatible_sizes_and_rope_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RingMultiheadAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **options})


@pytest.mark.parametrize("name", ["attention", "dilated", "multihead", "multihead dilated"])
def test_the_error_of_a_missing_sequence_names_the_argument(name: str) -> None:
    q, x = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 16)
    layers = {
        "attention": (RingAttention(), (q, q, q)),
        "dilated": (RingDilatedAttention([4], [1]), (q, q, q)),
        "multihead": (RingMultiheadAttention(16, 2), (x,)),
        "multihead dilated": (RingMultiheadDilatedAttention(16, 2, [4], [1]), (x,)),
    }
    layer, tensors = layers[name]
    with pytest.raises(InputError, match=r"^seq(:| must) .*NoneType"):
        layer(*tensors, None)


def test_memory_info_counts_the_layer_and_the_ring() -> None:
    module = RingMultiheadAttention(EMBED, HEADS, 2, bias=False, qk_norm=True).bfloat16()
    layer_bytes = {"parameter_bytes": 2 * (48 * EMBED + EMBED * EMBED + 12), "kv_bytes_per_token": 2 * 2 * 6 * 2}
    assert module.get_memory_info() == layer_bytes

    def after_a_call(ring: Ring) -> dict[str, int]:
        seq = ring.sequence(TOKENS)
        module(seq.shard(X.bfloat16()), seq)
        assert module.get_memory_info(seq) == {**layer_bytes, **ring.memory_info()}
        assert RingAttention().get_memory_info(seq) == ring.memory_info()
        return module.get_memory_info(seq)

    assert all(info["pool_bytes"] > 0 and info["plans"] == 1 for info in run_ranks(2, after_a_call))


@pytest.mark.filterwarnings("ignore:branch", "ignore:no branch")
@pytest.mark.parametrize(
    "options", [None, {}, {"grad": "detached", "offset": "block"}], ids=["plain", "dilated", "detached"]
)
def test_an_empty_batch_has_zero_gradients_and_does_not_affect_the_next_call(options: dict[str, Any] | None) -> None:
    """A call with an empty batch gives zero gradients, and leaves no unfinished transfer to the next call."""

    def body(ring: Ring) -> list[Tensor]:
        if options is None:
            module: nn.Module = layer(rope="neox", qk_norm=True, sinks=True)
        else:
            module = RingMultiheadDilatedAttention(EMBED, HEADS, [8], [1], dtype=torch.float64, **options)
            for weight in module.parameters():
                nn.init.constant_(weight, 0.1)
        seq, grads = ring.sequence(TOKENS), []
        for batch in (2, 0, 2, 0):
            module.zero_grad()
            out = module(seq.shard(X[:batch]), seq)
            assert out.shape == (batch, len(seq.positions()), EMBED)
            out.square().sum().backward()
            grads.append(torch.cat([weight.grad.flatten() for weight in module.parameters()]))
        return grads

    for full, empty, again, last in run_ranks(2, body, poison=True):
        assert torch.equal(full, again) and full.abs().sum() > 0
        assert not empty.any() and not last.any()
