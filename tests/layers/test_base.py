"""Projecting on the way: the order of things, and that it changes neither results nor gradients."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import ClosedError, InputError, Ring, RingError
from ringattn.layers import base as projected_module
from ringattn.layers.base import Heads, projected_attention
from ringattn.layers.projection import project_kv, project_q
from ringattn.layers.rotary import Rope
from ringattn.options import AttentionOptions
from ringattn.runtime import executor as executor_module
from ringattn.testing import run_ranks

HEADS, MODEL, TOKENS = Heads(4, 2, 8), 12, 37
ROPE = Rope(xpos_scale=16.0)


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"weight": (64, MODEL), "bias": (64,), "q_norm": (8,), "k_norm": (8,), "sinks": (4,)}
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return made | {"x": torch.randn(2, TOKENS, MODEL, generator=generator, dtype=torch.float64)}


def on_the_way(x: Tensor, seq: Any, schedule: str, **weights: Tensor) -> Tensor:
    return projected_attention(
        x, weights["weight"], weights["bias"], seq, HEADS, q_norm=weights["q_norm"], k_norm=weights["k_norm"],
        rope=ROPE, options=AttentionOptions(causal=True, sinks=weights["sinks"], schedule=schedule),
    )  # fmt: skip


def before(x: Tensor, seq: Any, schedule: str, **weights: Tensor) -> Tensor:
    """The same projections, and then the attention."""
    q_turn, k_turn = ROPE.turns(seq.positions(), 8, torch.float64, TOKENS)
    q = project_q(x, weights["weight"][:32], weights["bias"][:32], 8, norm=weights["q_norm"], turn=q_turn)
    k, v = project_kv(x, weights["weight"][32:], weights["bias"][32:], 8, norm=weights["k_norm"], turn=k_turn)
    return seq.ring.attention(q, k, v, seq, causal=True, sinks=weights["sinks"], schedule=schedule)


def results(attend: Any, ring: Ring, layout: str, schedule: str) -> list[Tensor]:
    """The output and all gradients."""
    seq, leaves = ring.sequence(TOKENS, layout=layout), parameters()
    leaves["x"] = seq.shard(leaves["x"]).clone()
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    out = attend(leaves["x"], seq, schedule, **{name: leaf for name, leaf in leaves.items() if name != "x"})
    return [out.detach(), *torch.autograd.grad(out.sum(), list(leaves.values()))]


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "direct", "all_to_all"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_as_if_projected_before(ranks: int, layout: str, schedule: str) -> None:
    def body(ring: Ring) -> list[list[Tensor]]:
        return [results(attend, ring, layout, schedule) for attend in (on_the_way, before, on_the_way)]

    for found, expected, again in run_ranks(ranks, body, engine="plain", poison=True):
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "wire", "straight"), [(None, None, True), ((5, 0), None, False), (None, "int8", False)], ids=str
)
def test_keys_leave_before_queries_are_made(
    window: tuple[int, int] | None, wire: str | None, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from where they were made, if all of them leave in one message as they are."""
    events: dict[int, list[str]] = defaultdict(list)

    def noted(what: str, work: Any) -> Any:
        def wrapped(*facts: Any, **options: Any) -> Any:
            events[threading.get_ident()].append(what)
            return work(*facts, **options)

        return wrapped

    monkeypatch.setattr(projected_module, "project_kv", noted("keys", project_kv))
    monkeypatch.setattr(projected_module, "project_q", noted("queries", project_q))
    monkeypatch.setattr(executor_module, "pack", noted("pack", executor_module.pack))

    def body(ring: Ring) -> list[str]:
        seq, p = ring.sequence(30, layout="contiguous"), parameters()
        ring.transport.exchange = noted("leave", ring.transport.exchange)  # type: ignore[method-assign]
        x, weight = seq.shard(p["x"][:, :30]).float(), p["weight"].float()
        projected_attention(
            x, weight, None, seq, HEADS, options=AttentionOptions(causal=True, window=window, schedule="ring")
        )
        return events[threading.get_ident()]

    for rank, order in enumerate(run_ranks(3, body, engine="plain", kv_wire_dtype=wire)):
        begun = order[: order.index("queries") + 1]
        sends = rank < 2  # with a causal mask nobody reads the last rank's keys
        packs = ["pack"] if sends and not straight else []
        assert begun == ["keys", *packs, *(["leave"] if rank or sends else []), "queries"], order


def test_keys_that_cannot_be_made_end_the_ring_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's projection breaks after the ranks have agreed: nobody waits."""

    def broken(x: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if not x.any():
            raise MemoryError("no room for the keys")
        return project_kv(x, *given, **options)

    monkeypatch.setattr(projected_module, "project_kv", broken)

    def body(ring: Ring) -> BaseException:
        seq, p = ring.sequence(30), parameters()
        x = seq.shard(p["x"][:, :30])
        with pytest.raises((RingError, MemoryError)) as caught:
            projected_attention(x if ring.rank else torch.zeros_like(x), p["weight"], None, seq, HEADS)
        with pytest.raises(ClosedError):
            ring.barrier()
        return caught.value

    errors = run_ranks(3, body, engine="plain", timeout_s=20.0)
    assert all("no room for the keys" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("tokens", "x must be (batch, 10, 12), this rank's shard"),
        ("weight", "need a weight"),
        ("bias", "bias must have"),
        ("dtype", "must be alike"),
        ("q_norm", "norm's weight"),
        ("k_norm", "norm's weight"),
        ("backend", "has neither float64"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(wrong: str, told: str) -> None:
    def body(ring: Ring) -> str:
        seq, p = ring.sequence(30), parameters()
        x, weight, bias = seq.shard(p["x"][:, :30]), p["weight"], p["bias"]
        options: dict[str, Any] = {}
        if ring.rank == 1:
            x = x[:, 1:] if wrong == "tokens" else x
            weight = {"weight": weight[1:], "dtype": weight.float()}.get(wrong, weight)
            bias = bias[1:] if wrong == "bias" else bias
            options = {} if wrong not in ("q_norm", "k_norm") else {wrong: torch.ones(3)}
            options |= {"backend": "fused"} if wrong == "backend" else {}
        with pytest.raises(InputError) as caught:
            projected_attention(x, weight, bias, seq, HEADS, **options)
        ring.barrier()  # it lives on
        return str(caught.value)

    assert all("rank 1" in one and told in one for one in run_ranks(3, body, engine="plain"))
