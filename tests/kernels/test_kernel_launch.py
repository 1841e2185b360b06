"""Launches through ringattn's handles pass the same arguments as Triton's own launches; and block sizes.

A stub replaces the driver and launches nothing. The tests define their own kernel, so that nothing that is compiled for
an absent GPU stays in a kernel of the library.
"""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import _allocation, driver

from ringattn.bench.launch import StubDriver
from ringattn.kernels import configs, launch
from ringattn.kernels.configs import configs_for, put_config
from ringattn.kernels.launch import Config, Kept, LaunchCall, Repeat, allocate, layouts

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def product(a, b, out, steps, scale, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(steps):
        left = tl.load(a + row[:, None] * DEPTH + (column + step * DEPTH)[None, :])
        right = tl.load(b + (column + step * DEPTH)[:, None] * SIZE + row[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * SIZE + row[None, :], total * scale)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubDriver]:
    """Replace Triton's driver in this process by a stub, which records launches."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stub = StubDriver(80)
    monkeypatch.setattr(driver, "_active", stub)
    product.device_caches.clear()
    yield stub
    product.device_caches.clear()


def call_with(
    dtype: torch.dtype = torch.float16, offset: int = 0, size: int = 32, scale: float = 48, warps: int = 4
) -> LaunchCall:
    """Return a call of a small matrix product. The first operand begins `offset` elements after an aligned address."""
    a, b = (torch.zeros(size * 16 + 16, dtype=dtype)[start:] for start in (offset, 0))
    meta = {"SIZE": size, "DEPTH": 16, "num_warps": warps, "num_stages": 1}
    return LaunchCall(product, (3,), (a, b, torch.zeros(size, size), 4, scale), meta)


def repeated(call: LaunchCall, sm_margin: int = 0) -> Repeat:
    return Kept().repeat(call, call.args[:3], sm_margin)


def test_launches_what_triton_launches(stub: StubDriver) -> None:
    """A launch through a handle has the grid, stream, function and arguments of Triton's launch.

    Only the metadata and hooks for profilers differ.
    """
    stub.launched, stub.stream, call = [], 7, call_with()
    call.run()
    repeated(call)(call.args[:3])
    theirs, ours = (recorded[:6] + recorded[9:] for recorded in stub.launched)
    assert theirs[:4] == (3, 1, 1, 7) and len(theirs) == 6 + len(product.arg_names)
    assert all(x is y or x == y for x, y in zip(theirs, ours, strict=True))


def test_each_launch_uses_its_own_tensors(stub: StubDriver) -> None:
    """Each launch uses the operands it is given, also if a tensor is two operands of one launch and not of the next.

    An argument of the call that is not among the operands stays the same at each launch.
    """
    call, stub.launched = call_with(), []
    repeat = Kept().repeat(call, (None, *call.args[:2]))
    x, y = torch.zeros(1), torch.zeros(1)
    repeat((None, x, x))
    repeat((None, y, x))
    first, second = (recorded[9:] for recorded in stub.launched)
    assert first[0] is x and first[1] is x and second[0] is y and second[1] is x
    assert first[2] is second[2] is call.args[2] and first[3:] == second[3:] == (4, 48, *call.meta.values())[:4]


@pytest.mark.parametrize(("sm_margin", "programs"), [(0, 3), (1, 3), (106, 2), (107, 1), (108, 1), (200, 1)])
def test_a_margin_of_multiprocessors_makes_the_grid_smaller(sm_margin: int, programs: int, stub: StubDriver) -> None:
    """With a margin, the grid has at most one block for each multiprocessor that the margin leaves, and at least one.

    The stub has 108 multiprocessors. Without a margin there is no limit.
    """
    stub.launched, call = [], call_with()
    stub.properties |= {"max_num_regs": 0}
    repeated(call, sm_margin)(call.args[:3])
    assert stub.launched[0][0] == programs


def test_a_persistent_call_gets_a_program_for_each_block_that_fits(stub: StubDriver) -> None:
    stub.launched, call = [], call_with()._replace(grid=(2000,), persistent=True)
    stub.registers = 40
    repeated(call)(call.args[:3])
    assert stub.launched[0][0] == 108 * 12


@pytest.mark.parametrize(
    ("changed", "resident"),
    [
        ({"max_num_regs": 1 << 20}, 16),  # a multiprocessor runs 2048 threads at once, 4 warps per block
        ({}, 12),  # a multiprocessor has 64 K registers; a block needs 40 for each of its 128 threads
        ({"max_num_regs": 128 * 40 * 5 + 9}, 5),
        ({"max_shared_mem": 3 * (4096 + 1024) - 1024}, 3),  # a block uses 4 KiB, and CUDA reserves 1 KiB per block
        ({"max_shared_mem": 100}, 1),
    ],
    ids=str,
)
def test_how_many_blocks_a_multiprocessor_holds(changed: dict[str, int], resident: int, stub: StubDriver) -> None:
    stub.properties |= changed
    stub.registers = 40
    assert Kept().compile(call_with()).resident == resident


def test_programs_count_on_a_counter_of_their_stream(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter from which programs take work is 0 at each launch.

    Launches that may overlap, on several streams or in captured graphs, have separate counters.
    """
    stub.launched, counters, call = [], [], call_with()
    monkeypatch.setattr("ringattn.kernels.launch._counters", {})
    repeat = Kept().repeat(call._replace(counter=call.args[2]), call.args[:2])
    for stream, captured in ((7, False), (7, False), (8, False), (7, True), (7, True)):
        stub.stream = stream
        monkeypatch.setattr("ringattn.kernels.launch.capturing", lambda captured=captured: captured)
        repeat(call.args[:2])
        counters.append(stub.launched[-1][9 + 2])
    assert counters[0] is counters[1] and len({id(x) for x in (*counters, call.args[2])}) == 5
    assert not any(x.any() for x in counters)


def test_nothing_is_launched_for_an_empty_grid(stub: StubDriver) -> None:
    stub.launched, call = [], call_with()._replace(grid=(0,))
    repeated(call)(call.args[:3])
    repeated(call, sm_margin=8)(call.args[:3])
    assert stub.launched == []


def test_each_launch_allocates_separate_memory(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch allocates the scratch memory of each launch, and frees it after the launch.

    So two graphs captured on one stream do not share memory, and the memory of a graph is freed with the graph.
    """
    allocated: list[weakref.ref[torch.Tensor]] = []

    def empty(size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert (dtype, device) == (torch.uint8, "cuda")
        tensor = torch.zeros(size, dtype=dtype)
        allocated.append(weakref.ref(tensor))
        return tensor

    def launch(self: StubDriver, programs: int, *args: Any) -> None:
        buffer = _allocation._allocator.get()(programs * 256, 128, 7)
        assert buffer is allocated[-1]() and buffer.numel() >= repeat.scratch_bytes
        sizes.append(programs * 256)

    sizes: list[int] = []
    monkeypatch.setattr(StubDriver, "launch", launch)
    call = call_with()
    repeat = Repeat(call, call.args[:3], Kept().compile(call)._replace(scratch=256), 0, None)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    repeat(call.args[:3])
    repeat(call.args[:3])
    call.run()
    assert (
        len(allocated) == 3
        and not any(reference() for reference in allocated)
        and sizes == 3 * [repeat.scratch_bytes] == 3 * [768]
    )


def allocators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the allocators that are set when the stub driver launches."""
    seen: list[Any] = []
    monkeypatch.setattr(StubDriver, "launch", lambda self, *args: seen.append(_allocation._allocator.get()))
    return seen


def test_a_kernel_that_needs_memory_gets_torchs_in_every_thread(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that needs scratch memory gets it from torch in every thread, such as autograd's.

    Triton keeps its allocator in a context variable, which is not set in other threads. So each launch must set it.
    """
    seen, call, kept = allocators(monkeypatch), call_with(), Kept()
    handle = kept.compile(call)
    for scratch in (256, 0):
        repeat = Repeat(call, call.args[:3], handle._replace(scratch=scratch), 0, None)
        thread = threading.Thread(target=repeat, args=(call.args[:3],))
        thread.start()
        thread.join()
    assert seen == [allocate, _allocation._NULL_ALLOCATOR]


def test_the_allocator_of_the_caller_stays(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's allocator stays set after a plain launch, a repeated launch, and launches that fail."""

    def theirs(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        raise AssertionError("the caller's allocator was used")

    def launch(self: StubDriver, *args: Any) -> None:
        seen.append(_allocation._allocator.get())
        assert len(seen) <= 2, "fails"

    seen: list[Any] = []
    monkeypatch.setattr(StubDriver, "launch", launch)
    call, context = call_with(), contextvars.copy_context()
    repeat = Repeat(call, call.args[:3], Kept().compile(call)._replace(scratch=256), 0, None)
    context.run(triton.set_allocator, theirs)
    for launched in (call.run, lambda: repeat(call.args[:3])) * 2:
        with pytest.raises(AssertionError, match="fails") if len(seen) >= 2 else nullcontext():
            context.run(launched)
        assert context[_allocation._allocator] is theirs
    assert seen == 4 * [allocate]


@pytest.mark.parametrize("different", [torch.zeros(8, 4).T, torch.zeros(36)[1:33].view(4, 8), None])
def test_layouts_distinguish_strides_and_alignment(different: torch.Tensor | None) -> None:
    base, same = torch.zeros(4, 8), torch.ones(4, 8)
    assert layouts((base, None)) == layouts((same, None)) and layouts((base,)) != layouts((different,))
    assert hash(layouts((base, None))) == hash(layouts((same, None)))


@pytest.mark.parametrize(
    ("first_options", "second_options"),
    [
        ({}, {"dtype": torch.bfloat16}),
        ({}, {"offset": 1}),
        ({}, {"size": 16}),
        ({}, {"warps": 8}),
        ({}, {"scale": 47}),
        ({}, {"scale": 1}),
        ({}, {"scale": 48.0}),
        ({}, {"scale": 1 << 40}),
        ({"scale": 1}, {"scale": True}),
        ({"scale": 1.0}, {"scale": True}),
    ],
    ids=str,
)
def test_calls_that_triton_distinguishes_have_different_handles(
    first_options: dict[str, Any], second_options: dict[str, Any], stub: StubDriver
) -> None:
    kept, first, second = Kept(), call_with(**first_options), call_with(**second_options)
    handles = [kept.compile(first), kept.compile(second)]
    assert handles[0].run is not handles[1].run
    for call, handle in zip((first, second), handles, strict=True):
        assert handle.run is call.warmup().run


def test_multiplication_and_addition_are_fused_whatever_the_default(stub: StubDriver) -> None:
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = False
        assert Kept().compile(call_with()).kernel.metadata.enable_fp_fusion is True


def test_a_handle_keeps_the_kernel_loaded(stub: StubDriver) -> None:
    """Triton 3.9 unloads a kernel when its last reference is gone, for example after its caches are cleared."""
    handle = Kept().compile(call_with())
    kernel = weakref.ref(call_with().warmup())
    product.device_caches.clear()
    gc.collect()
    assert kernel() is handle.kernel


def test_a_known_call_is_not_compiled_again(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.compile(call_with())
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_compiled", lambda call: pytest.fail("compiled again"))
        kept.compile(call_with())
        stub.device = 1
        with pytest.raises(pytest.fail.Exception, match="compiled again"):
            kept.compile(call_with())


def test_there_are_no_more_handles_than_kernels(stub: StubDriver) -> None:
    """Calls with integers that Triton does not distinguish share a handle. It launches with the value of each call."""
    kept, stub.launched, kernels = Kept(), [], set()
    for scale in (16, 32, -48, 1, 2, 3, -7, 1 << 40, 3 << 40, 0):
        call = call_with(scale=scale)
        kernels.add(id(call.warmup()))
        kept.repeat(call, call.args[:3])(call.args[:3])
        assert stub.launched[-1][9:][4] == scale
    assert len(kept.handles()) == len(kernels) == 4


def test_the_smallest_sufficient_dimension_is_used() -> None:
    assert configs_for(90, torch.float16, 65) is configs_for(90, torch.bfloat16, 128)
    assert configs_for(90, torch.float16, 64) is not configs_for(90, torch.float16, 65)
    assert configs_for(90, torch.float32, 128) is not configs_for(90, torch.float16, 128)


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "why"),
    [
        (75, torch.float16, 64, "sm_75; there are some for sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
        (90, torch.float64, 64, "torch.float64; there are some for float32, float16 and bfloat16"),
        (90, torch.float16, 257, "head dimension 257; there are some for dimensions to 256"),
    ],
)
def test_calls_without_an_entry_are_refused_by_name(arch: int, dtype: torch.dtype, dim: int, why: str) -> None:
    with pytest.raises(LookupError, match=why):
        configs_for(arch, dtype, dim)


def test_a_written_entry_is_read_by_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table_file = tmp_path / "configs.json"
    table_file.write_text(configs.TABLE.read_text())
    monkeypatch.setattr(configs, "TABLE", table_file)
    before, tried = configs_for(90, torch.bfloat16, 128), Config(64, 128, 4, 3, "descriptors")
    put_config(90, 128, "descriptors", "grad_q", tried)
    assert configs_for(90, torch.bfloat16, 128) is before
    for cached in (configs._entries, configs._table):
        cached.cache_clear()
    try:
        assert configs_for(90, torch.bfloat16, 128) == before._replace(grad_q=tried)
        assert configs_for(90, torch.bfloat16, 64).grad_q != tried
        assert len(table_file.read_text().splitlines()) == len(Path(__file__).parents[2].joinpath(
            "kernels/configs.json").read_text().splitlines())  # fmt: skip
    finally:
        for cached in (configs._entries, configs._table):
            cached.cache_clear()


def test_descriptors_are_the_default_if_there_is_an_entry() -> None:
    assert configs_for(90, torch.bfloat16, 100) is configs_for(90, torch.bfloat16, 128, "descriptors")
    assert configs_for(80, torch.float16, 128) is configs_for(80, torch.float16, 128, "pointers")
    assert {config.form for config in configs_for(100, torch.float32, 64)} == {"pointers"}
    assert {config.form for config in configs_for(90, torch.float16, 64, "pointers")} == {"pointers"}


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "form", "available"),
    [
        (80, torch.float16, 64, "descriptors", "pointers"),
        (90, torch.float32, 64, "descriptors", "pointers"),
    ],
)
def test_a_form_without_an_entry_is_refused(arch: int, dtype: torch.dtype, dim: int, form: str, available: str) -> None:
    with pytest.raises(LookupError, match=f"form '{form}' for sm_{arch}, {dtype}.*; there are some of {available}$"):
        configs_for(arch, dtype, dim, form)
