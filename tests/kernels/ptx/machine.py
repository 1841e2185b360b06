"""Run a launch: warps of 32 lanes in random turns, with copies that land late and in random order.

Every instruction runs for all lanes of a warp at once. Lanes that branch differently continue separately until they
are at the same instruction; those that are furthest behind run first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.ptx.arithmetic import PLAIN, Lanes, packed
from tests.kernels.ptx.barriers import Mbarrier, NamedBarrier, RegisterPool
from tests.kernels.ptx.copies import AddingUnit, Addition, CopyUnit, LaneCopies
from tests.kernels.ptx.fragments import ROW_BYTES, element_offsets, product
from tests.kernels.ptx.memory import MAP, MAP_BYTES, Accessor, Fault, GlobalMemory, SharedMemory, TensorMap, swizzled
from tests.kernels.ptx.products import MatrixUnit
from tests.kernels.ptx.program import LANES, SHARED_BASE, Address, Instruction, Program
from tests.kernels.ptx.races import COPY_ENGINES, RaceDetector
from tests.kernels.ptx.rules import Rules
from tests.kernels.ptx.tensor_memory import WORDS, Commit, TensorMemory, TransferUnit

MOST_TURNS = 200_000
ALL = np.ones(LANES, bool)
LANE = np.arange(LANES)
MOVES = ("mov.b64", "cvt.u64.u32", "shl.b64", "or.b64")
"""The instructions with which LLVM makes pairs of registers."""


class Copy(NamedTuple):
    """A tensor copy in flight: its map in global memory, the box's first column and row, and where it goes."""

    map_address: int
    column: int
    row: int
    target: int
    barrier: Mbarrier
    number: int


class GlobalMap:
    """A tensor map in global memory. `acquired`: stamps of the fences after which threads may use it."""

    def __init__(self, data: Lanes, stamp: tuple[int, int]) -> None:
        self.data, self.stamp = data, stamp
        self.acquired: list[tuple[int, int]] = []


class Warp:
    """A warp: its registers, the instruction at which each group of its lanes is, and what it waits for."""

    def __init__(self, block: Block, index: int) -> None:
        self.block, self.index = block, index
        self.threads = np.arange(LANES * index, LANES * index + LANES)
        self.registers: list[Any] = list(block.launch.program.initial)
        for name, slot in block.launch.program.special.items():
            self.registers[slot] = np.full(LANES, block.special(name), np.uint32)
        self.registers[block.launch.program.special["%tid.x"]] = self.threads.astype(np.uint32)
        self.matrix = MatrixUnit(index, self.registers, block.shared, block.detector, block.launch.rules)
        self.copies = CopyUnit(self.threads, block.shared, block.launch.memory, block.detector)
        self.transfers = TransferUnit(
            index, self.threads, self.registers, block.tensor_memory, block.detector, block.launch.rules
        )
        self.adding = AddingUnit(block.shared, block.detector)
        self.pc, self.mask = 0, ALL
        self.diverged: list[tuple[int, Lanes]] = []
        """Where the lanes are that branched differently."""
        self.waits_for: Callable[[], bool] | None = None
        self.ended = False

    def run(self, steps: int) -> None:
        """Run until the warp waits, ends, or has done `steps` instructions that others may notice."""
        code = self.block.launch.code
        self.waits_for = None
        try:
            while steps and not self.ended and self.waits_for is None:
                if self.diverged:
                    self._reconverge()
                elif run := code.run_from(self.pc):
                    for function in run:
                        function(self.registers)
                    self.pc += len(run)
                self._step(code)
                steps -= 1
        except Fault as fault:
            instruction = code.program.instructions[min(self.pc, len(code.program.instructions) - 1)]
            raise Fault(f"{fault} (warp {self.index}, line {instruction.line}: {instruction.text[:90]})") from None

    def _reconverge(self) -> None:
        """Continue with the lanes that are furthest behind, together with all that are at the same instruction."""
        groups = [(self.pc, self.mask), *self.diverged]
        self.pc = min(pc for pc, _ in groups)
        self.mask = np.logical_or.reduce([mask for pc, mask in groups if pc == self.pc])
        self.diverged = [(pc, mask) for pc, mask in groups if pc != self.pc]

    def _step(self, code: Code) -> None:
        instruction = code.program.instructions[self.pc]
        mask = self.mask
        if instruction.guard is not None:
            predicate = self.registers[instruction.guard]
            mask = mask & (~predicate if instruction.negated else predicate)
        if instruction.opcode.startswith("bra"):
            self._branch(instruction.operands[0], mask)
        elif instruction.opcode == "brx.idx":
            self.pc = instruction.operands[1][self.uniform(instruction.operands[0])]
        elif instruction.opcode == "ret":
            self._end(mask)
        elif code.plain[self.pc]:
            if mask.any():
                code.masked(self.pc, self.registers, mask)
            self.pc += 1
        elif not mask.any() or code.handlers[self.pc](self, instruction, mask) is not STAY:
            self.pc += 1

    def _branch(self, target: int, taken: Lanes) -> None:
        if not taken.any():
            self.pc += 1
        elif (taken == self.mask).all():
            self.pc = target
        else:
            self.diverged.append((target, taken))
            self.mask = self.mask & ~taken
            self.pc += 1

    def _end(self, mask: Lanes) -> None:
        if not (mask == self.mask).all() or self.diverged:
            raise Fault("a part of a warp ends")
        self.matrix.finish()
        self.copies.finish()
        self.transfers.finish()
        self.adding.finish()
        self.ended = True

    def converged(self, mask: Lanes) -> None:
        """Raise Fault unless all lanes run the instruction together."""
        if not mask.all():
            raise Fault("an aligned instruction that some lanes do not run")

    def uniform(self, operand: int) -> int:
        """Return the value of a register that is the same in all active lanes."""
        values = self.registers[operand][self.mask]
        if (values != values[0]).any():
            raise Fault("lanes differ in an operand that must be the same in all")
        return int(values[0])

    def addresses(self, address: Address, mask: Lanes) -> Lanes:
        """Return the addresses of active lanes, as 64-bit numbers."""
        base = np.zeros(LANES, np.uint64) if address.register is None else self.registers[address.register]
        # Offsets in shared memory wrap at 32 bits, those in global memory at 64.
        return (base[mask] + np.array(address.offset).astype(base.dtype)).astype(np.uint64)

    def accessor(self, mask: Lanes) -> Accessor:
        """Return the active lanes as those that access global memory now."""
        block, threads = self.block, self.threads[mask]
        known = block.detector.known[self.threads, : block.detector.threads].min(0)
        return Accessor(block.number, block.number_of(self), threads, block.detector.counts[threads], known)

    def set(self, slot: int, values: Lanes, mask: Lanes) -> None:
        """Set a register in the active lanes."""
        if mask.all():
            self.registers[slot] = values
        else:
            old = self.registers[slot]
            whole = np.zeros(LANES, values.dtype) if old is None else old.copy()
            whole[mask] = values
            self.registers[slot] = whole


class Block:
    """A thread block: its warps, shared memory and barriers."""

    def __init__(self, launch: Launch, number: int) -> None:
        self.launch, self.number = launch, number
        program = launch.program
        self.shared = SharedMemory(launch.shared_bytes)
        # The words of tensor memory follow those of shared memory.
        size = self.shared.size + 4 * WORDS * program.tensor_memory
        self.detector = RaceDetector(program.threads, size, program.copies, launch.rules)
        self.tensor_memory = TensorMemory(self.shared.size // 4, self.shared, self.detector, launch.rng)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.ended_mbarriers: dict[int, Mbarrier] = {}
        self.named = [NamedBarrier() for _ in range(16)]
        self.pool = RegisterPool(program.threads // LANES, program.registers)
        self.copies: list[Copy] = []
        self.warps = [Warp(self, index) for index in range(program.threads // LANES)]

    def special(self, name: str) -> int:
        """Return the value of a special register that is the same in all threads."""
        return {"%ctaid.x": self.number, "%nctaid.x": self.launch.blocks, "%nctaid.y": 1}.get(name, 0)

    def number_of(self, warp: Warp) -> int:
        """Return a number of a warp that is unique in the launch."""
        return self.number * len(self.warps) + warp.index

    def mbarrier(self, address: int) -> Mbarrier:
        """Return the barrier at an address."""
        if address not in self.mbarriers:
            raise Fault(f"no mbarrier at {address - SHARED_BASE}")
        return self.mbarriers[address]

    def land(self, copy: Copy | Commit) -> None:
        """Do a copy: read the map and the rows now, write shared memory and arrive at the barrier. Or do products."""
        if isinstance(copy, Commit):
            self.tensor_memory.land(copy)
            return
        self.copies.remove(copy)
        tensor_map = TensorMap.read(self.launch.maps[copy.map_address].data)
        values = tensor_map.box_values(self.launch.memory, copy.column, copy.row)
        rows, columns = np.indices(values.shape)
        self.shared.store(swizzled(copy.target + rows * 128 + columns * 2) - SHARED_BASE, values)
        copy.barrier.land(copy.number, values.nbytes)

    def add(self, warp: Warp) -> None:
        """Let an addition of a warp reach global memory."""
        landing = warp.adding.landing
        addition, values = landing.pop(self.launch.rng.randrange(len(landing)))
        addition.tensor_map.add_box(self.launch.memory, addition.column, addition.row, values)


class Launch:
    """A launch of a program with `blocks` thread blocks, all resident at once."""

    def __init__(
        self, code: Code, blocks: int, shared_bytes: int, parameters: Sequence[int | float], memory: GlobalMemory,
        rng: Random, late: bool, rules: Rules,
    ) -> None:  # fmt: skip
        """Prepare the launch. `late`: a copy lands only when no warp can go on without it."""
        self.code, self.program, self.blocks, self.shared_bytes = code, code.program, blocks, shared_bytes
        self.memory, self.rng, self.late, self.rules = memory, rng, late, rules
        self.maps: dict[int, GlobalMap] = {}
        self.elected = rng.choice((0, 13, 31) if rules.any_elected else (0,))
        """The lane that `elect.sync` chooses; programs may not rely on it."""
        self.values: dict[str, Lanes] = {}
        for parameter, value in zip(self.program.parameters, parameters, strict=True):
            bits = np.float32(value).view(np.uint32) if parameter.type == "f32" else value
            width = np.uint64 if parameter.type.endswith("64") else np.uint32
            self.values[parameter.name] = np.full(
                LANES, int(bits) & (2 ** (64 if width is np.uint64 else 32) - 1), width
            )
        self._blocks = [Block(self, number) for number in range(blocks)]

    def run(self) -> None:
        """Run all thread blocks to their end. Raises Fault for an error of the program."""
        rng, turns = self.rng, 0
        warps = [warp for block in self._blocks for warp in block.warps]
        # Some warps are slow, so that others are far ahead of them.
        speeds = {id(warp): rng.choice((1, 4, 20)) for warp in warps}
        with np.errstate(all="ignore"):
            while True:
                ready = [x for x in warps if not x.ended and (x.waits_for is None or x.waits_for())]
                copies = [(x, copy) for x in self._blocks for copy in (*x.copies, *x.tensor_memory.commits())]
                if (turns := turns + 1) > MOST_TURNS:
                    raise Fault("the launch does not end")
                if copies and (not ready or (not self.late and rng.random() < 0.1)):
                    block, copy = rng.choice(copies)
                    block.land(copy)
                elif (adding := [x for x in warps if x.adding.landing]) and (not ready or rng.random() < 0.1):
                    warp = rng.choice(adding)
                    warp.block.add(warp)
                elif ready:
                    warp = rng.choices(ready, [speeds[id(x)] for x in ready])[0]
                    warp.run(rng.choice((1, 3, 12)))
                else:
                    break
        if waiting := [warp for warp in warps if not warp.ended]:
            lines = sorted({self.program.instructions[warp.pc].line for warp in waiting})
            raise Fault(f"deadlock: {len(waiting)} warps wait at lines {lines}")
        if any(block.copies for block in self._blocks):
            raise Fault("a thread block ends while a copy is in flight")
        for block in self._blocks:
            block.tensor_memory.finish()
        if races := self.memory.conflicts():
            raise Fault(f"race: {'; '.join(races)}")


# --- compiled instructions -------------------------------------------------------------------------------------------


STAY = object()
"""What a handler returns if the warp must run the instruction again."""
Handler = Callable[[Warp, Instruction, Lanes], object]


class Code:
    """A program with a function for each instruction."""

    def __init__(self, program: Program) -> None:
        """Look up every opcode. Raises Fault for an unknown one."""
        self.program = program
        self.plain = [_plain(instruction) for instruction in program.instructions]
        self.handlers = [_handler(instruction) for instruction in program.instructions]
        self._runs: dict[int, list[Callable[[list[Any]], None]]] = {}

    def run_from(self, first: int) -> list[Callable[[list[Any]], None]]:
        """Return the functions of the instructions from `first` on that only change registers, in all lanes."""
        if first not in self._runs:
            end = first
            while self.plain[end] is not None and self.program.instructions[end].guard is None:
                end += 1
            self._runs[first] = self.plain[first:end]
        return self._runs[first]

    def masked(self, index: int, registers: list[Any], mask: Lanes) -> None:
        """Run an instruction that only changes registers, in some lanes."""
        targets = self.program.instructions[index].operands[0]
        slots = [slot for slot in _vector(targets) if slot is not None]
        before = [registers[slot] for slot in slots]
        self.plain[index](registers)
        for slot, old in zip(slots, before, strict=True):
            if old is not None:
                registers[slot] = np.where(mask, registers[slot], old)


def _plain(instruction: Instruction) -> Callable[[list[Any]], None] | None:
    """Return a function that runs an instruction that only changes registers, or None for other instructions."""
    if (function := PLAIN.get(instruction.opcode)) is None:
        return None
    target, *sources = instruction.operands
    half = np.uint32 if instruction.opcode.endswith("64") else np.uint16
    if isinstance(target, list):

        def unpack(registers: list[Any]) -> None:
            halves = np.ascontiguousarray(registers[sources[0]]).view(half).reshape(LANES, 2)
            for index, slot in enumerate(target):
                if slot is not None:  # "_"
                    registers[slot] = halves[:, index].copy()

        return unpack
    if isinstance(sources[0], list):
        low, high = sources[0]

        def pack(registers: list[Any]) -> None:
            registers[target] = packed(registers[low], registers[high], half)

        return pack
    if len(sources) == 1:
        (a,) = sources

        def unary(registers: list[Any]) -> None:
            registers[target] = function(registers[a])

        return unary
    if len(sources) == 2:
        a, b = sources

        def binary(registers: list[Any]) -> None:
            registers[target] = function(registers[a], registers[b])

        return binary
    a, b, c = sources

    def ternary(registers: list[Any]) -> None:
        registers[target] = function(registers[a], registers[b], registers[c])

    return ternary


def _handler(instruction: Instruction) -> Handler:
    if instruction.opcode in PLAIN or instruction.opcode.startswith(("bra", "brx", "ret")):
        return _nothing
    for prefix, handler in HANDLERS.items():
        if instruction.opcode.startswith(prefix):
            return handler
    raise Fault(f"no such instruction: {instruction.text}")


def _nothing(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    """Do nothing."""


# --- memory ----------------------------------------------------------------------------------------------------------


def _vector(operand: Any) -> list[int]:
    return operand if isinstance(operand, list) else [operand]


def _width(opcode: str) -> type[np.generic]:
    return {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}[opcode.split(".")[-1].lstrip("busf")]


def _load_parameter(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    slot, name = instruction.operands
    warp.set(slot, warp.block.launch.values[str(name)], ALL)


def _load_global(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    slots, dtype = _vector(instruction.operands[0]), _width(instruction.opcode)
    addresses, size = warp.addresses(instruction.operands[1], mask), np.dtype(dtype).itemsize
    _check_alignment(addresses, size * len(slots))
    accessor = warp.accessor(mask)
    for index, slot in enumerate(slots):
        values = warp.block.launch.memory.load(addresses + np.uint64(index * size), dtype, accessor)
        warp.set(slot, _loaded(warp, slot, values), mask)


def _loaded(warp: Warp, slot: int, values: Lanes) -> Lanes:
    """Return values in the width of a register, which may be wider than what is loaded."""
    least = np.uint16 if slot in warp.block.launch.program.narrow else np.uint32
    return values.astype(least) if values.itemsize < 4 else values


def _store_global(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    slots, dtype = _vector(instruction.operands[1]), _width(instruction.opcode)
    addresses, size = warp.addresses(instruction.operands[0], mask), np.dtype(dtype).itemsize
    _check_alignment(addresses, size * len(slots))
    accessor = warp.accessor(mask)
    for index, slot in enumerate(slots):
        values = warp.registers[slot][mask].astype(dtype)
        warp.block.launch.memory.store(addresses + np.uint64(index * size), values, accessor)


def _check_alignment(addresses: Lanes, size: int) -> None:
    if (addresses % np.uint64(size)).any():
        raise Fault(f"an access of {size} bytes at a misaligned address")


def _add_global(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    targets, address, values = (x if i == 1 else _vector(x) for i, x in enumerate(instruction.operands))
    memory, add = warp.block.launch.memory, PLAIN["add.f32" if instruction.opcode.endswith("f32") else "add.s32"]
    _check_alignment(warp.addresses(address, mask), 4 * len(values))
    results = [np.zeros(LANES, np.uint32) for _ in targets]
    for lane in np.flatnonzero(mask):
        single = LANE == lane
        first, accessor = warp.addresses(address, single), warp.accessor(single)
        for index, (result, value) in enumerate(zip(results, values, strict=True)):
            place = first + np.uint64(4 * index)
            result[single] = memory.load(place, np.uint32, accessor, atomic=True)
            memory.store(place, add(result[single], warp.registers[value][single]), accessor, atomic=True)
    for target, result in zip(targets, results, strict=True):
        warp.set(target, result[mask], mask)


def _prefetch(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.block.launch.memory.prefetch(warp.addresses(instruction.operands[0], mask))


def _load_shared(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, slots, dtype = warp.block, _vector(instruction.operands[0]), _width(instruction.opcode)
    addresses, size = warp.addresses(instruction.operands[1], mask), np.dtype(dtype).itemsize
    offsets = block.shared.offsets(addresses, size * len(slots))
    for index, slot in enumerate(slots):
        places = offsets + index * size
        for byte in range(0, size, 4):
            block.detector.read(warp.threads[mask], (places + byte) // 4)
        warp.set(slot, _loaded(warp, slot, block.shared.load(places, dtype)), mask)


def _store_shared(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, slots, dtype = warp.block, _vector(instruction.operands[1]), _width(instruction.opcode)
    addresses, size = warp.addresses(instruction.operands[0], mask), np.dtype(dtype).itemsize
    offsets = block.shared.offsets(addresses, size * len(slots))
    for index, slot in enumerate(slots):
        places, values = offsets + index * size, warp.registers[slot][mask].astype(dtype)
        same = block.shared.load(places, dtype) == values
        if size < 4:
            block.detector.write_parts(warp.threads[mask], places, size, same)
        else:
            for byte in range(0, size, 4):
                block.detector.write(warp.threads[mask], (places + byte) // 4, same)
        block.shared.store(places, values)


def _load_matrices(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    block, slots = warp.block, _vector(instruction.operands[0])
    # Only the first lanes have addresses of rows if there are fewer than four matrices.
    addresses = warp.addresses(instruction.operands[1], mask)[: 8 * len(slots)]
    places = element_offsets(block.shared.offsets(addresses, ROW_BYTES), ".trans" in instruction.opcode)
    block.detector.read(np.broadcast_to(warp.threads, places.shape), places // 4)
    for slot, (low, high) in zip(slots, block.shared.load(places, np.uint16).astype(np.uint32), strict=True):
        warp.set(slot, low | high << np.uint32(16), mask)


def _store_matrices(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    block, slots = warp.block, _vector(instruction.operands[1])
    addresses = warp.addresses(instruction.operands[0], mask)[: 8 * len(slots)]
    places = element_offsets(block.shared.offsets(addresses, ROW_BYTES), ".trans" in instruction.opcode)
    pairs = np.stack([np.ascontiguousarray(warp.registers[slot]).view(np.uint16).reshape(LANES, 2) for slot in slots])
    values = pairs.transpose(0, 2, 1)
    same = block.shared.load(places, np.uint16) == values
    block.detector.write(np.broadcast_to(warp.threads, places.shape), places // 4, same)
    block.shared.store(places, values)


def _copy_words(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, (target, source, _, *source_size) = warp.block, instruction.operands
    size = instruction.integers[2]
    offsets, addresses = block.shared.offsets(warp.addresses(target, mask), size), warp.addresses(source, mask)
    reads = np.full(len(offsets), True)
    if source_size:
        sizes = warp.registers[source_size[0]][mask]
        if not np.isin(sizes, (0, size)).all():
            raise Fault("a copy of a part of its bytes")
        reads = sizes != 0
    _check_alignment(addresses[reads], size)
    late = block.launch.late or block.launch.rng.random() < 0.5
    warp.copies.start(warp.threads[mask], LaneCopies(offsets, addresses, size, reads), late)


def _commit_copies(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    warp.copies.commit()


def _wait_for_copies(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    warp.copies.wait(instruction.integers[0])


# --- barriers and fences ---------------------------------------------------------------------------------------------


def _initialize(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block = warp.block
    (address,), count = warp.addresses(instruction.operands[0], mask).tolist(), warp.uniform(instruction.operands[1])
    thread = int(warp.threads[mask][0])
    words = _barrier_words(block, address)
    block.detector.write(np.full(2, thread), words)
    block.detector.make_barrier(words)
    old = block.ended_mbarriers.pop(address, None)
    engine = len(block.mbarriers) + len(block.ended_mbarriers) if old is None else old.engine
    if engine == COPY_ENGINES:
        raise Fault("too many mbarriers")
    barrier = Mbarrier(count, engine, block.detector.stamp(thread), block.detector)
    if old is not None:
        barrier.continue_copies(old)
    block.mbarriers[address] = barrier


def _barrier_words(block: Block, address: int) -> Lanes:
    return block.shared.offsets(np.array([address]), 8)[0] // 4 + np.arange(2)


def _invalidate(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, thread = warp.block, int(warp.threads[mask][0])
    (address,) = warp.addresses(instruction.operands[0], mask).tolist()
    barrier = block.mbarrier(address)
    barrier.check(thread)
    block.detector.end_barrier(thread, _barrier_words(block, address))
    if any(copy.barrier is barrier for copy in block.copies) or block.tensor_memory.uses(barrier):
        raise Fault("an mbarrier ends before a copy or a product has arrived at it")
    block.ended_mbarriers[address] = block.mbarriers.pop(address)


def _arrive(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    addresses, threads = warp.addresses(instruction.operands[1], mask), warp.threads[mask]
    for address in np.unique(addresses).tolist():
        arriving = threads[addresses == address]
        warp.block.detector.use_barrier(arriving, _barrier_words(warp.block, address))
        warp.block.mbarrier(address).arrive(arriving)


def _expect(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    addresses, counts = warp.addresses(instruction.operands[1], mask), warp.registers[instruction.operands[2]][mask]
    for address, count in zip(addresses.tolist(), counts.tolist(), strict=True):
        warp.block.mbarrier(address).expect(count)
    _arrive(warp, instruction, mask)


def _try_wait(warp: Warp, instruction: Instruction, mask: Lanes) -> object:
    target, address, parity = instruction.operands
    (where,) = np.unique(warp.addresses(address, mask)).tolist()
    barrier, side = warp.block.mbarrier(where), warp.uniform(parity)
    for thread in warp.threads[mask][:1].tolist():
        barrier.check(thread)
    if not barrier.has_passed(side):
        warp.waits_for = lambda: barrier.has_passed(side)
        return STAY
    barrier.acquire(warp.threads[mask])
    warp.block.detector.use_barrier(warp.threads[mask], _barrier_words(warp.block, where))
    warp.set(target, ALL[mask], mask)
    return None


def _synchronize(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    number, *count = (warp.uniform(x) for x in instruction.operands)
    barrier = warp.block.named[number]
    turns = barrier.turns
    barrier.arrive(warp.index, count[0] if count else warp.block.launch.program.threads, warp.block.detector)
    if barrier.turns == turns:
        warp.waits_for = lambda: barrier.turns > turns


def _synchronize_warp(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    warp.block.detector.join(warp.threads)


def _give_registers(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    warp.block.pool.give(warp.index, warp.uniform(instruction.operands[0]))


def _take_registers(warp: Warp, instruction: Instruction, mask: Lanes) -> object:
    warp.converged(mask)
    pool, limit = warp.block.pool, warp.uniform(instruction.operands[0])
    if pool.take(warp.index, limit):
        return None
    warp.waits_for = lambda: limit - pool.limits[warp.index] <= pool.free
    return STAY


def _fence_proxy(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.block.detector.fence(warp.threads[mask])


# --- lanes of a warp -------------------------------------------------------------------------------------------------


def _shuffle(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    target, source, distance, *_ = instruction.operands
    lanes = warp.registers[distance].astype(np.int64)
    lanes = LANE ^ lanes if ".bfly." in instruction.opcode else lanes & 31
    warp.set(target, warp.registers[source][lanes], mask)


def _elect(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    number, chosen = instruction.operands[0]
    elected = warp.block.launch.elected
    warp.set(number, np.full(LANES, elected, np.uint32), mask)
    warp.set(chosen, elected == LANE, mask)


# --- tensor maps and copies ------------------------------------------------------------------------------------------


def _replace_field(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    field = instruction.opcode.split(".")[3]
    address, *place, value = instruction.operands
    (where,) = warp.addresses(address, mask).tolist()
    block, thread = warp.block, int(warp.threads[mask][0])
    offset = int(block.shared.offsets(np.array([where]), MAP_BYTES)[0])
    dtype, start = MAP.fields[field][:2]
    size = dtype.base.itemsize
    # Single bytes share a word.
    start += size * warp.uniform(place[0]) if place else 0
    words = (offset + np.arange(start, start + size)) // 4
    block.detector.write(np.full(len(words), thread), words)
    new = np.array([warp.registers[value][mask][0]]).astype(dtype.base)
    block.shared.map_at(offset)[start : start + size] = new.view(np.uint8)


def _publish_map(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    block = warp.block
    (target,), (source,) = (np.unique(warp.addresses(x, mask)).tolist() for x in instruction.operands[:2])
    offset = int(block.shared.offsets(np.array([source]), MAP_BYTES)[0])
    block.detector.join(warp.threads)
    block.detector.read(warp.threads, offset // 4 + LANE)
    if target % MAP_BYTES:
        raise Fault("a tensor map at a misaligned address")
    if any(x.map_address == target for x in block.copies) or any(x.adding.reads(target) for x in block.warps):
        raise Fault("race: a tensor map is replaced while a copy may still read it")
    words = np.uint64(target) + 4 * LANE.astype(np.uint64)
    block.launch.memory.store(words, block.shared.map_at(offset).view(np.uint32).copy(), warp.accessor(ALL))
    data = block.shared.map_at(offset).copy()
    TensorMap.read(data)
    block.launch.maps[target] = GlobalMap(data, block.detector.stamp(int(warp.threads[0])))


def _acquire_map(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    detector = warp.block.detector
    for where in np.unique(warp.addresses(instruction.operands[0], mask)).tolist():
        if tensor_map := warp.block.launch.maps.get(where):
            knowing = [x for x in warp.threads[mask].tolist() if detector.knows(x, tensor_map.stamp)]
            tensor_map.acquired += [detector.stamp(thread) for thread in knowing]


def _acquired_map(block: Block, thread: int, map_address: int, where: int) -> TensorMap:
    """Return the map of a tensor copy that a thread starts, whose box is at an address in shared memory."""
    tensor_map = block.launch.maps.get(map_address)
    if tensor_map is None or not any(block.detector.knows(thread, stamp) for stamp in tensor_map.acquired):
        raise Fault("race: a copy through a tensor map that its thread has not acquired")
    if where % 1024:
        raise Fault("the box of a copy with 128-byte swizzle is not aligned to 1024 bytes")
    return TensorMap.read(tensor_map.data)


def _add_box(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, (thread,) = warp.block, warp.threads[mask].tolist()
    (target, (column, row)), source = instruction.operands
    (map_address,), (where,) = (warp.addresses(x, mask).tolist() for x in (target, source))
    tensor_map = _acquired_map(block, thread, map_address, where)
    if tensor_map.itemsize != 4 or tensor_map.box[0] != 32:
        raise Fault(f"an addition of a box of {tensor_map.box[0]} columns of {tensor_map.itemsize} bytes")
    x, y = (int(warp.registers[slot].view(np.int32)[mask][0]) for slot in (column, row))
    late = block.launch.late or block.launch.rng.random() < 0.5
    warp.adding.start(thread, Addition(map_address, tensor_map, x, y, where), late)


def _copy_box(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, thread = warp.block, int(warp.threads[mask][0])
    target, (source, (column, row)), barrier_address = instruction.operands
    (where,), (map_address,), (barrier_at,) = (
        warp.addresses(x, mask).tolist() for x in (target, source, barrier_address)
    )
    width, rows = _acquired_map(block, thread, map_address, where).box
    barrier = block.mbarrier(barrier_at)
    barrier.check(thread, fenced=block.launch.rules.fenced_mbarriers)
    first = block.shared.offsets(np.array([where, where + rows * 128 - 128]), 128)[0] // 4
    number = barrier.start_copy()
    block.detector.copy(thread, np.arange(first, first + rows * 32), barrier.engine, number)
    if width != 64:
        raise Fault(f"a box of {width} columns")
    x, y = (int(warp.registers[slot].view(np.int32)[mask][0]) for slot in (column, row))
    block.copies.append(Copy(map_address, x, y, where, barrier, number))


# --- matrix products -------------------------------------------------------------------------------------------------


def _multiply(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    _, _, _, _, shape, _, dtype, *_ = instruction.opcode.split(".")
    columns = int(shape[shape.index("n") + 1 : shape.index("k")])
    target, left, right, adds, _, _, *transposed = instruction.operands
    flags = [instruction.integers.get(place) for place in range(4, 6 + len(transposed))]
    if flags[:2] != [1, 1]:
        raise Fault("a product with negated operands")
    turned = (bool(flags[2]), bool(flags[3])) if len(transposed) == 2 else (False, bool(flags[2]))
    use = bool(warp.uniform(adds)) if 3 not in instruction.integers else bool(instruction.integers[3])
    warp.matrix.start(
        tuple(_vector(target)), use, tuple(left) if isinstance(left, list) else warp.uniform(left),
        warp.uniform(right), turned, columns, dtype,
    )  # fmt: skip


def _allocate_tensor_memory(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    block = warp.block
    (where,) = np.unique(warp.addresses(instruction.operands[0], mask)).tolist()
    offsets = block.shared.offsets(np.array([where]), 4)
    block.detector.write(warp.threads[:1], offsets // 4)
    block.shared.store(offsets, np.array([block.tensor_memory.allocate(instruction.integers[1])], np.uint32))


def _free_tensor_memory(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    address, columns = warp.uniform(instruction.operands[0]), instruction.integers[1]
    warp.block.tensor_memory.free(int(warp.threads[0]), address, columns)


def _tensor_address(warp: Warp, address: Address, mask: Lanes) -> int:
    (where,) = np.unique(warp.addresses(address, mask)).tolist()
    return int(where)


def _load_tensor_memory(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    shape, split = instruction.opcode.split(".")[4], instruction.integers.get(2, 0)
    address = _tensor_address(warp, instruction.operands[1], mask)
    warp.transfers.load(address, shape, _vector(instruction.operands[0]), split, warp.pc)


def _wait_for_tensor_loads(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    first, code = warp.transfers.wait_for_loads(), warp.block.launch.code
    if first is not None and not warp.block.launch.rules.waited_loads:
        # By the relaxed rules, moves of loaded registers may precede the wait: do them again with what was loaded.
        opcodes = [instruction.opcode for instruction in code.program.instructions[first : warp.pc]]
        if any(opcode.startswith("bra") for opcode in opcodes):
            raise Fault("a load of tensor memory is waited for only after a branch")
        for index, opcode in enumerate(opcodes, first):
            if opcode in MOVES:
                code.plain[index](warp.registers)


def _store_tensor_memory(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    address, *_, values = instruction.operands
    shape, split = instruction.opcode.split(".")[4], instruction.integers.get(1, 0)
    warp.transfers.store(_tensor_address(warp, address, mask), shape, _vector(values), split)


def _multiply_tensors(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    target, left, right, shape, adds = instruction.operands
    if mask.sum() != 1:
        raise Fault("a product that several lanes issue")
    thread, in_memory = int(warp.threads[mask][0]), isinstance(left, Address)
    start = _tensor_address(warp, left, mask) if in_memory else int(warp.registers[left][mask][0])
    warp.block.tensor_memory.start(
        thread, _tensor_address(warp, target, mask), start, in_memory, int(warp.registers[right][mask][0]),
        int(warp.registers[shape][mask][0]), bool(warp.registers[adds][mask][0]),
    )  # fmt: skip


def _commit_tensors(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    block, threads = warp.block, warp.threads[mask]
    addresses = warp.addresses(instruction.operands[0], mask).tolist()
    for thread, address in zip(threads.tolist(), addresses, strict=True):
        barrier = block.mbarrier(address)
        barrier.check(thread, fenced=block.launch.rules.fenced_mbarriers)
        block.detector.use_barrier(np.array([thread]), _barrier_words(block, address))
        block.tensor_memory.commit(thread, barrier)


def _multiply_fragments(warp: Warp, instruction: Instruction, mask: Lanes) -> None:
    warp.converged(mask)
    _, _, _, shape, _, _, _, dtype, *_ = instruction.opcode.split(".")
    if shape != "m16n8k16":
        raise Fault(f"a product of shape {shape}")
    target, *operands = instruction.operands
    left, right, sums = ([warp.registers[slot] for slot in slots] for slots in operands)
    for slot, values in zip(target, product(left, right, sums, dtype), strict=True):
        warp.set(slot, values, mask)


HANDLERS: dict[str, Handler] = {
    "ld.param": _load_parameter,
    "ld.global": _load_global,
    "ld.volatile.global": _load_global,
    "st.global": _store_global,
    "atom.global.gpu.relaxed.add": _add_global,
    "prefetch.global.L2": _prefetch,
    "ld.shared": _load_shared,
    "st.shared": _store_shared,
    "ldmatrix.sync.aligned.m8n8": _load_matrices,
    "stmatrix.sync.aligned.m8n8": _store_matrices,
    "mbarrier.init": _initialize,
    "mbarrier.inval": _invalidate,
    "mbarrier.arrive.expect_tx": _expect,
    "mbarrier.arrive.shared": _arrive,
    "mbarrier.try_wait.parity": _try_wait,
    "bar.sync": _synchronize,
    "barrier.sync": _synchronize,
    "bar.warp.sync": _synchronize_warp,
    "setmaxnreg.dec": _give_registers,
    "setmaxnreg.inc": _take_registers,
    "fence.proxy.async": _fence_proxy,
    "shfl.sync": _shuffle,
    "elect.sync": _elect,
    "tensormap.replace": _replace_field,
    "tensormap.cp_fenceproxy": _publish_map,
    "fence.proxy.tensormap": _acquire_map,
    "cp.async.bulk.tensor.2d": _copy_box,
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add": _add_box,
    "cp.async.bulk.commit_group": lambda warp, instruction, mask: warp.adding.commit(warp.threads[mask]),
    "cp.async.bulk.wait_group": lambda warp, instruction, mask: warp.adding.wait(
        warp.threads[mask], instruction.integers[0]
    ),
    "cp.async.commit_group": _commit_copies,
    "cp.async.wait_group": _wait_for_copies,
    "cp.async.cg.shared.global": _copy_words,
    "cp.async.ca.shared.global": _copy_words,
    "mma.sync.aligned": _multiply_fragments,
    "tcgen05.alloc.cta_group::1": _allocate_tensor_memory,
    "tcgen05.dealloc.cta_group::1": _free_tensor_memory,
    "tcgen05.relinquish_alloc_permit.cta_group::1": lambda warp, instruction, mask: (
        warp.block.tensor_memory.relinquish()
    ),
    "tcgen05.ld.sync.aligned": _load_tensor_memory,
    "tcgen05.st.sync.aligned": _store_tensor_memory,
    "tcgen05.wait::ld.sync.aligned": _wait_for_tensor_loads,
    "tcgen05.wait::st.sync.aligned": lambda warp, instruction, mask: warp.transfers.wait_for_stores(),
    "tcgen05.mma.cta_group::1.kind::f16": _multiply_tensors,
    # Triton 3.6.0 passes an address in shared memory without naming the state space.
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one": _commit_tensors,
    "wgmma.mma_async": _multiply,
    "wgmma.fence": lambda warp, instruction, mask: warp.matrix.fence(),
    "wgmma.commit_group": lambda warp, instruction, mask: warp.matrix.commit(),
    "wgmma.wait_group": lambda warp, instruction, mask: warp.matrix.wait(instruction.integers[0]),
}
"""The function of each opcode that starts so, for instructions that do more than change registers."""
