"""Machine code as nvdisasm prints it: its loops, and the instructions of one pass through a loop.

Guarantees: a loop is a natural loop of the control flow graph, whatever the order of the code. Waits after the last
EXIT and the parts of a warp-specialised kernel are therefore assigned to the right loop. For a loop with branches,
`product_loops` considers the paths with the most matrix products, and returns the shortest and the longest of them, for
example the paths without and with the mask.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CLASSES = ("mma", "mufu", "fp32", "integer", "memory", "barrier", "convert", "other")
"""What an instruction works on. "integer": also addresses and predicates, per thread or uniform; "memory": shared,
global and tensor memory, shuffles and spills; "other": moves and jumps."""

_OPCODES = {
    "mma": "HGMMA QGMMA IGMMA HMMA IMMA DMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "mufu": "MUFU",
    "fp32": "FFMA FADD FMUL FMNMX FMNMX3 FSEL FSETP FSET FCHK FFMA2 FADD2 FMUL2 HFMA2 HADD2 HMUL2 HSETP2 HMNMX2",
    "memory": (
        "LD LDC LDCU LDG LDGSTS LDL LDS LDSM LDTM ST STG STL STS STSM STTM ATOM ATOMG ATOMS RED REDG SHFL UTMALDG "
        "UTMASTG UTMAREDG UTMAPF UBLKCP UBLKRED UTCCP UTCSHIFT MATCH LDTRAM MOVM"
    ),
    "barrier": (
        "BAR SYNCS WARPGROUP WARPSYNC DEPBAR LDGDEPBAR MEMBAR FENCE BSSY BSYNC BREAK BMOV UTCBAR USETMAXREG ELECT "
        "NANOSLEEP ARRIVES UTMACCTL UTMACMDFLUSH ERRBAR CCTL CCTLL B2R R2B YIELD UTCATOMSWS UCGABAR_ARV UCGABAR_WAIT "
        "ACQBULK PREEXIT FENCE VOTE VOTEU"
    ),
    "convert": "F2F F2FP F2I F2IP I2F I2FP I2I I2IP FRND",
    "other": "BRA BRX BRXU JMP CALL RET EXIT NOP MOV UMOV MOV32I CS2R S2R S2UR S2URS BPT KILL RPCMOV DEPBAR",
}
_CLASS = {opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()}

_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P[T\d]+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
    r"(?:\s*/\* 0x(?P<low>[0-9a-f]{16}) \*/)?"
)
_HIGH = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_TARGETS = re.compile(r"BRANCH_TARGETS\s+([^\"*)]+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?),")


class Instruction(NamedTuple):
    """One instruction. `high`: the upper 64 bits of its encoding, 0 if they were not printed."""

    opcode: str
    operands: str
    guard: str = ""
    high: int = 0

    @property
    def kind(self) -> str:
        """Return the class of the instruction, one of CLASSES."""
        name = self.opcode.split(".")[0]
        if name == "IMAD" and self.opcode.startswith("IMAD.MOV"):
            return "other"
        return _CLASS.get(name, "integer")

    @property
    def spills(self) -> bool:
        """Return whether the instruction moves a register to or from thread-local memory."""
        return self.opcode.split(".")[0] in ("LDL", "STL")


class Loop(NamedTuple):
    """An innermost loop over matrix products.

    `least` and `most` are the instructions of its shortest and longest pass, and `body` those of all its blocks.
    """

    least: tuple[Instruction, ...]
    most: tuple[Instruction, ...]
    body: tuple[Instruction, ...]


def functions(listing: str) -> dict[str, str]:
    """Return the listing of each kernel by name."""
    listings: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            lines = listings.setdefault(section[1], [])
        lines.append(line)
    return {name: "\n".join(part) for name, part in listings.items()}


class _Block(NamedTuple):
    instructions: list[Instruction]
    after: list[int]


def instructions(listing: str) -> list[Instruction]:
    """Return all instructions in the order of the listing."""
    return [instruction for block in _blocks(listing) for instruction in block.instructions]


def product_loops(listing: str) -> list[Loop]:
    """Return the loops that multiply matrices and contain no other such loop, ordered by their first blocks.

    In a kernel for tensor memory, other warps may compute the exponentials, whose loops count too. For a kernel that
    uses no matrix units, return the loops with FFMA instructions.
    """
    blocks = _blocks(listing)
    above = _dominators(blocks)
    bodies: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for head in block.after if above[index] else ():
            if head in above[index]:
                bodies.setdefault(head, {head}).update(_reaching(blocks, above, index, head))
    every = [item for block in blocks for item in block.instructions]
    units = {"mma"} if any(item.kind == "mma" for item in every) else {"FFMA"}
    if any(item.opcode.startswith("UTC") and item.kind == "mma" for item in every):
        units.add("MUFU.EX2")
    products = [
        sum(not units.isdisjoint((item.kind, item.opcode, item.opcode.split(".")[0])) for item in block.instructions)
        for block in blocks
    ]
    of_products = {head: body for head, body in bodies.items() if any(products[index] for index in body)}
    inner = [
        head
        for head, body in of_products.items()
        if not any(item < body for item in of_products.values() if item != body)
    ]
    waits = {
        index for head, body in bodies.items() for index in body if head not in of_products and _waits(blocks, body)
    }
    return [_loop(blocks, products, head, of_products[head], above, waits) for head in sorted(inner)]


def count_by_class(counted_instructions: Iterable[Instruction]) -> dict[str, int]:
    """Return the number of instructions in total (`all`) and of each class."""
    kinds = Counter(instruction.kind for instruction in counted_instructions)
    return {"all": kinds.total(), **{name: kinds[name] for name in CLASSES}}


def _blocks(listing: str) -> list[_Block]:
    starts: dict[str, int] = {}
    parts: list[list[Instruction]] = [[]]
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            if parts[-1]:
                parts.append([])
            starts[label[1]] = len(parts) - 1
        elif match := _LINE.match(line):
            parts[-1].append(Instruction(match["opcode"], match["operands"].strip(), (match["guard"] or "").strip()))
            if match["opcode"].split(".")[0] in ("BRA", "BRX", "BRXU", "JMP", "RET", "EXIT"):
                parts.append([])
        elif (high := _HIGH.match(line)) and (part := parts[-1] or (parts[-2] if len(parts) > 1 else [])):
            part[-1] = part[-1]._replace(high=int(high[1], 16))
    return [_Block(part, _after(part, index, starts, len(parts))) for index, part in enumerate(parts)]


def _after(part: Sequence[Instruction], index: int, starts: dict[str, int], count: int) -> list[int]:
    """Return the indices of the blocks that may follow the block number `index` of `count`.

    `part` has the instructions of the block. `starts` has the index of the block at each label.
    """
    following = [index + 1] if index + 1 < count else []
    if not part:
        return following
    last = part[-1]
    name = last.opcode.split(".")[0]
    if name in ("EXIT", "RET"):
        return following if last.guard else []
    if name in ("BRX", "BRXU"):
        listed = _TARGETS.search(last.operands)
        return [starts[label.strip()] for label in (listed[1].split(",") if listed else []) if label.strip() in starts]
    if name not in ("BRA", "JMP"):
        return following
    if last.opcode.startswith("BRA.DIV"):
        return following  # taken if the threads of a warp have diverged, which uniform loops never do
    targets = [starts[label] for label in _TARGET.findall(last.operands) if label in starts]
    always = not last.guard and last.operands.startswith("`")
    return targets if always else [*following, *targets]


def _dominators(blocks: Sequence[_Block]) -> list[set[int]]:
    """Return the dominators of each block, including itself; an empty set for an unreachable block."""
    blind = any(
        block.instructions and block.instructions[-1].opcode.startswith("BRX") and not block.after for block in blocks
    )
    entries, reached = set[int](), set[int]()
    # A jump through a table that is not listed may go to any block that cannot be reached otherwise.
    for start in range(len(blocks) if blind else 1):
        if start not in reached:
            entries.add(start)
            pending = [start]
            while pending:
                index = pending.pop()
                if index not in reached:
                    reached.add(index)
                    pending += blocks[index].after
    before: list[list[int]] = [[] for _ in blocks]
    for index in reached:
        for successor in blocks[index].after:
            before[successor].append(index)
    dominators = [
        {index} if index in entries else set(reached) if index in reached else set() for index in range(len(blocks))
    ]
    changed = True
    while changed:
        changed = False
        for index in sorted(reached - entries):
            new = {index}.union(set.intersection(*(dominators[successor] for successor in before[index])))
            changed |= new != dominators[index]
            dominators[index] = new
    return dominators


def _reaching(blocks: Sequence[_Block], above: Sequence[set[int]], last: int, head: int) -> set[int]:
    """Return the blocks of a loop: `head`, `last`, and all from which `last` can be reached without passing `head`.

    `above` has the dominators of each block; a block without any is unreachable and is left out.
    """
    reaching, pending = {head, last}, [last]
    before: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        for neighbour in block.after if above[index] else ():
            before.setdefault(neighbour, []).append(index)
    while pending:
        index = pending.pop()
        if index == head:
            continue
        fresh = [neighbour for neighbour in before.get(index, ()) if neighbour not in reaching]
        reaching.update(fresh)
        pending += fresh
    return reaching


def _waits(blocks: Sequence[_Block], body: Iterable[int]) -> bool:
    """Return whether a loop polls until something has arrived."""
    return any("TRYWAIT" in instruction.opcode for index in body for instruction in blocks[index].instructions)


def _loop(
    blocks: Sequence[_Block], products: Sequence[int], head: int, body: set[int], above: Sequence[set[int]],
    waits: set[int],
) -> Loop:  # fmt: skip
    """Return the loop with its shortest and longest path from the head back to the head.

    A loop that waits is assumed to succeed immediately, so paths do not enter it.
    """
    usable = body - waits if head not in waits else body
    ways: dict[int, dict[int, tuple[tuple[int, int], list[int]]]] = {}

    def way(index: int, sign: int) -> tuple[tuple[int, int], list[int]] | None:
        memo = ways.setdefault(sign, {})
        if index in memo:
            return memo[index]
        size, best = len(blocks[index].instructions), None
        for successor in blocks[index].after:
            rest: tuple[tuple[int, int], list[int]] | None = None
            if successor == head:
                rest = (0, 0), []
            elif successor in usable and successor not in above[index]:
                rest = way(successor, sign)
            if rest and (best is None or rest[0] > best[0]):
                best = rest
        if best is None:
            return None
        memo[index] = (best[0][0] + products[index], best[0][1] + sign * size), [index, *best[1]]
        return memo[index]

    def instructions_of(sign: int) -> tuple[Instruction, ...]:
        best_way = way(head, sign)
        assert best_way, "a loop has a way back to its head"
        return tuple(successor for index in best_way[1] for successor in blocks[index].instructions)

    return Loop(
        instructions_of(-1),
        instructions_of(1),
        tuple(successor for index in sorted(body) for successor in blocks[index].instructions),
    )
