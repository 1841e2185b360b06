"""Runs the source of the Gluon kernels on CPU: warp groups as threads in random turns, copies that land when they like.

Guarantees that a run raises `Fault` where a GPU would hang, read a buffer or a descriptor that is being written, write
one that is being read, or use a product before it was waited for; what was never filled reads as NaN. Barriers count
arrivals, bytes and phases as mbarrier does (PTX ISA, section "mbarrier"): a wait for a parity passes while the phase
under way has the other one.
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
    "attention_tiles", "attention_gluon_parts", "attention_gluon_forward", "attention_gluon_grad_kv",
    "attention_gluon_grad_q",
)  # fmt: skip
"""What a kernel may consist of, each after those that it imports."""


class Fault(Exception):
    """What a GPU would answer with a hang, or with wrong numbers."""


class Abandoned(Exception):
    """Another role of the program has failed."""


class Barrier:
    """An mbarrier."""

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
    """An array of them."""

    def __init__(self, count: int) -> None:
        self.members = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.members[int(at)]


class Shared:
    """Shared memory, or a part of it. `home`: what is loaded as one. `step`: lets other roles run."""

    layout = None

    def __init__(self, data: np.ndarray, home: tuple[int, int], step: Callable[[], None]) -> None:
        self.data, self.home, self.dtype, self.shape = data, home, data.dtype, list(data.shape)
        self.step = step

    def index(self, at: Any) -> Shared:
        return Shared(self.data[int(at)], (self.home[0], int(at)), self.step)

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
    """A matrix product under way."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.homes = [x.home for x in (a, b) if isinstance(x, Shared)]
        self.value: Value | None = None

    def finish(self) -> None:
        a, b = (np.asarray(x.data if isinstance(x, Shared) else x, np.float32) for x in (self.a, self.b))
        self.value = value(a @ b + self.acc, np.float32)


class Load(NamedTuple):
    """A copy under way: of the rows from `at` on. `due`: the turn before which it only lands if all roles wait."""

    described: Any
    at: int
    barrier: Barrier
    buffer: Shared
    due: int
    speed: int = 1


class Role:
    """A partition of a program: a thread that runs while it holds the baton."""

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
    """One program of the grid: its shared memory, what is under way, and whose turn it is."""

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
            made = Barriers(shape[0])
            self.barriers += made.members
            return made if len(shape) > 1 else made.members[0]
        self.memories += 1
        # As an item, what was never filled lies before every table.
        fill = -(1 << 30) if dtype == np.int32 else np.nan
        return Shared(np.full(shape, fill, dtype), (self.memories, 0), self.step)

    def specialize(self, parts: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        """Run all parts to their ends."""
        # Some groups of warps are much slower than others: only then the rotation of buffers meets its limits.
        self.roles = [Role(self, work, args, self.random.choice((1, 1, 20))) for work, args in parts]
        while True:
            self.turns += 1
            ready = [role for role in self.roles if not role.done and (self.failed or not role.blocked())]
            loads = [] if self.failed else [load for load in self.loads if not ready or load.due <= self.turns]
            turns: list[Role | Load] = [*ready, *loads]
            if not turns:
                break
            (chosen,) = self.random.choices(turns, [one.speed for one in turns])
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
        """Let any other role run, and go on when not `blocked`."""
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
        """A descriptor; one made in the same line as another takes its place in memory."""
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

    def copy(self, described: Any, at: Sequence[Any], barrier: Barrier, buffer: Shared) -> None:
        self.step()
        if self.readers[buffer.home]:
            raise Fault("a buffer is loaded while a product reads it")
        if any(load.buffer.home == buffer.home for load in self.loads):
            raise Fault("a buffer is loaded while it is being loaded")
        buffer.data[...] = np.nan
        due = self.turns + self.random.choice((0, 10, 100))
        self.loads.append(Load(described, int(at[0]), barrier, buffer, due))

    def _land(self, load: Load) -> None:
        self.loads = [other for other in self.loads if other is not load]
        described, at, barrier, buffer, *_ = load
        live = np.arange(at, at + described.box[0]) < int(described.shape[0])
        rows = (np.arange(at, at + described.box[0]) * int(described.step))[:, None] + np.arange(described.box[1])
        places, _ = (described.first + np.where(live[:, None], rows, 0)).places(None)
        buffer.data[...] = np.where(live[:, None], described.first.memory[places], 0)
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

    def finish(self, outstanding: int, deps: Sequence[Product]) -> Value:
        """The value of the one product in `deps`, when at most the last `outstanding` of the role are under way."""
        self.step()
        assert self.current
        products = self.current.products
        while len(products) > outstanding:
            product = products.pop(0)
            product.finish()
            self.readers.subtract(product.homes)
        (product,) = deps
        if product.value is None:
            raise Fault("a product is used before it was waited for")
        return product.value


class Taking:
    """The counter that programs take items from. Programs run one after another here, as if they had run beside each
    other: each leaves gaps, which later ones fill. `total`: how often they take together."""

    def __init__(self, counter: Tensor, total: int, programs: int, seed: int) -> None:
        self.counter, self.left, self.programs, self.random = counter, list(range(total)), programs, Random(seed)
        self.place, self.last, self.total = -1, -1, total
        if counter.item():
            raise Fault("the counter is not 0 before a launch")
        # What the last one to take must clear.
        counter.fill_(total > 0)

    def take(self, place: int) -> Value:
        if place != self.place:
            self.place, self.last = place, -1
        if not self.counter.item() and self.total - 1 in self.left:
            raise Fault("the counter is cleared while programs still count")
        later = [one for one in self.left if one > self.last]
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
    """The kernel modules for the simulation, with `edit` (old, new) wherever the old text stands."""
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
        async_copy_global_to_shared=lambda *args: program().copy(*args),
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
    with patch.dict(sys.modules, stubs | {f"ringattn.kernels.{name}": one for name, one in modules.items()}):
        for name, module in modules.items():
            exec(_code(name, edit), vars(module))
            vars(module)["range"] = counted
    return modules


def simulate(call: LaunchCall, seed: int, edit: tuple[str, str] = ("", "")) -> None:
    """Run a launch of one of the Gluon kernels; `edit`: (old, new) text of their sources."""
    now: dict[str, Any] = {}
    modules = loaded(edit, lambda: now["program"], lambda: now["place"], lambda: now["taking"])
    name = call.kernel.fn.__name__
    kernel = next(vars(module)[name] for module in modules.values() if name in vars(module))
    args = [pointer(x) if isinstance(x, Tensor) else x if x is None else value(x) for x in call.args]
    constants = {name: given for name, given in call.meta.items() if name.isupper()}
    given = dict(zip(signature(kernel).parameters, call.args, strict=False))
    if "counter" in given:
        total = given["block_count"] * given["slots"] * given["batches"]
        now["taking"] = Taking(given["counter"], total, call.grid[0], seed)
    for at in range(call.grid[0]):
        now.update(program=Program(seed * 1000 + at), place=(at, call.grid[0]))
        kernel(*args, **constants)
    if "taking" in now:
        now["taking"].finish()


@cache
def _code(name: str, edit: tuple[str, str]) -> CodeType:
    return compile(source_of(name).replace(*edit), name, "exec")


def source_of(name: str) -> str:
    """Of a kernel's module."""
    return (KERNELS / f"{name}.py").read_text(encoding="utf-8")
