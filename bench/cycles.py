"""A small model of a multiprocessor: how many cycles a pass through a kernel's inner loop takes, and what that gives.

Modelled is one of the four quarters of a multiprocessor, which are alike: the warps that share it issue the loop's
instructions in order, one a cycle at most, as the machine code itself says: stall counts, scoreboards, barriers. Each
pipe takes an instruction again after so many cycles (CUDA C Programming Guide, "Arithmetic Instructions").
Matrix products queue for the matrix unit, so that what overlaps and what is exposed follows from the code. Not
modelled: memory, which is taken to be in time; caches of instructions; what precedes and follows the loop.
The clock falls with the load of the matrix unit, on a line through two measured points, and only these are fitted.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from ringattn.bench.sass import Instruction

QUARTERS = 4
QUEUED = 2
"""Products that wait for a busy matrix unit; the next one holds up its warp, so those of two warps alternate."""
BARRIER_CYCLES = 20
PASSES, WARM = 10, 4
"""How often the loop is gone through, and how many of these are not counted."""


class Gpu(NamedTuple):
    """`flops_a_cycle`: dense half precision, of one multiprocessor. `clocks`: (load of the matrix unit, GHz), twice."""

    name: str
    multiprocessors: int
    flops_a_cycle: int
    clocks: tuple[tuple[float, float], tuple[float, float]]

    def clock(self, load: float) -> float:
        """GHz that the power limit leaves at a load of the matrix unit."""
        (low, fast), (high, slow) = self.clocks
        return fast + (slow - fast) * (max(load, low) - low) / (high - low)

    def tflops(self, flops: float, cycles: float, load: float) -> float:
        """Of so many useful FLOPs of one multiprocessor in so many cycles."""
        return self.multiprocessors * flops / cycles * self.clock(load) * 1e-3


class Paced(NamedTuple):
    """Of one pass by all warps of a multiprocessor: its cycles, and those for which each pipe of a quarter is busy."""

    cycles: float
    busy: dict[str, float]

    @property
    def load(self) -> float:
        """Of the matrix unit."""
        return min(1.0, self.busy.get("matrix", 0.0) / self.cycles)


# (pipe, cycles until it takes the next instruction, cycles until the result is there where a scoreboard tells)
_PIPES = {
    "MUFU": ("mufu", 8.0, 24.0),
    "FMNMX": ("alu", 2.0, 0.0),
    "SHFL": ("memory", 4.0, 26.0),
    "LDS": ("memory", 4.0, 30.0),
    "STS": ("memory", 4.0, 20.0),
    "LDSM": ("memory", 4.0, 33.0),
    "STSM": ("memory", 4.0, 30.0),
    "LDG": ("memory", 4.0, 300.0),
    "LDGSTS": ("memory", 4.0, 40.0),
    "STG": ("memory", 4.0, 30.0),
    "LDL": ("memory", 4.0, 40.0),
    "STL": ("memory", 4.0, 30.0),
    "LDC": ("memory", 4.0, 30.0),
    "RED": ("memory", 4.0, 30.0),
    "REDG": ("memory", 4.0, 30.0),
    "ATOMG": ("memory", 4.0, 300.0),
    "S2R": ("memory", 2.0, 24.0),
    "S2UR": ("memory", 2.0, 24.0),
    "SYNCS": ("barrier", 2.0, 24.0),
    "UTMALDG": ("barrier", 2.0, 24.0),
    "R2UR": ("uniform", 2.0, 12.0),
}
_BY_KIND = {"fp32": "fma", "convert": "alu", "memory": "memory", "barrier": "barrier", "other": "alu"}
_PIPE_CYCLES = {"fma": 1.0, "alu": 2.0, "memory": 4.0, "barrier": 1.0, "uniform": 2.0}
_ON_FMA = ("FFMA", "FADD", "FMUL", "HFMA2", "HMUL2", "HADD2")
HOPPER = 4096
HMMA_SHARE = 0.629
"""Of the matrix unit's rate that products of registers (mma.sync) reach on Hopper: arXiv 2402.13499, section 5."""


def _pipe(one: Instruction, flops_a_cycle: int) -> tuple[str, float, float]:
    name = one.opcode.split(".")[0]
    if one.kind == "mma":
        return "matrix", matrix_cycles(one, flops_a_cycle), 30.0
    if name in _PIPES:
        pipe, cycles, delay = _PIPES[name]
        wide = re.search(r"\.(64|128|M88\.2|M88\.4)\b", one.opcode)
        factor = {None: 1, "64": 2, "128": 4, "M88.2": 2, "M88.4": 4}[wide and wide[1]]
        return pipe, cycles * (factor if pipe == "memory" else 1), delay
    if name.startswith("U"):
        return "uniform", _PIPE_CYCLES["uniform"], 12.0
    if name in _ON_FMA or name == "IMAD":
        return "fma", 2.0 if name == "IMAD" and "MOV" not in one.opcode else 1.0, 0.0
    pipe = "alu" if one.kind in ("integer", "fp32") else _BY_KIND[one.kind]
    return ("none", 0.0, 0.0) if name in ("NOP", "BRA", "WARPGROUP", "WARPSYNC") else (pipe, _PIPE_CYCLES[pipe], 20.0)


def _shape(one: Instruction) -> tuple[int, int, int, int]:
    """(m, n, k) of a product, and the quarters that do it together; zeros where the code does not say."""
    if shape := re.search(r"\.(\d+)x(\d+)x(\d+)", one.opcode):  # HGMMA.64x128x16: by a warpgroup
        return int(shape[1]), int(shape[2]), int(shape[3]), QUARTERS
    small = re.search(r"\.(16)(8)(16|8|32)\b", one.opcode)  # HMMA.16816: by one warp
    return (int(small[1]), int(small[2]), int(small[3]), 1) if small else (0, 0, 0, 1)


def matrix_flops(one: Instruction) -> float:
    """What an instruction of a warp multiplies on its quarter's matrix unit."""
    m, n, k, quarters = _shape(one) if one.kind == "mma" else (0, 0, 0, 1)
    return 2.0 * m * n * k / quarters


def matrix_cycles(one: Instruction, flops_a_cycle: int) -> float:
    """For which a product occupies the matrix unit of a quarter; its operands may come from shared memory."""
    m, n, k, quarters = _shape(one)
    cycles = matrix_flops(one) * QUARTERS / flops_a_cycle
    if quarters == 1:
        return cycles / (HMMA_SHARE if flops_a_cycle == HOPPER else 1.0)
    bytes_read = 2 * k * (n + (m if re.match(r"R\d+, gdesc", one.operands) else 0))
    return max(cycles, bytes_read / 128)


class _Warp:
    """`team`: its thread block among those that share the quarter. `first`: whether it has the first turn in it."""

    def __init__(self, team: int, first: bool) -> None:
        self.team, self.at, self.passes, self.ready, self.issued = team, 0, 0, 0.0, -1.0
        self.boards = [0.0] * 6
        self.products: list[float] = []
        self.last_product = 0.0
        self.ended: list[float] = []
        self.held = False
        self.turns = int(first)


def paced(
    loop: Sequence[Instruction], flops_a_cycle: int, warps: int, blocks: int = 1, tile_flops: float = 0.0
) -> Paced:
    """The loop of a kernel with so many warps a quarter in each of the thread blocks that a multiprocessor holds.

    `tile_flops`: of a thread block's products in a pass, where the instructions do not say (sm_100).
    """
    teams = [_Warp(block, at == 0) for block in range(blocks) for at in range(warps)]
    free: defaultdict[str, float] = defaultdict(float)
    busy: defaultdict[str, float] = defaultdict(float)
    pipes = [_pipe(one, flops_a_cycle) for one in loop]
    if tile_flops:
        each = tile_flops / flops_a_cycle / warps / sum(one.kind == "mma" for one in loop)
        pipes = [("matrix", each, pipe[2]) if pipe[0] == "matrix" else pipe for pipe in pipes]
    controls = [_control(one) for one in loop]
    barriers: dict[tuple[int, str], list[_Warp]] = {}
    queue: deque[float] = deque()
    now = 0.0
    while not all(len(warp.ended) == PASSES for warp in teams):
        waiting = [warp for warp in teams if len(warp.ended) < PASSES and not warp.held]
        assert waiting, "all warps wait for a barrier that none of them reaches"
        due = {id(warp): _due(warp, loop[warp.at], pipes[warp.at], controls[warp.at], free, queue) for warp in waiting}
        chosen = min(waiting, key=lambda warp: (max(due[id(warp)], now), warp.issued))
        now = max(due[id(chosen)], now)
        one, (pipe, cycles, delay), (stall, writes, reads, _) = loop[chosen.at], pipes[chosen.at], controls[chosen.at]
        if pipe == "matrix":
            begins = max(now, free[pipe])
            free[pipe] = begins + cycles
            queue.append(begins)
            chosen.last_product = begins + cycles + delay
            if "gsb0" in one.operands:
                chosen.products.append(chosen.last_product)
        elif pipe != "none":
            free[pipe] = max(now, free[pipe]) + cycles
        busy[pipe] += cycles
        busy["issue"] += 1
        if writes < 6:
            chosen.boards[writes] = max(chosen.boards[writes], now + cycles + delay)
        if reads < 6:
            chosen.boards[reads] = max(chosen.boards[reads], now + cycles + 8)
        chosen.issued, chosen.ready = now, now + max(stall, 1)
        _step(chosen, len(loop), now)
        if one.opcode.startswith(("BAR.SYNC", "BAR.ARV")):
            _meet(chosen, one, warps, teams, barriers, now)
        now += 1
    ends = [[warp.ended[at] for warp in teams] for at in (WARM - 1, PASSES - 1)]
    cycles = (sum(ends[1]) - sum(ends[0])) / len(teams) / (PASSES - WARM)
    return Paced(cycles, {pipe: one / PASSES for pipe, one in busy.items() if pipe != "none"})


def _due(
    warp: _Warp, one: Instruction, pipe: tuple[str, float, float], control: tuple[int, int, int, int],
    free: defaultdict[str, float], queue: deque[float],
) -> float:  # fmt: skip
    """When the warp's next instruction may be issued."""
    at = warp.ready
    for board in range(6):
        if control[3] >> board & 1:
            at = max(at, warp.boards[board])
    if one.opcode.startswith("WARPGROUP.DEPBAR"):
        under_way = int(one.operands.split(",")[1].strip(), 16)
        if len(warp.products) > under_way:
            at = max(at, warp.products[-1 - under_way])
    if pipe[0] == "matrix":
        if len(queue) > QUEUED:
            at = max(at, queue[-1 - QUEUED])
    elif pipe[0] != "none":
        at = max(at, free[pipe[0]])
    return at


def _step(warp: _Warp, size: int, now: float) -> None:
    warp.at += 1
    if warp.at == size:
        warp.at = 0
        warp.ended.append(now)


def _meet(
    warp: _Warp, one: Instruction, warps: int, teams: Sequence[_Warp],
    barriers: dict[tuple[int, str], list[_Warp]], now: float,
) -> None:  # fmt: skip
    """A barrier of the thread block, or of as many threads as it names: a warpgroup has one warp in each quarter.

    Warpgroups that name their barrier by a register, and one another's, take turns: FlashAttention-3's "ping-pong".
    """
    name, _, threads = (part.strip() for part in one.operands.partition(","))
    fixed = name.startswith("0x")
    expected = warps if fixed and not threads else 1
    if threads.startswith("0x"):
        expected = max(1, min(warps, int(threads, 16) // (32 * QUARTERS)))
    team = [other for other in teams if other.team == warp.team]
    if one.opcode.startswith("BAR.ARV"):
        if not fixed and expected > 1:
            _release(team[(team.index(warp) + 1) % len(team)], now)
        return
    if not fixed:
        if expected > 1:
            warp.turns -= 1
            warp.held = warp.turns < 0
        return
    there = barriers.setdefault((warp.team, name), [])
    there.append(warp)
    warp.held = True
    if len(there) >= min(expected, len({id(one) for one in team if len(one.ended) < PASSES or one in there})):
        for each in there:
            each.held, each.ready = False, max(each.ready, now + BARRIER_CYCLES)
        there.clear()


def _release(warp: _Warp, now: float) -> None:
    """It is this warp's turn."""
    warp.turns += 1
    if warp.held:
        warp.held, warp.ready = False, max(warp.ready, now + BARRIER_CYCLES)


def _control(one: Instruction) -> tuple[int, int, int, int]:
    """(stall cycles, scoreboard that its result sets, that its operands set, those it waits for); 7 is none."""
    bits = one.high >> 41
    if not one.high:
        return 1, 7, 7, 0
    return bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
