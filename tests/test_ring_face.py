"""Wrong input raises an error that names it on every rank, long before any deadline, and the ring stays usable.

Not covered: results (see test_exact.py), failures in a pass (see test_ring_fails.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import DisagreementError, InputError, Ring, Sequence, UnsupportedError
from ringattn.engine.plain import PlainEngine
from ringattn.testing import run_ranks
from tests.face import DEADLINE_S, RANKS, TOKENS, Change, X, attend, errors


def setting(**values: Any) -> Change:
    """Return a change that sets these arguments."""
    return lambda ring, arguments: arguments.update(values)


def editing(name: str, edit: Callable[[Tensor], object]) -> Change:
    """Return a change that replaces the argument `name` by `edit` of it."""
    return lambda ring, arguments: arguments.update({name: edit(arguments[name])})


def cross(kv_documents: list[int] | None = None, **options: Any) -> Change:
    """Return a change that passes K and V of another sequence of eight tokens, and `options`."""

    def change(ring: Ring, arguments: dict[str, Any]) -> None:
        kv_seq = ring.sequence(8, cu_seqlens=kv_documents, layout="contiguous")
        kv = kv_seq.shard(X[:, :8, :2])
        arguments.update({"kv_seq": kv_seq, "k": kv, "v": kv, **options})

    return change


def of_another_ring(name: str) -> Change:
    """Return a change that replaces the sequence in the argument `name` by a sequence of another ring."""

    def change(ring: Ring, arguments: dict[str, Any]) -> None:
        with Ring() as stranger:
            arguments[name] = stranger.sequence(arguments["q"].shape[1])

    return change


BAD: dict[str, tuple[Change, str]] = {
    "three dimensions": (editing("q", lambda q: q[0]), r"rank R: q must be a \(batch, tokens, heads, head_dim\)"),
    "no tensor": (setting(k=[1.0]), r"rank R: k must be a .* got list"),
    "full q": (setting(q=X), r"rank R: q has 12 tokens, this rank owns 4 of 12; pass seq\.shard\(q\)"),
    "full k of kv_seq": (
        lambda ring, a: cross(k=X[:, :8, :2])(ring, a),
        r"rank R: k has 8 tokens, this rank owns \d of 8; pass kv_seq\.shard\(k\)",
    ),
    "mixed dtypes": (editing("k", Tensor.double), r"rank R: k is torch\.float64 and q is torch\.float32"),
    "batches": (editing("v", lambda v: v.expand(2, -1, -1, -1)), r"rank R: v has batch 2 and q has batch 1"),
    "k and v heads": (editing("v", lambda v: v[:, :, :1]), r"rank R: k has 2 heads and v has 1"),
    "head dims": (editing("k", lambda k: k[..., :4]), r"rank R: q has head_dim 8 and k has head_dim 4"),
    "heads that do not divide": (editing("q", lambda q: q[:, :, :3]), r"q_heads=3 is not a multiple of kv_heads=2"),
    "last dimension": (editing("q", lambda q: q.transpose(2, 3).contiguous().transpose(2, 3)), r"rank R: the last dim"),
    "integers": (lambda ring, a: a.update({n: a[n].int() for n in "qkv"}), r"q, k and v are int32, which is not sup"),
    "sinks": (setting(sinks=torch.zeros(2)), r"rank R: sinks must be a tensor of shape \(4,\), .* got \(2,\)"),
    "sinks of integers": (setting(sinks=torch.zeros(4, dtype=torch.int64)), r"rank R: sinks are torch\.int64; use one"),
    "sinks elsewhere": (setting(sinks=torch.zeros(4, device="meta")), r"rank R: sinks are on meta and q is on cpu"),
    "slopes of other heads": (setting(alibi_slopes=[0.5] * 3), r"alibi_slopes must be 4 numbers, one .* got 3"),
    "dropout without a seed": (setting(dropout_p=0.1), r"dropout_p=0\.1 needs a dropout_seed, the same on all"),
    "no query heads": (editing("q", lambda q: q[:, :, :0]), r"q_heads=0, where attention needs at least 1"),
    "no head_dim": (
        lambda ring, a: a.update({n: a[n][..., :0] for n in "qk"}),
        r"head_dim=0, where attention needs at least 1",
    ),
    "schedule": (setting(schedule="star"), r"schedule='star' is not known; choose"),
    "misspelt schedule": (
        setting(schedule="node_gathr"),
        r"schedule='node_gathr' is not .*; did you mean node_g",
    ),
    "window ahead": (setting(window=(3, 2)), r"window=\(3, 2\) looks ahead, causal=True forbids it"),
    "unbounded window ahead": (setting(window=(-1, 2)), r"window=\(-1, 2\) looks ahead, causal=True forbids it"),
    "unpaired documents": (cross(kv_documents=[0, 3, 8]), r"kv_seq has documents and seq has none"),
    "seq of another ring": (of_another_ring("seq"), r"rank R: seq must come .* got a sequence of another ring"),
    "seq of nothing": (setting(seq=12), r"rank R: seq must come from this ring's own ring\.sequence.* got int"),
    "kv_seq of another ring": (of_another_ring("kv_seq"), r"rank R: kv_seq must come .* a sequence of another ring"),
    "kv_seq of nothing": (setting(kv_seq=0), r"rank R: kv_seq must come from this ring's own .* got int"),
}


def refusal_on(rank: int, message: str) -> str:
    """Return the pattern of the error for a message in `BAD`. The error names the rank even if the message does not."""
    return f"rank {rank}: {message.removeprefix('rank R: ')}"


@pytest.mark.parametrize("bad", BAD)
def test_bad_on_one_rank_is_refused_by_all_and_the_ring_lives(bad: str) -> None:
    change, message = BAD[bad]
    wanted = run_ranks(RANKS, attend, engine="plain")

    def body(ring: Ring) -> None:
        try:
            attend(ring, change if ring.rank == 1 else None)
        except InputError:
            # No pass has run, and the next call is exact.
            assert ring.counters()["passes"] == 0
            assert torch.equal(attend(ring), wanted[ring.rank])
            raise

    for rank, error in enumerate(errors(body)):
        prefix = "" if rank == 1 else "rank 1 refused the call, so all ranks refuse it: "
        assert isinstance(error, InputError) and re.match(prefix + refusal_on(1, message), str(error))


SHARD = TOKENS // RANKS
ROTARY, LATENTS = torch.ones(1, SHARD, 2), torch.ones(1, SHARD, 3)
WEIGHTS = torch.ones(X.shape[2], X.shape[3] - 2, 3), torch.ones(X.shape[2], 5, 3)
ONE_TENSOR: dict[str, Callable[[Ring, Sequence, Tensor], object]] = {
    "attention": lambda ring, seq, x: ring.attention(x, x, x, seq),
    "gather": lambda ring, seq, x: seq.gather(x),
    "halo": lambda ring, seq, x: ring.halo(x, seq, 2),
    "scan_states": lambda ring, seq, x: ring.scan_states(x, x, seq),
    "latent_attention": lambda ring, seq, x: ring.latent_attention(x, ROTARY, LATENTS, *WEIGHTS, seq),
}


@pytest.mark.parametrize("call", ONE_TENSOR)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tensor.to_sparse, "is torch.sparse_coo"),
        (lambda x: x.to("meta"), "is on meta, this ring uses cpu"),
        (Tensor.numpy, "got ndarray"),
        (lambda x: None, "got NoneType"),
    ],
    ids=["sparse", "meta", "no tensor", "None"],
)
def test_a_tensor_without_dense_values_on_one_rank_is_refused_by_all(
    call: str, change: Callable[[Tensor], Any], message: str
) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS, layout="contiguous")
        x = torch.ones(1, 1, 2, 4) if call == "scan_states" else seq.shard(X)
        with pytest.raises(InputError, match=f"rank 1: .*{message}"):
            ONE_TENSOR[call](ring, seq, change(x) if ring.rank == 1 else x)
        ONE_TENSOR[call](ring, seq, x)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("call", [name for name in ONE_TENSOR if name != "gather"])
@pytest.mark.parametrize("wrong", [None, 12], ids=str)
def test_no_sequence_on_one_rank_is_refused_by_all(call: str, wrong: Any) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS, layout="contiguous")
        x = torch.ones(1, 1, 2, 4) if call == "scan_states" else seq.shard(X)
        message = rf"rank 1: seq must come from this ring's own ring\.sequence.* got {type(wrong).__name__}"
        with pytest.raises(InputError, match=message):
            ONE_TENSOR[call](ring, wrong if ring.rank == 1 else seq, x)
        ONE_TENSOR[call](ring, seq, x)

    run_ranks(RANKS, body)


def test_a_feature_that_an_engine_lacks() -> None:
    lacked: tuple[dict[str, Any], ...] = (
        {"softcap": 3.0},
        {"alibi_slopes": [0.5] * 4},
        {"dropout_p": 0.1, "dropout_seed": 3},
    )
    for options in lacked:
        for error in errors(lambda ring, options=options: attend(ring, setting(**options)), engine="aten"):
            assert isinstance(error, UnsupportedError) and f"engine='aten' has no {next(iter(options))}" in str(error)


def length_eleven(ring: Ring, arguments: dict[str, Any]) -> None:
    seq = ring.sequence(11)
    arguments.update({"seq": seq, **dict.fromkeys("qkv", X[:, : seq.counts[ring.rank]])})


DISAGREE: dict[str, tuple[Change, str, str]] = {
    "length": (length_eleven, "12 tokens", "11 tokens"),
    "layout": (lambda ring, a: a.update(seq=ring.sequence(TOKENS, layout="striped")), "zigzag", "striped"),
    "dtype": (lambda ring, a: a.update({n: a[n].double() for n in "qkv"}), "float32", "float64"),
    "causal": (setting(causal=False), "distance 0..inf", "any distance"),
    "window": (setting(window=(4, 0)), "distance 0..inf", "distance 0..4"),
    "documents": (
        lambda ring, a: a.update(seq=ring.sequence(cu_seqlens=[0, 3, 12], layout="zigzag")), "q 0..11", "q 0..2"
    ),
    "heads": (lambda ring, a: a.update({n: a[n][:, :, :1] for n in "kv"}), "kv_heads 2", "kv_heads 1"),
    "batch": (lambda ring, a: a.update({n: torch.cat([a[n]] * 2) for n in "qkv"}), "batch 1", "batch 2"),
    "scale": (setting(scale=0.5), "scale 0.353553", "scale 0.5"),
    "softcap": (setting(softcap=2.0), "softcap None", "softcap 2.0"),
    "dropout": (setting(dropout_p=0.1, dropout_seed=1), "dropout_p None", "dropout_p 0.1"),
    "slopes": (setting(alibi_slopes=[0.5] * 4), "alibi_slopes None", "alibi_slopes (0.5, 0.5, 0.5, 0.5)"),
    "a bit of scale": (setting(scale=1 / math.sqrt(8) + 2**-54), "0.35355339059327373", "0.3535533905932738"),
    "sinks": (setting(sinks=torch.zeros(4)), ": no sinks", ": sinks"),
    "schedule": (setting(schedule="direct"), "schedule.name 'ring'", "schedule.name 'direct'"),
    "wire": (lambda ring, a: setattr(ring, "dkv_wire_dtype", "bfloat16"), "wire_dtype None", "wire_dtype 'bfloat16'"),
}  # fmt: skip


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree(what: str) -> None:
    change, common, odd = DISAGREE[what]

    def body(ring: Ring) -> None:
        before = ring.dkv_wire_dtype
        try:
            attend(ring, change if ring.rank == 2 else None)
        except DisagreementError:
            ring.dkv_wire_dtype = before
            assert attend(ring).shape == (1, 4, 4, 8)
            raise

    for error in errors(body):
        assert isinstance(error, DisagreementError)
        lines = str(error).splitlines()
        assert [line.split(":")[0].strip() for line in lines[1:]] == ["rank 0", "rank 1", "rank 2"]
        assert common in lines[1] and common in lines[2] and odd in lines[3]


def test_ranks_that_make_different_calls() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        if ring.rank == 0:
            seq.gather(seq.shard(X))
        else:
            attend(ring)

    for error in errors(body):
        assert isinstance(error, DisagreementError) and "rank 0: call 1: gather" in str(error)


def test_a_barrier_beside_another_call() -> None:
    for error in errors(lambda ring: ring.barrier() if ring.rank == 0 else attend(ring)):
        assert isinstance(error, DisagreementError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "magic"}, r"engine='magic' is not known; choose one of auto, aten, plain"),
        ({"timeout_s": 0}, r"timeout_s must be a positive, finite number, got 0"),
        ({"timeout_s": float("nan")}, r"timeout_s must be a positive, finite number, got nan"),
        ({"timeout_s": float("inf")}, r"timeout_s must be a positive, finite number, got inf"),
        ({"timeout_s": "60"}, r"timeout_s must be a positive, finite number, got '60'"),
        ({"dkv_wire_dtype": torch.int8}, r"dkv_wire_dtype=torch\.int8 is not supported; use one of float64"),
        ({"transport": "pigeon"}, r"transport='pigeon' is not known; choose one of auto, local, shm, gloo, nccl, peer"),
        ({"cluster": 5}, r"cluster must be a Cluster, the name of a preset or a file, got 5"),
        ({"transport": "nccl"}, r"needs a CUDA device, and torch finds none"),
    ],
)
def test_bad_options_of_a_ring(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ring(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"sequence needs a length in tokens, or cu_seqlens"),
        ({"length": -1}, r"length must be a number of tokens, got -1"),
        ({"length": True}, r"length must be a number of tokens, got True"),
        ({"length": 8.0}, r"length must be a number of tokens, got 8\.0"),
        ({"cu_seqlens": [0, 5, 3, 8]}, r"cu_seqlens is out of order: document 1 would run from 5 to 3"),
        ({"cu_seqlens": [1, 5]}, r"cu_seqlens must start with 0"),
        ({"cu_seqlens": [0]}, r"have one number more than documents"),
        ({"cu_seqlens": [0, 5], "length": 6}, r"cu_seqlens ends at 5, the sequence has 6 tokens"),
        ({"cu_seqlens": [0, "x"]}, r"cu_seqlens must be integers"),
        ({"cu_seqlens": 7}, r"cu_seqlens must be integers"),
        ({"cu_seqlens": [0, True]}, r"cu_seqlens must be integers, got True"),
        ({"cu_seqlens": [0, float("inf")]}, r"cu_seqlens must be integers, got inf"),
        ({"cu_seqlens": [0, 2.5, 4]}, r"cu_seqlens must be integers"),
        ({"cu_seqlens": torch.tensor([0.0, 2.5, 4.0])}, r"cu_seqlens must be integers"),
        ({"length": 8, "layout": "spiral"}, r"layout='spiral' is not known"),
        ({"length": 8, "for_": "fun"}, r"for_='fun' is not known"),
        ({"length": 8, "layout": "per_document"}, r"layout='per_document' needs cu_seqlens"),
    ],
)
def test_bad_sequences(options: dict[str, Any], message: str) -> None:
    with Ring() as ring, pytest.raises(InputError, match=message):
        ring.sequence(**options)


def test_only_some_ranks_may_use_lse() -> None:
    # No message depends on whether a rank uses lse. In the expected call all ranks use lse, with weight 0 except on
    # rank 1.
    def grad(ring: Ring, everywhere: bool) -> Tensor:
        seq = ring.sequence(TOKENS)
        x = seq.shard(X).double().requires_grad_()
        out, lse = ring.attention(x, x, x, seq, causal=True, return_lse=True)
        loss = out.sum()
        if everywhere or ring.rank == 1:
            loss = loss + lse.sum() * (ring.rank == 1)
        loss.backward()
        return x.grad

    some = run_ranks(RANKS, lambda ring: grad(ring, False), engine="plain", timeout_s=DEADLINE_S)
    reference = run_ranks(RANKS, lambda ring: grad(ring, True), engine="plain", timeout_s=DEADLINE_S)
    assert all(torch.equal(a, b) for a, b in zip(some, reference, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sinks_of_another_float_are_taken_and_their_gradient_is_theirs(dtype: torch.dtype) -> None:
    def grads(ring: Ring, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        seq = ring.sequence(TOKENS)
        q = seq.shard(X)
        sinks = torch.linspace(-1, 2, 4).to(dtype).to(kind).requires_grad_()
        out = ring.attention(q, q, q, seq, causal=True, sinks=sinks)
        (grad,) = torch.autograd.grad(out.square().sum(), sinks)
        return out.detach(), grad

    for engine in ("plain", "aten"):
        alike = run_ranks(2, lambda ring: grads(ring, torch.float32), engine=engine, timeout_s=DEADLINE_S)
        other = run_ranks(2, lambda ring: grads(ring, dtype), engine=engine, timeout_s=DEADLINE_S)
        for (out, grad), (wanted, of_float) in zip(other, alike, strict=True):
            assert torch.equal(out, wanted) and grad.dtype == dtype and torch.equal(grad, of_float.to(dtype))


def test_engines_get_sinks_that_lie_side_by_side() -> None:
    """Engines get contiguous sinks even if the caller passes a strided view, because kernels index them by head."""
    seen: list[Tensor] = []

    class Recording(PlainEngine):
        def begin(self, works: Any, q: Tensor, value_dim: int, sinks: Tensor | None) -> Any:
            assert sinks is not None and sinks.is_contiguous()
            seen.append(sinks)
            return super().begin(works, q, value_dim, sinks)

    sinks = torch.arange(8.0)[::2]
    with Ring() as ring:
        ring.engine_for = lambda *_: Recording()  # type: ignore[method-assign]
        attend(ring, setting(sinks=sinks))
    assert len(seen) == 1 and torch.equal(seen[0], sinks)
