"""The projection to queries, keys and values on one GPU: ours, compared with a model in plain torch.

`python -m ringattn.bench.qkv [key=value ...]`. Baselines: "fused", one kernel for product and finish; "epilogue", a
cuBLAS product and one kernel; "eager", a cuBLAS product, a split, two RMS norms, rotations in the dtype of the inputs,
and copies of K and V into the message that a ring sends. Backward starts from gradients stored in such a message.
Guarantees: a baseline is timed only after its q, message and every gradient have passed a float64 reference at 1.25
times eager's error, with a number of tokens that no block divides. Device time comes from events; the figure is the
median of the repetitions. Each baseline runs in a separate process with a time limit, and its figures are saved
immediately: one that fails or hangs loses only its own figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.bench.crash_proof import Budget, JobFailed, Worker
from ringattn.bench.device_clock import device_facts, device_us
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, keep, progress
from ringattn.layers.projection import Backend, project
from ringattn.layers.rotary import Rotation, rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP, MARGIN, ROPE_BASE = 4, 1.25, 10_000.0
GATE_TOKENS = 333
PARTS = ("q", "the message", "dx", "dweight", "dq_norm", "dk_norm")


@dataclass(frozen=True)
class QkvOptions:
    """The options of the benchmark.

    `tokens` tokens of one batch row are projected at once. `models` are widths of a token, which are also the widths of
    all its query heads together. There is one key and value head per four query heads. Each timing is repeated for `ms`
    milliseconds. `limit_s` limits one figure or gate, including compilation, and `budget_s` limits the whole run.
    `results` is the folder of the results.
    """

    tokens: int = 8192
    models: tuple[int, ...] = (2048, 4096, 8192)
    head_dim: int = 128
    dtype: str = "bfloat16"
    ms: int = 100
    limit_s: float = 60.0
    budget_s: float = 300.0
    results: str = "bench/results/gpu"


class Inputs(NamedTuple):
    """The inputs of one projection.

    `x` is (1, tokens, model). `weight` is (columns, model), with the rows of q first. The norm weights are (head_dim,).
    `turn` is the rotation, in float32 or, for a reference, float64. `message` is (tokens, 1, kv_heads, 2 * head_dim): K
    and then V. `dq` is the gradient of q, (1, tokens, heads, head_dim), and `dmessage` that of the message.
    """

    x: Tensor
    weight: Tensor
    q_norm: Tensor
    k_norm: Tensor
    turn: Rotation
    message: Tensor
    dq: Tensor
    dmessage: Tensor

    @property
    def head_dim(self) -> int:
        """Return the number of elements of one head."""
        return self.q_norm.shape[0]

    @property
    def cut(self) -> int:
        """Return the number of rows of the weight that produce queries."""
        return self.dq.shape[2] * self.head_dim

    def halves(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of a message, (1, tokens, kv_heads, head_dim) each."""
        k, v = message.transpose(0, 1).split(self.head_dim, 3)
        return k, v


Forward = Callable[[Inputs], tuple[Tensor, Tensor, Tensor]]
"""Returns q, k and v of the inputs, (1, tokens, heads, head_dim) each; k and v are also written to the message."""


def make_inputs(options: QkvOptions, model: int, tokens: int) -> Inputs:
    """Return random inputs."""
    dim, dtype = options.head_dim, getattr(torch, options.dtype)
    heads = model // dim
    kv_heads = max(1, heads // GROUP)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype)

    return Inputs(
        normal(1, tokens, model).requires_grad_(),
        normal((heads + 2 * kv_heads) * dim, model, scale=model**-0.5).requires_grad_(),
        normal(dim).requires_grad_(),
        normal(dim).requires_grad_(),
        _turn(options, tokens, torch.float32),
        normal(tokens, 1, kv_heads, 2 * dim),
        normal(1, tokens, heads, dim),
        normal(tokens, 1, kv_heads, 2 * dim),
    )


def ours(backend: Backend) -> Forward:
    """Return our projection, which first writes keys and values directly into the message."""

    def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, q_norm, k_norm, turn, message, *_ = inputs
        dim, cut = inputs.head_dim, inputs.cut
        into = message[..., :dim], message[..., dim:]
        finish: dict[str, Any] = {"norms": (q_norm, k_norm), "turns": (turn, turn), "backend": backend}
        k, v = project(x, weight[cut:], None, 0, (len(weight) - cut) // dim // 2, dim, into=into, **finish)
        (q,) = project(x, weight[:cut], None, cut // dim, 0, dim, **finish)
        return q, k, v

    return forward


def eager(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the projection as a model in plain torch does."""
    dim, kv_rows = inputs.head_dim, (inputs.weight.shape[0] - inputs.cut) // 2
    raw = F.linear(inputs.x, inputs.weight).split((inputs.cut, kv_rows, kv_rows), -1)
    q, k, v = (heads.unflatten(-1, (-1, dim)) for heads in raw)
    cos, sin = (torch.cat((angle, angle), -1).to(q.dtype)[:, None] for angle in inputs.turn[:2])

    def rotate(heads: Tensor, norm: Tensor) -> Tensor:
        heads = F.rms_norm(heads, (dim,), norm, 1e-6)
        a, b = heads.chunk(2, -1)
        return heads * cos + torch.cat((-b, a), -1) * sin

    q, k = rotate(q, inputs.q_norm), rotate(k, inputs.k_norm)
    with torch.no_grad():
        for place, heads in zip(inputs.halves(inputs.message), (k, v), strict=True):
            place.copy_(heads)
    return q, k, v


BASELINES: dict[str, Forward] = {"eager": eager, "epilogue": ours("epilogue"), "fused": ours("fused")}


def gradients(inputs: Inputs, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of x, the weight and both norms; the autograd graph is retained."""
    grad_outputs = inputs.dq, *inputs.halves(inputs.dmessage)
    return torch.autograd.grad(outputs, inputs[:4], grad_outputs, retain_graph=True)


def fault(options: QkvOptions, model: int, name: str) -> str | None:
    """Return a text about the first wrong result of an implementation, or None if all are right."""
    inputs = make_inputs(options, model, min(options.tokens, GATE_TOKENS))
    wide = inputs._replace(
        **{name: getattr(inputs, name).detach().double().requires_grad_() for name in Inputs._fields[:4]},
        **{name: getattr(inputs, name).double() for name in Inputs._fields[5:]},
        turn=_turn(options, len(inputs.message), torch.float64),
    )
    reference, bound = _results(ours("plain"), wide), _results(eager, inputs)
    inputs.message.fill_(float("nan"))
    for part, actual, eager_result, exact in zip(
        PARTS, _results(BASELINES[name], inputs), bound, reference, strict=True
    ):
        error, limit = _error(actual, exact), MARGIN * _error(eager_result, exact)
        if not error <= limit:
            return f"model {model}: {part} is off by {error:.2e}, more than {limit:.2e}"
    return None


def _results(forward: Forward, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the tensors named in `PARTS`."""
    outputs = forward(inputs)
    return (outputs[0].detach(), inputs.message.clone(), *gradients(inputs, outputs))


def _turn(options: QkvOptions, tokens: int, dtype: torch.dtype) -> Rotation:
    return rotation(torch.arange(tokens, device=DEVICE), options.head_dim, ROPE_BASE, dtype)


def _error(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def times(options: QkvOptions, model: int, name: str) -> dict[str, Any]:
    """Return the microseconds of one implementation."""
    inputs, forward = make_inputs(options, model, options.tokens), BASELINES[name]
    outputs = forward(inputs)
    return {
        "model": model,
        "columns": inputs.weight.shape[0],
        "tokens": options.tokens,
        "backend": name,
        "forward_us": device_us(lambda: forward(inputs), options.ms),
        "backward_us": device_us(lambda: gradients(inputs, outputs), options.ms),
    }


def shown(rows: list[dict[str, Any]], refused: dict[str, str]) -> Table:
    """Return the table of all figures."""
    table = Table(
        "microseconds, and eager's time over it", ["model", "columns", "backend", "forward", "", "backward", ""]
    )
    base = {row["model"]: row for row in rows if row["backend"] == "eager"}
    for row in rows:
        cells = []
        for name in ("forward_us", "backward_us"):
            cells += [f"{row[name]:.1f}", f"{base[row['model']][name] / row[name]:.2f}" if row["model"] in base else ""]
        table.rows.append([str(row["model"]), str(row["columns"]), row["backend"], *cells])
    table.notes += [f"not timed: {name}: {why}" for name, why in refused.items()]
    return table


def main(arguments: list[str]) -> None:
    """Check and time all implementations, save the results and print the table."""
    options = parse(QkvOptions(), arguments)
    budget = Budget(options.budget_s)
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    facts = device_facts()

    def save(write: Callable[..., None] = keep, complete: bool = False) -> None:
        data = {"measured on": facts, "complete": complete, "times": rows, "refused": refused}
        write("qkv", options, [shown(rows, refused)], data, options.results)

    with progress("qkv") as say:
        say(f"{options.budget_s:.0f} s at most, {options.limit_s:.0f} s for each figure")
        for name in BASELINES:
            with Worker() as worker:
                for model in options.models:
                    say(f"model {model}: {name}")
                    try:
                        if reason := worker.ask(fault, options, model, name, limit_s=budget.limit(options.limit_s)):
                            raise JobFailed(reason)
                        rows.append(worker.ask(times, options, model, name, limit_s=budget.limit(options.limit_s)))
                    except JobFailed as error:  # if one model is wrong, the next is not trusted either
                        refused[name] = str(error)
                        break
                    finally:
                        save()
    save(finish, complete=True)


if __name__ == "__main__":
    main(sys.argv[1:])
