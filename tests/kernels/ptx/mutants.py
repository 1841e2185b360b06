"""Mutants of the compiled kernels: each barrier, fence and wait removed in turn.

`python -m tests.kernels.ptx.mutants FILE [case ...]` runs mutants in forked children, and writes what they found to
FILE. A case is a kernel and a share of its sites, such as `forward/3/8`: the sites whose number leaves 3 when divided
by 8. The kernel is one of Gluon (also `sm_100/gluon/forward`, and with options or of another dimension, such as
`grad_q-options` or `forward-256`), one of another form (`sm_80/pointers/forward`), or a case of the compile gate of
rows (`sm_90/row_sums/128/dlse`). `planted` is one mutant with and without race detection.
`python -m tests.kernels.ptx.mutants table KERNEL ...` prints every mutant of kernels.
A mutant is caught by a fault (a race, a deadlock, an access that is not allowed) or by results with other bits than
those of the kernel, which are the same for all seeds except in the dQ of `grad_all`: its float32 sums may differ in
their last bits. `EXPLAINED` and `EXPLAINED_OF_TRITON` say why the others are harmless.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile
from ringattn.engine.base import Softmax
from ringattn.engine.blocks import key_blocks, query_blocks
from ringattn.engine.forms import named_gluon
from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_gluon import forward_gluon, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import LaunchCall, Table
from tests.contract.engine_scenarios import strip
from tests.kernels.compile_gate.compiling import Gate, all_compiled
from tests.kernels.compile_gate.row_cases import call_of
from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.cases import RULES_OF, interpreter
from tests.kernels.ptx.machine import ALL, Code, Warp
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.program import Instruction, Program
from tests.kernels.ptx.races import RaceDetector
from tests.kernels.ptx.rules import OF_TRITON, STRICT

ROOT = Path(__file__).resolve().parents[3]
ATTENTION = ("forward", "grad_q", "grad_kv")
KERNELS = (*ATTENTION, "grad_all")
OPTIONS = "softcap", "alibi_slopes"
VARIANTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "": (64, 64, ()), "options": (64, 64, OPTIONS), "192": (192, 128, ()), "256": (256, 256, ()),
}  # fmt: skip
"""The dimensions of keys and of values and the options of each variant of a kernel."""
FORMS = (
    "sm_80/pointers",
    "sm_90/pointers",
    "sm_90/descriptors",
    "sm_100/pointers",
    "sm_100/descriptors",
    "sm_100/gluon",
)
TRITON_KERNELS = (
    *(f"{form}/{kernel}" for form in FORMS for kernel in ATTENTION),
    "sm_90/move_rows/128/scatter,add,wider", "sm_90/row_sums/128/dlse", "sm_90/quantize/128/int8",
    "sm_90/restore/128/fp8", "sm_90/epilogue_grad/128/neox,norm,two",
    "sm_90/project_heads/64/neox,norm,bias,rows,two", "sm_80/project_heads/64/neox,norm,bias,rows,two",
)  # fmt: skip
ROWS, SCALE, SOFTCAP, SLOPE = 768, 0.3, 1.5, 0.01
HEAD = StridedRange(0, 1)
TILES = (
    Tile(strip(0, 384), strip(0, 384), CAUSAL, HEAD),
    # All blocks of this tile need a mask.
    Tile(strip(192, 128), strip(0, 384), Band(0, 290), HEAD),
    # Blocks of queries with one block of keys, and blocks of keys with one block of queries.
    Tile(strip(0, 384, row=384), strip(0, 128), FULL, HEAD),
    Tile(strip(0, 64), strip(0, 256, row=384), FULL, HEAD),
    # Three entries in a row with one block each.
    *[Tile(strip(0, 64), strip(0, 128, row=128), FULL, HEAD)] * 3,
)
"""Every buffer is used again by the same item and by others, with and without a mask. A producer can be far ahead."""
SHORT_TILES = (
    Tile(strip(192, 128), strip(0, 320), Band(0, 290), HEAD),
    # Two entries in a row for the same block of queries.
    *[Tile(strip(0, 64), strip(0, 128, row=128), FULL, HEAD)] * 2,
)
SHORT_TILES_BY_KEY = (
    Tile(strip(0, 320), strip(0, 64), Band(0, 290), HEAD),
    *[Tile(strip(0, 128, row=128), strip(0, 64, row=64), FULL, HEAD)] * 2,
)
"""Tiles for kernels without Gluon, whose buffers are for the blocks of one entry. The first one has five blocks, of
which three need no mask.
"""
SECOND_TILE = Tile(strip(0, 384, row=384), strip(0, 128, row=128), FULL, HEAD)
"""With `TILES`, an item of exactly two blocks, for the Gluon kernel of sm_100."""
LONG_TILE = Tile(strip(0, 64), strip(0, 640), FULL, HEAD)
LONG_TILES_BY_KEY = (
    Tile(strip(0, 384), strip(0, 64), FULL, HEAD),
    # Ten blocks of 64 queries, none of which sees all keys.
    Tile(strip(0, 640), strip(0, 128, 3), Band(0, 290), HEAD),
)
"""More tiles for the loops of sm_100 without Gluon, which start copies of later blocks."""
SEEDS, MORE_SEEDS, SEEDS_OF_TRITON = 2, 16, 4
"""How many runs a mutant must survive to count as one that is not caught: with an explanation, without one, and without
one in kernels whose warps all do the same, which have fewer orders."""

DQ, SUM_ERROR = 6, 1e-6
"""The argument of `grad_all` that is added to, and how far sums in another order may differ, of the largest value."""

SITES = re.compile(
    r"mbarrier\.(init|arrive|try_wait)|bar\.sync|barrier\.sync|bar\.warp\.sync|setmaxnreg|fence\.|wgmma\.(fence|commit|wait)"
    r"|tensormap\.cp_fenceproxy|cp\.async\.(bulk\.)?(commit|wait)|mbarrier\.inval|tcgen05\.(commit|wait)"
)
"""The instructions that are removed."""

EXPLAINED = {
    ("bar.sync", r": mbarrier\.wait\("): "Triton synchronizes a group before each wait, but the wait alone is enough.",
    ("bar.warp", r": mbarrier\.wait\("): "The same for the only warp of a producer.",
    ("bar.warp", r"described: "): "The publication of a map synchronizes the warp before it makes the next one.",
    ("bar.warp", r": copy_block"): "One lane starts a copy, and it has waited for the buffer itself.",
    ("bar.warp", r": mbarrier\.arrive\(dout_full"): "The arrival before it follows the same stores, and synchronizes.",
    ("bar.warp", r"taken: "): "The warp also synchronizes between the last read of the item's word and its next write.",
    ("mbarrier.try_wait", r"< bring\(q_rows, 0, q_slot"):
        "The producer first waits for a K that is released after the last product with the Q of this buffer.",
    ("mbarrier.try_wait", r"landed\(items, q_full"):
        "The item before waited for the older of the two loads when it made its descriptor.",
    ("bar.sync", r": mbarrier\.arrive\((q_empty\.index\(q_slot\)|barriers\[1\])\)"):
        "The group has synchronized after its last product, and reads no buffer in between.",
    ("mbarrier.try_wait", r"^(sm_100/gluon/)?forward[\w-]*: .*landed\(turn, k_full"):
        "The producer has waited for the release of a V, which follows the product with the older of the two K.",
    ("mbarrier.try_wait",
     r"^(sm_100/gluon/(forward|grad_q)|grad_q-options): .*landed\(turn, v_full"
     r"|^sm_100/gluon/(grad_q: .*landed\(turn, k_full|grad_kv: .*landed\(turn, q_full)"):
        "Only an order in which all later copies land before the oldest one shows it, which 16 runs need not have.",
    ("mbarrier.try_wait", r"^grad_q-256: produce: mbarrier\.wait\(q_full"):
        "Every item of the tiles has more blocks of K than there are buffers, so products with Q precede.",
    ("bar.warp", r"^sm_100/gluon/\w+: received: mbarrier\.arrive\(empty"):
        "The producer waits for the release of an item with entries before it writes this word again.",
    ("bar.sync", r"(\bgrad_[\w-]+|^sm_100/gluon/\w+): received: mbarrier\.arrive\(empty"):
        "The producer waits for the release of an item with entries before it writes this word again.",
    ("mbarrier.try_wait", r"(\bgrad_[\w-]+|^sm_100/gluon/\w+): hand_over: mbarrier\.wait\(empty"): "The same.",
    ("bar.sync", r"barriers_for: mbarrier\.init\("):
        "Triton 3.6.0 synchronizes after each of several barriers that are made in a row; the last one is enough.",
    ("mbarrier.try_wait", r"_score: mbarrier\.wait\(k_full"): "The first half of the rows has waited for the same K.",
    ("mbarrier.try_wait", r"_score_q: mbarrier\.wait\(s_read.* < _score_q\(turn, "):
        "Q of this item was loaded after all products of the item before, which follow the reads of S.",
    ("mbarrier.try_wait", r"_start: mbarrier\.wait\(done.* < _start\(turn, "):
        "K and V of this item were loaded after all products of the item before.",
    ("mbarrier.try_wait", r"_multiply_q: mbarrier\.wait\(dq_done"):
        "The next K was loaded into its buffer, one of two, after the product with the dS of these columns.",
    ("bar.sync", r"tcgen05_\w+_kernel: gl\.warp_specialize"): "The barrier of all roles precedes it.",
    ("bar.sync", r"tcgen05_\w+_kernel: def "):
        "Barriers of the roles precede the next use of the word with the address of tensor memory.",
    ("tcgen05.wait::st", r"_soften: sums\.store\("): "The wait for the weights precedes the next access to the sums.",
    ("tcgen05.wait::st", r"_update: (weights|piece)\.store\("):
        "The wait for the last piece of the sums covers all stores before the arrival.",
    ("bar.sync",
     r"_soften: sums\.store\(|_update: (weights|piece)\.store\(|: mbarrier\.arrive\(p_full\)"
     r"|_update_\w+: (_operand\(|mbarrier\.arrive\(ds_full)"):
        "Another barrier follows the last store, before the arrival or as the one of the arrival itself.",
    ("bar.sync", r"_update_kv: deltas = "): "Delta was stored before the arrival for which this group has waited.",
    ("wgmma.commit_group", r": sums = hopper\.warpgroup_mma\(left\[piece\]|added: started \+= "):
        "The product joins the group of the next piece of columns, and the same wait is for both.",
    ("bar.sync", r": mbarrier\.arrive\(k_empty\."):
        "The producer first waits for the release of the V before, which follows the same product.",
    ("wgmma.fence", r": sums = hopper\.warpgroup_mma\(left|added: started \+= "):
        "Several products start in a row, and the fence before the first one orders the registers of both.",
    ("bar.sync", r"^grad_all: _update: dk = hopper"):
        "The arrival before it follows the same stores of dS, and synchronizes.",
    ("wgmma.fence", r": dq = hopper\.warpgroup_mma\(ds_buffers"):
        "The fence before the product with Q orders the registers of both.",
    ("mbarrier.try_wait", r": mbarrier\.wait\(v_full\.index\((old_)?slot\)"):
        "The same wait has passed before; it only ends a basic block.",
    ("wgmma.wait_group", r"< dv = completed\(dv|: dv = hopper\.warpgroup_mma_wait\([12]"):
        "A wait for one more product, or for all, follows at once.",
    ("setmaxnreg.inc", r": def |: $"): "PTX does not say how many registers of the hardware an instruction needs.",
    ("setmaxnreg.dec", r": def "): "The loop in which warps wait for a role starts by giving these registers back.",
    ("barrier.sync", r": def "): "No warp is in the state whose branch this is: all have a role or wait for one.",
    ("cp.async.bulk", r"described: "): "No addition is in flight when a map is made, so nothing is waited for.",
}  # fmt: skip
"""Why mutants survive, by opcode and by a pattern of the kernel and the statement. Not every such mutant does."""
EXPLAINED_OF_TRITON = {
    ("bar.sync", r"^sm_100/\w+/grad_kv: _add_kv: d[kv]_rows = tl\.dot\("):
        "Another barrier precedes the product that adds to the stored sums.",
    ("bar.sync", r": for (n_block|m_block|edge) in tl\.range"):
        "Another barrier precedes the next use of the loop's buffers.",
    ("bar.sync", r"(k_rows|v_rows|q_rows|dout_rows|lse|delta) = |piece = |of_head = "):
        "Copies to different buffers follow each other, and Triton sees only that they are in one allocation.",
    ("bar.sync", r"store_rows\(|load_rows\("): "The barrier after the loop precedes the same stores.",
    ("bar.sync", r"rows_of: source|read_block: rows = source"):
        "The first warp makes the tensor map, expects the bytes and starts the copy.",
    ("cp.async.commit_group", r""): "The copies join the next group, and the same wait is for both.",
    ("cp.async.bulk", r""): EXPLAINED["cp.async.bulk", r"described: "],
    ("fence.proxy", r"tl\.dot"): "Another fence orders the same stores. The rules for copies are relaxed.",
    ("wgmma.fence", r""): "The rule for registers is relaxed.",
    ("wgmma.commit_group", r": s, capped = "): "Nothing reads S before the wait for dP, which waits for both products.",
    ("wgmma.wait_group", r": s, capped = "): "The same.",
    ("bar.sync", r": (acc|dp) = tl\.dot\("): "The wait for the copy, which precedes it, is enough.",
    ("wgmma.commit_group", r"_add_kv: d[kv]_rows = tl\.dot"):
        "The products join the next group, and nothing reads the sums before the wait for it.",
    ("wgmma.wait_group", r": for edge in tl\.range"): "A later wait precedes the next read of the sums.",
    ("bar.sync", r": def "): "Another barrier precedes the next use of the word with the address of tensor memory.",
    ("bar.sync", r": for (item|index) in tl\.range"): "Another barrier precedes the next use of the buffers.",
    ("bar.sync", r": s, (raw|capped) = logits\(tl\.dot"): "The wait for the copy, which precedes it, is enough.",
    ("tcgen05.wait::st", r""): "A later wait for stores precedes the product.",
    ("mbarrier.try_wait", r": acc = tl\.dot\("):
        "The commit of S, which was waited for before, also tracks the older product with V.",
    ("mbarrier.try_wait", r"_add_q: return tl\.dot\("):
        "The commit of dP, which was waited for before, also tracks the older product with K.",
    ("bar.sync", r"_add_q: return tl\.dot\("):
        "Another barrier precedes the product that reads what was stored, dS or the sums of an entry before.",
    ("mbarrier.try_wait", r"_add_kv: d[kv]_rows = tl\.dot\("):
        "The commit of a later product, of dP or after the loop of dK, is waited for too and tracks this product.",
    ("tcgen05.wait::ld", r"_add_kv: dv_rows = tl\.dot\("):
        "The wait for the load of dK follows at once, and covers both.",
}  # fmt: skip
"""The same for kernels without Gluon."""


class Mutant(NamedTuple):
    """A kernel without the instruction number `index`.

    `opcode`: its first two parts, or three for copies. `statement`: the source from which it was compiled, see
    `_statement`.
    """

    kernel: str
    index: int
    line: int
    opcode: str
    statement: str


class Outcome(NamedTuple):
    """What a case found: how mutants ended, with their number, and the survivors without an explanation."""

    ways: dict[str, Any]
    survivors: list[Mutant]


def mutants(kernel: str, program: Program) -> list[Mutant]:
    """Return all mutants of a kernel."""
    sites = [(index, x) for index, x in enumerate(program.instructions) if SITES.match(x.opcode)]
    return [
        Mutant(kernel, index, x.line, ".".join(x.opcode.split(".")[: 3 if "cp.async" in x.opcode else 2]),
               _statement(x.source))
        for index, x in sites
    ]  # fmt: skip


def _statement(source: tuple[str, ...]) -> str:
    """Return the innermost function and its line of the source, then the lines that call it.

    For example `bring: mbarrier.wait(...) < bring(k_rows, ...)`.
    """
    lines, function = list[str](), ""
    for place in source:
        file, _, number = place.partition(":")
        before = linecache.getlines(str(ROOT / "kernels" / file))[: int(number)]
        functions = [match[1] for line in before if (match := re.match(r"def (\w+)", line))]
        function = function or (functions[-1] if functions else "")
        lines += [line.strip() for line in before[-1:]]
    return f"{function}: {' < '.join(lines)}" if function else ""


def is_gluon(kernel: str) -> bool:
    """Return whether a kernel is written in Gluon."""
    return base_of(kernel) in KERNELS or "/gluon/" in kernel


def base_of(kernel: str) -> str:
    """Return the name of a Gluon kernel without its variant."""
    return kernel.partition("-")[0]


def explanation(mutant: Mutant) -> str:
    """Return why a mutant may survive, or ""."""
    place = f"{mutant.kernel}: {mutant.statement}"
    return next(
        (
            why
            for (opcode, part), why in (EXPLAINED if is_gluon(mutant.kernel) else EXPLAINED_OF_TRITON).items()
            if opcode == mutant.opcode and re.search(part, place)
        ),
        "",
    )


def without(code: Code, index: int) -> Code:
    """Return a copy of a program without an instruction; a wait passes at once."""
    changed = copy(code)
    changed.handlers = list(code.handlers)
    changed.handlers[index] = _pass
    return changed


def _pass(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    if instruction.opcode.startswith("mbarrier.try_wait"):
        warp.set(instruction.operands[0], ALL[mask], mask)


class Bench:
    """A launch of a kernel that can be repeated with its first inputs, with and without an instruction."""

    def __init__(self, kernel: str) -> None:
        gluon, self._make = base_of(kernel) in KERNELS, torch.Generator().manual_seed(len(kernel))
        architecture = 90 if gluon else int(kernel.split("/")[0].removeprefix("sm_"))
        self.kernel, self.device = kernel, interpreter(architecture)
        self.device.rules, self.device.changed = STRICT if gluon else OF_TRITON, None
        self.device.rules_of = RULES_OF
        if gluon or kernel.startswith(FORMS):
            self._call = self._attention(kernel, architecture)
        else:
            self._call = call_of(kernel, 64, 1)
            for x in self._tensors():
                self._fill(x)
        self._first = [x.clone() for x in self._tensors()]
        self.expected = self.results(1)
        self.code = self.device.ran[-1].code

    def _tensors(self) -> list[Tensor]:
        return [x for x in self._call.args if isinstance(x, Tensor)]

    def _fill(self, x: Tensor) -> None:
        """Fill an argument: lists are permutations."""
        numbers = torch.randn(x.shape, generator=self._make)
        if x.dtype == torch.int64:
            numbers = torch.randperm(len(x), generator=self._make)
        x.copy_(numbers * 40 if x.dtype == torch.int8 else numbers)

    def results(self, seed: int) -> list[Tensor]:
        """Return the bytes of all tensors after a launch."""
        for x, first in zip(self._tensors(), self._first, strict=True):
            x.copy_(first)
        self.device.rng, self.device.late = Random(seed), seed % 2 == 0
        self._call.run()
        return [x.contiguous().view(-1).view(torch.uint8).clone() for x in self._tensors()]

    def caught(self, mutant: Mutant, seeds: Sequence[int] = ()) -> str:
        """Return how a mutant is caught, or "". `seeds`: those to try, by default as many as it must survive."""
        self.device.changed = lambda function: without(self.code, mutant.index)
        most = SEEDS if explanation(mutant) else MORE_SEEDS if is_gluon(mutant.kernel) else SEEDS_OF_TRITON
        for seed in seeds or range(most):
            try:
                results = self.results(seed)
            except Fault as fault:
                return str(fault).split(" (warp")[0]
            if not self._agree(results):
                return "results"
        return ""

    def _agree(self, results: Sequence[Tensor]) -> bool:
        """Return whether results have the bits of the kernel's own, and the dQ of additions its values."""
        pairs = list(zip(results, self.expected, strict=True))
        if self.kernel == "grad_all":
            dq, expected = (x.view(torch.float32) for x in pairs.pop(DQ))
            if not torch.allclose(dq, expected, rtol=0, atol=float(expected.abs().max()) * SUM_ERROR):
                return False
        return all(torch.equal(*pair) for pair in pairs)

    def _attention(self, kernel: str, architecture: int) -> LaunchCall:
        """Return the launch of an attention kernel in one program."""
        *form, kernel = kernel.split("/")
        kernel, _, variant = kernel.partition("-")
        dim, value_dim, options = VARIANTS[variant]
        dims = (dim, dim, value_dim, value_dim)
        q, k, v, dout = (torch.randn(ROWS, 1, 1, each, generator=self._make).bfloat16() for each in dims)
        lse, grad = torch.full((1, 1, ROWS), -torch.inf), torch.zeros_like(k.float())
        grad_v = torch.zeros_like(v.float())
        softmax = Softmax(SCALE, softcap=SOFTCAP, alibi_slopes=(SLOPE,)) if options else Softmax(SCALE)
        how: dict[str, Any] = {"scale": SCALE, "programs": 1}
        if options:
            how |= {"softcap": SOFTCAP, "slopes": torch.tensor([SLOPE])}
        gluon = form[1:] in ([], ["gluon"])
        tiles, tiles_by_key = (TILES, TILES) if gluon else (SHORT_TILES, SHORT_TILES_BY_KEY)
        if architecture == 100:
            tiles = (*tiles, SECOND_TILE if gluon else LONG_TILE)
            tiles_by_key = tiles_by_key if gluon else (*tiles_by_key, *LONG_TILES_BY_KEY)
        if gluon:
            configs = named_gluon(architecture, torch.bfloat16, dim, options)
        else:
            configs = configs_for(architecture, torch.bfloat16, dim, form[1])
        if kernel == "forward":
            config, call = configs.forward, forward_gluon if gluon else forward
            table = query_blocks(tiles, config.block_m, config.block_n, softmax=softmax)
            return call(q, k, v, grad_v, lse, _table(table), config, **how)
        logits = torch.einsum("nbhd,mbhd->bhnm", q.float(), k.float()) * SCALE
        if options:
            logits = (logits / SOFTCAP).tanh() * SOFTCAP
        out = torch.einsum("bhnm,mbhd->nbhd", logits.softmax(-1), v.float())
        per_row = logits.logsumexp(-1), torch.einsum("nbhd,nbhd->bhn", out, dout.float()).contiguous()
        if kernel == "grad_q":
            config, call = configs.grad_q, partial(grad_q_gluon, arch=architecture) if gluon else grad_q
            table = query_blocks(tiles, config.block_m, config.block_n, softmax=softmax)
            return call(q, k, v, dout, *per_row, grad, _table(table), config, **how)
        if kernel == "grad_all":
            how["dq"] = torch.zeros_like(grad)
        config, call = configs.grad_kv, partial(grad_kv_gluon, arch=architecture) if gluon else grad_kv
        table = key_blocks(tiles_by_key, 1, config.block_n, config.block_m, softmax=softmax)
        return call(q, k, v, dout, *per_row, grad, grad_v, _table(table), config, **how)


def _table(blocks: Any) -> Table:
    places = None if blocks.places is None else torch.from_numpy(blocks.places)
    return Table(torch.from_numpy(blocks.blocks), torch.from_numpy(blocks.entries), blocks.slots, places)


def run(name: str) -> Outcome:
    """Run the mutants of a case."""
    if name == "planted":
        return planted()
    kernel, part, parts = name.rsplit("/", 2)
    bench = Bench(kernel)
    chosen = mutants(kernel, bench.code.program)[int(part) :: int(parts)]
    ways = [bench.caught(mutant) for mutant in chosen]
    survivors = [mutant for mutant, way in zip(chosen, ways, strict=True) if not way and not explanation(mutant)]
    return Outcome(Counter(way.split(":")[0] if way else "survived" for way in ways), survivors)


def planted() -> Outcome:
    """Run one mutant with and without race detection: a consumer releases V before its other warps have read it.

    Both runs have the same order, the first one in which the results are right.
    """
    bench = Bench("forward")
    sites = mutants("forward", bench.code.program)
    site = next(x for x in sites if x.opcode == "bar.sync" and ": mbarrier.arrive(v_empty" in x.statement)
    for seed in range(MORE_SEEDS):
        with patch.multiple(RaceDetector, **dict.fromkeys(("read", "write", "copy", "multiply"), _ignore)):
            without_detection = bench.caught(site, [seed])
        if not without_detection:
            break
    return Outcome({"with": bench.caught(site, [seed]), "without": without_detection}, [])


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""


GATE = Gate("ptx", Path(), (), (), run)


def main(arguments: Sequence[str]) -> None:
    """Run cases and write what they found, or print the table of kernels."""
    if arguments[0] == "table":
        for kernel in arguments[1:] or (*KERNELS, *TRITON_KERNELS):
            bench = Bench(kernel)
            for mutant in mutants(kernel, bench.code.program):
                way = bench.caught(mutant) or f"survived: {explanation(mutant) or 'NOT EXPLAINED'}"
                print(*mutant, way, sep="\t", flush=True)
        return
    Path(arguments[0]).write_text(json.dumps(dict(all_compiled(arguments[1:], GATE))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
