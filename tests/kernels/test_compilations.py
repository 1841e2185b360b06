"""Batches with varying documents compile no new kernels. The tests count the calls of Triton's compile function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ringattn.bench.launch import StubDriver
from ringattn.core.geometry import CAUSAL, StridedRange, Tile, TokenRange
from ringattn.engine import triton
from ringattn.engine.base import KV, BackwardInputs, Sizes, Softmax
from ringattn.engine.triton import TritonEngine
from ringattn.kernels.attention_gluon import CONFIG, gluon_missing
from ringattn.kernels.configs import Configs, configs_for
from ringattn.kernels.launch import Kept
from tests.kernels.compile_gate import row_cases

SETS, HEADS, KV_HEADS, DIM, DTYPE = 200, 4, 2, 64, torch.bfloat16
PROGRAM_BYTES = 256
FORMS: dict[str, Callable[[], Configs]] = {
    "pointers": lambda: configs_for(90, DTYPE, DIM, "pointers"),
    "descriptors": lambda: configs_for(90, DTYPE, DIM, "descriptors"),
    "gluon": lambda: configs_for(90, DTYPE, DIM)._replace(forward=CONFIG),
}


class Loaded:
    """A stand-in for a compiled kernel. It launches nothing and records the number of programs of each launch."""

    metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=0, global_scratch_size=PROGRAM_BYTES)
    packed_metadata = function = None
    n_regs, n_spills = 32, 0

    def __init__(self, programs: list[int]) -> None:
        self.programs = programs

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, programs: int, *_: Any) -> None:
        self.programs.append(programs)


class Counted(NamedTuple):
    """A record of compilations and launches.

    `kernels`: for each kernel that Triton distinguishes, by name and specialization, its arguments that are None.
    `kept`: ringattn's handles of the kernels. `programs`: the number of programs of each launch.
    """

    kernels: dict[tuple[str, str], frozenset[Any]]
    kept: Kept
    programs: list[int]

    def both(self) -> tuple[int, int]:
        return len(self.kernels), len(self.kept.handles())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    found = Counted({}, Kept(), [])
    used: set[JITFunction[Any]] = set()

    def compiled(
        self: JITFunction[Any], key: str, signature: Any, device: int, constants: dict[Any, Any], *_: Any, **__: Any
    ) -> Loaded:
        nones = frozenset(place for place, value in constants.items() if value is None)
        found.kernels[self.fn.__qualname__, key] = nones
        used.add(self)
        self.device_caches[device][0][key] = Loaded(found.programs)
        return self.device_caches[device][0][key]

    monkeypatch.setattr(driver, "_active", StubDriver(90))
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(triton, "kept", found.kept)
    monkeypatch.setattr(triton, "architecture", lambda device: 90)
    yield found
    for kernel in used:
        kernel.device_caches.clear()


def documents(random: Random, rows: int) -> list[int]:
    """Return the bounds of 1 to 12 random documents with `rows` tokens in total."""
    return sorted({0, rows, *(random.randrange(1, rows) for _ in range(random.randrange(12)))})


def run_pass(engine: TritonEngine, rows: int, steps: list[list[Tile]], batch: int) -> list[Any]:
    """Run a forward and a backward pass over `rows` tokens. Return what `engine.prepare` returned for each of them."""
    softmax = Softmax(0.1, HEADS // KV_HEADS)
    q, dout = (torch.zeros(batch, rows, HEADS, DIM, dtype=DTYPE).transpose(0, 1) for _ in range(2))
    k, v = (torch.zeros(batch, rows, KV_HEADS, DIM, dtype=DTYPE).transpose(0, 1) for _ in range(2))
    works = [engine.prepare(steps, softmax, rows, HEADS) for _ in range(2)]
    state = engine.begin(works[0], q, DIM, None)
    for work in works[0]:
        engine.attend(q, KV(k, v), state, work)
    out = state.out.finalized(DTYPE)
    inputs = BackwardInputs(dout, out, state.lse, None, engine.delta(dout, out, None))
    dq, dkv = engine.begin_grad(works[1], q, DIM), KV(*(torch.zeros_like(x, dtype=torch.float32) for x in (k, v)))
    for work in works[1]:
        engine.attend_grad(q, KV(k, v), inputs, dq, dkv, work)
    return works


def steps_of(random: Random, rows: int) -> list[list[Tile]]:
    """Return the tiles of a ring step over local documents and, if there are several, of a step over a remote document.

    The tiles of the second step have one head or all heads.
    """
    bounds = documents(random, rows)
    heads = StridedRange(0, HEADS)
    local_documents = [TokenRange(StridedRange(a, b - a), StridedRange(a, b - a)) for a, b in pairwise(bounds)]
    steps = [[Tile(tokens, tokens, CAUSAL, heads) for tokens in local_documents]]
    if len(local_documents) > 1:
        steps.append(
            [Tile(local_documents[0], local_documents[0], CAUSAL, heads._replace(count=random.choice((1, HEADS))))]
        )
    return steps


@pytest.mark.parametrize("form", ["descriptors", "gluon", pytest.param("pointers", marks=pytest.mark.slow)])
def test_varying_documents_compile_nothing_new(form: str, counted: Counted) -> None:
    """After the first ten sets of documents nothing new is compiled.

    In the sets, the numbers of blocks, batches and rows may be 1, a multiple of 16, or neither, which Triton
    distinguishes by default.
    """
    random, engine, seen = Random(6), TritonEngine(FORMS[form]()), []
    for _ in range(SETS):
        rows = random.randrange(2, 600)
        run_pass(engine, rows, steps_of(random, rows), random.choice((1, 2)))
        seen.append(counted.both())
    assert seen[9] == seen[-1], seen[-1]
    # Each kernel is compiled once for each set of arguments that are None. There is no handle of the kernel of `delta`.
    kinds = {(name, nones) for (name, _), nones in counted.kernels.items()}
    names = {name for name, _ in kinds}
    assert ("forward_kernel" if form == "gluon" else "_forward") in names and len(names) >= 4
    assert seen[-1] == (len(kinds), len(kinds) - 1), seen[-1]


def test_workspace_bytes_counts_the_memory_of_descriptors(counted: Counted) -> None:
    """`workspace_bytes` is the memory for descriptors in the step's largest launch, as the compiled kernels report it.

    It returns the same number before anything is compiled.
    """
    engine, tiles = TritonEngine(FORMS["descriptors"]()), steps_of(Random(3), 500)[:1]
    sizes = Sizes(500, 2, HEADS, DIM, DIM, DTYPE)
    (work,) = engine.prepare(tiles, Softmax(0.1, HEADS // KV_HEADS), 500, HEADS)
    before = [engine.workspace_bytes(work, sizes, backward) for backward in (False, True)]
    forward_works, backward_works = run_pass(engine, 500, tiles, 2)
    after = [
        engine.workspace_bytes(forward_works[0], sizes, False),
        engine.workspace_bytes(backward_works[0], sizes, True),
    ]
    assert before == after
    forward_programs, _, *grads = counted.programs
    assert engine.workspace_bytes(forward_works[0], sizes, False) == PROGRAM_BYTES * forward_programs > 0
    assert engine.workspace_bytes(backward_works[0], sizes, True) == PROGRAM_BYTES * max(grads) > 0 and len(grads) == 2


@pytest.mark.usefixtures("counted")
def test_workspace_bytes_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first call, `workspace_bytes` is the number of programs times the bytes of a program's descriptors.

    Gluon's kernels have a program per multiprocessor, those with descriptors one per block. Kernels with plain pointers
    need no descriptors.
    """
    gluon_missing.cache_clear()
    if why := gluon_missing(90):
        pytest.skip(why)
    tile = Tile(*(TokenRange(StridedRange(0, 65_536), StridedRange(0, 65_536)),) * 2, CAUSAL, StridedRange(0, HEADS))
    sizes = Sizes(65_536, 1, HEADS, DIM, DIM, DTYPE)
    monkeypatch.setattr(triton, "usable", lambda device, margin: 132 - margin)

    def reported_bytes(backward: bool, **options: Any) -> int:
        engine = TritonEngine(**options)
        return engine.workspace_bytes(engine.prepare([[tile]], Softmax(0.1), 65_536, HEADS)[0], sizes, backward)

    blocks = 65_536 // 128 * HEADS
    assert [reported_bytes(False), reported_bytes(False, sm_margin=32)] == [132 * 384, 100 * 384]
    assert [reported_bytes(True), reported_bytes(True, form="descriptors"), reported_bytes(True, form="pointers")] == [
        132 * 512,
        blocks * 256,
        0,
    ]
    assert reported_bytes(True, form="descriptors", sm_margin=32) == 200 * 256
    assert reported_bytes(True, deterministic=False) == 132 * 640
    assert reported_bytes(False, form="descriptors") == blocks * 256
    assert reported_bytes(True, form="descriptors", deterministic=False) == blocks * 256
    gluon_missing.cache_clear()


def test_row_kernels_compile_once(counted: Counted) -> None:
    """Each row kernel is compiled only once for all numbers of tokens and heads."""
    names = [name for name in row_cases.CASES if name.startswith("sm_90")]
    for tokens, heads in ((64, 4), (37, 3), (1, 1), (16, 2), (33, 16)):
        for name in names:
            counted.kept.compile(row_cases.call_of(name, tokens, heads))
    assert counted.both() == (len(names), len(names)), sorted(name for name, _ in counted.kernels)
