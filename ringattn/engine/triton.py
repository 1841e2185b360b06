"""The engine on ringattn's own Triton kernels.

Guarantees:
- one launch per step in forward and two in backward, whatever tiles the step has;
- partial results and gradients in float32 from the first step to the last;
- softcap, ALiBi, dropout, sinks, head dimensions up to 256, any strides;
- equal bits for equal calls, except with the fused backward, which is used only on request;
- no allocation during a pass except the block tables, which the first pass on a device makes and keeps, and the tensor
  descriptors of a launch, which are freed when the launch is enqueued.
If every query row has a first and a last launch, no state is initialised before the pass, read by the first launch or
stored after the last. The engine needs a CUDA device or Triton's interpreter.
Not covered: ranks, schedules, float64 (refused).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from ringattn.core.geometry import Tile
from ringattn.engine.base import KV, Accumulating, BackwardInputs, Output, Sizes, Softmax, SoftmaxState, Visit
from ringattn.engine.blocks import Blocks, Ints, key_blocks, query_blocks, set_flags
from ringattn.engine.forms import (
    Options,
    forward_config,
    fused_readable,
    gradient_configs,
    gradients_readable,
    named_gluon,
    nearest,
    readable,
)
from ringattn.engine.philox import KEYS_OF_A_COUNTER, threshold
from ringattn.errors import UnsupportedError, one_of
from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_gluon import forward_gluon, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.attention_options import STEEPEST, CallOptions, Dropout, seed_words
from ringattn.kernels.attention_tiles import grid_of
from ringattn.kernels.configs import ARCHITECTURES, DIMS, Configs, configs_for, with_dropout
from ringattn.kernels.launch import (
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    FIRST,
    FORMS,
    LAST,
    BlockColumn,
    Config,
    Kept,
    LaunchCall,
    Operands,
    Repeat,
    Table,
    compiler_missing,
    layouts,
    usable,
)
from ringattn.kernels.rows import delta_call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

kept = Kept()
"""The compiled kernels of all engines of this process."""


class TritonWork:
    """A step of a pass, and the launches that were prepared for it so far."""

    def __init__(self, whole: PassTables, step: int) -> None:
        self.whole, self.step = whole, step
        self.launches: dict[Hashable, tuple[Repeat, ...]] = {}


class TritonEngine(Accumulating):
    """The engine that computes attention with ringattn's own Triton kernels."""

    name = "triton"

    def __init__(
        self, configs: Configs | None = None, *, form: str | None = None, deterministic: bool = True, sm_margin: int = 0
    ) -> None:
        """Create the engine.

        `configs`: block sizes for every call; by default the table's for the device, dtype and head dimensions.
        `form`: one of `ringattn.kernels.launch.FORMS`, by default the best that supports the call (see `forms`).
        `deterministic`: False selects the fused backward, which adds to dQ in any order. `sm_margin`: the
        multiprocessors left free for exchanges. Raises InputError if there is no such form.
        """
        if form is not None:
            one_of(form, FORMS, "form")
        self._configs, self._form, self._deterministic, self.sm_margin = configs, form, deterministic, sm_margin
        self._named = configs is not None or form is not None

    def prepare(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        *,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> list[TritonWork]:
        """Keep the tiles. Their block tables are made by the first call that has tensors: it has dtype and device."""
        if why := too_steep(softmax):
            raise UnsupportedError(why)
        whole = PassTables(steps, softmax, rows, heads, more, visits)
        return [TritonWork(whole, step) for step in range(len(whole.steps))]

    def begin(self, works: Sequence[TritonWork], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Return the state before the first step: uninitialized if the first launch of every row is known.

        Raises UnsupportedError in the same cases as `attend`.
        """
        # The blocks of `attend`: their flags define which launches read a state.
        config = self._forward_config(q, value_dim, _options(works))
        # Without flags every launch reads the state, so it must be initialised.
        if not works or not (tables := works[0].whole.by_query(config, q.device)).flagged:
            return super().begin(works, q, value_dim, sinks)
        # The FIRST block of a row does not read its lse, so the lse need not be filled.
        lse = q.new_empty(q.shape[1], q.shape[2], q.shape[0], dtype=torch.float32)
        return SoftmaxState(_uninitialized(q, value_dim, tables.alone), lse, sinks)

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: TritonWork) -> None:
        """Accumulate the tiles into the state, in place.

        Raises UnsupportedError for float64 and head dimensions > 256.
        """

        def describe(
            q: Tensor, k: Tensor, v: Tensor, lse: Tensor, out: Tensor | None, result: Tensor | None,
            sinks: Tensor | None,
        ) -> list[LaunchCall]:  # fmt: skip
            options = _options([work])
            config = self._forward_config(q, v.shape[3], options)
            table = work.whole.by_query(config, q.device).steps[work.step]
            # A descriptor may not support the strides or the base address of a tensor.
            config = readable(config, q, k, v, architecture(q.device), options, self._named)
            launch = forward_gluon if config.form == "gluon" else forward
            return [launch(q, k, v, out, lse, table, config, result=result, sinks=sinks, **_call_options(kv, work))]

        operands = (q, kv.k, kv.v, state.lse, *state.out, state.sinks)
        self._launch(work, kv, operands, describe, state.dropout_seed)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """Return `BackwardInputs.delta`, computed by a kernel in a single pass over the tensors."""
        delta = dout.new_empty(dout.shape[1], dout.shape[2], dout.shape[0], dtype=torch.float32)
        if dout.dtype not in DTYPES:
            return super().delta(dout, out, dlse)
        with torch.cuda.device_of(dout):
            delta_call(dout, out, dlse, delta).run()
        return delta

    def begin_grad(self, works: Sequence[TritonWork], q: Tensor, value_dim: int) -> Output:
        """Return dQ before the first step: uninitialized if the first launch of every row is known.

        Raises UnsupportedError in the same cases as `attend`.
        """
        # The same blocks as in `attend_grad` for dQ: their flags define which launches read dQ.
        config = self._gradient_configs(q, value_dim, _options(works)).grad_q
        # The fused backward adds to dQ atomically, so dQ must start as zeros.
        if works and self._deterministic and (tables := works[0].whole.by_query(config, q.device)).flagged:
            return _uninitialized(q, q.shape[3], tables.alone)
        return super().begin_grad(works, q, value_dim)

    def attend_grad(
        self,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        dkv: KV | None,
        work: TritonWork,
        result: KV | None = None,
    ) -> None:
        """Add the tiles' gradients to `dq` and then to `dkv`, in place, or write the last sums to `result`.

        Raises UnsupportedError in the same cases as `attend`.
        """

        def describe(
            q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor | None,
            dv: Tensor | None, k_result: Tensor | None, v_result: Tensor | None, dq: Tensor | None,
            result: Tensor | None,
        ) -> list[LaunchCall]:  # fmt: skip
            results = None if k_result is None or v_result is None else (k_result, v_result)
            options, rows, keywords = _options([work]), (q, k, v, dout, lse, delta), _call_options(kv, work)
            table = self._configs_for(q, v.shape[3], options)
            configs = self._gradient_configs(q, v.shape[3], options)
            if not self._deterministic:
                assert dq is not None
                by_key = fused_readable(
                    configs, table, (q, k, v, dout), dq, architecture(q.device), options, self._named
                )
                keys = work.whole.by_key(by_key, q.device).steps[work.step]
                launch = grad_kv_gluon if by_key.form == "gluon" else grad_kv
                return [launch(*rows, dk, dv, keys, by_key, results=results, dq=dq, **keywords)]
            arch = architecture(q.device)
            configs = gradients_readable(configs, table, (q, k, v, dout), arch, options, self._named)
            queries = work.whole.by_query(configs.grad_q, q.device).steps[work.step]
            # The flags of this table are the step's `Visit`: first on these keys, last, or both.
            keys = work.whole.by_key(configs.grad_kv, q.device).steps[work.step]
            # dQ by query blocks, dK and dV by key blocks: no two programs add to one row, so the bits repeat.
            launch_q, launch_kv = grad_q, grad_kv
            if configs.grad_q.form == "gluon":
                launch_q, launch_kv = partial(grad_q_gluon, arch=arch), partial(grad_kv_gluon, arch=arch)
            return [
                launch_q(*rows, dq, queries, configs.grad_q, result=result, **keywords),
                launch_kv(*rows, dk, dv, keys, configs.grad_kv, results=results, **keywords),
            ]

        sums, results = (
            (None, None) if gradients is None else (gradients.k, gradients.v) for gradients in (dkv, result)
        )
        operands = (q, kv.k, kv.v, inputs.dout, inputs.lse, inputs.delta, *sums, *results, *dq)
        self._launch(work, kv, operands, describe, inputs.dropout_seed)

    def workspace_bytes(self, work: TritonWork, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """Return the bytes of the tensor descriptors that the launches of a step make in global memory.

        Block tables are not counted: they are kept. If the launches are prepared, the kernels report their size.
        Before that, the size follows from the default form for tensors that descriptors can read.
        """
        if work.launches:
            return max(launch.scratch_bytes for each in work.launches.values() for launch in each)
        return self._foreseen_bytes(work, sizes, backward)

    def _foreseen_bytes(self, work: TritonWork, sizes: Sizes, backward: bool) -> int:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        q = torch.empty(0, sizes.batch, sizes.heads, sizes.head_dim, dtype=sizes.dtype, device=device)
        options, by_query, by_key = _options([work]), work.whole.by_query, work.whole.by_key
        if not backward:
            launches = [(by_query, self._forward_config(q, sizes.value_dim, options), 0)]
        elif not self._deterministic:
            # With Gluon the rows of dout and dQ have a descriptor too.
            launches = [(by_key, self._gradient_configs(q, sizes.value_dim, options).grad_fused, 2)]
        else:
            configs = self._gradient_configs(q, sizes.value_dim, options)
            # With Gluon the rows of dout have a descriptor too.
            launches = [(by_query, configs.grad_q, 1), (by_key, configs.grad_kv, 1)]
        most = 0
        for tables_of, config, more in launches:
            if config.form == "pointers":
                continue
            # Make the table on the host, because the device may be short of memory when this is called.
            table = tables_of(config, torch.device("cpu")).steps[work.step]
            programs, gluon = grid_of(table, sizes.batch, None)[0], config.form == "gluon"
            if self.sm_margin or gluon:
                # A multiprocessor runs at most one Gluon program, or two programs of the other forms (256 threads).
                programs = min(programs, usable(device.index or 0, self.sm_margin) * (1 if gluon else 2))
            most = max(most, programs * (DESCRIPTORS[config.form] + more * gluon) * DESCRIPTOR_BYTES)
        return most

    def _launch(
        self, work: TritonWork, kv: KV, operands: Operands, describe: Callable[..., Sequence[LaunchCall]], seed: int
    ) -> None:
        """Launch the kernels that `describe` returns for the operands.

        `describe` runs once for each combination of device, dtype, shapes and strides; later calls repeat its launches.
        `seed`: the dropout seed, which may differ in each launch.
        """
        q = operands[0]
        assert q is not None
        device = q.get_device()
        # Triton launches on the current device, not on the tensors' device.
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(work, kv, operands, describe, seed)
            return
        # A compiled launch depends on the values in this key; each call passes new addresses.
        key = (device, kv.first_head, q.dtype, q.shape, kv.v.shape, layouts(operands))
        launches = work.launches.get(key)
        if launches is None:
            # Two operands may be the same tensor. Detached copies are distinct objects, so each can be identified.
            distinct = [None if x is None else x.detach() for x in operands]
            launches = tuple(kept.repeat(call, distinct, self.sm_margin) for call in describe(*distinct))
            work.launches[key] = launches
        for launch in launches:
            launch(operands, seed_words(seed))

    def _forward_config(self, q: Tensor, value_dim: int, options: Options) -> Config:
        table = self._configs_for(q, value_dim, options).forward
        return forward_config(table, q, value_dim, architecture(q.device), options, self._named)

    def _gradient_configs(self, q: Tensor, value_dim: int, options: Options) -> Configs:
        table = self._configs_for(q, value_dim, options)
        return gradient_configs(table, q, value_dim, architecture(q.device), options, self._named)

    def _configs_for(self, q: Tensor, value_dim: int, options: Options) -> Configs:
        # The table of block sizes has one head dimension: use the larger of keys and values.
        dim = max(q.shape[3], value_dim)
        if q.dtype not in DTYPES:
            raise UnsupportedError(f"engine 'triton' does not support {q.dtype}; use engine='plain'")
        if dim > DIMS[-1]:
            raise UnsupportedError(
                f"engine 'triton' takes head dimensions to {DIMS[-1]}, not {dim}; use engine='plain'"
            )
        if self._configs is not None:
            return self._configs
        arch = architecture(q.device)
        if self._form == "gluon":
            return named_gluon(arch, q.dtype, dim, options)
        try:
            configs = configs_for(arch, q.dtype, dim, self._form)
            return with_dropout(configs) if "dropout_p" in options else configs
        except LookupError as error:
            raise UnsupportedError(f"engine 'triton': {error}; leave form unset") from error


def _uninitialized(q: Tensor, dim: int, alone: bool) -> Output:
    """Allocate the output as (rows, batch, heads, dim) views with batches outermost.

    `alone`: no sum is carried between steps, so only the result is allocated.
    """
    shape = (q.shape[1], q.shape[0], q.shape[2], dim)
    result = q.new_empty(shape).transpose(0, 1)
    # A float32 result is also the state; otherwise the state is a float32 tensor next to a result in the dtype of q.
    if alone or q.dtype == torch.float32:
        return Output(None if alone else result, result)
    return Output(q.new_empty(shape, dtype=torch.float32).transpose(0, 1), result)


def _call_options(kv: KV, work: TritonWork) -> CallOptions:
    """Return the keywords of a launch that describe the call."""
    softmax, slopes, p = work.whole.softmax, work.whole.slopes(kv.k.device), work.whole.softmax.dropout_p
    # Each launch passes its seed separately.
    dropout = None if p is None else Dropout(0, threshold(p), 1 - p)
    return {
        "scale": softmax.scale, "softcap": softmax.softcap, "group": softmax.group, "first_kv_head": kv.first_head,
        "slopes": slopes, "dropout": dropout,
    }  # fmt: skip


def _options(works: Sequence[TritonWork]) -> Options:
    """Return the names of the softmax options that a pass uses."""
    return tuple(works[0].whole.softmax.options()) if works else ()


@cache
def architecture(device: torch.device) -> int:
    """Return the newest architecture with block sizes that `device` supports, as 10 * major + minor.

    The interpreter uses the oldest. Raises UnsupportedError for a GPU that is older than all of them.
    """
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    supported = nearest((major, minor))
    if supported is None:
        raise UnsupportedError(
            f"engine='triton' needs a GPU from sm_{ARCHITECTURES[0]} on, not sm_{major}{minor}; use engine='plain'"
        )
    return supported


def too_steep(softmax: Softmax) -> str | None:
    """Return why this engine does not support the slopes, or None if it does."""
    steepest = max((abs(slope) for slope in softmax.alibi_slopes or ()), default=0.0)
    if steepest <= STEEPEST:
        return None
    return f"engine='triton' takes alibi_slopes to {STEEPEST:.0f}, of either sign, not {steepest:g}; use engine='plain'"


def missing(device: torch.device) -> str | None:
    """Return why this engine cannot run on `device`, or None if it can."""
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"engine='triton' needs a CUDA device, not {device}; use engine='auto' or engine='plain'"
    if (why := compiler_missing()) and not _driver_starts():
        return f"engine='triton': {why}; or use engine='auto'"
    return None


@cache
def _driver_starts() -> bool:
    """Return whether Triton's driver starts, which needs no compiler if its C code is in Triton's cache."""
    try:
        return bool(driver.active.utils)
    except Exception:
        return False


# --- block tables of a pass ------------------------------------------------------------------------------------------
# A table is made once for each side, block size and device, when a call first needs it. Its flags mark the first and
# the last launch that updates a row. For query rows `set_flags` sets them, for all steps or for none; for key rows they
# follow the step's `Visit`.


class Tables(NamedTuple):
    """The block tables of a pass, one per step. `flagged`: flags mark the first and the last block of every row.

    `alone`: every block is both first and last, so no sum is carried.
    """

    steps: list[Table]
    flagged: bool
    alone: bool


class PassTables:
    """The tiles of a pass's steps, and the block tables that were made from them so far."""

    def __init__(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> None:
        """Keep the tiles; tables are made when a call needs them.

        `more`: none of these steps is the last that adds to a row. `visits`: for each step, how it adds to dK/dV.
        """
        self.steps, self.softmax, self.rows, self.heads = [tuple(tiles) for tiles in steps], softmax, rows, heads
        # Outputs of other ranks are merged after these steps, so the state must be kept.
        self.more = more
        self.visits = visits or [Visit()] * len(self.steps)
        self._tables: dict[tuple[str, int, int, torch.device], Tables] = {}
        self._slopes: dict[torch.device, Tensor] = {}

    def slopes(self, device: torch.device) -> Tensor | None:
        """Return ALiBi's slopes on the device, one per query head of the call; None without ALiBi."""
        if self.softmax.alibi_slopes is None:
            return None
        if device not in self._slopes:
            self._slopes[device] = torch.tensor(self.softmax.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes[device]

    def by_query(self, config: Config, device: torch.device) -> Tables:
        """Return tables of query blocks (`config.block_m` rows), with entries in key blocks (`config.block_n` rows)."""
        make = [partial(query_blocks, tiles, softmax=self.softmax) for tiles in self.steps]
        return self._cached_tables("query", make, config.block_m, config.block_n, device)

    def by_key(self, config: Config, device: torch.device) -> Tables:
        """Return tables of key blocks (`config.block_n` rows), with entries in query blocks (`config.block_m` rows)."""
        # A block belongs to K/V heads, so an entry also names the query heads of the group. Rows that no query sees get
        # a block if they must be set to zero or converted.
        make = [
            partial(key_blocks, tiles, self.softmax.group, unseen=any(visit), softmax=self.softmax)
            for tiles, visit in zip(self.steps, self.visits, strict=True)
        ]
        return self._cached_tables("key", make, config.block_n, config.block_m, device)

    def _cached_tables(
        self, side: str, make: Sequence[Callable[..., Blocks]], own_rows: int, other_rows: int, device: torch.device
    ) -> Tables:
        # Kernels of equal block sizes share a table.
        key = (side, own_rows, other_rows, device)
        if key not in self._tables:
            step_blocks = [blocks(own_rows=own_rows, other_rows=other_rows) for blocks in make]
            if side == "key":
                # A step is the first, or the last, on all rows of its tiles.
                for blocks, visit in zip(step_blocks, self.visits, strict=True):
                    blocks.blocks[:, BlockColumn.FLAGS] = FIRST * visit.overwrite | LAST * visit.last
            # Only query rows carry a state between steps, and with `more` none of these steps is the last.
            has_flags = side == "query" and not self.more and set_flags(step_blocks, self.rows, self.heads)
            # If every block is both first and last on its rows, a single step does all their work.
            alone = has_flags and all(
                (blocks.blocks[:, BlockColumn.FLAGS] == FIRST | LAST).all() for blocks in step_blocks
            )
            # Copy to the device after `set_flags`, which writes the flags into the host arrays.
            tables = [_table_on(device, blocks, side == "key") for blocks in step_blocks]
            self._tables[key] = Tables(tables, has_flags, alone)
        return self._tables[key]


def _table_on(device: torch.device, blocks: Blocks, keys_own: bool) -> Table:
    places, positions = (
        None if columns is None else _on(device, columns) for columns in (blocks.places, blocks.positions)
    )
    together = 1 if blocks.positions is None else _keys_per_counter(blocks.positions[:, 0 if keys_own else 2 :])
    return Table(_on(device, blocks.blocks), _on(device, blocks.entries), blocks.slots, places, positions, together)


def _keys_per_counter(keys: Ints) -> int:
    """Return how many adjacent keys share a counter of the dropout generator in all entries (`Table.together`).

    `keys`: for each entry, the position of its first key and the stride of its keys.
    """
    # A block has a multiple of 16 keys.
    return 1 if (keys[:, 1] != 1).any() or (keys[:, 0] % KEYS_OF_A_COUNTER).any() else KEYS_OF_A_COUNTER


def _on(device: torch.device, columns: Ints) -> Tensor:
    return torch.from_numpy(columns).to(device)
