"""Compile the projection and row kernels without a GPU, and read the resulting machine code.

`python -m tests.kernels.compile_gate.row_cases FILE CASE ...` writes its findings to FILE, for the test;
`python -m tests.kernels.compile_gate.row_cases renew` compiles every case and writes the golden table of the
installed Triton and the table of inner loops (`loops.py`); `renew counted` compiles only the cases in the table of
inner loops.
Guarantees: a case is a name such as `sm_90/project_heads/128/neox,norm`, compiled through the library's launch
functions with the alignments of ordinary calls; nothing is left in Triton's cache.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.bench.kernel_code import code_of
from ringattn.bench.sass import instructions
from ringattn.kernels.launch import LaunchCall
from ringattn.kernels.qkv import Finish, epilogue_call, epilogue_grad_call, norm_parts, projection_call
from ringattn.kernels.rows import delta_call, merge_call, move_rows_call, quantize_call, restore_call
from tests.kernels.compile_gate import loops
from tests.kernels.compile_gate.compiling import MATRIX, RANKED, Gate, main

GOLDEN = Path(__file__).with_name("golden_rows")
MODEL = 256
ORDINARY = 64, 4
"""The numbers of tokens and heads of the call that is compiled."""


class FoundRows(NamedTuple):
    """What the machine code of a compiled kernel shows.

    `matrix`: the most powerful unit that multiplies its matrices, "" for none. `loop_spills`: the spills in the
    innermost loops with products, which run for every block. `loads`, `stores`: how many instructions access global
    memory, by the bits that one instruction moves for a thread. `row`: the row of the table of inner loops, for cases
    in that table.
    """

    registers: int
    spills: int
    loop_spills: int
    shared_bytes: int
    matrix: str
    loads: dict[str, int]
    stores: dict[str, int]
    row: loops.Row | None = None


def _cases() -> Iterable[str]:
    styles, everything = ("neox", "interleaved"), "norm,bias,rows,two"
    projections = [f"{dim}/{style},{what}" for dim in (64, 128, 256) for style in styles for what in ("", everything)]
    projections += [f"128/neox,{what}" for what in everything.split(",")]
    projections += [f"128/single,{style},{everything}" for style in styles]
    of_rows = [f"epilogue/128/{style},norm,two" for style in styles]
    of_rows += [f"epilogue_grad/128/{style},norm,two" for style in styles]
    of_rows += [f"move_rows/128/{what}" for what in ("", "gather", "scatter", "add", "scatter,add,wider")]
    of_rows += ["merge/128/", "row_sums/128/", "row_sums/128/dlse", "quantize/128/int8", "restore/128/int8"]
    for arch in (80, 90, 100):
        yield from (f"sm_{arch}/project_heads/{what}" for what in projections)
        yield from (f"sm_{arch}/{what}" for what in of_rows)
    yield from (f"sm_{arch}/{kernel}/128/fp8" for arch in (89, 90, 100) for kernel in ("quantize", "restore"))


CASES = tuple(_cases())
COUNTED = tuple(
    name
    for name in CASES
    if name.startswith("sm_90") and name.endswith(("/neox,norm,bias,rows,two", "/128/neox,norm,two"))
)
"""The cases in the table of inner loops: the fused projection, and the epilogue after cuBLAS."""


class Call:
    """The launches of one case, with tensors of `tokens` tokens, batch 1 and `heads` heads of `dim` elements.

    `what`: the options in the case's name. Each kernel has the method of its name, which returns the launch.
    """

    def __init__(self, tokens: int, heads: int, dim: int, what: frozenset[str]) -> None:
        self.tokens, self.heads, self.dim, self.what = tokens, heads, dim, what
        self.dtype = torch.float32 if "single" in what else torch.bfloat16

    def described(self, kernel: str) -> LaunchCall:
        """Return the launch of the kernel with this name."""
        call: LaunchCall = getattr(self, kernel)()
        return call

    def project_heads(self) -> LaunchCall:
        finish, what = self._finish(), self.what
        columns = finish.heads * self.dim
        x, weight = (torch.zeros(*shape, MODEL, dtype=self.dtype) for shape in ((1, self.tokens), (columns,)))
        bias = torch.zeros(columns, dtype=self.dtype) if "bias" in what else None
        return projection_call(x, weight, bias, finish, self._list() if "rows" in what else None)

    def epilogue(self) -> LaunchCall:
        finish = self._finish()
        return epilogue_call(torch.zeros(1, self.tokens, finish.heads * self.dim, dtype=self.dtype), finish)

    def epilogue_grad(self) -> LaunchCall:
        finish = self._finish()
        raw, draw = (torch.zeros(1, self.tokens, finish.heads * self.dim, dtype=self.dtype) for _ in range(2))
        return epilogue_grad_call(raw, finish, draw, norm_parts(finish))

    def move_rows(self) -> LaunchCall:
        into = self._rows(torch.float32 if "wider" in self.what else self.dtype)
        lists = {name: self._list() for name in ("gather", "scatter") if name in self.what}
        return move_rows_call(self._rows(), into, **lists, add="add" in self.what)

    def merge(self) -> LaunchCall:
        return merge_call(self._rows(torch.float32), self._lse(), self._rows(torch.float32), self._lse())

    def row_sums(self) -> LaunchCall:
        return delta_call(self._rows(), self._rows(), self._lse() if "dlse" in self.what else None, self._lse())

    def quantize(self) -> LaunchCall:
        return quantize_call(self._rows(), *self._eight_bits())

    def restore(self) -> LaunchCall:
        return restore_call(*self._eight_bits(), self._rows())

    def _finish(self) -> Finish:
        """Return what the epilogue does: where it writes, and the norm and rotation that it applies.

        With the option "two", it writes to K and V, which are adjacent in a message's records; otherwise to one tensor
        that has all heads of a token in a row.
        """
        record = torch.zeros(1, self.tokens, self.heads, 2 * self.dim, dtype=self.dtype)
        k, v = record.split(self.dim, 3)
        places = (k, v) if "two" in self.what else (record.view(1, self.tokens, -1, self.dim), None)
        angles = torch.zeros(self.tokens, self.dim // 2)
        norm = torch.zeros(self.dim, dtype=self.dtype) if "norm" in self.what else None
        return Finish(*places, norm, cos=angles, sin=angles, interleaved="interleaved" in self.what)

    def _rows(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self.tokens, 1, self.heads, self.dim, dtype=dtype or self.dtype)

    def _lse(self) -> Tensor:
        return torch.zeros(1, self.heads, self.tokens)

    def _list(self) -> Tensor:
        return torch.zeros(self.tokens, dtype=torch.int64)

    def _eight_bits(self) -> tuple[Tensor, Tensor]:
        code = torch.int8 if "int8" in self.what else torch.float8_e4m3fn
        return self._rows(code), torch.zeros(self.tokens, 1, self.heads)


def call_of(name: str, tokens: int, heads: int) -> LaunchCall:
    """Return the launch of the case `name` with this many tokens and heads."""
    _, kernel, dim, what = name.split("/")
    return Call(tokens, heads, int(dim), frozenset(what.split(","))).described(kernel)


def compiled(name: str) -> FoundRows:
    """Compile a case through its launch wrapper, for the GPU that it names."""
    arch = int(name.split("/")[0].removeprefix("sm_"))
    code = code_of(call_of(name, *ORDINARY), arch)
    units = set(MATRIX.findall(code.listing))
    row = loops.row_of(code, arch)
    return FoundRows(
        registers=code.registers,
        spills=sum(instruction.spills for instruction in instructions(code.listing)),
        loop_spills=row["spills_inside"],
        shared_bytes=code.shared_bytes,
        matrix=next((rank for rank in RANKED if any(unit.startswith(rank) for unit in units)), ""),
        loads=widths("LDG", code.listing),
        stores=widths("STG", code.listing),
        row=row if name in COUNTED else None,
    )


def widths(opcode: str, code: str) -> dict[str, int]:
    """Count the instructions of `opcode` by their width in bits: 16 for LDG.E.U16, 128 for LDG.E.128, 32 for LDG.E."""
    counts: Counter[int] = Counter()
    for suffixes in re.findall(rf"\b{opcode}((?:\.\w+)+)", code):
        bits_named = [int(bits) for bits in re.findall(r"\.[US]?(8|16|64|128|256)\b", suffixes)]
        counts[(*bits_named, 32)[0]] += 1
    return {str(bits): counts[bits] for bits in sorted(counts)}


if __name__ == "__main__":
    main(sys.argv[1:], Gate("rows", GOLDEN, CASES, COUNTED, compiled))
