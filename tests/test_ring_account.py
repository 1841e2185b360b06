"""What a ring says about itself: counters, memory, explanations; what is active.

Not covered: attention's results (see test_exact.py).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import ringattn
from ringattn import InputError, Ring, Sequence, masks
from ringattn.attention import call_of
from ringattn.core.dilation import Dilated
from ringattn.options import AttentionOptions
from ringattn.planner.cluster import CLUSTERS, LinkClass
from ringattn.planner.simulate import Crossed
from ringattn.schedule.routes import ROUTES
from ringattn.testing import dense_attention, run_ranks
from ringattn.transport.local import LocalWorld
from ringattn.transport.location import Location
from tests.face import RANKS, TOKENS, X
from tests.strategies import Case, simple


def bytes_forward(case: Case, rank: int, route: str, row_bytes: int) -> int:
    """What a rank sends in a forward pass, by brute force."""
    total = 0
    for owner in range(case.ranks):
        for distance in range(1, case.ranks):
            reader = (owner + distance) % case.ranks
            sender = (reader - 1) % case.ranks if route == "ring" else owner
            if sender == rank:
                rows = case.reads_beyond(owner, distance) if route == "ring" else case.reads(owner, reader)
                total += len(rows) * row_bytes
    return total


@pytest.mark.parametrize("schedule", ["ring", "direct", "all_gather"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("contiguous", {}),
        ("zigzag", {"causal": True}),
        ("contiguous", {"window": (9, 0)}),
        ("striped", {"window": (2, 3)}),
        ("contiguous", {"causal": True, "mask": masks.chunked(9)}),
        ("zigzag", {"causal": True, "mask": masks.prefix(10)}),
        ("striped", {"window": (2, 1), "mask": masks.global_tokens(2)}),
    ],
)
def test_counters_and_explanations_are_what_happened(schedule: str, layout: str, options: dict[str, Any]) -> None:
    ranks, tokens = 4, 30
    case = simple(layout, tokens, ranks, **options)
    x = torch.randn(2, tokens, 3, 64).bfloat16()

    def body(ring: Ring) -> tuple[Any, ...]:
        seq = ring.sequence(tokens, layout=layout)
        q = seq.shard(x).requires_grad_()
        told = ring.explain(seq, q=q, k=q, v=q, schedule=schedule, **options)
        ahead = ring.explain(seq, q=q, k=q, v=q, schedule=schedule, backward=False, **options)
        fresh = ring.counters()
        out = ring.attention(q, q, q, seq, schedule=schedule, **options)
        forward = ring.counters()
        out.sum().backward()
        return told, ahead, fresh, forward, ring.counters()

    results = run_ranks(ranks, body, engine="plain")
    high = [after["pool_high_water_bytes"] for *_, after in results]
    row_bytes = 2 * 3 * 128 * 2  # batch, heads, K beside V, bf16
    for rank, (told, ahead, fresh, forward, after) in enumerate(results):
        assert set(fresh.values()) == {0}
        sent = bytes_forward(case, rank, schedule, row_bytes)
        assert forward["bytes_sent"] == sent == ahead.bytes_sent[rank] and forward["passes"] == 1
        assert (after["bytes_sent"], after["messages"]) == (told.bytes_sent[rank], told.messages[rank])
        assert after["passes"] == 2 and forward["messages"] == ahead.messages[rank]
        assert told.peak_bytes == max(high) and ahead.peak_bytes <= told.peak_bytes
        positions = [case.problem.q_layout.positions(r) for r in range(ranks)]
        assert told.pairs == tuple(3 * int(case.reference[0][p].sum()) for p in positions)
        assert told.balance == pytest.approx(max(told.pairs) / (sum(told.pairs) / ranks))
        assert told.predicted_us is ahead.predicted_us is None
        assert f"{told.balance:.3f}" in str(told) and schedule in str(told) and "backward" not in str(ahead)


def test_reset_and_memory() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        q = seq.shard(X).requires_grad_()
        assert ring.memory_info() == dict.fromkeys(ring.memory_info(), 0) | {"world_size": RANKS}
        ring.attention(q, q, q, seq, causal=True).sum().backward()
        first, held = ring.counters(), ring.memory_info()
        assert held["plans"] == 2 and held["pool_bytes"] >= held["pool_high_water_bytes"] > 0
        assert held["slots"] > 0 and held["pool_gap_bytes"] >= 0 and held["pool_reuses"] == 0
        ring.reset_counters()
        assert set(ring.counters().values()) == {0}
        ring.attention(q, q, q, seq, causal=True).sum().backward()
        # The same plans in the same memory.
        assert ring.counters() == first and ring.memory_info() == held | {"pool_reuses": held["pool_reuses"] + 2}
        ring.attention(q, q, q, seq)
        assert ring.memory_info()["plans"] == 3
        seq.gather(q.detach())
        ring.all_reduce([torch.zeros(3)])
        assert ring.counters()["messages"] == first["messages"] + RANKS - 1  # only attention is counted
        done.append(ring.rank)

    done: list[int] = []
    run_ranks(RANKS, body)
    assert sorted(done) == [0, 1, 2]


def test_explain_takes_numbers_instead_of_tensors() -> None:
    with Ring() as ring:
        seq = ring.sequence(64)
        told = ring.explain(seq, q_heads=4, kv_heads=2, head_dim=16, causal=True)
        assert told.pairs == (4 * 64 * 65 // 2,) and told.bytes_sent == (0,) and told.balance == 1.0
        assert (told.problem.kv_heads, told.problem.dtype, told.problem.value_dim) == (2, "bfloat16", 16)
        for bad in ({}, {"q_heads": 4}, {"head_dim": 16}):
            with pytest.raises(InputError, match=r"explain needs q=, or q_heads= and head_dim="):
                ring.explain(seq, **bad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"offset": "block"}, "offset= and layer= belong to dilated attention"),
        ({"layer": 1}, "offset= and layer= belong to dilated attention"),
        ({"q": torch.zeros(1, 8, 2, 8), "q_heads": 4}, "give q= or these, not both"),
        ({"q": torch.zeros(1, 8, 2, 8), "batch": 2}, "give q= or these, not both"),
        ({"q": torch.zeros(1, 8, 2, 8), "dtype": "float16"}, "give q= or these, not both"),
    ],
)
def test_explain_refuses_what_it_would_ignore(arguments: dict[str, Any], words: str) -> None:
    with Ring() as ring, pytest.raises(InputError, match=words):
        ring.explain(ring.sequence(8), **{**({} if "q" in arguments else {"q_heads": 2, "head_dim": 8}), **arguments})


def test_the_slowest_hop_goes_at_the_rate_of_a_pair() -> None:
    """Between two nodes one pair of H100 reaches 18 of the NIC's 50 GB/s, as it does in the simulator."""
    machines = replace(CLUSTERS["h100"], ranks_per_node=1)

    def body(ring: Ring) -> tuple[Crossed, ...]:
        seq = ring.sequence(2 * 4096, layout="contiguous")
        return ring.explain(seq, q_heads=1, head_dim=64, backward=False, cluster=machines).crossed[0]

    (network,) = run_ranks(2, body)[0]
    assert network.slowest_us == pytest.approx(network.latency_us + 4096 * 2 * 64 * 2 / 18e3)


@pytest.mark.parametrize(
    ("schedule", "heads", "blocks", "better"),
    [
        ("ring", 4, (0, 4, 8, 12), "zigzag"),  # the pairs of its own queries
        ("ulysses", 4, (6, 6, 6, 6), None),  # of its heads
        ("ulysses", 1, (6, 0, 0, 0), None),  # heads are uneven, not the layout
        ("pass_q", 4, (12, 8, 4, 0), "zigzag"),  # of its own keys
        ("balanced", 4, (4, 4, 8, 8), "zigzag"),
    ],
)
def test_explain_counts_pairs_where_they_are_computed(
    schedule: str, heads: int, blocks: tuple[int, ...], better: str | None
) -> None:
    """Causal over contiguous shards of 64 tokens: whole blocks of a rank, over all heads, beside its own diagonal."""

    def body(ring: Ring) -> tuple[tuple[int, ...], str | None]:
        seq = ring.sequence(256, layout="contiguous")
        told = ring.explain(seq, q_heads=heads, head_dim=8, causal=True, schedule=schedule)
        return told.pairs, told.better_layout

    found, named = run_ranks(4, body)[0]
    assert found == tuple(one * 64 * 64 + heads * 64 * 65 // 2 for one in blocks)
    assert named == better


# --- active sequences, sums, copies ----------------------------------------------------------------------------------


def test_activate_nests_and_stays_in_its_thread() -> None:
    with Ring() as ring:
        one, two = ring.sequence(4), ring.sequence(5)
        seen: list[Sequence | None] = []
        assert ringattn.active_sequence() is None
        with ring.activate(one):
            with ring.activate(two):
                assert ringattn.active_sequence() is two
                with ring.activate(None):
                    assert ringattn.active_sequence() is None
                assert ringattn.active_sequence() is two
            with pytest.raises(KeyError), ring.activate(two):
                raise KeyError
            assert ringattn.active_sequence() is one
            thread = threading.Thread(target=lambda: seen.append(ringattn.active_sequence()))
            thread.start()
            thread.join()
        assert ringattn.active_sequence() is None and seen == [None]


ROUNDS_OUTPUTS = {"ulysses", "ulysses_ring", "pass_q", "balanced"}
"""The schedules of which the documentation says that `out_wire_dtype` rounds."""


@pytest.mark.parametrize("schedule", ROUTES)
def test_explain_names_the_dtype_of_outputs_where_they_are_rounded(schedule: str) -> None:
    def body(ring: Ring) -> tuple[torch.Tensor, str]:
        x = torch.randn(1, 24, 4, 8, generator=torch.Generator().manual_seed(0))
        seq = ring.sequence(24, layout="contiguous")
        head = str(ring.explain(seq, q=x, causal=True, schedule=schedule)).splitlines()[0]
        return ring.attention(*[seq.shard(x)] * 3, seq, causal=True, schedule=schedule), head

    wide, narrow = (run_ranks(4, body, engine="plain", out_wire_dtype=wire) for wire in (None, torch.bfloat16))
    rounds = any(not torch.equal(out, other) for (out, _), (other, _) in zip(wide, narrow, strict=True))
    assert rounds == (schedule in ROUNDS_OUTPUTS)
    assert {"outputs return as bfloat16" in head for _, head in narrow} == {rounds}
    assert not any("outputs return" in head for _, head in wide)


def test_plans_of_ever_new_documents_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones used last are kept; one that is not is made again when its backward pass comes."""
    monkeypatch.setattr("ringattn.core.bounded_cache.AT_LEAST", 3)
    monkeypatch.setattr("ringattn.core.bounded_cache.CACHE_BYTES", 1)

    def body(ring: Ring) -> None:
        x = torch.randn(1, 16, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        cuts, outs, inputs = [[0, first, 16] for first in range(1, 8)], [], []
        for cut in cuts:
            seq = ring.sequence(cu_seqlens=cut, layout="contiguous")
            inputs.append(seq.shard(x).requires_grad_())
            outs.append(ring.attention(*[inputs[-1]] * 3, seq, causal=True))
            assert ring.memory_info() and len(ring._executors) <= 3
        for cut, out, mine in zip(cuts, outs, inputs, strict=True):
            out.sum().backward()
            whole = x.clone().requires_grad_()
            dense_attention(whole, whole, whole, causal=True, cu_seqlens=cut)[0].sum().backward()
            assert whole.grad is not None
            shard = ring.sequence(16, layout="contiguous").shard(whole.grad)
            torch.testing.assert_close(mine.grad, shard, rtol=1e-12, atol=1e-12)
        assert len(ring._executors) == 3

    run_ranks(2, body)


def test_a_captured_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph has the addresses of what belongs to it; here the capture is only said to be one."""
    monkeypatch.setattr("ringattn.core.bounded_cache.AT_LEAST", 1)
    monkeypatch.setattr("ringattn.core.bounded_cache.CACHE_BYTES", 1)
    with Ring() as ring:

        def call(first: int) -> None:
            x = torch.zeros(1, 8, 1, 8)
            ring.attention(x, x, x, ring.sequence(cu_seqlens=[0, first, 8]))

        call(1)
        (captured,) = ring._executors.values()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            call(1)
        call(2)
        call(3)
        assert captured in ring._executors.values() and len(ring._executors) == 2


def explained(machines: str, **options: Any) -> tuple[ringattn.explain.Explanation, str]:
    """What a ring explains whose ranks are on the machines of these letters."""

    def body(ring: Ring) -> Any:
        return ring.explain(ring.sequence(8 * len(machines)), q_heads=1, head_dim=64, dtype="float32", **options)

    locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate(machines))
    world = LocalWorld(len(machines))
    transport = world.transport(0)
    transport.locations = locations
    with Ring(transport=transport) as ring:
        assert ring.locations == locations
        told = body(ring)
    return told, str(told)


def test_explain_says_which_links_the_hops_cross() -> None:
    told, text = explained("aab")
    forward, backward = told.crossed
    nbytes = 8 * 2 * 64 * 4
    # Each of two hops a rank sends a shard: 0 to 1 inside, 1 to 2 and 2 to 0 across.
    assert [(one.kind, one.pairs, one.nbytes) for one in forward] == [
        (LinkClass.NETWORK, ((1, 2), (2, 0)), 4 * nbytes),
        (LinkClass.MEMORY, ((0, 1),), 2 * nbytes),
    ]
    network = forward[0]
    assert network.slowest == (1, 2) and network.latency_us == pytest.approx(30)
    assert network.slowest_us == pytest.approx(30 + nbytes / 50e3)
    assert (
        "pairs of ranks that exchange messages in forward: 2 over network (16.4kB), 1 over host memory (8.19kB); the "
        "slowest message, " in text
    )
    assert "rank 1 to 2 over network, takes 30.08 us, 30 us of it latency" in text
    assert (
        "ranks 0,1 on node 0; 2 on node 1: the ring crosses between nodes 2 times" in text
        and "would be enough" not in text
    )
    assert backward[0].kind is LinkClass.NETWORK and "messages in backward" in text and "unknown" not in text
    near, _ = explained("aaa")
    assert near.crossed[0][0].latency_us == pytest.approx(15) and told.predicted_us is None
    assert [one.kind for one in near.crossed[0]] == [LinkClass.MEMORY]
    assert "4 times, but 2 would be enough" in explained("abab")[1]


@pytest.mark.parametrize(("machines", "route"), [("aaaa", "all_gather"), ("aabb", "ulysses"), ("abab", "ulysses")])
def test_calls_take_the_route_of_their_links(machines: str, route: str) -> None:
    transport = LocalWorld(4).transport(0)
    transport.locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate(machines))
    options, dilated = AttentionOptions(), Dilated((512, 1 << 14), (1, 4))
    with Ring(transport=transport, engine="plain") as ring:
        seq = ring.sequence(1 << 14, layout="contiguous")
        sizes = 1, 16, 16, 64, 64
        call = call_of(ring, seq, None, sizes, torch.bfloat16, torch.device("cpu"), options, dilated)
        told = ring.explain(
            seq, q_heads=16, head_dim=64, segment_lengths=[512, 1 << 14], dilation_rates=[1, 4], backward=False
        )
    assert call.route.name == told.forward.name == route


def test_links_that_nobody_found_out_are_told_as_unknown() -> None:
    locations = tuple(Location("host", "a", rank, 0, gpu=f"gpu-{rank}") for rank in range(2))
    transport = LocalWorld(2).transport(0)
    transport.locations = locations
    with Ring(transport=transport) as ring:
        text = str(ring.explain(ring.sequence(16), q_heads=1, head_dim=64))
    assert "2 over unknown" in text and "does not report the kind of some links" in text
