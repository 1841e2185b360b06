"""Short convolutions, gated delta rules and selective states against one process that reads token by token."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ringattn import GatedDeltaRule, InputError, Ring, SelectiveState, Sequence, ShortConvolution, UnsupportedError
from ringattn.core.fragments import fragments_of
from ringattn.core.layout import make_layout
from ringattn.layers import recurrent
from ringattn.testing import gated_delta_rule, run_ranks, selective_state, short_convolution
from tests.adapters.environments import environment
from tests.contract.mesh import on_mesh

DOCUMENTS = (0, 1, 1, 2, 70, 71, 73, 150)
"""Documents of one token, of none, and of several chunks."""
LAYOUTS = ["contiguous", "zigzag", "per_document", "documents"]
TOKENS, BATCH, HEADS, V_HEADS, D_K, D_V = DOCUMENTS[-1], 2, 2, 4, 5, 3


class Case(NamedTuple):
    """A layer: its call with (shards, other tensors, sequence), the reference, and all tensors by name."""

    layer: Callable[[dict[str, Tensor], Sequence], Tensor]
    reference: Callable[..., Tensor]
    sharded: dict[str, Tensor]
    shared: dict[str, Tensor]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * scale


def convolution_case(fn: Any = None) -> Case:
    def call(tensors: dict[str, Tensor], seq: Sequence) -> Tensor:
        layer = ShortConvolution(6, 4, bias=True, activation="silu", fn=fn)  # one for each thread
        weights = {"weight": tensors["weight"], "bias": tensors["bias"]}
        return torch.func.functional_call(layer, weights, (tensors["x"], seq))

    shared = {"weight": randn(6, 1, 4), "bias": randn(6)}
    return Case(call, lambda **x: short_convolution(**x, activation="silu"), {"x": randn(BATCH, TOKENS, 6)}, shared)


def delta_case(channels: bool = False, gates: Tensor | None = None, keys: float = 0.4, fn: Any = None) -> Case:
    gate = (BATCH, TOKENS, V_HEADS, D_K)[: 4 if channels else 3]
    sharded = {
        "q": randn(BATCH, TOKENS, HEADS, D_K), "k": randn(BATCH, TOKENS, HEADS, D_K, scale=keys),
        "v": randn(BATCH, TOKENS, V_HEADS, D_V), "g": -randn(*gate).abs() if gates is None else gates,
        "beta": 2 * torch.rand(gate[:3], dtype=torch.float64),
    }  # fmt: skip
    layer = GatedDeltaRule(fn=fn)
    return Case(lambda tensors, seq: layer(**tensors, seq=seq), gated_delta_rule, sharded, {})


def selective_case(dt: Tensor | None = None, fn: Any = None) -> Case:
    sharded = {
        "x": randn(BATCH, TOKENS, V_HEADS, D_V), "dt": randn(BATCH, TOKENS, V_HEADS) if dt is None else dt,
        "B": randn(BATCH, TOKENS, HEADS, D_K), "C": randn(BATCH, TOKENS, HEADS, D_K),
    }  # fmt: skip
    shared = {"A": -torch.rand(V_HEADS, dtype=torch.float64), "D": randn(V_HEADS, D_V), "dt_bias": randn(V_HEADS)}
    layer = SelectiveState(dt_softplus=True, dt_limit=(0.01, 2.0), fn=fn)

    def reference(dt: Tensor, dt_bias: Tensor, **tensors: Any) -> Tensor:
        return selective_state(dt=F.softplus(dt.double() + dt_bias.double()).clamp(0.01, 2.0), **tensors)

    return Case(lambda tensors, seq: layer(**tensors, seq=seq), reference, sharded, shared)


CASES: dict[str, Callable[[], Case]] = {
    "convolution": convolution_case,
    "gate per head": delta_case,
    "gate per channel": lambda: delta_case(channels=True),
    "selective state": selective_case,
}


def made(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


class Results(NamedTuple):
    """The output and the gradients of a call, whole, by name."""

    out: Tensor
    gradients: dict[str, Tensor]


def one_process(case: Case, weights: Tensor, documents: tuple[int, ...]) -> Results:
    leaves = {name: x.clone().requires_grad_() for name, x in (case.sharded | case.shared).items()}
    out = case.reference(**leaves, cu_seqlens=documents)
    gradients = torch.autograd.grad((out * weights).sum(), list(leaves.values()))
    return Results(out.detach(), dict(zip(leaves, gradients, strict=True)))


def over_ranks(
    ring: Ring,
    case: Case,
    weights: Tensor,
    documents: tuple[int, ...],
    layout: str,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
) -> Results:
    seq = ring.sequence(cu_seqlens=documents, layout=layout)
    local = {name: seq.shard(x).to(dtype).requires_grad_() for name, x in case.sharded.items()}
    local |= {name: x.clone().to(dtype).requires_grad_() for name, x in case.shared.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = case.layer(local, seq)
    gradients = torch.autograd.grad((out * seq.shard(weights)).sum(), list(local.values()))
    results = dict(zip(local, gradients, strict=True))
    ring.all_reduce([results[name] for name in case.shared])
    return Results(seq.gather(out.detach()), {n: seq.gather(x) if n in case.sharded else x for n, x in results.items()})


def assert_close(actual: Results, expected: Results, tolerance: float, where: str) -> None:
    """Compare relative to the largest value of each tensor."""
    for name, reference in {"out": expected.out, **expected.gradients}.items():
        value = actual.out if name == "out" else actual.gradients[name]
        error = (value.double() - reference).abs().max() / reference.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{where}: {name} is wrong by {error:.2e}"


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4, 5))])
@pytest.mark.parametrize("name", CASES)
def test_layers_over_ranks_are_those_of_one_process(name: str, ranks: int) -> None:
    case = made(name)
    weights = torch.randn_like(case.reference(**case.sharded, **case.shared))
    grid = [(layout, documents) for layout in LAYOUTS for documents in (DOCUMENTS, (0, TOKENS))]

    def body(ring: Ring) -> list[Results]:
        return [over_ranks(ring, case, weights, documents, layout) for layout, documents in grid]

    results = run_ranks(ranks, body)
    for documents in (DOCUMENTS, (0, TOKENS)):
        expected = one_process(case, weights, documents)
        for rank, each in enumerate(results):
            for (layout, tried), actual in zip(grid, each, strict=True):
                if tried == documents:
                    assert_close(actual, expected, 1e-10, f"{name}, {layout}, {documents}, rank {rank}")


def gates_of(kind: str, *shape: int) -> Tensor:
    """Return logarithms of the decay."""
    gates = torch.zeros(shape, dtype=torch.float64)
    if kind == "strong":
        gates -= 40 * torch.rand(shape, dtype=torch.float64)
    if kind == "mixed":  # strong decay now and then, almost no decay between
        gates = -torch.where(torch.rand(shape) < 0.1, 60.0, 0.01).double()
    return gates


DECAYS: dict[str, Callable[[], Case]] = {
    "no decay": lambda: delta_case(gates=gates_of("none", BATCH, TOKENS, V_HEADS), keys=0.3),
    "strong": lambda: delta_case(gates=gates_of("strong", BATCH, TOKENS, V_HEADS)),
    "mixed": lambda: delta_case(gates=gates_of("mixed", BATCH, TOKENS, V_HEADS), keys=0.3),
    "mixed channels": lambda: delta_case(True, gates=gates_of("mixed", BATCH, TOKENS, V_HEADS, D_K), keys=0.3),
    "keys above 1": lambda: delta_case(gates=gates_of("none", BATCH, TOKENS, V_HEADS) - 0.5, keys=0.55),
    "no step": lambda: selective_case(torch.full((BATCH, TOKENS, V_HEADS), -30.0, dtype=torch.float64)),
    "long steps": lambda: selective_case(torch.full((BATCH, TOKENS, V_HEADS), 30.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", DECAYS)
def test_decays_keys_and_dtypes(decay: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    case = DECAYS[decay]()
    case.sharded.update({name: x.float().double() for name, x in case.sharded.items()})
    case.shared.update({name: x.float().double() for name, x in case.shared.items()})
    assert decay != "keys above 1" or case.sharded["k"].norm(dim=-1).max() > 1.5
    weights = torch.randn_like(case.reference(**case.sharded, **case.shared)).float().double()
    expected = one_process(case, weights, DOCUMENTS)
    for actual in run_ranks(3, lambda ring: over_ranks(ring, case, weights, DOCUMENTS, "zigzag", dtype)):
        assert_close(actual, expected, 1e-10 if dtype == torch.float64 else 1e-6, decay)


def test_decay_to_nothing() -> None:
    torch.manual_seed(0)
    case = delta_case()
    case.sharded["g"][:, ::7] = -torch.inf
    weights = torch.randn_like(case.sharded["v"])
    expected = one_process(case, weights, DOCUMENTS)
    for actual in run_ranks(2, lambda ring: over_ranks(ring, case, weights, DOCUMENTS, "zigzag")):
        assert_close(actual, expected, 1e-10, "gates of -inf")


@pytest.mark.parametrize("name", CASES)
def test_states_are_float32_for_bfloat16_inputs_and_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = made(name)
    for tensors in (case.sharded, case.shared):
        tensors.update({key: x.bfloat16().double() for key, x in tensors.items()})
    weights = torch.randn_like(case.reference(**case.sharded, **case.shared)).bfloat16().double()
    expected = one_process(case, weights, DOCUMENTS)
    dtypes = set()
    started_scan = recurrent.started_scan

    def observed(ring: Any, transitions: Tensor, states: Tensor, *rest: Any) -> Any:
        dtypes.add(states.dtype)
        return started_scan(ring, transitions, states, *rest)

    monkeypatch.setattr(recurrent, "started_scan", observed)

    def body(ring: Ring) -> tuple[Results, Results]:
        plain = over_ranks(ring, case, weights, DOCUMENTS, "zigzag", torch.bfloat16)
        return plain, over_ranks(ring, case, weights, DOCUMENTS, "zigzag", torch.float32, autocast=True)

    for plain, cast in run_ranks(2, body):
        assert_close(plain, expected, 2e-2, name)
        assert_close(cast, expected, 2e-2 if name == "convolution" else 1e-6, name)  # torch casts the convolution
    assert dtypes == (set() if name == "convolution" else {torch.float32})


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_are_recomputed_in_checkpointed_code(reentrant: bool) -> None:
    torch.manual_seed(0)
    case, conv = delta_case(), ShortConvolution(HEADS * D_K, 3).double()

    def body(ring: Ring, recompute: bool) -> list[Tensor]:
        seq = ring.sequence(cu_seqlens=DOCUMENTS, layout="zigzag")
        local = {name: seq.shard(x).requires_grad_() for name, x in case.sharded.items()}

        def block(q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
            q, k = (conv(x.flatten(2), seq).unflatten(2, (HEADS, D_K)) for x in (q, k))
            return case.layer(dict(zip(case.sharded, (q, k, *rest), strict=True)), seq)

        inputs = local.values()
        out = checkpoint(block, *inputs, use_reentrant=reentrant) if recompute else block(*inputs)
        out.square().sum().backward()
        return [seq.gather(x.grad) for x in inputs if x.grad is not None]

    plain = run_ranks(2, lambda ring: body(ring, False))
    for grads in run_ranks(2, lambda ring: body(ring, True)):
        assert all(torch.equal(x, y) for x, y in zip(grads, plain[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_code_calls_the_layers_between_its_graphs(recompute: bool) -> None:
    """Results are those of eager mode. Another sequence with equally many tokens on each rank compiles nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    conv, rule, state = ShortConvolution(HEADS * D_K, 3).double(), GatedDeltaRule(), SelectiveState(dt_softplus=True)
    case = delta_case()
    del case.sharded["q"]
    rates = -randn(V_HEADS).exp()

    def block(seq: Sequence, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q = conv(2 * k.flatten(2), seq).unflatten(2, (HEADS, D_K)) + 1
        return state(rule(q, k, v, g, beta, seq) * 2, beta, rates, k, q, seq) + v

    def body(ring: Ring) -> tuple[list[tuple[Tensor, ...]], list[int]]:
        counter = CompileCounterWithBackend("aot_eager")
        compiled, results, graphs = torch.compile(block, backend=counter), list[tuple[Tensor, ...]](), list[int]()
        for documents in (DOCUMENTS, (0, 40, 150)):
            seq = ring.sequence(cu_seqlens=documents, layout="zigzag")
            for call in (compiled, block):
                local = [seq.shard(x).requires_grad_() for x in case.sharded.values()]
                out = checkpoint(call, seq, *local, use_reentrant=False) if recompute else call(seq, *local)
                grads = torch.autograd.grad(out.sin().sum(), local)
                results.append(tuple(seq.gather(x) for x in (out.detach(), *grads)))
            graphs.append(counter.frame_count)
        return results, graphs

    for (first, eager_first, second, eager_second), graphs in run_ranks(2, body):
        assert 0 < graphs[0] == graphs[1]
        torch.testing.assert_close(first, eager_first, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(second, eager_second, rtol=1e-11, atol=1e-11)


@on_mesh
def test_layers_of_sharded_heads(mesh: DeviceMesh) -> None:
    """Under tensor parallelism, a convolution uses this rank's part of its weights. Other DTensors are refused."""
    conv = ShortConvolution(6, 3, bias=True).double()
    x = randn(2, 9, 6)
    with Ring() as ring:
        seq = ring.sequence(9)
        expected = conv(x, seq)
        grads = torch.autograd.grad(expected.sum(), tuple(conv.parameters()))
        for name, weight in list(conv.named_parameters()):
            setattr(conv, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
        assert torch.equal(conv(x, seq), expected)
        conv(x, seq).sum().backward()
        for weight, grad in zip(conv.parameters(), grads, strict=True):
            assert isinstance(weight.grad, DTensor) and torch.equal(weight.grad.to_local(), grad)
        sharded = distribute_tensor(x, mesh, [Shard(2)])
        heads = sharded.unflatten(2, (2, 3))
        calls = {
            "x": lambda: conv(sharded, seq),
            "q": lambda: GatedDeltaRule()(*[heads] * 5, seq),
            "transitions": lambda: ring.scan_states(sharded, sharded, seq),
            "latents": lambda: ring.latent_attention(x[:, :, None], x, sharded, x, x, seq),
        }
        for name, call in calls.items():
            with pytest.raises(UnsupportedError, match=rf"rank 0: {name} is a DTensor; give {name}\.to_local\(\)"):
                call()


# --- kernels ---------------------------------------------------------------------------------------------------------


def delta_kernel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute fla's function, token by token."""
    if cu_seqlens is not None:
        assert len(q) == 1 and initial_state is None and not output_final_state
        rows = [slice(*each) for each in pairwise(cu_seqlens.tolist())]
        outs = [delta_kernel(q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], scale)[0] for i in rows]
        return torch.cat(outs, 1), None
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    state = v.new_zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    decay, outs = (g if g.dim() == 4 else g[..., None]).exp(), []
    for token in range(v.shape[1]):
        state = decay[:, token, ..., None] * state
        update = beta[:, token, :, None] * (v[:, token] - torch.einsum("bhk,bhkv->bhv", k[:, token], state))
        state = state + k[:, token, ..., None] * update[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state) * (scale or q.shape[-1] ** -0.5))
    return torch.stack(outs, 1), state if output_final_state else None


def selective_kernel(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:  # fmt: skip
    """Compute mamba_ssm's function, token by token."""
    B, C = (each.repeat_interleave(x.shape[2] // B.shape[2], 2) for each in (B, C))
    state, outs = x.new_zeros(*x[:, 0].shape, B.shape[-1]), []
    for token in range(x.shape[1]):
        if token and seq_idx is not None:
            state = state * (seq_idx[:, token] == seq_idx[:, token - 1])[:, None, None, None]
        update = (x[:, token] * dt[:, token, :, None])[..., None] * B[:, token, :, None]
        state = (dt[:, token] * A).exp()[..., None, None] * state + update
        outs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, token]))
    out = torch.stack(outs, 1)
    return (out, state) if return_final_states else out


def convolution_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """Compute causal_conv1d's function."""
    assert activation == "silu"
    return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight)))


KERNELS: dict[str, Callable[[], Case]] = {
    "convolution": lambda: convolution_case(convolution_kernel),
    "gate per head": lambda: delta_case(fn=delta_kernel),
    "gate per channel": lambda: delta_case(channels=True, fn=delta_kernel),
    "selective state": lambda: selective_case(fn=selective_kernel),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_continue_documents(name: str) -> None:
    torch.manual_seed(0)
    case = KERNELS[name]()
    weights = torch.randn_like(case.reference(**case.sharded, **case.shared))
    expected = one_process(case, weights, DOCUMENTS)

    def body(ring: Ring) -> list[Results]:
        return [over_ranks(ring, case, weights, DOCUMENTS, layout) for layout in LAYOUTS]

    for results in run_ranks(3, body):
        for layout, actual in zip(LAYOUTS, results, strict=True):
            assert_close(actual, expected, 1e-10, f"{name}, {layout}")


# --- references of others --------------------------------------------------------------------------------------------


def naive(operator: str) -> ModuleType:
    """Return fla's definitions of an operator, which need no GPU, without the package around them."""
    path = environment("fla-core==0.6.0") / "fla" / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{operator}_naive", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda", "simple_gla"])
def test_layers_agree_with_the_definitions_of_fla(operator: str) -> None:
    """They compute in float32."""
    torch.manual_seed(0)
    case = delta_case(channels=operator == "kda")
    q, k, v, g, beta = (x.float() for x in case.sharded.values())
    module = naive(operator)
    if operator != "kda":  # these have equal numbers of heads
        q, k = (x.repeat_interleave(V_HEADS // HEADS, 2) for x in (q, k))
    if operator == "simple_gla":
        expected = module.naive_recurrent_simple_gla(q, k, v, g, scale=1.0)[0]
    else:
        expected = getattr(module, f"naive_recurrent_{operator}")(q, k, v, beta=beta, g=g)[0]

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(TOKENS, layout="zigzag")
        query, key, value, gate, factor = (seq.shard(x) for x in (q, k, v, g, beta))
        if operator == "simple_gla":  # the same decay, exp(dt A), and the same values, dt x
            x, rate = value / -gate[..., None], -torch.ones(V_HEADS)
            return seq.gather(SelectiveState()(x, -gate, rate, key, query, seq))
        return seq.gather(GatedDeltaRule()(query, key, value, gate, factor, seq))

    for out in run_ranks(3, body):
        assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()


def context_parallel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return attention-gym's module of fragments, without the packages around it, which need a GPU."""
    folder = environment("attn-gym==0.0.17") / "attn_gym"
    for name in ("attn_gym", "attn_gym.linear", "attn_gym._backends"):
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delitem(sys.modules, "attn_gym.linear.context_parallel", raising=False)
    return importlib.import_module("attn_gym.linear.context_parallel")


@pytest.mark.slow
def test_fragments_agree_with_those_of_attention_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_class = context_parallel(monkeypatch).ContextParallelPlan
    draw = random.Random(0)
    compared = 0
    for _ in range(400):
        length, ranks = draw.randrange(8, 80), draw.randrange(1, 7)
        documents = (0, *sorted(draw.randint(0, length) for _ in range(draw.randrange(6))), length)
        layout = make_layout(draw.choice(LAYOUTS), length, ranks, documents)
        table: list[list[tuple[int, int]]] = []
        for shard in layout.shards:
            table.append([])
            for start, stop in [(run.start, run.start + run.count) for run in shard if run.count]:
                if table[-1] and table[-1][-1][1] == start:
                    start, _ = table[-1].pop()
                table[-1].append((start, stop))
        if not all(table):
            continue  # attention-gym has no ranks without tokens
        every = fragments_of(layout, documents)
        for rank in range(ranks):
            plan = plan_class.from_fragments(documents, table, rank)
            local = every.of(rank)
            starts, stops = every.start[local].tolist(), every.stop[local].tolist()
            assert [(each.start, each.stop) for each in plan.subsequences] == list(zip(starts, stops, strict=True))
            ends = local == every.last[local]
            assert plan.terminal == tuple(np.flatnonzero(ends).tolist())
            waiting = [part[0].start for part, before in zip(plan.fragments, plan.predecessors, strict=True) if before]
            assert waiting == every.start[local[local > every.first[local]]].tolist()
            sending = [part[-1].stop for part, after in zip(plan.fragments, plan.successors, strict=True) if after]
            assert sending == every.stop[local[~ends]].tolist()
            compared += 1
    assert compared > 1000


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Callable[[Sequence], Any]]] = [
    (r"x must be \(batch, 10, 6\)", lambda seq: ShortConvolution(6, 4)(torch.zeros(1, 9, 6), seq)),
    (r"x must be \(batch, 10, 6\)", lambda seq: ShortConvolution(6, 4)(torch.zeros(1, 10, 5), seq)),
    (r"x must have a float dtype", lambda seq: ShortConvolution(6, 4)(torch.zeros(1, 10, 6, dtype=torch.int64), seq)),
    (r"k must be \(1, 10, 2, 4\)", lambda seq: delta(seq, k=torch.zeros(1, 10, 2, 3))),
    (r"g must be \(1, 10, 2, 4\)", lambda seq: delta(seq, g=torch.zeros(1, 10, 2, 3))),
    (r"beta must be \(1, 10, 2\)", lambda seq: delta(seq, beta=torch.zeros(1, 10, 1))),
    (r"v_heads must be a multiple of heads; got 2 and 3", lambda seq: delta(seq, heads=3)),
    (r"A must be \(2\)", lambda seq: selective(seq, A=torch.zeros(3))),
    (r"D must be \(2, 5\)", lambda seq: selective(seq, D=torch.zeros(2, 4))),
    (r"dt_bias must be \(2\)", lambda seq: selective(seq, dt_bias=torch.zeros(1))),
    (r"heads must be a multiple of groups; got 2 and 3", lambda seq: selective(seq, groups=3)),
]


def delta(seq: Sequence, heads: int = 2, **changed: Tensor) -> Tensor:
    key, token = torch.zeros(1, 10, heads, 4), torch.zeros(1, 10, 2)
    tensors = {"q": key, "k": key, "v": torch.zeros(1, 10, 2, 5), "g": token, "beta": token}
    return GatedDeltaRule()(**(tensors | changed), seq=seq)


def selective(seq: Sequence, groups: int = 2, **changed: Tensor) -> Tensor:
    group, token = torch.zeros(1, 10, groups, 4), torch.zeros(1, 10, 2)
    tensors = {"x": torch.zeros(1, 10, 2, 5), "dt": token, "A": torch.zeros(2), "B": group, "C": group}
    return SelectiveState()(**(tensors | changed), seq=seq)


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_calls_that_do_not_fit_are_refused_on_all_ranks(message: str, call: Any) -> None:
    def body(ring: Ring) -> str:
        seq = ring.sequence(20, layout="zigzag")
        with pytest.raises(InputError, match=message) as refusal:
            (ring.barrier if ring.rank else lambda: call(seq))()
        ring.barrier()  # the ring can still be used
        return str(refusal.value)

    own, other = run_ranks(2, body)
    assert own.startswith("rank 0: ") and "rank 0 refused the call" in other


def test_options_that_are_refused() -> None:
    with pytest.raises(InputError, match="kernel_size must be a positive number of tokens, got 0"):
        ShortConvolution(6, 0)
    with pytest.raises(InputError, match="activation must be 'silu', 'swish' or None, got 'gelu'"):
        ShortConvolution(6, 4, activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"seq must come from ring\.sequence"):
        GatedDeltaRule()(*[torch.zeros(1)] * 5, seq=None)


def test_striped_sequences_are_refused() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(20, layout="striped")
        for call in (delta, selective, lambda seq: ShortConvolution(6, 4)(torch.zeros(1, 10, 6), seq)):
            with pytest.raises(UnsupportedError, match="use layout='zigzag'"):
                call(seq)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["gate per head", "selective state"])
def test_the_gradient_of_one_tensor_is_computed_alone(name: str) -> None:
    """Whichever gradient is requested, all ranks run the backward pass of the states.

    The last rank ends the document, so its states are not needed, and the states of these kernels do not depend on all
    tensors.
    """
    torch.manual_seed(0)
    case = KERNELS[name]()
    weights = torch.randn_like(case.reference(**case.sharded, **case.shared))
    expected = one_process(case, weights, (0, TOKENS)).gradients

    def body(ring: Ring) -> dict[str, Tensor]:
        seq = ring.sequence(TOKENS, layout="contiguous")
        gradients = {}
        for name in expected:
            leaves = {name: seq.shard(x).clone().requires_grad_() for name, x in case.sharded.items()}
            leaves |= {name: x.clone().requires_grad_() for name, x in case.shared.items()}
            loss = (case.layer(leaves, seq) * seq.shard(weights)).sum()
            (gradient,) = torch.autograd.grad(loss, [leaves[name]])
            if name in case.shared:
                ring.all_reduce([gradient])
            gradients[name] = gradient if name in case.shared else seq.gather(gradient)
        return gradients

    for gradients in run_ranks(2, body):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kernels", [False, True])
def test_ranks_without_tokens_take_part(kernels: bool) -> None:
    conv = ShortConvolution(8, 1, activation="silu", fn=convolution_kernel if kernels else None)
    rule = GatedDeltaRule(fn=delta_kernel if kernels else None)
    ssm = SelectiveState(fn=selective_kernel if kernels else None)

    def body(ring: Ring) -> int:
        seq = ring.sequence(2, layout="contiguous")
        tokens = seq.counts[ring.rank]
        q = torch.ones(1, tokens, 2, 4, requires_grad=True)
        k = conv(q.flatten(2), seq).unflatten(2, (2, 4))
        one = torch.ones(1, tokens, 2)
        out = rule(q, k, q, -one, one, seq)
        y = ssm(out, one, -torch.ones(2), k, k, seq)
        grad, *_ = torch.autograd.grad(y.sum(), [q, *conv.parameters()])
        return grad.shape[1]

    assert run_ranks(3, body) == [1, 1, 0]


def test_one_wide_tensor_makes_all_states_wide() -> None:
    torch.manual_seed(0)
    case = delta_case()
    narrow = {name: x.float() for name, x in case.sharded.items() if name != "beta"}

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(cu_seqlens=DOCUMENTS, layout="zigzag")
        return seq.gather(case.layer({name: seq.shard(x) for name, x in (case.sharded | narrow).items()}, seq))

    expected = case.reference(**(case.sharded | narrow), cu_seqlens=DOCUMENTS)
    for out in run_ranks(2, body):
        assert out.dtype == torch.float32 and (out - expected).abs().max() < 1e-6


def test_layers_name_their_options_and_load_the_state_of_torch() -> None:
    conv = ShortConvolution(6, 4, bias=True)
    conv.load_state_dict(nn.Conv1d(6, 6, 4, groups=6).state_dict())
    assert conv.get_memory_info() == {"parameter_bytes": (6 * 4 + 6) * 4} and not GatedDeltaRule().get_memory_info()
    texts = [str(each) for each in (conv, GatedDeltaRule(scale=0.5), SelectiveState())]
    assert texts == [
        "ShortConvolution(6, kernel_size=4, bias=True, activation=None)",
        "GatedDeltaRule(scale=0.5)",
        "SelectiveState(dt_softplus=False, dt_limit=(0.0, inf))",
    ]
