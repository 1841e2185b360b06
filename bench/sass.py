"""Machine code as nvdisasm prints it: its loops, and what the instructions of a pass through one do.

Guarantees: a loop is a natural loop of the control flow graph, whatever the order of the code: waits behind the last
EXIT and the parts of a kernel that is split between warps are where they belong. Of a loop with branches, `passes`
gives the shortest and the longest way through it that multiplies most matrices: without and with the mask, say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CLASSES = ("mma", "mufu", "fp32", "integer", "memory", "barrier", "convert", "other")
"""What an instruction works on. "integer": addresses and predicates too, by threads or uniform; "memory": shared,
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
    """`high`: the upper 64 bits of its encoding, 0 where they were not printed."""

    opcode: str
    operands: str
    guard: str = ""
    high: int = 0

    @property
    def kind(self) -> str:
        """One of CLASSES."""
        name = self.opcode.split(".")[0]
        if name == "IMAD" and self.opcode.startswith("IMAD.MOV"):
            return "other"
        return _CLASS.get(name, "integer")

    @property
    def spills(self) -> bool:
        """Whether it moves a register to or from a thread's own memory."""
        return self.opcode.split(".")[0] in ("LDL", "STL")


class Loop(NamedTuple):
    """An innermost loop over matrix products: the shortest and the longest pass, and all that its blocks hold."""

    least: tuple[Instruction, ...]
    most: tuple[Instruction, ...]
    body: tuple[Instruction, ...]


def functions(listing: str) -> dict[str, str]:
    """The listing of each kernel by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            lines = found.setdefault(section[1], [])
        lines.append(line)
    return {name: "\n".join(part) for name, part in found.items()}


class _Block(NamedTuple):
    instructions: list[Instruction]
    after: list[int]


def instructions(listing: str) -> list[Instruction]:
    """All of them, as they are printed."""
    return [one for block in _blocks(listing) for one in block.instructions]


def product_loops(listing: str) -> list[Loop]:
    """The loops that multiply matrices and hold no other such loop, in the order of their heads.

    Of a kernel without matrix units, those that multiply and add.
    """
    blocks = _blocks(listing)
    above = _dominators(blocks)
    bodies: dict[int, set[int]] = {}
    for at, block in enumerate(blocks):
        for head in block.after if above[at] else ():
            if head in above[at]:
                bodies.setdefault(head, {head}).update(_reaching(blocks, above, at, head))
    unit = "mma" if any(one.kind == "mma" for block in blocks for one in block.instructions) else "FFMA"
    products = [sum(unit in (one.kind, one.opcode.split(".")[0]) for one in block.instructions) for block in blocks]
    of_products = {head: body for head, body in bodies.items() if any(products[at] for at in body)}
    inner = [
        head for head, body in of_products.items() if not any(one < body for one in of_products.values() if one != body)
    ]
    waits = {at for head, body in bodies.items() for at in body if head not in of_products and _waits(blocks, body)}
    return [_loop(blocks, products, head, of_products[head], above, waits) for head in sorted(inner)]


def counted(some: Iterable[Instruction]) -> dict[str, int]:
    """How many there are of each class, and in all."""
    kinds = Counter(one.kind for one in some)
    return {"all": kinds.total(), **{name: kinds[name] for name in CLASSES}}


def _blocks(listing: str) -> list[_Block]:
    starts: dict[str, int] = {}
    parts: list[list[Instruction]] = [[]]
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            if parts[-1]:
                parts.append([])
            starts[label[1]] = len(parts) - 1
        elif found := _LINE.match(line):
            parts[-1].append(Instruction(found["opcode"], found["operands"].strip(), (found["guard"] or "").strip()))
            if found["opcode"].split(".")[0] in ("BRA", "BRX", "BRXU", "JMP", "RET", "EXIT"):
                parts.append([])
        elif (high := _HIGH.match(line)) and (part := parts[-1] or (parts[-2] if len(parts) > 1 else [])):
            part[-1] = part[-1]._replace(high=int(high[1], 16))
    return [_Block(part, _after(part, at, starts, len(parts))) for at, part in enumerate(parts)]


def _after(part: Sequence[Instruction], at: int, starts: dict[str, int], count: int) -> list[int]:
    """The blocks that may follow."""
    following = [at + 1] if at + 1 < count else []
    if not part:
        return following
    last = part[-1]
    name = last.opcode.split(".")[0]
    if name in ("EXIT", "RET"):
        return following if last.guard else []
    if name in ("BRX", "BRXU"):
        listed = _TARGETS.search(last.operands)
        return [starts[one.strip()] for one in (listed[1].split(",") if listed else []) if one.strip() in starts]
    if name not in ("BRA", "JMP"):
        return following
    if last.opcode.startswith("BRA.DIV"):
        return following  # taken where the threads of a warp have parted, which uniform loops never do
    targets = [starts[one] for one in _TARGET.findall(last.operands) if one in starts]
    always = not last.guard and last.operands.startswith("`")
    return targets if always else [*following, *targets]


def _dominators(blocks: Sequence[_Block]) -> list[set[int]]:
    """For each block those that every way to it goes through, itself among them; none for one that is not reached."""
    blind = any(
        block.instructions and block.instructions[-1].opcode.startswith("BRX") and not block.after for block in blocks
    )
    entries, reached = set[int](), set[int]()
    # A jump through a table that is not listed may go to any block that nothing else leads to.
    for start in range(len(blocks) if blind else 1):
        if start not in reached:
            entries.add(start)
            waiting = [start]
            while waiting:
                at = waiting.pop()
                if at not in reached:
                    reached.add(at)
                    waiting += blocks[at].after
    before: list[list[int]] = [[] for _ in blocks]
    for at in reached:
        for one in blocks[at].after:
            before[one].append(at)
    found = [{at} if at in entries else set(reached) if at in reached else set() for at in range(len(blocks))]
    changed = True
    while changed:
        changed = False
        for at in sorted(reached - entries):
            new = {at}.union(set.intersection(*(found[one] for one in before[at])))
            changed |= new != found[at]
            found[at] = new
    return found


def _reaching(blocks: Sequence[_Block], above: Sequence[set[int]], last: int, head: int) -> set[int]:
    """The blocks from which `last` is reached without the head, itself among them."""
    found, waiting = {head, last}, [last]
    before: dict[int, list[int]] = {}
    for at, block in enumerate(blocks):
        for one in block.after if above[at] else ():
            before.setdefault(one, []).append(at)
    while waiting:
        at = waiting.pop()
        if at == head:
            continue
        fresh = [one for one in before.get(at, ()) if one not in found]
        found.update(fresh)
        waiting += fresh
    return found


def _waits(blocks: Sequence[_Block], body: Iterable[int]) -> bool:
    """Whether a loop asks again and again for something to have arrived."""
    return any("TRYWAIT" in one.opcode for at in body for one in blocks[at].instructions)


def _loop(
    blocks: Sequence[_Block], products: Sequence[int], head: int, body: set[int], above: Sequence[set[int]],
    waits: set[int],
) -> Loop:  # fmt: skip
    """The two ways from the head back to it; a wait succeeds at once."""
    usable = body - waits if head not in waits else body
    ways: dict[int, dict[int, tuple[tuple[int, int], list[int]]]] = {}

    def way(at: int, sign: int) -> tuple[tuple[int, int], list[int]] | None:
        known = ways.setdefault(sign, {})
        if at in known:
            return known[at]
        size, best = len(blocks[at].instructions), None
        for one in blocks[at].after:
            rest: tuple[tuple[int, int], list[int]] | None = None
            if one == head:
                rest = (0, 0), []
            elif one in usable and one not in above[at]:
                rest = way(one, sign)
            if rest and (best is None or rest[0] > best[0]):
                best = rest
        if best is None:
            return None
        known[at] = (best[0][0] + products[at], best[0][1] + sign * size), [at, *best[1]]
        return known[at]

    def taken(sign: int) -> tuple[Instruction, ...]:
        found = way(head, sign)
        assert found, "a loop has a way back to its head"
        return tuple(one for at in found[1] for one in blocks[at].instructions)

    return Loop(taken(-1), taken(1), tuple(one for at in sorted(body) for one in blocks[at].instructions))
