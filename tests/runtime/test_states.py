"""`Ring.halo` and `Ring.scan_states` against one process that reads every document token by token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import TCPStore
from torch.utils.checkpoint import checkpoint

from ringattn.errors import ClosedError, DisagreementError, InputError, RingError, UnsupportedError
from ringattn.ring import Ring
from ringattn.runtime.states import reach, started_scan
from ringattn.sequence import Sequence
from ringattn.testing import run_ranks
from tests.contract.processes import Processes
from tests.transport.attribution import named_at_fault

DOCUMENTS = (0, 1, 2, 30, 31, 33, 57)
LAYOUTS = ["contiguous", "zigzag", "per_document", "documents"]


def recurrence(gates: Tensor, inputs: Tensor, before: Tensor, matrix: bool) -> tuple[Tensor, Tensor]:
    """Return the states after each token, (tokens, ...), and the product of all gates."""
    state, states = before, []
    product = torch.eye(gates.shape[-1], dtype=gates.dtype) if matrix else torch.ones_like(gates[0])
    for gate, value in zip(gates, inputs, strict=True):
        state = (gate @ state if matrix else gate * state) + value
        product = gate @ product if matrix else gate * product
        states.append(state)
    return torch.stack(states), product


def over_documents(gates: Tensor, inputs: Tensor, bounds: tuple[int, ...], matrix: bool) -> Tensor:
    """Return the states after each token on one process."""
    parts = [
        recurrence(gates[start:stop], inputs[start:stop], torch.zeros_like(inputs[0]), matrix)[0]
        for start, stop in pairwise(bounds)
        if stop > start
    ]
    return torch.cat(parts)


def over_ring(ring: Ring, gates: Tensor, inputs: Tensor, seq: Sequence, matrix: bool) -> Tensor:
    """Return the states after each local token: fragment by fragment, then continued."""
    zeros = torch.zeros_like(inputs[:1]).sum(0)
    tokens = {each: (gates[each.start : each.stop], inputs[each.start : each.stop]) for each in seq.fragments()}
    parts = [each for each in tokens if each.is_part]
    local = [recurrence(*tokens[each], zeros, matrix) for each in parts]
    transitions = torch.stack([gates[:1].sum(0), *(product for _, product in local)])[1:]
    states = torch.stack([zeros, *(states[-1] for states, _ in local)])[1:]
    before = ring.scan_states(transitions, states + 0 * inputs.sum(), seq, matrix=matrix)
    initial = dict(zip(parts, before, strict=True))
    outputs = [recurrence(*tokens[each], initial.get(each, zeros), matrix)[0] for each in tokens]
    return reach(torch.cat([inputs[:0], *outputs]), before)


def gradients(out: Tensor, weights: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9, 11])
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recurrence_over_ranks_is_that_of_one_process(ranks: int, matrix: bool, layout: str):
    bounds = DOCUMENTS if layout in ("per_document", "documents") or ranks % 2 else (0, 57)
    torch.manual_seed(ranks)
    inputs = torch.randn(57, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    gates = (torch.rand(57, 2, *((3, 3) if matrix else (3, 1)), dtype=torch.float64) - 0.3).requires_grad_()
    weights = torch.randn(57, 2, 3, 4, dtype=torch.float64)
    expected = over_documents(gates, inputs, bounds, matrix)
    expected_gradients = gradients(expected, weights, gates, inputs)

    def body(ring: Ring) -> tuple[Tensor, list[Tensor]]:
        seq = ring.sequence(cu_seqlens=bounds, layout=layout)
        local = [seq.shard(x.detach(), 0).requires_grad_() for x in (gates, inputs)]
        out = over_ring(ring, *local, seq, matrix)
        grads = gradients(out, seq.shard(weights, 0), *local)
        return seq.gather(out.detach(), 0), [seq.gather(grad, 0) for grad in grads]

    for out, grads in run_ranks(ranks, body):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
        for grad, reference in zip(grads, expected_gradients, strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_convolution_over_ranks_is_that_of_one_process(layout: str, width: int):
    torch.manual_seed(width)
    x = torch.randn(2, 57, 5, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(width + 1, 5, dtype=torch.float64)
    weights = torch.randn(2, 57, 5, dtype=torch.float64)
    parts = []
    for start, stop in pairwise(DOCUMENTS):
        padded = torch.nn.functional.pad(x[:, start:stop], (0, 0, width, 0))
        parts.append(sum(padded[:, tap : tap + stop - start] * taps[tap] for tap in range(width + 1)))
    expected = torch.cat(parts, 1)
    (expected_gradient,) = gradients(expected, weights, x)

    def body(ring: Ring) -> tuple[Tensor, Tensor]:
        seq = ring.sequence(cu_seqlens=DOCUMENTS, layout=layout)
        local = seq.shard(x.detach()).requires_grad_()
        padded, rows = ring.halo(local, seq, width)
        out = sum(padded[:, rows - width + tap] * taps[tap] for tap in range(width + 1))
        (grad,) = gradients(out, seq.shard(weights), local)
        return seq.gather(out.detach()), seq.gather(grad)

    for out, grad in run_ranks(4, body):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, expected_gradient, rtol=1e-13, atol=1e-13)


def test_a_checkpoint_may_stop_its_recomputation_at_a_scan() -> None:
    """torch stops there by an error, because the scan saves the last tensors that backward needs."""

    def body(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(9, layout="contiguous")
        sums = torch.full((1, 2), 1.0 + ring.rank, dtype=torch.float64, requires_grad=True)
        factors = torch.full((1, 2), 0.5, dtype=torch.float64, requires_grad=True)

        def scan(factors: Tensor, sums: Tensor) -> Tensor:
            return ring.scan_states(factors, sums, seq)

        plain = torch.autograd.grad(scan(factors, sums).sum(), (factors, sums))
        again = torch.autograd.grad(checkpoint(scan, factors, sums, use_reentrant=False).sum(), (factors, sums))
        assert all(map(torch.equal, plain, again)) and ring.is_open
        return list(plain)

    # The states before ranks 0, 1 and 2 are 0, 1 and 0.5 * 1 + 2.
    factors, sums = zip(*run_ranks(3, body), strict=True)
    assert [float(x[0, 0]) for x in factors] == [0.0, 1.0, 0.0]
    assert [float(x[0, 0]) for x in sums] == [1.5, 1.0, 0.0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_scans_are_recomputed_in_checkpointed_code(reentrant: bool):
    torch.manual_seed(0)
    inputs = torch.randn(57, 2, 3, 4, dtype=torch.float64)
    gates = torch.rand(57, 2, 3, 3, dtype=torch.float64) - 0.3

    def body(ring: Ring, recompute: bool) -> list[Tensor]:
        seq = ring.sequence(cu_seqlens=DOCUMENTS, layout="zigzag")
        local = [seq.shard(x, 0).requires_grad_() for x in (gates, inputs)]

        def layer(gates: Tensor, inputs: Tensor) -> Tensor:
            padded, rows = ring.halo(inputs, seq, 2, dim=0)
            return over_ring(ring, gates, padded[rows] + padded[rows - 2], seq, matrix=True)

        out = checkpoint(layer, *local, use_reentrant=reentrant) if recompute else layer(*local)
        out.square().sum().backward()
        return [seq.gather(x.grad, 0) for x in local if x.grad is not None]

    plain = run_ranks(3, lambda ring: body(ring, False))[0]
    for grads in run_ranks(3, lambda ring: body(ring, True)):
        assert all(torch.equal(grad, reference) for grad, reference in zip(grads, plain, strict=True))


def test_results_are_the_same_if_other_work_is_done_while_the_states_travel():
    torch.manual_seed(0)
    whole = torch.randn(8, 6, 3, 3, dtype=torch.float64) / 3

    def body(ring: Ring, overlapped: bool) -> list[Tensor]:
        seq = ring.sequence(64, layout="zigzag")
        count = len(seq.fragments())
        transitions, states = (x[:count].clone().requires_grad_() for x in (whole, whole + ring.rank))
        with started_scan(ring, transitions, states, seq, matrix=True) as scan:
            before = None if overlapped else scan.wait()
            other = torch.sin(transitions @ states)  # its backward pass runs between those of the two halves, too
            before = scan.wait() if before is None else before
        return [before.detach(), *gradients(before + other, torch.ones_like(states), transitions, states)]

    apart, overlapped = (run_ranks(3, lambda ring, way=way: body(ring, way)) for way in (False, True))
    for expected, actual in zip(apart, overlapped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(expected, actual, strict=True))


def test_an_error_while_the_states_travel_ends_the_ring_on_all_ranks():
    def body(ring: Ring) -> str:
        seq = ring.sequence(12, layout="contiguous")
        inputs = torch.full((1, 1), 0.5), torch.ones(1, 2)

        def call() -> None:
            with started_scan(ring, *inputs, seq, matrix=False) as scan:
                if ring.rank == 0:
                    raise MemoryError("no room for the outputs")
                scan.wait()
            ring.barrier()  # a rank that received its states earlier gets the error here

        with pytest.raises((RingError, MemoryError)) as caught:
            call()
        with pytest.raises(ClosedError):
            ring.scan_states(*inputs, seq)
        return str(caught.value)

    failed, *waiting = run_ranks(3, body)
    assert failed == "no room for the outputs"
    assert all("rank 0 failed first: MemoryError: no room for the outputs" in message for message in waiting)


def test_all_ranks_run_backward_if_one_needs_gradients():
    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(12, layout="contiguous")
        states = torch.ones(1, 2, dtype=torch.float64, requires_grad=ring.rank == 0)
        before = ring.scan_states(torch.full((1, 1), 0.5, dtype=torch.float64), states, seq)
        before.sum().backward()
        return torch.zeros(1, 2) if states.grad is None else states.grad

    first, *_ = run_ranks(3, body)
    assert first.tolist() == [[1.5, 1.5]]


def test_states_stay_in_float32_under_autocast():
    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(12, layout="contiguous")
        transitions = torch.tensor([[[1 + 2**-12]]])
        with torch.autocast("cpu", torch.bfloat16):
            return ring.scan_states(transitions, torch.ones(1, 1, 1), seq, matrix=True)

    assert [before.item() for before in run_ranks(3, body)] == [0.0, 1.0, 2 + 2**-12]


def test_padding_without_history_and_ranks_without_tokens():
    def body(ring: Ring) -> tuple[list[float], int]:
        seq = ring.sequence(2, layout="contiguous")
        padded, rows = ring.halo(seq.shard(torch.arange(1.0, 3.0), 0), seq, 2, dim=0)
        assert padded[rows].tolist() == seq.shard(torch.arange(1.0, 3.0), 0).tolist()
        return padded.tolist(), len(seq.fragments())

    assert run_ranks(3, body) == [([0.0, 0.0, 1.0], 1), ([0.0, 1.0, 2.0], 1), ([], 0)]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


REFUSED: list[tuple[str, str, Callable[[Ring, Sequence], Any]]] = [
    ("zigzag", "both be float32 or both float64", lambda ring, seq: scan(ring, seq, dtype=torch.bfloat16)),
    ("zigzag", "both be float32 or both float64", lambda ring, seq: scan(ring, seq, other=torch.float64)),
    ("contiguous", "has 1 fragments that are parts.*shapes .2, 3, 4.", lambda ring, seq: scan(ring, seq, fragments=2)),
    ("zigzag", "must have the shape .2, 3, 3.", lambda ring, seq: scan(ring, seq, transition=(4, 4))),
    ("zigzag", "must broadcast to the states", lambda ring, seq: scan(ring, seq, transition=(2, 1), matrix=False)),
    ("zigzag", "width must be a number of rows, got -1", lambda ring, seq: ring.halo(zeros(1, 10), seq, -1)),
    ("zigzag", "must have this rank's 10 tokens", lambda ring, seq: ring.halo(zeros(1, 9), seq, 1)),
]


def scan(
    ring: Ring,
    seq: Sequence,
    fragments: int = 2,
    transition: tuple[int, ...] = (3, 3),
    dtype: torch.dtype = torch.float32,
    other: torch.dtype | None = None,
    matrix: bool = True,
) -> Tensor:
    states = zeros(fragments, 3, 4, dtype=dtype)
    return ring.scan_states(zeros(fragments, *transition, dtype=other or dtype), states, seq, matrix=matrix)


@pytest.mark.parametrize(("layout", "message", "call"), REFUSED)
def test_calls_that_do_not_fit_are_refused_on_all_ranks(layout: str, message: str, call: Any):
    def body(ring: Ring) -> str:
        seq = ring.sequence(20, layout=layout)
        made = ring.barrier if ring.rank else lambda: call(ring, seq)
        with pytest.raises(InputError, match=message) as refusal:
            made()
        ring.barrier()  # the ring can still be used
        return str(refusal.value)

    own, other = run_ranks(2, body)
    assert own.startswith("rank 0: ") and "rank 0 refused the call" in other


def test_striped_sequences_have_no_states():
    def body(ring: Ring) -> None:
        seq = ring.sequence(20, layout="striped")
        for call in (seq.fragments, lambda: ring.halo(zeros(1, 10), seq, 1)):
            with pytest.raises(UnsupportedError, match="use layout='zigzag'"):
                call()

    run_ranks(2, body)


def test_ranks_that_differ_are_refused():
    def body(ring: Ring) -> None:
        seq = ring.sequence(cu_seqlens=[0, 8 + ring.rank, 20], layout="contiguous")
        with pytest.raises(DisagreementError, match="documents"):
            ring.halo(zeros(1, 10), seq, 1)

    run_ranks(2, body)


# --- lost ranks ------------------------------------------------------------------------------------------------------

DEADLINE_S = 3.0


def scans_until_lost(rank: int, world_size: int, port: int, transport: str, dies: str) -> tuple[str, float]:
    """Scan until a scan fails. Return the error's message and how long the scan took. Rank 1 is lost in its scan."""
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in environment.items()})
    with Ring(transport=transport, timeout_s=DEADLINE_S) as ring:
        seq = ring.sequence(12, layout="contiguous")
        states = torch.ones(1, 2, requires_grad=True)
        factor = torch.full((1, 1), 0.5)
        ring.scan_states(factor, states, seq)  # all ranks are connected
        for passes in range(3):
            start = time.monotonic()
            try:
                with started_scan(ring, factor, states, seq, matrix=False) as scan:
                    if rank == 1 and dies == "forward":
                        os._exit(0)
                    before = scan.wait()
                if rank == 1 and dies == "silent":
                    time.sleep(DEADLINE_S + 4)
                if rank == 1 and dies == "backward":
                    before.register_hook(lambda _: os._exit(0))
                (before * (passes + 1)).sum().backward()
            except RingError as error:
                if rank == 1:
                    return "", 0.0
                with pytest.raises(ClosedError):
                    ring.scan_states(factor, states, seq)
                return str(error), time.monotonic() - start
    return "no scan failed", 0.0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("dies", ["forward", "backward", "silent"])
def test_a_rank_that_is_lost_in_a_scan_is_named_and_no_other(transport: str, dies: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the store is in this process
    with Processes(3) as started:
        answers = started.run(scans_until_lost, store.port, transport, dies, exits=None if dies == "silent" else 1)
    for message, seconds in (answers[0], answers[2]):
        assert named_at_fault(message) == {1}, message
        assert seconds < DEADLINE_S + 3, message


@pytest.mark.slow
def test_graphs_break_at_collective_calls():
    """Results are those of eager mode. Another sequence with the same shapes compiles nothing."""
    torch._dynamo.reset()
    weights = torch.randn(2, 2, 3, 6, dtype=torch.float64)

    def block(ring: Ring, x: Tensor, seq: Sequence) -> Tensor:
        padded, rows = ring.halo(2 * x, seq, 2)
        x = padded[:, rows - 2] + x
        x = x + ring.scan_states(x.mean((0, 1)).sin()[None], x[None, 0, -1], seq)
        x = x + seq.gather(x).cumsum(1)[:, : x.shape[1]]
        q = 2 * x.unflatten(2, (2, 3))
        x = x + ring.attention(q, q, q, seq, causal=True).flatten(2)
        q = torch.cat([q, q[..., :1]], 3)
        return 2 * ring.latent_attention(q, x[..., :1], x, *weights, seq, causal=True).flatten(2)

    def body(ring: Ring) -> tuple[list[list[Tensor]], list[int]]:
        counter = CompileCounterWithBackend("aot_eager")
        results, graphs = list[list[Tensor]](), list[int]()
        for first in (3, 2):
            seq = ring.sequence(cu_seqlens=[0, first, 16], layout="contiguous")
            for call in (torch.compile(block, backend=counter), block):
                x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(1, 16, 6)
                x = seq.shard(x).requires_grad_()
                out = call(ring, x, seq)
                out.sin().sum().backward()
                assert x.grad is not None
                results.append([out.detach(), x.grad])
            graphs.append(counter.frame_count)
        if ring.rank == 0:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="collective calls of a ring are not traced"):
                torch.compile(lambda x: ring.halo(x, seq, 1), fullgraph=True)(x)
        return results, graphs

    ranks = run_ranks(2, body)
    assert any(graphs[0] > 0 for _, graphs in ranks)  # a rank may use the graphs of the other one, which is a thread
    for (first, eager_first, second, eager_second), graphs in ranks:
        assert graphs[0] == graphs[1]
        torch.testing.assert_close(first, eager_first, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(second, eager_second, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
def test_another_sequence_with_the_same_shapes_is_not_compiled_again():
    """Not only graphs, but also functions around them that would be compiled without a graph."""
    torch._dynamo.reset()

    def block(x: Tensor, seq: Sequence) -> Tensor:
        padded, rows = ring.halo(2 * x, seq, 2)
        q = padded[:, rows - 1].unflatten(2, (2, 3))
        return ring.attention(q, q, q, seq).sum() + seq.gather(x).sum()

    with Ring() as ring:
        compiled, x = torch.compile(block, backend="eager"), torch.ones(1, 16, 6, dtype=torch.float64)
        for step, first in enumerate((3, 2, 5)):
            seq = ring.sequence(cu_seqlens=[0, first, 16], layout="contiguous")
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                actual = compiled(x, seq)
            torch.testing.assert_close(actual, block(x, seq), rtol=1e-13, atol=1e-13)
