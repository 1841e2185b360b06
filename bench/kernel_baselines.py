"""The attention implementations that the kernel benchmark compares, each behind one call per pass.

Guarantees: inputs are random, and new for each figure. The gate compares out, dQ, dK and dV of each implementation with
a dense float64 reference. The error may be at most 1.25 times that of torch's own attention on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringattn.bench.crash_proof import one_line
from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.engine import aten
from ringattn.engine.aten import BlockOp
from ringattn.engine.base import KV, BackwardInputs, Engine, Softmax, Visit
from ringattn.engine.flash import NEEDS, flash_engine
from ringattn.engine.select import choose
from ringattn.engine.triton import TritonEngine, architecture
from ringattn.errors import UnsupportedError

GATE_TOKENS, GATE_HEADS, MARGIN = 1000, 2, 1.25
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

AUTO_ENGINES = ("aten", "triton", *NEEDS)
"""Engines that engine="auto" chooses from."""

Work = Callable[[], Any]


class Inputs(NamedTuple):
    """Tensors of shape (batch, tokens, heads, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class KernelBaseline(NamedTuple):
    """One implementation of attention on a single GPU.

    `passes(inputs, causal)` returns two functions (forward, backward), which can be called repeatedly. forward()
    returns out, and backward() returns (dq, dk, dv), all in the shape order of the inputs. `engine` is the Triton
    engine if the implementation is ours, else None.
    """

    name: str
    passes: Callable[[Inputs, bool], tuple[Work, Work]]
    engine: TritonEngine | None = None


def make_inputs(batch: int, tokens: int, heads: int, dim: int, dtype: str, k_tokens: int | None = None) -> Inputs:
    """Return random inputs. `k_tokens`: tokens of k and v, by default those of q."""
    shapes = [(batch, n, heads, dim) for n in (tokens, k_tokens or tokens, k_tokens or tokens, tokens)]
    return Inputs(*(torch.randn(shape, device=DEVICE, dtype=getattr(torch, dtype)) for shape in shapes))


def kernel_baselines(dim: int, dtype: str, only: tuple[str, ...]) -> tuple[list[KernelBaseline], dict[str, str]]:
    """Return the baselines that can run here, most important first, and by name why others cannot run.

    If `only` is not empty, other names are left out.
    """
    baselines, refused = [], {}
    makers: dict[str, Callable[[], KernelBaseline]] = {
        "cudnn": lambda: _op_baseline("cudnn", aten.CUDNN),
        "descriptors": lambda: ours("descriptors", TritonEngine(form="descriptors")),
        "gluon": lambda: ours("gluon", TritonEngine(form="gluon")),
        "flash": lambda: _op_baseline("flash", aten.FLASH),
        **{name: (lambda name=name: _flash_baseline(name, dim, dtype)) for name in NEEDS},  # type: ignore[misc]
        "pointers": lambda: ours("pointers", TritonEngine(form="pointers")),
        "fused": lambda: ours("fused", TritonEngine(deterministic=False)),
        **{f"engine {name}": (lambda name=name: _auto_baseline(name, dim, dtype)) for name in AUTO_ENGINES},  # type: ignore[misc]
    }
    for name, make in makers.items():
        if only and name not in only:
            continue
        if DEVICE == "cpu" and name in ("cudnn", "flash"):
            refused[name] = "needs a CUDA device"
            continue
        try:
            baselines.append(make())
        except UnsupportedError as error:
            refused[name] = str(error)
    return baselines, refused


def implementation(name: str, dim: int, dtype: str) -> KernelBaseline:
    """Return a baseline by name. Raises UnsupportedError if it cannot run here."""
    baselines, refused = kernel_baselines(dim, dtype, (name,))
    if not baselines:
        raise UnsupportedError(refused[name])
    return baselines[0]


def check_baseline(baseline: KernelBaseline, dim: int, dtype: str) -> str | None:
    """Return why the results of a baseline are wrong, or None if they are right.

    Both masks are checked, at a length that is not a multiple of any block size.
    """
    inputs = make_inputs(2, GATE_TOKENS if DEVICE == "cuda" else 70, GATE_HEADS, dim, dtype)
    for causal in (False, True):
        reference = _torch_results(Inputs(*(x.double() for x in inputs)), causal)
        bound = [_error(x, y) for x, y in zip(_torch_results(inputs, causal), reference, strict=True)]
        try:
            forward, backward = baseline.passes(inputs, causal)
            errors = [_error(x, y) for x, y in zip((forward(), *backward()), reference, strict=True)]
        except Exception as error:
            return one_line(error)
        worse = [f"{n} {a:.2e} > {MARGIN} x {b:.2e}" for n, a, b in zip(("out", "dQ", "dK", "dV"), errors, bound,
                 strict=True) if not a <= MARGIN * b]  # fmt: skip
        if worse:
            return f"{'causal' if causal else 'full'} mask: " + ", ".join(worse)
    return None


def _error(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def _torch_results(inputs: Inputs, causal: bool) -> list[Tensor]:
    """Return out, dQ, dK and dV of torch's own attention in the dtype of the inputs. In float64 it is dense."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    q_first, k_first, v_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q_first, k_first, v_first, is_causal=causal).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)]


def _op_baseline(name: str, op: BlockOp) -> KernelBaseline:
    """Return a baseline that calls an attention operator of torch or FlashAttention on (batch, heads, tokens, dim)."""

    def make_passes(inputs: Inputs, causal: bool) -> tuple[Work, Work]:
        q, k, v, dout = (x.transpose(1, 2) for x in inputs)
        scale = q.shape[3] ** -0.5
        out, lse = op.forward(q, k, v, causal, scale)
        return (
            lambda: op.forward(q, k, v, causal, scale)[0].transpose(1, 2),
            lambda: [x.transpose(1, 2) for x in op.backward(dout, q, k, v, out, lse, causal, scale)],
        )

    return KernelBaseline(name, make_passes)


def _flash_baseline(name: str, dim: int, dtype: str) -> KernelBaseline:
    return _op_baseline(name, flash_engine(name, torch.device(DEVICE), getattr(torch, dtype), dim).op)


def _auto_baseline(name: str, dim: int, dtype: str) -> KernelBaseline:
    return ours(f"engine {name}", choose(name, torch.device(DEVICE), getattr(torch, dtype), dim, dim, None).engine)


def ours(name: str, engine: Engine) -> KernelBaseline:
    """Return a baseline that calls an engine directly, in the way a ring of one rank does."""
    if DEVICE == "cuda" and name in ("descriptors", "gluon") and architecture(torch.device("cuda")) < 90:
        raise UnsupportedError(f"{name}: needs a GPU of sm_90 or later")

    def make_passes(inputs: Inputs, causal: bool) -> tuple[Work, Work]:
        q, k, v, dout = (x.transpose(0, 1) for x in inputs)
        rows, _, heads, dim = q.shape
        strip = TokenRange(StridedRange(0, rows), StridedRange(0, rows))
        tile = Tile(strip, strip, CAUSAL if causal else FULL, StridedRange(0, heads))
        only_step = Visit(overwrite=True, last=True)
        works = [engine.prepare([(tile,)], Softmax(dim**-0.5), rows, heads, visits=[only_step]) for _ in range(2)]

        def forward() -> Tensor:
            state = engine.begin(works[0], q, dim, None)
            engine.attend(q, KV(k, v), state, works[0][0])
            last.append((state.out.finalized(q.dtype), state.lse))
            del last[:-1]
            return last[0][0].transpose(0, 1)

        def backward() -> list[Tensor]:
            out, lse = last[0]
            delta = engine.delta(dout, out, None)
            dq = engine.begin_grad(works[1], q, dim)
            dk, dv = (torch.empty_like(x) for x in (k, v))
            backward_inputs = BackwardInputs(dout, out, lse, None, delta)
            engine.attend_grad(q, KV(k, v), backward_inputs, dq, None, works[1][0], KV(dk, dv))
            return [x.transpose(0, 1) for x in (dq.finalized(q.dtype), dk, dv)]

        last: list[tuple[Tensor, Tensor]] = []
        forward()
        return forward, backward

    return KernelBaseline(name, make_passes, engine if isinstance(engine, TritonEngine) else None)
