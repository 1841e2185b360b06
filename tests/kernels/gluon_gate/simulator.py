"""Run the source of the Gluon kernels on the CPU.

Warp groups are threads that run one at a time in a random order, and asynchronous copies complete at random times.

Guarantees: a run raises `Fault` if a GPU would hang, read a buffer or descriptor that is being written, write one that
is being read, or use a product before it was waited for. Memory that was never filled is read as NaN. Barriers count
arrivals, bytes and phases like mbarrier (PTX ISA, section "mbarrier"): a wait for a parity passes while the current
phase has the other parity.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from random import Random
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from torch import Tensor

from ringattn.kernels import launch
from ringattn.kernels.launch import LaunchCall
from tests.kernels.gluon_gate.values import Pointer, Value, counted, language, pointer, value

KERNELS = Path(launch.__file__).parent
MODULES = (
    "attention_tiles", "attention_options", "attention_gluon_parts", "attention_gluon_forward",
    "attention_gluon_grad_kv", "attention_gluon_grad_q",
)  # fmt: skip
"""The modules of the kernels, each after those that it imports."""


class Fault(Exception):
    """The error for an operation with which a GPU would hang or compute wrong numbers."""


class Abandoned(Exception):
    """The error that ends the other roles of a program when one role has failed."""


class Barrier:
    """An mbarrier: a phase ends after `count` arrivals, when no more bytes are expected."""

    def __init__(self) -> None:
        self.count = self.awaited = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.awaited = count

    def arrive(self, count: int = 1, more_bytes: int = 0) -> None:
        self.awaited -= count
        self.bytes += more_bytes
        if self.awaited < 0:
            raise Fault("more arrivals in a phase than the barrier counts")
        if not self.awaited and not self.bytes:
            self.phase, self.awaited = self.phase + 1, self.count


class Barriers:
    """An array of barriers."""

    def __init__(self, count: int) -> None:
        self.members = [Barrier() for _ in range(count)]

    def index(self, number: Any) -> Barrier:
        return self.members[int(number)]


class Shared:
    """Shared memory, or a view of a part of it. `home`: the (allocation, index) of the buffer that a copy fills.

    `step` lets other roles run before each access.
    """

    layout = None

    def __init__(self, data: np.ndarray, home: tuple[int, int], step: Callable[[], None]) -> None:
        self.data, self.home, self.dtype, self.shape = data, home, data.dtype, list(data.shape)
        self.step = step

    def index(self, number: Any) -> Shared:
        return Shared(self.data[int(number)], (self.home[0], int(number)), self.step)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length], self.home, self.step)

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.data.transpose(order), self.home, self.step)

    def load(self, layout: Any) -> Value:
        self.step()
        return value(self.data.copy())

    def store(self, values: Value) -> None:
        self.step()
        self.data[...] = values


class Product:
    """An asynchronous matrix product that is in progress until `Program.finish` waits for it."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.homes = [x.home for x in (a, b) if isinstance(x, Shared)]
        self.value: Value | None = None

    def finish(self) -> None:
        a, b = (np.asarray(x.data if isinstance(x, Shared) else x, np.float32) for x in (self.a, self.b))
        # Products in progress may have the same sums: they end in the order in which they were issued.
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = value(a @ b + acc, np.float32)


class Load(NamedTuple):
    """An asynchronous copy in progress, of a box from row and column `first` on, through the descriptor `described`.

    It may complete once the program has made `due` scheduling steps (each resumes one role or completes one copy), or
    earlier if all roles wait.
    """

    described: Any
    first: tuple[int, int]
    barrier: Barrier
    buffer: Shared
    due: int
    speed: int = 1


class Role:
    """One warp-specialized partition of a program (a warp group), run by a thread. Only one role runs at a time."""

    def __init__(self, program: Program, work: Callable[..., None], args: Sequence[Any], speed: int) -> None:
        self.go, self.done, self.speed = threading.Semaphore(0), False, speed
        self.blocked: Callable[[], bool] = lambda: False
        self.products: list[Product] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(program, work, args), daemon=True)
        self.thread.start()

    def _run(self, program: Program, work: Callable[..., None], args: Sequence[Any]) -> None:
        self.go.acquire()
        try:
            if not program.failed:
                with np.errstate(all="ignore"):
                    work(*args)
                if self.products:
                    raise Fault("a role ends with products that it has not waited for")
        except BaseException as error:
            self.error, program.failed = error, True
        self.done = True
        program.back.release()


class Program:
    """A program (thread block) of the grid: its shared memory, the operations in progress, and its roles.

    `current` is the role that may run. A turn is a scheduling step: it resumes one role or completes one copy.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.back, self.failed = Random(seed), threading.Semaphore(0), False
        self.roles: list[Role] = []
        self.current: Role | None = None
        self.loads: list[Load] = []
        self.turns = 0
        self.readers: Counter[tuple[int, int]] = Counter()
        self.memories = 0
        self.barriers: list[Barrier] = []

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype == np.int64:
            buffers = Barriers(shape[0])
            self.barriers += buffers.members
            return buffers if len(shape) > 1 else buffers.members[0]
        self.memories += 1
        # Unfilled float memory is NaN. An unfilled int32 is an index far before the start of any table.
        fill = -(1 << 30) if dtype == np.int32 else np.nan
        return Shared(np.full(shape, fill, dtype), (self.memories, 0), self.step)

    def specialize(self, parts: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        """Run each of `parts`, pairs of a function and its arguments, as a role, until all roles have ended.

        Raises `Fault` if the roles hang, or the error of the role that failed.
        """
        # A role's speed is the weight with which it is chosen. With different speeds, fast roles get as far ahead as
        # the buffers allow.
        self.roles = [Role(self, work, args, self.random.choice((1, 1, 20))) for work, args in parts]
        while True:
            self.turns += 1
            ready = [role for role in self.roles if not role.done and (self.failed or not role.blocked())]
            loads = [] if self.failed else [load for load in self.loads if not ready or load.due <= self.turns]
            turns: list[Role | Load] = [*ready, *loads]
            if not turns:
                break
            (chosen,) = self.random.choices(turns, [role.speed for role in turns])
            if isinstance(chosen, Role):
                self.current = chosen
                chosen.go.release()
                self.back.acquire()
            else:
                self._land(chosen)
        errors = [role.error for role in self.roles if role.error and not isinstance(role.error, Abandoned)]
        if errors:
            raise errors[0]
        if not all(role.done for role in self.roles):
            raise Fault("all roles wait: the program hangs")
        if any(barrier.awaited != barrier.count for barrier in self.barriers):
            raise Fault("the program ends within a phase")

    def step(self, blocked: Callable[[], bool] = lambda: False) -> None:
        """Suspend the current role, so that others may run. It continues some time after `blocked()` is false."""
        role = self.current
        assert role
        role.blocked = blocked
        self.back.release()
        role.go.acquire()
        if self.failed:
            raise Abandoned

    def wait(self, barrier: Barrier, parity: Any) -> None:
        self.step(lambda: barrier.phase & 1 == int(parity))

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.step()
        barrier.arrive(count)

    def expect(self, barrier: Barrier, count: int) -> None:
        self.step()
        barrier.arrive(1, count)

    def describe(self, first: Pointer, shape: Any, strides: Any, box: Any, layout: Any) -> Any:
        """Make a tensor descriptor. All descriptors that the same line of code makes use the same memory.

        Raises `Fault` if a load still reads the previous one, or if the tensor does not meet TMA's requirements.
        """
        self.step()
        frame, line = sys._getframe(1), []
        while frame and frame.f_code.co_name != "_run":
            line.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        place = tuple(line)
        if any(load.described.place == place for load in self.loads):
            raise Fault("a descriptor is made over one that a load is reading")
        item = first.memory.itemsize
        if int(first.at) * item % 16 or int(strides[0]) * item % 16 or int(shape[0]) < 1:
            raise Fault(f"no descriptor of {shape} from element {first.at} on, {strides} apart")
        size = SimpleNamespace(nbytes=int(np.prod(box)) * item)
        return SimpleNamespace(place=place, first=first, shape=shape, step=strides[0], box=box, block_type=size)

    def copy(self, described: Any, coordinates: Sequence[Any], barrier: Barrier, buffer: Shared) -> None:
        self.step()
        if self.readers[buffer.home]:
            raise Fault("a buffer is loaded while a product reads it")
        if any(load.buffer.home == buffer.home for load in self.loads):
            raise Fault("a buffer is loaded while it is being loaded")
        buffer.data[...] = np.nan
        due = self.turns + self.random.choice((0, 10, 100))
        first = int(coordinates[0]), int(coordinates[1])
        self.loads.append(Load(described, first, barrier, buffer, due))

    def _land(self, load: Load) -> None:
        self.loads = [pending for pending in self.loads if pending is not load]
        described, first, barrier, buffer, *_ = load
        rows, cols = (np.arange(start, start + size) for start, size in zip(first, described.box, strict=True))
        live = (rows < int(described.shape[0]))[:, None] & (cols < int(described.shape[1]))
        elements = (rows * int(described.step))[:, None] + cols
        places, _ = (described.first + np.where(live, elements, 0)).places(None)
        buffer.data[...] = np.where(live, described.first.memory[places], 0)
        barrier.arrive(0, -described.block_type.nbytes)

    def multiply(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        self.step()
        assert self.current and is_async
        product = Product(a, b, acc if use_acc else np.zeros_like(acc))
        if any(load.buffer.home in product.homes for load in self.loads):
            raise Fault("a product reads a buffer that is being loaded")
        self.readers.update(product.homes)
        self.current.products.append(product)
        return product

    def finish(self, outstanding: int, deps: Sequence[Product]) -> Any:
        """Wait until at most `outstanding` products of the role are in progress. Return those in `deps`, or the one."""
        self.step()
        assert self.current
        products = self.current.products
        while len(products) > outstanding:
            product = products.pop(0)
            product.finish()
            self.readers.subtract(product.homes)
        values = tuple(product.value for product in deps)
        if any(value is None for value in values):
            raise Fault("a product is used before it was waited for")
        return values if len(values) > 1 else values[0]


class Taking:
    """The counter from which the programs of a grid take work items, `total` in all.

    Programs run one after another here. To imitate concurrent programs, each program skips some items, which later
    programs take.
    """

    def __init__(self, counter: Tensor, total: int, programs: int, seed: int) -> None:
        self.counter, self.left, self.programs, self.random = counter, list(range(total)), programs, Random(seed)
        self.place, self.last, self.total = -1, -1, total
        if counter.item():
            raise Fault("the counter is not 0 before a launch")
        # The counter is made nonzero, so that `finish` detects if the program that takes the last item does not reset
        # it.
        counter.fill_(total > 0)

    def take(self, place: int) -> Value:
        if place != self.place:
            self.place, self.last = place, -1
        if not self.counter.item() and self.total - 1 in self.left:
            raise Fault("the counter is cleared while programs still count")
        later = [item for item in self.left if item > self.last]
        if not later:
            raise Fault("items are taken more often than there are some")
        share = 1 if place == self.programs - 1 else self.random.choice((1, 1, 3, len(later)))
        self.last = self.random.choice(later[:share])
        self.left.remove(self.last)
        return value(self.last)

    def finish(self) -> None:
        if self.left:
            raise Fault(f"no program took {self.left}")
        if self.counter.item():
            raise Fault("the counter is not 0 after a launch")


def loaded(
    edit: tuple[str, str],
    program: Callable[[], Program],
    place: Callable[[], tuple[int, int]],
    taking: Callable[[], Taking],
) -> dict[str, ModuleType]:
    """Load the kernel modules for the simulation, after replacing the text `edit[0]` by `edit[1]` in their sources.

    `program` returns the program that runs, `place` its index and the number of programs, `taking` the counter.
    """
    gl = language()
    gl.program_id, gl.num_programs = lambda axis: value(place()[0]), lambda axis: value(place()[1])
    gl.atomic_add = lambda where, by, sem: taking().take(place()[0])
    gl.allocate_shared_memory = lambda *args: program().allocate(*args)
    gl.warp_specialize = lambda *args: program().specialize(*args)
    mbarrier = SimpleNamespace(
        init=lambda barrier, count: barrier.init(count),
        wait=lambda *args: program().wait(*args), arrive=lambda *args: program().arrive(*args),
        expect=lambda *args: program().expect(*args), MBarrierLayout=lambda: None,
    )  # fmt: skip
    tma = SimpleNamespace(
        make_tensor_descriptor=lambda *args: program().describe(*args),
        async_load=lambda *args: program().copy(*args),
    )
    hopper = SimpleNamespace(
        mbarrier=mbarrier, tma=tma, fence_async_shared=lambda: None,
        warpgroup_mma=lambda *args, **how: program().multiply(*args, **how),
        warpgroup_mma_wait=lambda outstanding, deps: program().finish(outstanding, deps),
    )  # fmt: skip
    jit: Any = SimpleNamespace(jit=lambda function=None, **_: function or jit.jit, language=gl, experimental=None)
    gluon = "triton.experimental.gluon"
    stubs = {
        "triton": jit, "triton.language": gl, "triton.experimental": SimpleNamespace(gluon=jit), gluon: jit,
        f"{gluon}.language": gl, f"{gluon}.language.nvidia": SimpleNamespace(hopper=hopper),
        f"{gluon}.language.nvidia.hopper": hopper,
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in MODULES}
    with patch.dict(sys.modules, stubs | {f"ringattn.kernels.{name}": module for name, module in modules.items()}):
        for name, module in modules.items():
            exec(_code(name, edit), vars(module))
            vars(module)["range"] = counted
    return modules


def simulate(call: LaunchCall, seed: int, edit: tuple[str, str] = ("", "")) -> None:
    """Run a launch of a Gluon kernel, in an order drawn from `seed`. `edit`: a replacement (old, new) in its source."""
    now: dict[str, Any] = {}
    modules = loaded(edit, lambda: now["program"], lambda: now["place"], lambda: now["taking"])
    name = call.kernel.fn.__name__
    kernel = next(vars(module)[name] for module in modules.values() if name in vars(module))
    args = [pointer(x) if isinstance(x, Tensor) else x if x is None else value(x) for x in call.args]
    constants = {name: arguments for name, arguments in call.meta.items() if name.isupper()}
    arguments = dict(zip(signature(kernel).parameters, call.args, strict=False))
    if "counter" in arguments:
        total = arguments["block_count"] * arguments["slots"] * arguments["batches"]
        now["taking"] = Taking(arguments["counter"], total, call.grid[0], seed)
    for program in range(call.grid[0]):
        now.update(program=Program(seed * 1000 + program), place=(program, call.grid[0]))
        kernel(*args, **constants)
    if "taking" in now:
        now["taking"].finish()


@cache
def _code(name: str, edit: tuple[str, str]) -> CodeType:
    return compile(source_of(name).replace(*edit), name, "exec")


def source_of(name: str) -> str:
    """Return the source of a kernel's module."""
    return (KERNELS / f"{name}.py").read_text(encoding="utf-8")
