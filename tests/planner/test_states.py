"""Predicted messages and times of layers with a state: those that run, the formulas, by hand, and many ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ringattn.core.layout import make_layout
from ringattn.core.span import COMM, Span
from ringattn.errors import InputError, UnsupportedError
from ringattn.layers import recurrent
from ringattn.layers.recurrent import GatedDeltaRule, SelectiveState, ShortConvolution
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster, Links
from ringattn.planner.simulate import Timeline, simulate_steps
from ringattn.planner.states import CHUNK, StateLayer, StateSizes, alone_s, layer_pass, state_pass
from ringattn.ring import Ring
from ringattn.testing import run_ranks

DOCUMENTS = (0, 1, 30, 31, 33, 57)
SIZES: dict[str, Any] = {
    "state_bytes": 2 * 3 * 4 * 8,
    "transition_bytes": 2 * 3 * 3 * 8,
    "halo_rows": 3,
    "row_bytes": 5 * 8,
}


@pytest.mark.parametrize("ranks", [1, 3, 9])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "per_document", "documents"])
def test_bytes_are_those_that_ranks_send(layout: str, ranks: int) -> None:
    def body(ring: Ring) -> tuple[Any, list[int]]:
        seq = ring.sequence(cu_seqlens=DOCUMENTS, layout=layout)
        explained = ring.explain_states(seq, **SIZES)
        counted, exchange = [0, 0, 0], ring.transport.exchange

        def observed(sends: Any, receives: Any) -> Any:
            for position, messages in ((0, sends), (1, receives)):
                counted[position] += sum(each.buffer.numel() * each.buffer.element_size() for each in messages)
            counted[2] += len(sends)
            return exchange(sends, receives)

        vars(ring.transport)["exchange"] = observed
        fragments = sum(each.is_part for each in seq.fragments())
        x = torch.ones(1, seq.counts[ring.rank], 5, dtype=torch.float64, requires_grad=True)
        states = torch.ones(fragments, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        padded, _ = ring.halo(x, seq, 3)
        before = ring.scan_states(torch.ones(fragments, 2, 3, 3, dtype=torch.float64), states, seq, matrix=True)
        (padded.sum() + before.sum()).backward()
        return explained, counted

    for rank, (explained, counted) in enumerate(run_ranks(ranks, body)):
        sent = [explained.bytes_sent[rank], explained.bytes_received[rank], explained.messages[rank]]
        assert sent == counted
        assert sum(explained.bytes_sent) == sum(explained.bytes_received)


def received_mib(ranks: int, layout: str) -> float:
    """Return the MiB of states and transitions of 1 MiB each that the busiest rank receives in forward."""
    sizes = StateSizes(transition_bytes=2**20, state_bytes=2**20)
    tokens = 64 * ranks
    each = state_pass(make_layout(layout, tokens, ranks), (0, tokens), (0,) * ranks, REFERENCE, sizes, backward=False)
    return float(each.received_bytes.max() / 2**20)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_short_chains_receive_all_earlier_fragments(ranks: int) -> None:
    assert received_mib(ranks, "contiguous") == 2 * (ranks - 1) - 1
    # The two chunks of the last rank are neighbours, so there are 2 P - 1 fragments, and rank 0 owns two of them.
    assert received_mib(ranks, "zigzag") == 2 * (2 * ranks - 3)


def test_long_chains_receive_a_logarithm() -> None:
    assert [received_mib(1 << power, "zigzag") for power in (4, 6, 8)] == [4 * power + 2 for power in (4, 6, 8)]


def test_a_thousand_ranks_take_less_than_ten_seconds() -> None:
    layout, nodes = make_layout("zigzag", 1 << 20, 1024), tuple(rank // 8 for rank in range(1024))
    start = time.monotonic()
    each = state_pass(layout, (0, 1 << 20), nodes, REFERENCE, StateSizes(1, 1, 3, 1), backward=True)
    assert time.monotonic() - start < 10
    assert each.exchanges < 16 and each.seconds > 15e-6 * each.exchanges


def test_time_is_that_of_the_slowest_link_of_each_exchange() -> None:
    cluster = Cluster("two nodes", 1e12, 1e9, 1e-6, ranks_per_node=2, node_bandwidth=1e8, node_latency_s=1e-3)
    layout = make_layout("contiguous", 400, 4)
    sizes = StateSizes(halo_rows=1, row_bytes=10**6)
    each = state_pass(layout, (0, 400), (0, 0, 1, 1), cluster, sizes, backward=False)
    assert each.messages.tolist() == [1, 1, 1, 0] and each.seconds == pytest.approx(1e-3 + 1e-2)
    inside = state_pass(layout, (0, 200, 400), (0, 0, 1, 1), cluster, sizes, backward=True)
    assert inside.messages.tolist() == [0, 1, 0, 1] and inside.seconds == pytest.approx(1e-6 + 1e-3)


def test_the_text_of_an_explanation() -> None:
    def body(ring: Ring) -> str:
        return str(ring.explain_states(ring.sequence(64), **SIZES, cluster="h100"))

    lines = run_ranks(2, body)[0].splitlines()
    assert lines[0] == "zigzag layout, 64 tokens on 2 ranks; the longest document has 3 fragments"
    assert lines[1] == "state 192B, transition 144B, 3 rows of history of 40B"
    assert lines[3].split() == ["rank", "fragments", "messages", "sends", "receives"]
    assert lines[-1].startswith("exchanges one after the other: 2 in forward, 2 in backward, predicted")


def test_what_is_refused() -> None:
    with Ring() as ring:
        seq = ring.sequence(64)
        with pytest.raises(InputError, match="state_bytes must be a number of bytes or rows, got -1"):
            ring.explain_states(seq, state_bytes=-1)
        with pytest.raises(InputError, match="unknown machine"):
            ring.explain_states(seq, cluster="abacus")

    def striped(ring: Ring) -> None:
        with pytest.raises(UnsupportedError, match="contiguous tokens"):
            ring.explain_states(ring.sequence(64, layout="striped"), state_bytes=1)

    run_ranks(2, striped)


# --- the steps of a layer --------------------------------------------------------------------------------------------

SMALL = StateLayer(heads=4, d_k=3, d_v=5, key_heads=2, gates=2, matrix=True, batch=2, dtype="float32")


@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize(
    ("documents", "layout", "nodes", "exchanges"),
    [
        (DOCUMENTS, "zigzag", (0, 0), 1),
        (DOCUMENTS, "documents", (0, 0, 0), 1),
        (DOCUMENTS, "per_document", (0, 0, 0, 1, 1), 1),
        ((0, 50), "zigzag", (0,) * 8, 1),
        # The history of token 4 on rank 1 is tokens 1 to 3, and rank 1 has token 1.
        ((0, 6), "zigzag", (0, 0, 0), 1),
        # Blocks of 3, 3, 5, 3 and 3 fragments: three exchanges within the longest, three over blocks, the last.
        ((0, 50), "zigzag", (0, 0, 0, 1, 1, 1, 2, 2, 2), 7),
    ],
)
def test_simulated_messages_are_those_that_a_layer_sends(
    documents: tuple[int, ...], layout: str, nodes: tuple[int, ...], exchanges: int, matrix: bool
) -> None:
    """Each exchange of a convolution and a recurrence, forward and backward: peers and bytes, in the same order."""
    layer, ranks = SMALL._replace(matrix=matrix), len(nodes)

    def body(ring: Ring) -> list[list[tuple[int, int]]]:
        ring.links = Links(nodes)
        seq = ring.sequence(cu_seqlens=documents, layout=layout)
        recorded, exchange = [], ring.transport.exchange

        def observed(sends: Any, receives: Any) -> Any:
            recorded.append([(each.peer, each.buffer.numel() * each.buffer.element_size()) for each in sends])
            return exchange(sends, receives)

        vars(ring.transport)["exchange"] = observed
        x = torch.randn(layer.batch, seq.counts[ring.rank], layer.channels, requires_grad=True)
        key_size, value_size = layer.key_heads * layer.d_k, layer.heads * layer.d_v
        q, k, v = ShortConvolution(layer.channels, layer.taps)(x, seq).split([key_size, key_size, value_size], -1)
        q, k = (each.unflatten(-1, (layer.key_heads, layer.d_k)) for each in (q, k))
        v = v.unflatten(-1, (layer.heads, layer.d_v))
        gates = torch.sigmoid(v.sum(-1))
        if matrix:
            out = GatedDeltaRule()(q, k, v, -gates, gates, seq)
        else:
            out = SelectiveState()(v, gates, -torch.ones(layer.heads), k, q, seq)
        out.sum().backward()
        return recorded

    placed = make_layout(layout, documents[-1], ranks, cu_seqlens=documents)
    for rank, recorded in enumerate(run_ranks(ranks, body)):
        passes = [
            layer_pass(placed, documents, nodes, REFERENCE, layer, rank, backward).steps for backward in (False, True)
        ]
        steps = [step for each in passes for step in each if step.name.startswith(("history", "exchange"))]
        assert [sorted(step.sends) for step in steps] == [sorted(sends) for sends in recorded]
        assert len(steps) == 2 * (1 + exchanges)


def timeline_of(cluster: Cluster, layer: StateLayer, backward: bool, overlap: bool = True) -> Timeline:
    """Simulate a layer on two ranks, which have the two halves of 100 tokens."""
    layout = make_layout("contiguous", 100, 2)
    passes = [layer_pass(layout, (0, 100), (0, 0), cluster, layer, rank, backward) for rank in range(2)]
    return simulate_steps([each.steps for each in passes], cluster, overlap)


def ends_us(spans: tuple[Span, ...]) -> dict[str, float]:
    """Return the end of each span by its name."""
    return {span.name: span.end_us for span in spans}


def test_two_ranks_by_hand() -> None:
    """One head with states of 1 x 1, factors as transitions, no convolution, and chunks of 64 tokens.

    A token has 2 FLOP of the state, 2 * 64 * 2 + 2 of the outputs, and 2 of the initial state. With 50 tokens and
    1 FLOP per us these are 100, 12900 and 100 us. Rank 0 sends its state of 4 bytes, which takes 10 + 4 us. Rank 1 has
    no update, because the state that it receives is its initial state.
    """
    cluster = Cluster("1 FLOP per us", 1e6, 1e6, 10e-6)
    layer = StateLayer(heads=1, d_k=1, d_v=1, key_heads=1, gates=1, matrix=False, taps=1)
    forward = timeline_of(cluster, layer, backward=False)
    assert ends_us(forward.spans[0]) == pytest.approx(
        {"local states compute": 100, "exchange 1 compute": 13000, "exchange 1 exchange": 114}
    )
    assert ends_us(forward.spans[1]) == pytest.approx(
        {"local states compute": 100, "exchange 1 compute": 13000, "exchange 1 exchange": 114,
         "initial states compute": 13100}
    )  # fmt: skip
    # If messages follow the outputs, they are exposed.
    assert timeline_of(cluster, layer, backward=False, overlap=False).total_us == pytest.approx(13114)
    # Backward takes twice the time of forward. The gradient of the state travels from rank 1, behind the gradient of
    # the outputs. Then each rank computes the gradient of its transition (2 FLOP).
    backward = timeline_of(cluster, layer, backward=True)
    assert ends_us(backward.spans[1]) == pytest.approx(
        {"initial states compute": 200, "exchange 1 compute": 26000, "exchange 1 exchange": 214,
         "local states compute": 26000 + 202}
    )  # fmt: skip
    assert ends_us(backward.spans[0])["exchange 1 compute"] == pytest.approx(25800)
    assert backward.total_us == pytest.approx(26202)
    # Alone, one process has no exchange and no initial state.
    assert alone_s(layer, 50, cluster, backward=False) == pytest.approx(13000e-6)
    assert alone_s(layer, 50, cluster, backward=True) == pytest.approx(26000e-6)


def test_a_halo_by_hand() -> None:
    """Three channels with 2 taps: rank 0 sends a row of 6 bytes before the convolution, and gets it back after it."""
    cluster = Cluster("1 FLOP per us", 1e6, 1e6, 10e-6)
    layer = StateLayer(heads=1, d_k=1, d_v=1, key_heads=1, gates=1, matrix=False, taps=2)
    forward, backward = (timeline_of(cluster, layer, each).spans for each in (False, True))
    assert ends_us(forward[1])["history exchange"] == pytest.approx(10 + 6)
    assert ends_us(forward[1])["local states compute"] == pytest.approx(16 + 50 * (2 * 2 * 3 + 2))
    last = [span for span in backward[1] if span.lane == COMM][-1]
    assert (last.name, last.nbytes) == ("history exchange", 6) and last.end_us == backward[1][-1].end_us


def test_memory_counts_tables_messages_and_padding_by_hand() -> None:
    """Copies of 1 byte per us: packing reads and writes each byte, and the shard is copied for the convolution."""
    cluster = Cluster("free FLOPs", 1e30, 1e30, 0.0, copy_bytes_s=1e6)
    layer = StateLayer(heads=1, d_k=1, d_v=1, key_heads=1, gates=1, matrix=False, taps=2, dtype="float64")
    first, second = timeline_of(cluster, layer, backward=False).spans
    # 50 rows of 24 bytes are read and written, after 51 rows of zeros. Rank 0 packs a row, and then the table of one
    # transition and one state of 8 bytes each, and the state.
    rows = 24 * (2 * 50 + 51)
    assert ends_us(first)["history pack"] == pytest.approx(rows + 2 * 24)
    packs = [span.end_us - span.start_us for span in first if span.name == "exchange 1 pack"]
    assert packs == pytest.approx([2 * 16 + 2 * 8])
    assert ends_us(second)["history pack"] == pytest.approx(rows)
    # Rank 1 copies the received state into its table, and then for each token reads 2 and writes 1 number.
    assert second[-1].name == "initial states compute"
    assert second[-1].end_us - second[-1].start_us == pytest.approx(2 * 8 + 50 * 3 * 8)


def test_large_layers_hide_states_within_a_node_and_not_between_nodes() -> None:
    """Qwen3-Next with 131,072 tokens: on 8 ranks the scan hides behind the outputs, on 16 ranks it does not."""
    layer = StateLayer(heads=32, d_k=128, d_v=128, key_heads=16, gates=2, matrix=True)
    shares = []
    for ranks in (8, 16):
        layout, nodes = make_layout("zigzag", 131072, ranks), tuple(rank // 8 for rank in range(ranks))
        passes = [layer_pass(layout, (0, 131072), nodes, CLUSTERS["h100"], layer, rank, False) for rank in range(ranks)]
        timeline = simulate_steps([each.steps for each in passes], CLUSTERS["h100"])
        shares.append(max(timeline.exposed_us) / timeline.total_us)
    assert shares[0] < 0.01 and shares[1] > 0.3


def test_chunks_are_those_of_the_layers() -> None:
    assert CHUNK == recurrent.CHUNK
