"""Attention over a ring inside torch.compile: one graph, results and gradients as in eager mode, no recompilation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import ClosedError, InputError, Ring, Sequence, UnsupportedError, masks
from ringattn.adapters import torch_ops
from ringattn.adapters.torch_ops import ACTIVE, attention, attention_backward, ring_attention
from ringattn.sequence import sequence_with
from ringattn.testing import dense_attention, run_ranks
from tests.contract.mesh import on_mesh

TOKENS, DIM, HEADS, KV_HEADS = 17, 16, 4, 2
DOCUMENTS = [0, 3, 12, 17]
Attend = Callable[..., Tensor]


class Layers(nn.Module):
    """Two pre-norm layers with grouped heads that share their weights, from (batch, tokens, 16) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, DIM + 2 * DIM * KV_HEADS // HEADS, bias=False, dtype=torch.float64)
        self.up = nn.Linear(DIM, DIM, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            nn.init.uniform_(weight, -0.5, 0.5, generator=generator)

    def forward(self, x: Tensor, attend: Attend, *where: Sequence) -> Tensor:
        for _ in range(2):
            heads = self.qkv(F.rms_norm(x, (DIM,))).unflatten(2, (-1, DIM // HEADS))
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 2)
            x = x + attend(q, k, v, *where).flatten(2)
            x = x + F.silu(self.up(x))
        return x


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Start without compiled code of other tests, and without parallel compile processes.

    The key of Inductor's disk cache includes neither an operator's fake shapes nor ATEN_CPU_CAPABILITY.
    """
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(compile_threads=1):
        yield


def causal(q: Tensor, k: Tensor, v: Tensor, *where: Sequence) -> Tensor:
    return ring_attention(q, k, v, *where, causal=True)


def inputs(batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(batch, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(ring: Ring, seq: Sequence, model: nn.Module, run: Callable[..., Tensor], x: Tensor, *how: Any) -> list[Tensor]:
    """Run one forward and backward pass over the ring. Return the whole output, then the summed gradients."""
    model.zero_grad()
    with ring.activate(None if seq in how else seq):  # a sequence in `how` takes precedence
        out = run(seq.shard(x), *how)
    out.sin().sum().backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    ring.all_reduce(grads)
    return [seq.gather(out.detach()), *grads]


def reference(x: Tensor, documents: list[int] | None = None, **options: Any) -> list[Tensor]:
    """Return the output and the gradients of one process."""
    model = Layers()
    out = model(x, lambda q, k, v: dense_attention(q, k, v, causal=True, cu_seqlens=documents, **options)[0])
    out.sin().sum().backward()
    return [out.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) == 4
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


# Thread ranks share dynamo's caches: its counters count all ranks, and each rank compiles a separate model.


def test_layers_compile_into_one_graph() -> None:
    """Results equal eager mode and one process. Other documents and steps compile no further graph."""

    def body(ring: Ring) -> tuple[list[list[Tensor]], int]:
        model, counter = Layers(), CompileCounterWithBackend("aot_eager")
        run = torch.compile(model, backend=counter, fullgraph=True)
        whole, cut = ring.sequence(TOKENS, layout="zigzag"), ring.sequence(cu_seqlens=DOCUMENTS, layout="zigzag")
        steps = [step(ring, seq, model, run, inputs(seed=seed), causal) for seed, seq in enumerate((whole, cut, whole))]
        eager = step(ring, cut, model, model, inputs(seed=1), causal)
        return [*steps, eager], counter.frame_count

    for (first, second, third, eager), graphs in run_ranks(2, body):
        assert graphs == 1
        assert_same(first, reference(inputs()))
        assert_same(second, reference(inputs(seed=1), DOCUMENTS))
        assert_same(third, reference(inputs(seed=2)))
        assert_same(eager, second)


@pytest.mark.parametrize(
    ("backend", "again"),
    [("aot_eager", False), *(pytest.param(name, again, marks=pytest.mark.slow)
                             for name, again in (("aot_eager", True), ("inductor", False), ("inductor", True)))],
)  # fmt: skip
def test_all_ranks_compute_a_result_that_one_rank_reads(backend: str, again: bool) -> None:
    def body(ring: Ring) -> tuple[list[Tensor], list[Tensor], int]:
        model, seq = Layers(), ring.sequence(TOKENS)
        x = seq.shard(inputs())

        def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
            q, k, v = model.qkv(x).unflatten(2, (-1, DIM // HEADS)).split((HEADS, KV_HEADS, KV_HEADS), 2)
            out = causal(q, k, v)
            logged = causal(out, k, v).detach()  # after `out`, because compilers may reorder independent operators
            return out, logged.norm() if ring.rank == 0 else None

        def trained(run: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> list[Tensor]:
            with ring.activate(seq):
                with torch.no_grad():
                    other, _ = run(x)
                out, _ = checkpoint(run, x, use_reentrant=False) if again else run(x)
            (dweight,) = torch.autograd.grad(out.sin().sum(), [model.qkv.weight])
            return [out.detach(), dweight, other]

        eager = trained(run)
        ring.reset_counters()
        compiled = trained(torch.compile(run, backend=backend, fullgraph=True))
        return eager, compiled, ring.counters()["passes"]

    results = run_ranks(2, body)
    assert results[0][2] == results[1][2] >= 5  # two times two forward passes, and a backward pass
    for eager, compiled, _ in results:
        for x, y in zip(compiled, eager, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_inductor_compiles_around_the_operators() -> None:
    def body(ring: Ring) -> list[Tensor]:
        x = torch.linspace(-1, 1, TOKENS * DIM, dtype=torch.float64).view(1, TOKENS, HEADS, -1).requires_grad_()
        seq = ring.sequence(TOKENS, layout="zigzag")
        run = torch.compile(lambda q: causal(q, q + 1, q * 2) * 3, backend="inductor", fullgraph=True)
        with ring.activate(seq):
            out = run(seq.shard(x))
        out.sin().sum().backward()
        assert x.grad is not None
        ring.all_reduce([x.grad])
        return [seq.gather(out.detach()), x.grad]

    x = torch.linspace(-1, 1, TOKENS * DIM, dtype=torch.float64).view(1, TOKENS, HEADS, -1).requires_grad_()
    expected = dense_attention(x, x + 1, x * 2, causal=True)[0] * 3
    expected.sin().sum().backward()
    for out, grad in run_ranks(2, body):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(grad, x.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_a_sequence_given_compiles_once_more_and_a_batch_size_too() -> None:
    cuts: list[list[int]] = [[0, 17], DOCUMENTS, [0, 8, 17], [0, 1, 17]]

    def body(ring: Ring) -> tuple[list[list[Tensor]], tuple[int, int]]:
        model, counter = Layers(), CompileCounterWithBackend("aot_eager")
        run = torch.compile(model, backend=counter, fullgraph=True)
        seqs = [ring.sequence(cu_seqlens=documents, layout="zigzag") for documents in cuts]
        outputs = [step(ring, seq, model, run, inputs(2), causal, seq) for seq in seqs]
        for_sequences, counter.frame_count = counter.frame_count, 0
        outputs += [step(ring, seqs[1], model, run, inputs(batch), causal) for batch in (2, 3, 5)]
        return outputs, (for_sequences, counter.frame_count)

    results = run_ranks(2, body)
    # Ranks are threads and share dynamo's record of which sizes change, so one rank may need only one graph.
    assert all(1 <= count <= 2 for _, counts in results for count in counts)
    for outputs, _ in results:
        for output, documents in zip(outputs[:4], cuts, strict=True):
            assert_same(output, reference(inputs(2), documents))
        for output, batch in zip(outputs[4:], (2, 3, 5), strict=True):
            assert_same(output, reference(inputs(batch), DOCUMENTS))


# --- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "window"), [(torch.float64, (-1, -1)), (torch.bfloat16, (2, 1))])
def test_operators_keep_their_word_to_compilers(dtype: torch.dtype, window: tuple[int, int]) -> None:
    """The operators pass `opcheck`: true shapes, strides and dtypes, no hidden aliases, gradients by autograd only."""
    with Ring() as ring:
        seq = ring.sequence(7)
        q, k = (torch.randn(2, 7, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2))
        v = torch.randn(2, 7, 2, 6, dtype=dtype, requires_grad=True)
        sinks = torch.randn(4, dtype=dtype, requires_grad=True)
        given_sinks, slopes = (sinks, torch.tensor([0.5, 0.25, 0.1, 0.0])) if dtype == torch.float64 else (None, None)
        mask = "" if window == (-1, -1) else "global_tokens:1"
        dropout = (0.5, 2**31, 5) if dtype == torch.float64 else (0.0, None, None)
        options = False, *window, mask, 0.3, 2.0, slopes, *dropout, "auto"
        arguments = q, k, v, given_sinks, seq.handle, "q k v", *options
        torch.library.opcheck(attention, arguments)
        with torch.no_grad():
            out, lse, ticket = attention(*arguments)
            backward_arguments = (*arguments[:4], out, lse, ticket, torch.randn_like(out), torch.randn_like(lse))
            torch.library.opcheck(attention_backward, backward_arguments)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "fastest"}, "schedule"), ({"mask": "prefix:2"}, "mask='prefix:2' is not a mask"),
    ({"mask": masks.global_tokens(1)}, "needs a window"), ({"chunk": 2}, "chunk=2 is now a mask"),
    ({"mask": masks.prefix((1, 2))}, "2 numbers for 3 documents"), ({"dropout_p": 0.3}, "needs a dropout_seed"),
    ({"dropout_p": 0.3, "dropout_seed": -1}, "dropout_seed must be"),
    ({"dropout_p": True}, "dropout_p must be a probability"),
    ({"dropout_p": 0.3, "dropout_seed": True}, "dropout_seed must be"),
]  # fmt: skip


def test_wrong_options_are_those_of_the_ring() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(cu_seqlens=DOCUMENTS, layout="striped")
        q, k = (seq.shard(torch.zeros(2, TOKENS, heads, 8)) for heads in (4, 2))
        for wrong, message in WRONG:
            with pytest.raises(InputError, match=message):
                ring_attention(q, k, k, seq, causal=True, **wrong)
        with pytest.raises(InputError, match="needs a window"):  # raised by the operator itself
            attention(q, k, k, None, seq.handle, "", True, None, None, "global_tokens:1", None, None, None, 0.0, None,
                      None, "auto")  # fmt: skip

    run_ranks(2, body)


@pytest.mark.slow
def test_compiled_calls_take_every_mask_and_other_seeds_without_compiling_again() -> None:
    """The first seed is a constant of its graph. The second graph takes the seed as an input and serves later seeds."""
    options: dict[str, Any] = {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1]), "dropout_p": 0.3}
    several: list[dict[str, Any]] = [
        {"mask": masks.chunked(3)}, {"mask": masks.prefix((2, 0))},
        {"window": (1, 0), "mask": masks.global_tokens(1)},
    ]  # fmt: skip

    def body(ring: Ring) -> None:
        seq = ring.sequence(cu_seqlens=[0, 5, 11])
        x = torch.linspace(-1, 1, 11 * 8, dtype=torch.float64).view(1, 11, 2, 4).requires_grad_()

        def same(attend: Callable[..., Tensor], seeds: Many[int], most_graphs: int, **more: Any) -> None:
            counter = CompileCounterWithBackend("aot_eager")
            run = torch.compile(lambda x, seed: attend(x, x, x, dropout_seed=seed), backend=counter, fullgraph=True)
            for seed in seeds:
                with ring.activate(seq):
                    compiled_out = run(seq.shard(x), seed)
                local = seq.shard(x)
                expected = ring.attention(local, local, local, seq, dropout_seed=seed, **options, **more)
                torch.testing.assert_close(compiled_out, expected, rtol=1e-13, atol=1e-13)
                grads = [torch.autograd.grad(out.sin().sum(), x)[0] for out in (compiled_out, expected)]
                torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
            assert counter.frame_count <= most_graphs

        for more in several:
            seeds = (3, 8, 2**40, 2**62) if more is several[0] else (2**64 - 1,)
            same(partial(ring_attention, **options, **more), seeds, min(len(seeds), 2), **more)
        assert len(torch_ops._kept_of[ring]) == len(several)  # the seed is not part of the key

    run_ranks(1, body)


@on_mesh
def test_sinks_of_sharded_heads(mesh: DeviceMesh) -> None:
    """Sinks may be a DTensor if q, k and v are. `Ring.attention` refuses any DTensor by name."""
    x, sinks = torch.randn(1, 6, 2, 8, dtype=torch.float64), torch.randn(2, dtype=torch.float64, requires_grad=True)
    heads, sharded = DTensor.from_local(x, mesh, [Shard(2)]), DTensor.from_local(sinks, mesh, [Shard(0)])
    with Ring(transport="local") as ring:
        seq = ring.sequence(6)
        expected = ring.attention(x, x, x, seq, sinks=sinks)
        out = ring_attention(heads, heads, heads, seq, sinks=sharded)
        assert isinstance(out, DTensor) and torch.equal(out.to_local(), expected)
        (grad,) = torch.autograd.grad(out.to_local().sum(), sinks)
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), sinks)[0])
        with pytest.raises(UnsupportedError, match=r"rank 0: sinks is a DTensor; give sinks\.to_local\(\)"):
            ring.attention(x, x, x, seq, sinks=sharded)
        with pytest.raises(UnsupportedError, match=r"rank 0: k is a DTensor; give k\.to_local\(\)"):
            ring.attention(x, heads, x, seq)


def test_a_policy_that_saves_the_operator_sends_nothing_again() -> None:
    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saved = op is torch.ops.ringattn.attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def body(ring: Ring) -> tuple[list[Tensor], int]:
        model, seq = Layers(), ring.sequence(TOKENS, layout="zigzag")
        contexts = partial(create_selective_checkpoint_contexts, policy)
        output = step(
            ring, seq, model, lambda x: checkpoint(model, x, causal, use_reentrant=False, context_fn=contexts), inputs()
        )
        return output, ring.counters()["passes"]

    for output, passes in run_ranks(2, body):
        assert passes == 2 + 2
        assert_same(output, reference(inputs()))


def test_what_cannot_be_known_is_refused() -> None:
    def body(ring: Ring) -> None:
        x = torch.zeros(1, 8, 1, 4, dtype=torch.float64, requires_grad=True)
        run = torch.compile(causal, backend="aot_eager", fullgraph=True)
        for attend in (run, causal):
            with pytest.raises(InputError, match="no sequence is active"):
                attend(x, x, x)
        with ring.activate(None):
            alone = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True)
            torch.testing.assert_close(run(x, x, x), alone.transpose(1, 2))
        with pytest.raises(InputError, match="the sequence with handle 0 was deleted"):
            sequence_with(ACTIVE)

    run_ranks(2, body)
    ring = Ring()
    x = torch.zeros(1, 8, 1, 4, requires_grad=True)
    out = ring_attention(x, x, x, ring.sequence(8))  # the sequence no longer exists
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    del ring
    gc.collect()
    with pytest.raises(ClosedError, match="keep the ring open until backward is done"):
        out.sum().backward()


def test_calls_of_ever_new_documents_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "KEPT_CALLS", 2)
    with Ring() as ring:
        x = torch.zeros(1, 8, 1, 4, requires_grad=True)
        seqs = [ring.sequence(cu_seqlens=[0, first, 8]) for first in (1, 2, 3)]
        first, *others = (ring_attention(x, x, x, seq) for seq in seqs)
        assert len(torch_ops._kept_of[ring]) == 2
        for out in others:
            out.sum().backward()
        with pytest.raises(ClosedError, match="fewer than 2 calls over other sequences in between"):
            first.sum().backward()
