"""Recomputed regions attend over the sequence that they attended over in forward.

The tests draw random programs. Forward passes of one module run over sequences with equal local token counts, through
nested checkpointed regions of every kind, with activations around and inside them. Then the backward passes run in any
order, some of them twice. The reference is dense float64 attention on one process without regions.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn import InputError, Ring, Sequence
from ringattn.adapters.attend import attend, lone_sequence
from ringattn.adapters.context import attends_locally, recompute_context, sequence_of
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.adapters.torch_ops import ring_attention
from ringattn.runtime.activation import active_sequence
from ringattn.runtime.executor import ForwardArithmetic
from ringattn.testing import dense_attention, run_ranks

DOCUMENTS = [0, 3, 12, 16], None, [0, 5, 16]
"""The documents of each sequence that a program chooses from."""
KINDS = "plain", "reentrant", "non-reentrant", "function", "context_fn"
Body = Callable[[Tensor], Tensor]


class CheckpointFunction(torch.autograd.Function):
    """A custom checkpoint function, as trainers define it."""

    @staticmethod
    def forward(ctx: Any, body: Body, x: Tensor) -> Tensor:
        ctx.body = body
        ctx.save_for_backward(x)
        with torch.no_grad():
            return body(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.body(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def run_region(kind: str, body: Body, x: Tensor) -> Tensor:
    if kind == "plain":
        return body(x)
    if kind == "function":
        out: Tensor = CheckpointFunction.apply(body, x)
    elif kind == "context_fn":
        out = checkpoint(body, x, use_reentrant=False, context_fn=recompute_context)
    else:
        out = checkpoint(body, x, use_reentrant=kind == "reentrant")
    return out


class Region(NamedTuple):
    """A checkpointed region that contains one call of attention, or other regions.

    `around` and `inside` are the numbers of the sequences that are activated around and inside the region, or None.
    """

    kind: str
    around: int | None = None
    inside: int | None = None
    parts: tuple[Region, ...] = ()

    def run(self, x: Tensor, attends: Body, active: Callable[[int], AbstractContextManager[Any]]) -> Tensor:
        def body(x: Tensor) -> Tensor:
            with nullcontext() if self.inside is None else active(self.inside):
                for part in self.parts:
                    x = part.run(x, attends, active)
                return x if self.parts else attends(x)

        with nullcontext() if self.around is None else active(self.around):
            return run_region(self.kind, body, x)

    def reference(self, x: Tensor, attends: Callable[[Tensor, int], Tensor], active: int) -> Tensor:
        active = next(index for index in (self.inside, self.around, active) if index is not None)
        for part in self.parts:
            x = part.reference(x, attends, active)
        return x if self.parts else attends(x, active)


def drawn_region(r: random.Random, depth: int) -> Region:
    parts = tuple(drawn_region(r, depth - 1) for _ in range(r.choice((1, 1, 2)))) if depth else ()
    around, inside = (r.randrange(3) if r.random() < 0.2 else None for _ in range(2))
    return Region(r.choice(KINDS), around, inside, parts)


class Program(NamedTuple):
    """Forward passes, each with its active sequence, and backward passes in order, each with its own or with none."""

    passes: list[tuple[int, Region]]
    backwards: list[tuple[int, int | None]]
    entry: str

    @classmethod
    def drawn(cls, seed: int) -> Program:
        r = random.Random(seed)
        passes = [(r.randrange(3), drawn_region(r, r.randrange(3))) for _ in range(r.randint(1, 3))]
        order = r.sample(range(len(passes)), len(passes))
        order += r.choices(order, k=r.randint(0, 1))
        return cls(passes, [(index, r.choice((None, 0, 1, 2))) for index in order], r.choice(tuple(ENTRIES)))


ENTRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "attend": lambda h: attend(sequence_of(), h, h, h, causal=True),
    "ring_attention": lambda h: ring_attention(h, h, h, causal=True),
    "ring_sdpa": lambda h: ring_sdpa(*[h.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2),
}


class Attending(nn.Module):
    """A module of self-attention with one head: x (batch, tokens, dim)."""

    def __init__(self, entry: str = "attend") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
        self.attention = ENTRIES[entry]

    def forward(self, x: Tensor) -> Tensor:
        return self.attention((x * self.weight)[:, :, None]).flatten(2).sin() + x


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(1, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference_gradient(program: Program) -> Tensor:
    """Return the gradient of the weight in one process without regions."""
    weight = torch.linspace(0.5, 1.5, 8, dtype=torch.float64).requires_grad_()

    def attends(x: Tensor, index: int) -> Tensor:
        h = (x * weight)[:, :, None]
        return dense_attention(h, h, h, causal=True, cu_seqlens=DOCUMENTS[index])[0].flatten(2).sin() + x

    losses = [region.reference(tokens(n), attends, seq).sum() for n, (seq, region) in enumerate(program.passes)]
    torch.stack([losses[index] for index, _ in program.backwards]).sum().backward()
    assert weight.grad is not None
    return weight.grad


def ring_gradient(ring: Ring, program: Program) -> Tensor:
    module = Attending(program.entry)
    sequences = [ring.sequence(16, cu_seqlens=cuts, layout="zigzag") for cuts in DOCUMENTS]
    losses = []
    for n, (index, region) in enumerate(program.passes):
        with ring.activate(sequences[index]):
            x = sequences[index].shard(tokens(n)).requires_grad_()
            losses.append(region.run(x, module, lambda inner: ring.activate(sequences[inner])).sum())
    for index, around in program.backwards:
        with nullcontext() if around is None else ring.activate(sequences[around]):
            losses[index].backward(retain_graph=True)
    assert module.weight.grad is not None
    ring.all_reduce([module.weight.grad])
    return module.weight.grad


def check(program: Program) -> None:
    expected = reference_gradient(program)
    for gradient in run_ranks(2, lambda ring: ring_gradient(ring, program), timeout_s=30.0):
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{text}\n{program}")


@pytest.mark.parametrize("first", range(0, 90, 30))
def test_drawn_programs(first: int) -> None:
    for seed in range(first, first + 30):
        check(Program.drawn(seed))


@pytest.mark.slow
def test_more_drawn_programs() -> None:
    for seed in range(1000, 1500):
        check(Program.drawn(seed))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_nothing_is_active_around_a_region_that_activates_its_sequence(kind: str) -> None:
    def body(ring: Ring) -> Tensor:
        module, seq = Attending(), ring.sequence(16, cu_seqlens=DOCUMENTS[0], layout="zigzag")

        def activating(x: Tensor) -> Tensor:
            with ring.activate(seq):
                return module(x)  # type: ignore[no-any-return]

        run_region(kind, activating, seq.shard(tokens()).requires_grad_()).sum().backward()
        assert module.weight.grad is not None
        ring.all_reduce([module.weight.grad])
        return module.weight.grad

    for gradient in run_ranks(2, body):
        expected = reference_gradient(Program([(0, Region("plain"))], [(0, None)], "attend"))
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("compiled", ["inside", "around"])
def test_compiled_code_and_checkpoints_with_three_passes_in_flight(compiled: str, kind: str) -> None:
    """Gradients are exact if all backward passes follow all forward passes, in reverse order.

    The backend uses the partitioner that recomputes.
    """
    torch._dynamo.reset()

    def body(ring: Ring) -> Tensor:
        module = Attending("ring_attention")
        sequences = [ring.sequence(16, cu_seqlens=cuts, layout="zigzag") for cuts in DOCUMENTS]
        options: dict[str, Any] = {"backend": "aot_eager_decomp_partition", "fullgraph": True}
        if compiled == "inside":
            inner = torch.compile(module, **options)
            step: Body = lambda x: run_region(kind, inner, x)  # noqa: E731
        else:
            step = torch.compile(lambda x: checkpoint(module, x, use_reentrant=kind == "reentrant"), **options)
        losses = []
        for n, seq in enumerate(sequences):
            with ring.activate(seq):
                losses.append(step(seq.shard(tokens(n)).requires_grad_()).sum())
        for loss in reversed(losses):
            loss.backward()
        assert module.weight.grad is not None
        ring.all_reduce([module.weight.grad])
        return module.weight.grad

    program = Program([(index, Region("plain")) for index in range(3)], [(index, None) for index in range(3)], "attend")
    (gradient,) = run_ranks(1, body)
    torch.testing.assert_close(gradient, reference_gradient(program), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_tower_inside_a_region_stays_local(kind: str) -> None:
    def body(ring: Ring) -> None:
        model, tower, alone = Attending(), attends_locally(Attending()), Attending()
        seq = ring.sequence(16, layout="zigzag")
        with ring.activate(seq):
            loss = run_region(kind, lambda x: model(tower(x)), seq.shard(tokens()).requires_grad_()).sum()
        loss.backward()
        with ring.activate(None):
            local = alone(seq.shard(tokens()))
        with ring.activate(seq):
            model(local).sum().backward()
        assert tower.weight.grad is not None and alone.weight.grad is not None
        torch.testing.assert_close(tower.weight.grad, alone.weight.grad, rtol=1e-11, atol=1e-11)

    run_ranks(2, body)


def test_a_backward_pass_inside_a_recomputation_does_not_recompute_outer_regions_over_its_sequence() -> None:
    """A recomputed function runs a backward pass itself, which reaches a region outside of it through a closure."""

    def body(ring: Ring) -> Tensor:
        module, sequences = Attending(), [ring.sequence(16, cu_seqlens=cuts, layout="zigzag") for cuts in DOCUMENTS]
        x = sequences[0].shard(tokens()).requires_grad_()
        with ring.activate(sequences[1]):
            outside = checkpoint(module, x, use_reentrant=False)
        with ring.activate(sequences[0]):
            shard = sequences[0].shard(tokens(1)).requires_grad_()
            CheckpointFunction.apply(lambda y: module(y) * outside, shard).sum().backward()
        assert module.weight.grad is not None
        ring.all_reduce([module.weight.grad])
        return module.weight.grad

    weight = Attending().weight

    def alone(x: Tensor, cuts: list[int] | None) -> Tensor:
        h = (x * weight)[:, :, None]
        return dense_attention(h, h, h, causal=True, cu_seqlens=cuts)[0].flatten(2).sin() + x

    (alone(tokens(1), DOCUMENTS[0]) * alone(tokens(), DOCUMENTS[1])).sum().backward()
    assert weight.grad is not None
    for gradient in run_ranks(2, body):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-11, atol=1e-11)


class _HookCheckpoint:
    """A checkpoint on saved-tensor hooks, as another library might build it."""

    def __init__(self, body: Body, x: Tensor) -> None:
        self.body, self.x, self.saved_count = body, x, 0

    def __call__(self) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.body(self.x)

    def pack(self, x: Tensor) -> int:
        self.saved_count += 1
        return self.saved_count - 1

    def unpack(self, index: int) -> Tensor:
        recomputed: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            recomputed.append(x)
            return x

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            self.body(self.x)
        return recomputed[index]


@pytest.mark.parametrize("inside_region", [False, True])
@pytest.mark.parametrize("activates", [False, True])
def test_a_region_that_is_not_found_is_refused_unless_it_activates_its_sequence(
    inside_region: bool, activates: bool
) -> None:
    def body(ring: Ring) -> None:
        module, sequences = Attending(), [ring.sequence(16, cu_seqlens=cuts, layout="zigzag") for cuts in DOCUMENTS]

        def attends(x: Tensor) -> Tensor:
            with ring.activate(sequences[1]) if activates else nullcontext():
                return module(x)  # type: ignore[no-any-return]

        x = sequences[1].shard(tokens()).requires_grad_()
        with ring.activate(sequences[1]):
            outside = _HookCheckpoint(attends, x)()
        with ring.activate(sequences[0]):
            loss = outside.sum()
            if inside_region:
                shard = sequences[0].shard(tokens(1)).requires_grad_()
                loss = CheckpointFunction.apply(lambda y: module(y) * outside, shard).sum()
        if activates:
            (gradient,) = torch.autograd.grad(outside.sum(), x)
            whole = tokens().requires_grad_()
            h = (whole * module.weight)[:, :, None]
            (dense_attention(h, h, h, causal=True)[0].flatten(2).sin() + whole).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(sequences[1].gather(gradient), whole.grad, rtol=1e-11, atol=1e-11)
        else:
            with pytest.raises(
                InputError, match=r"the checkpointed region it recomputes is not known: enter `with ring"
            ):
                loss.backward()

    run_ranks(2, body)


def test_a_region_around_which_two_sequences_were_active_is_refused() -> None:
    """An activation entered by hand ends halfway through a region, so an outer one is active for the rest of it."""

    def body(ring: Ring) -> None:
        module, sequences = Attending(), [ring.sequence(16, cu_seqlens=cuts, layout="zigzag") for cuts in DOCUMENTS]
        first = ring.activate(sequences[0])

        def leaving(x: Tensor) -> Tensor:
            x = module(x)
            if torch._C._current_graph_task_id() == -1:
                first.__exit__(None, None, None)
            return module(x)  # type: ignore[no-any-return]

        with ring.activate(sequences[1]):
            first.__enter__()
            loss = checkpoint(leaving, sequences[0].shard(tokens()).requires_grad_(), use_reentrant=False).sum()
        with pytest.raises(InputError, match="in forward 2 sequences were active in turn"):
            loss.backward()

    run_ranks(2, body)


def test_an_activation_that_only_the_forward_run_enters_is_refused_in_recomputation() -> None:
    """Recomputation is refused if only the forward run enters the activation, as a hook might do.

    No sequence was active around the region, and the ring is open.
    """

    def body(ring: Ring) -> None:
        module, seq = Attending(), ring.sequence(16, layout="zigzag")

        def forward_only(x: Tensor) -> Tensor:
            assert active_sequence() is None  # this call records on the region that no sequence is active
            with ring.activate(seq) if torch._C._current_graph_task_id() == -1 else nullcontext():
                return module(x)  # type: ignore[no-any-return]

        loss = checkpoint(forward_only, seq.shard(tokens()).requires_grad_(), use_reentrant=False).sum()
        with ring.activate(seq), pytest.raises(InputError, match="no sequence is active"):
            loss.backward()

    run_ranks(2, body)


# --- activation and local attention ----------------------------------------------------------------------------------


def test_nothing_active_is_local_only_while_no_ring_is_shared() -> None:
    assert sequence_of() is None
    with Ring() as alone, Ring() as second:
        assert sequence_of() is None
        with alone.activate(alone.sequence(5)):
            assert sequence_of() is active_sequence() is not None
        with pytest.raises(InputError, match="activate takes a sequence of this ring"):
            alone.activate(second.sequence(4))

    def body(ring: Ring) -> Sequence | None:
        with pytest.raises(InputError, match=r"no sequence is active.*ring\.activate\(seq\)"):
            sequence_of()
        with ring.activate(None):
            return sequence_of()

    assert run_ranks(2, body) == [None, None]
    assert sequence_of() is None  # those rings are closed


def test_local_attention_keeps_every_option() -> None:
    q, k = tokens()[:, :, None], tokens(1)[:, :, None]
    for options in ({"causal": True}, {"window": (2, 0), "causal": True}, {"scale": 0.3}, {}):
        assert torch.allclose(attend(None, q, k, k, **options), dense_attention(q, k, k, **options)[0], atol=1e-12)
    capped = attend(None, q, k, k, softcap=0.5)
    assert not torch.allclose(capped, attend(None, q, k, k), atol=1e-3)
    few = attend(None, q[:, :3], k, k)
    assert torch.allclose(few, dense_attention(q, k, k)[0][:, :3], atol=1e-12)


def test_local_attention_continues_after_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate recognises the error, and the next call of this thread succeeds with a smaller batch."""
    memory = pytest.importorskip("accelerate.utils.memory")
    attend_to_block, batches = ForwardArithmetic.attend, list[int]()

    def attend_if_small(arithmetic: ForwardArithmetic, *arguments: Any) -> None:
        if batches[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        attend_to_block(arithmetic, *arguments)

    def attend_to_batch(batch: int) -> Tensor:
        batches.append(batch)
        return attend(None, *3 * (tokens()[:1, :, None].expand(batch, -1, -1, -1),), softcap=0.5)

    monkeypatch.setattr(ForwardArithmetic, "attend", attend_if_small)
    out = memory.find_executable_batch_size(attend_to_batch, starting_batch_size=2)()
    assert out.shape[0] == batches[-1] == 1


def test_local_attention_in_a_forked_process() -> None:
    assert lone_sequence(4).ring.is_open
    child = os.fork()
    if child == 0:
        signal.alarm(8)
        os._exit(0 if lone_sequence(4).ring.is_open else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_casts_local_and_ring_attention(dtype: torch.dtype) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(16)
        q = seq.shard(tokens())[:, :, None].to(dtype)
        v = q.to(torch.bfloat16 if dtype == torch.float32 else dtype)
        with torch.autocast("cpu", torch.bfloat16):
            for where in (seq, None):
                for options in ({}, {"softcap": 2.0}):  # None: local, by torch or over one rank
                    assert attend(where, q, q, v, **options).dtype == v.dtype
            like = q.to("meta")
            assert attend(None, like, like, like).dtype == dtype  # autocast has no meta device

    run_ranks(2, body)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("is_local", [False, True])
def test_the_graph_keeps_the_sequence_of_a_region_and_frees_it(kind: str, is_local: bool) -> None:
    def body(ring: Ring) -> Tensor:
        module, seq = Attending(), ring.sequence(16, cu_seqlens=DOCUMENTS[0], layout="zigzag")
        x, freed = tokens() if is_local else seq.shard(tokens()), weakref.ref(seq)
        with ring.activate(None if is_local else seq):
            loss = run_region(kind, module, x.requires_grad_()).sum()
        del seq
        gc.collect()
        loss.backward()
        del loss
        gc.collect()
        assert freed() is None and module.weight.grad is not None
        if not is_local:
            ring.all_reduce([module.weight.grad])
        return module.weight.grad

    expected = reference_gradient(Program([(1 if is_local else 0, Region("plain"))], [(0, None)], "attend"))
    for gradient in run_ranks(2, body):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_the_same_tokens_in_other_documents() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(16, layout="striped")
        cut = seq.with_documents(DOCUMENTS[0])
        assert torch.equal(cut.positions(), seq.positions()) and cut.documents == (0, 3, 12, 16) and cut != seq
        assert cut.with_documents(None) == seq and hash(cut.with_documents(None)) == hash(seq)
        with pytest.raises(InputError, match="ends at 12, the sequence has 16 tokens"):
            seq.with_documents([0, 12])

    run_ranks(2, body)
