"""The kernels of rows and of projections in the PTX interpreter, compared with float64.

`python -m tests.kernels.ptx.row_cases FILE [case ...]` runs cases in forked children, and writes what they found to
FILE. `python -m tests.kernels.ptx.row_cases seeds N [case ...]` runs cases with N other seeds and prints faults.
A case is a kernel, a head dimension and options, such as `epilogue/48/neox,norm`, for sm_90 or with the option "sm_80"
for that architecture. The launches are those of
`ringattn.kernels`, for tensors with strides. Their results are compared outside the interpreter, so that the errors do
not depend on it.
"""

from __future__ import annotations

import sys
from collections import Counter
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.engine.base import merge_
from ringattn.kernels.qkv import Finish, epilogue_call, epilogue_grad_call, norm_parts, projection_call
from ringattn.kernels.rows import LARGEST, delta_call, merge_call, move_rows_call, quantize_call, restore_call
from ringattn.layers.rotary import rotate
from tests.kernels.ptx.cases import LSE_TOLERANCE, Outcome, far, interpreter, main, relative_error
from tests.kernels.ptx.rules import OF_TRITON

CASES = (
    "move_rows/48/gather", "move_rows/64/scatter,add,wider", "move_rows/128/far",
    "row_sums/48/", "row_sums/128/dlse", "merge/48/", "merge/128/blind",
    "quantize/48/int8", "quantize/128/fp8", "restore/48/int8", "restore/128/fp8",
    "epilogue/48/neox,norm,two", "epilogue/64/interleaved,norm", "epilogue/128/two",
    "epilogue_grad/48/neox,norm,two", "epilogue_grad/64/interleaved,norm,two", "epilogue_grad/128/neox",
    "project_heads/64/neox,norm,bias,rows,two", "project_heads/48/interleaved,two", "project_heads/32/single,neox,norm",
    "project_heads/64/neox,norm,bias,rows,two,sm_80", "merge/64/sm_80", "row_sums/64/dlse,sm_80",
)  # fmt: skip

SINGLE, ROUNDED = 1e-6, 2.0**-9 + 1e-6
"""Bounds on relative errors: of sums in float32, and of results that are then rounded to bfloat16."""
TOLERANCES = {
    "into": 0.0, "x": 0.0, "delta": SINGLE, "out": SINGLE, "lse": LSE_TOLERANCE, "scales": SINGLE,
    "bound": 1 + 2.0**-13, "first": ROUNDED, "second": ROUNDED, "draw": ROUNDED, "dnorm": SINGLE,
}  # fmt: skip
"""The largest error of each result; a copy is exact. `rows.py` documents the bound of quantized numbers."""

TOKENS, BATCH, HEADS, MODEL = 37, 2, 3, 200
"""One full block of 32 rows, and a part of another."""
HALF = torch.bfloat16
EPS = 1e-6


class RowTrial:
    """The launch of one case. Each kernel has the method of its name, which runs it and returns its errors."""

    def __init__(self, dim: int, what: frozenset[str], seed: int) -> None:
        self.dim, self.what, self.dtype = dim, what, torch.float32 if "single" in what else HALF
        self._generator = torch.Generator().manual_seed(seed)

    def _numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def _rows(self, dtype: torch.dtype = HALF, count: int = TOKENS) -> Tensor:
        """Return rows whose heads are parts of longer records, at 16-byte alignment."""
        return self._numbers(count, BATCH, HEADS, self.dim + 16, dtype=dtype)[..., : self.dim]

    def _per_row(self) -> Tensor:
        return self._numbers(BATCH, TOKENS, HEADS).transpose(1, 2)

    def move_rows(self) -> dict[str, float]:
        """Copy or add rows by lists; the results are exact."""
        what = self.what
        source, into = self._rows(count=50), self._rows(torch.float32 if "wider" in what else HALF, count=50)
        if "far" in what:
            source, into = far(source[:3]), far(into[:3])
        listed = torch.randperm(len(source), generator=self._generator)[:TOKENS]
        gather, scatter = (listed.clone() if name in what else None for name in ("gather", "scatter"))
        expected, read = into.clone(), source if gather is None else source[gather]
        read = read[: len(listed)] if scatter is not None else read
        rows = torch.arange(len(read)) if scatter is None else scatter
        expected[rows] = (expected[rows].float() + read.float() if "add" in what else read).to(into.dtype)
        if scatter is not None:
            source = source[: len(scatter)]
        move_rows_call(source, into, gather=gather, scatter=scatter, add="add" in what).run()
        return {"into": float((into.double() - expected.double()).abs().max())}

    def row_sums(self) -> dict[str, float]:
        """Compute delta."""
        dout, out, delta = self._rows(), self._rows(), self._per_row()
        dlse = self._per_row() if "dlse" in self.what else None
        delta_call(dout, out, dlse, delta).run()
        expected = (dout.double() * out.double()).sum(-1).permute(1, 2, 0) - (0 if dlse is None else dlse.double())
        return {"delta": relative_error(delta, expected)}

    def merge(self) -> dict[str, float]:
        """Merge two states; with the option "blind", some rows have seen no key in one state or in both."""
        out, part_out = self._rows(torch.float32), self._rows(torch.float32)
        lse, part_lse = self._per_row() * 5, self._per_row() * 5
        if "blind" in self.what:
            for state, values, step in ((lse, out, 2), (part_lse, part_out, 3)):
                state[..., ::step], values[::step] = -torch.inf, 0.0
        expected, expected_lse = out.double(), lse.double()
        merge_(expected, expected_lse, part_out.double(), part_lse.double())
        merge_call(out, lse, part_out, part_lse).run()
        blind = expected_lse.isinf()
        assert torch.equal(lse.isneginf(), blind)
        return {
            "out": relative_error(out, expected),
            "lse": relative_error(lse.masked_fill(blind, 0.0), expected_lse.masked_fill(blind, 0.0)),
        }

    def quantize(self) -> dict[str, float]:
        """Quantize rows. The error is that of the restored numbers, as a part of the documented bound."""
        x, values, scales = self._rows(), self._eight_bits(), self._numbers(TOKENS, BATCH, HEADS)
        quantize_call(x, values, scales).run()
        wide = x.double()
        largest = wide.abs().amax(-1)
        wrong = (values.double() * scales.double()[..., None] - wide).abs() / self._bound(wide)
        return {"scales": relative_error(scales, largest / LARGEST[values.dtype]), "bound": float(wrong.max())}

    def restore(self) -> dict[str, float]:
        """Restore rows; the result is the exact product, rounded once."""
        x, values, scales = self._rows(), self._eight_bits(), self._numbers(TOKENS, BATCH, HEADS)
        values.copy_(self._numbers(*values.shape) * 40)
        restore_call(values, scales, x).run()
        expected = (values.float() * scales[..., None]).to(HALF)
        return {"x": float((x.double() - expected.double()).abs().max())}

    def _eight_bits(self) -> Tensor:
        return torch.zeros(
            TOKENS, BATCH, HEADS, self.dim, dtype=torch.int8 if "int8" in self.what else torch.float8_e4m3fn
        )

    def _bound(self, x: Tensor) -> Tensor:
        """Return the bound on the error of quantized numbers that `rows.py` documents."""
        largest = x.abs().amax(-1, keepdim=True)
        if "int8" in self.what:
            return (largest / 254).expand_as(x)
        return x.abs() * 2.0**-4 + largest / 448 * 2.0**-10

    def epilogue(self) -> dict[str, float]:
        """Normalize and rotate heads."""
        finish = self._finish()
        raw = self._numbers(BATCH, TOKENS, finish.heads * self.dim, dtype=HALF)
        epilogue_call(raw, finish).run()
        return self._errors(finish, raw.double())

    def _errors(self, finish: Finish, raw: Tensor) -> dict[str, float]:
        """Return the errors of the finished heads of a product in float64."""
        results = [x for x in (finish.first, finish.second) if x is not None]
        expected = self.finished(raw, None if finish.norm is None else finish.norm.double(), finish)
        return dict(zip(("first", "second"), map(relative_error, results, expected), strict=False))

    def epilogue_grad(self) -> dict[str, float]:
        """Compute the gradients of the product and of the norm's weight."""
        grads = self._finish()
        raw = self._numbers(BATCH, TOKENS, grads.heads * self.dim, dtype=HALF)
        draw, parts = torch.empty_like(raw), None if grads.norm is None else norm_parts(grads)
        epilogue_grad_call(raw, grads, draw, parts).run()
        wide = raw.double().requires_grad_()
        norm = None if grads.norm is None else grads.norm.double().requires_grad_()
        outputs = self.finished(wide, norm, grads)
        leaves = [x for x in (wide, norm) if x is not None]
        into = [x.double() for x in (grads.first, grads.second) if x is not None]
        expected = torch.autograd.grad(outputs, leaves, into)
        results = [draw] if parts is None else [draw, parts.sum((0, 1))]
        return dict(zip(("draw", "dnorm"), map(relative_error, results, expected), strict=False))

    def project_heads(self) -> dict[str, float]:
        """Project and finish heads; with the option "rows", of listed tokens in another order."""
        finish, what = self._finish(), self.what
        x, weight = self._numbers(BATCH, 50, MODEL, dtype=self.dtype), self._numbers(finish.heads * self.dim, MODEL)
        weight = (weight / MODEL**0.5).to(self.dtype)
        bias = self._numbers(len(weight), dtype=self.dtype) if "bias" in what else None
        rows = torch.randperm(50, generator=self._generator)[:TOKENS] if "rows" in what else None
        projection_call(x, weight, bias, finish, rows).run()
        read = x[:, :TOKENS] if rows is None else x[:, rows]
        raw = F.linear(read.double(), weight.double(), None if bias is None else bias.double())
        return self._errors(finish, raw)

    def _finish(self) -> Finish:
        """Return what the epilogue does. With the option "two" it writes to K and V of the same records."""
        record = self._numbers(BATCH, TOKENS, HEADS, 2 * self.dim, dtype=self.dtype)
        k, v = record.split(self.dim, 3)
        angles = self._numbers(TOKENS, self.dim // 2)
        norm = self._numbers(self.dim, dtype=self.dtype) if "norm" in self.what else None
        return Finish(
            k, v if "two" in self.what else None, norm, EPS,
            angles.cos(), angles.sin(), interleaved="interleaved" in self.what,
        )  # fmt: skip

    def finished(self, raw: Tensor, norm: Tensor | None, finish: Finish) -> list[Tensor]:
        """Return the finished heads of a product, in float64."""
        assert finish.cos is not None and finish.sin is not None
        heads = raw.unflatten(-1, (-1, self.dim))
        turned, rest = heads[:, :, : finish.first.shape[2]], heads[:, :, finish.first.shape[2] :]
        if norm is not None:
            turned = F.rms_norm(turned, (self.dim,), norm, EPS)
        turned = rotate(turned, finish.cos.double(), finish.sin.double(), finish.interleaved)
        return [turned] if finish.second is None else [turned, rest]


def run(name: str, seed: int | None = None) -> Outcome:
    """Run a case. Raises Fault if its kernel has an error, whatever its results are."""
    rng = Random(name if seed is None else f"{name}/{seed}")
    kernel, dim, what = name.split("/")
    device = interpreter(80 if "sm_80" in what else 90)
    device.rng, device.late, device.rules, device.ran = rng, rng.random() < 0.5, OF_TRITON, []
    trial = RowTrial(int(dim), frozenset(what.split(",")), rng.randrange(1 << 20))
    errors: dict[str, Any] = getattr(trial, kernel)()
    return Outcome(errors, Counter(function.name for function in device.ran))


if __name__ == "__main__":
    main(sys.argv[1:], CASES, run)
