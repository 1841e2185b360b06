"""The counters, memory and explanations of a ring, and its active sequence.

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
    """Compute the bytes that a rank sends in a forward pass, by brute force from the reference of `case`."""
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
        ("zigzag", {"causal": True, "window": (4, 0), "mask": masks.bidirectional_blocks([(2, 14), (15, 30)])}),
        ("striped", {"window": (2, 1), "mask": masks.global_tokens(2)}),
    ],
)
def test_counters_and_explanations_match_the_reference(schedule: str, layout: str, options: dict[str, Any]) -> None:
    ranks, tokens = 4, 30
    case = simple(layout, tokens, ranks, **options)
    x = torch.randn(2, tokens, 3, 64).bfloat16()

    def body(ring: Ring) -> tuple[Any, ...]:
        seq = ring.sequence(tokens, layout=layout)
        q = seq.shard(x).requires_grad_()
        both = ring.explain(seq, q=q, k=q, v=q, schedule=schedule, **options)
        forward_only = ring.explain(seq, q=q, k=q, v=q, schedule=schedule, backward=False, **options)
        fresh = ring.counters()
        out = ring.attention(q, q, q, seq, schedule=schedule, **options)
        forward = ring.counters()
        out.sum().backward()
        return both, forward_only, fresh, forward, ring.counters()

    results = run_ranks(ranks, body, engine="plain")
    high = [after["pool_high_water_bytes"] for *_, after in results]
    row_bytes = 2 * 3 * 128 * 2  # batch, heads, dimensions of K and V, bf16
    for rank, (both, forward_only, fresh, forward, after) in enumerate(results):
        assert set(fresh.values()) == {0}
        sent = bytes_forward(case, rank, schedule, row_bytes)
        assert forward["bytes_sent"] == sent == forward_only.bytes_sent[rank] and forward["passes"] == 1
        assert (after["bytes_sent"], after["messages"]) == (both.bytes_sent[rank], both.messages[rank])
        assert after["passes"] == 2 and forward["messages"] == forward_only.messages[rank]
        assert max(plan.arena_bytes for of_pass in both.plans for plan in of_pass) == max(high)
        assert forward_only.peak_bytes <= both.peak_bytes > max(high)
        positions = [case.problem.q_layout.positions(r) for r in range(ranks)]
        assert both.pairs == tuple(3 * int(case.reference[0][p].sum()) for p in positions)
        assert both.balance == pytest.approx(max(both.pairs) / (sum(both.pairs) / ranks))
        assert both.predicted_us is forward_only.predicted_us is None
        assert f"{both.balance:.3f}" in str(both) and schedule in str(both) and "backward" not in str(forward_only)


def test_reset_and_memory() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        q = seq.shard(X).requires_grad_()
        assert ring.memory_info() == dict.fromkeys(ring.memory_info(), 0) | {"world_size": RANKS}
        ring.attention(q, q, q, seq, causal=True).sum().backward()
        first, memory = ring.counters(), ring.memory_info()
        assert memory["plans"] == 2 and memory["pool_bytes"] >= memory["pool_high_water_bytes"] > 0
        assert memory["slots"] > 0 and memory["pool_gap_bytes"] >= 0 and memory["pool_reuses"] == 0
        ring.reset_counters()
        assert set(ring.counters().values()) == {0}
        ring.attention(q, q, q, seq, causal=True).sum().backward()
        # The second call uses the same plans in the same memory.
        assert ring.counters() == first and ring.memory_info() == memory | {"pool_reuses": memory["pool_reuses"] + 2}
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
        explanation = ring.explain(seq, q_heads=4, kv_heads=2, head_dim=16, causal=True)
        problem = explanation.problem
        assert explanation.pairs == (4 * 64 * 65 // 2,)
        assert explanation.bytes_sent == (0,) and explanation.balance == 1.0
        assert (problem.kv_heads, problem.dtype, problem.value_dim) == (2, "bfloat16", 16)
        for bad in ({}, {"q_heads": 4}, {"head_dim": 16}):
            with pytest.raises(InputError, match=r"explain needs q=, or q_heads= and head_dim="):
                ring.explain(seq, **bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_heads": 2.5}, r"q_heads must be a whole number, not below 0, got 2\.5"),
        ({"q_heads": True}, "q_heads must be a whole number, not below 0, got True"),
        ({"kv_heads": 0}, "kv_heads=0, where attention needs at least 1"),
        ({"kv_heads": 1.0}, r"kv_heads must be a whole number, not below 0, got 1\.0"),
        ({"head_dim": "16"}, "head_dim must be a whole number, not below 0, got '16'"),
        ({"batch": -1}, "batch must be a whole number, not below 0, got -1"),
        ({"sm_margin": 0.5}, r"sm_margin must be a number of multiprocessors, got 0\.5"),
        ({"cluster": 5}, "cluster must be a Cluster, the name of a preset or a file, got 5"),
        ({"k": torch.zeros(8, 2, 16)}, r"k must be a \(batch, tokens, heads, head_dim\) tensor, got \(8, 2, 16\)"),
    ],
)
def test_explain_and_memory_plan_refuse_values_that_are_not_sizes(arguments: dict[str, Any], message: str) -> None:
    with Ring() as ring:
        seq = ring.sequence(8)
        for method in (ring.explain, ring.memory_plan):
            with pytest.raises(InputError, match=message):
                method(seq, **({"q_heads": 2, "head_dim": 16} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": "block"}, "offset= and layer= need dilated attention"),
        ({"layer": 1}, "offset= and layer= need dilated attention"),
        ({"q": torch.zeros(1, 8, 2, 8), "q_heads": 4}, "give either q= or these"),
        ({"q": torch.zeros(1, 8, 2, 8), "batch": 2}, "give either q= or these"),
        ({"q": torch.zeros(1, 8, 2, 8), "dtype": "float16"}, "give either q= or these"),
    ],
)
def test_explain_refuses_arguments_without_effect(arguments: dict[str, Any], message: str) -> None:
    with Ring() as ring, pytest.raises(InputError, match=message):
        ring.explain(ring.sequence(8), **{**({} if "q" in arguments else {"q_heads": 2, "head_dim": 8}), **arguments})


def test_the_slowest_hop_has_the_rate_of_a_single_pair() -> None:
    """Between two nodes, `explain` gives a single pair of H100s 18 of the NIC's 50 GB/s, as the simulator does."""
    machines = replace(CLUSTERS["h100"], ranks_per_node=1)

    def body(ring: Ring) -> tuple[Crossed, ...]:
        seq = ring.sequence(2 * 4096, layout="contiguous")
        return ring.explain(seq, q_heads=1, head_dim=64, backward=False, cluster=machines).crossed[0]

    (network,) = run_ranks(2, body)[0]
    assert network.slowest_us == pytest.approx(network.latency_us + 4096 * 2 * 64 * 2 / 18e3)


@pytest.mark.parametrize(
    ("schedule", "heads", "blocks", "better"),
    [
        ("ring", 4, (0, 4, 8, 12), "zigzag"),  # a rank computes the pairs of its local queries
        ("ulysses", 4, (6, 6, 6, 6), None),  # the pairs of its heads
        ("ulysses", 1, (6, 0, 0, 0), None),  # the heads are uneven, so that no other layout helps
        ("pass_q", 4, (12, 8, 4, 0), "zigzag"),  # the pairs of its local keys
        ("balanced", 4, (4, 4, 8, 8), "zigzag"),
    ],
)
def test_explain_counts_pairs_where_they_are_computed(
    schedule: str, heads: int, blocks: tuple[int, ...], better: str | None
) -> None:
    """`explain` counts a pair on the rank that computes it.

    The call is causal with contiguous shards of 64 tokens. `blocks`: the full blocks of each rank over all heads.
    """

    def body(ring: Ring) -> tuple[tuple[int, ...], str | None]:
        seq = ring.sequence(256, layout="contiguous")
        explanation = ring.explain(seq, q_heads=heads, head_dim=8, causal=True, schedule=schedule)
        return explanation.pairs, explanation.better_layout

    pairs, better_layout = run_ranks(4, body)[0]
    assert pairs == tuple(count * 64 * 64 + heads * 64 * 65 // 2 for count in blocks)
    assert better_layout == better


# --- active sequences, sums, copies ----------------------------------------------------------------------------------


def test_activate_nests_and_stays_in_its_thread() -> None:
    with Ring() as ring:
        first, second = ring.sequence(4), ring.sequence(5)
        seen: list[Sequence | None] = []
        assert ringattn.active_sequence() is None
        with ring.activate(first):
            with ring.activate(second):
                assert ringattn.active_sequence() is second
                with ring.activate(None):
                    assert ringattn.active_sequence() is None
                assert ringattn.active_sequence() is second
            with pytest.raises(KeyError), ring.activate(second):
                raise KeyError
            assert ringattn.active_sequence() is first
            thread = threading.Thread(target=lambda: seen.append(ringattn.active_sequence()))
            thread.start()
            thread.join()
        assert ringattn.active_sequence() is None and seen == [None]


ROUNDS_OUTPUTS = {"ulysses", "ulysses_ring", "pass_q", "balanced"}
"""The schedules whose outputs `out_wire_dtype` rounds, according to the documentation."""


@pytest.mark.parametrize("schedule", ROUTES)
def test_explain_names_the_dtype_of_rounded_outputs(schedule: str) -> None:
    def body(ring: Ring) -> tuple[torch.Tensor, str]:
        x = torch.randn(1, 24, 4, 8, generator=torch.Generator().manual_seed(0))
        seq = ring.sequence(24, layout="contiguous")
        head = str(ring.explain(seq, q=x, causal=True, schedule=schedule)).splitlines()[0]
        return ring.attention(*[seq.shard(x)] * 3, seq, causal=True, schedule=schedule), head

    wide, narrow = (run_ranks(4, body, engine="plain", out_wire_dtype=wire) for wire in (None, torch.bfloat16))
    rounds = any(not torch.equal(out, rounded) for (out, _), (rounded, _) in zip(wide, narrow, strict=True))
    assert rounds == (schedule in ROUNDS_OUTPUTS)
    assert {"outputs return as bfloat16" in head for _, head in narrow} == {rounds}
    assert not any("outputs return" in head for _, head in wide)


def test_plans_of_new_documents_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps only the plans used most recently. A backward pass whose plan was evicted plans again."""
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
        for cut, out, local in zip(cuts, outs, inputs, strict=True):
            out.sum().backward()
            whole = x.clone().requires_grad_()
            dense_attention(whole, whole, whole, causal=True, cu_seqlens=cut)[0].sum().backward()
            assert whole.grad is not None
            shard = ring.sequence(16, layout="contiguous").shard(whole.grad)
            torch.testing.assert_close(local.grad, shard, rtol=1e-12, atol=1e-12)
        assert len(ring._executors) == 3

    run_ranks(2, body)


def test_a_captured_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan captured by a CUDA graph stays in the cache, because the graph stores the addresses of its memory.

    The test only simulates the capture.
    """
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
    """Return the explanation, and its text, of a ring whose rank i is on the machine named by letter i."""

    def body(ring: Ring) -> Any:
        return ring.explain(ring.sequence(8 * len(machines)), q_heads=1, head_dim=64, dtype="float32", **options)

    locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate(machines))
    world = LocalWorld(len(machines))
    transport = world.transport(0)
    transport.locations = locations
    with Ring(transport=transport) as ring:
        assert ring.locations == locations
        explanation = body(ring)
    return explanation, str(explanation)


def test_explain_says_which_links_the_hops_cross() -> None:
    explanation, text = explained("aab")
    forward, backward = explanation.crossed
    nbytes = 8 * 2 * 64 * 4
    # In each of two steps a rank sends a shard: 0 to 1 within a node, 1 to 2 and 2 to 0 between nodes.
    assert [(crossed.kind, crossed.pairs, crossed.nbytes) for crossed in forward] == [
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
    assert near.crossed[0][0].latency_us == pytest.approx(15) and explanation.predicted_us is None
    assert [crossed.kind for crossed in near.crossed[0]] == [LinkClass.MEMORY]
    assert "4 times, but 2 would be enough" in explained("abab")[1]


@pytest.mark.parametrize(("machines", "route"), [("aaaa", "all_gather"), ("aabb", "ulysses"), ("abab", "ulysses")])
def test_the_links_choose_the_route_of_a_call(machines: str, route: str) -> None:
    transport = LocalWorld(4).transport(0)
    transport.locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate(machines))
    options, dilated = AttentionOptions(), Dilated((512, 1 << 14), (1, 4))
    with Ring(transport=transport, engine="plain") as ring:
        seq = ring.sequence(1 << 14, layout="contiguous")
        sizes = 1, 16, 16, 64, 64
        call = call_of(ring, seq, None, sizes, torch.bfloat16, torch.device("cpu"), options, dilated)
        explanation = ring.explain(
            seq, q_heads=16, head_dim=64, segment_lengths=[512, 1 << 14], dilation_rates=[1, 4], backward=False
        )
    assert call.route.name == explanation.forward.name == route


def test_explain_names_links_of_unknown_kind() -> None:
    locations = tuple(Location("host", "a", rank, 0, gpu=f"gpu-{rank}") for rank in range(2))
    transport = LocalWorld(2).transport(0)
    transport.locations = locations
    with Ring(transport=transport) as ring:
        text = str(ring.explain(ring.sequence(16), q_heads=1, head_dim=64))
    assert "2 over unknown" in text and "does not report the kind of some links" in text
