"""The engine on this project's own Triton kernels.

Guarantees one launch a step forward and two backward, whatever tiles the step has; partials and gradients in float32
from the first step to the last; softcap, ALiBi, dropout, sinks, any head dimensions to 256, any strides; the same bits
for the same calls, unless it was asked for the fused backward; and no allocation in a pass but the block tables, which
the first pass on a device makes and keeps, and a launch's tensor descriptors, which are given back when it is enqueued.
Where every query row has its first and its last launch, no state is set before the pass, read by the first or kept
after the last. It needs a CUDA device, or Triton's interpreter.
Not covered: ranks, schedules, float64 (refused).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ringattn.core.geometry import Tile
from ringattn.engine.base import KV, Accumulating, BackwardInputs, Output, Sizes, Softmax, SoftmaxState, Visit
from ringattn.engine.blocks import Blocks, Ints, flagged, key_blocks, query_blocks
from ringattn.engine.forms import (
    Options,
    check_specialized,
    forward_config,
    gradient_configs,
    gradients_readable,
    loadable,
    nearest,
    readable,
)
from ringattn.engine.philox import KEYS_OF_A_COUNTER, threshold
from ringattn.errors import UnsupportedError
from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward, one_entry_each, specialized_configs
from ringattn.kernels.attention_gluon import CONFIG, GRAD_KV, GRAD_Q, forward_gluon, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.attention_options import STEEPEST, CallOptions, Dropout, seed_words
from ringattn.kernels.attention_tiles import grid_of
from ringattn.kernels.configs import ARCHITECTURES, DIMS, Configs, configs_for, with_dropout
from ringattn.kernels.launch import (
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    FIRST,
    LAST,
    BlockColumn,
    Config,
    Kept,
    LaunchCall,
    Operands,
    Repeat,
    Table,
    layouts,
    usable,
)
from ringattn.kernels.rows import delta_call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

kept = Kept()
"""The compiled kernels of all engines of this process."""


class TritonWork:
    """One step of a pass, and its launches described so far."""

    def __init__(self, whole: PassTables, step: int) -> None:
        self.whole, self.step = whole, step
        self.launches: dict[Hashable, tuple[Repeat, ...]] = {}


class TritonEngine(Accumulating):
    """Attention by the kernels of this project."""

    name = "triton"

    def __init__(
        self, configs: Configs | None = None, *, form: str | None = None, deterministic: bool = True, sm_margin: int = 0
    ) -> None:
        """`configs`: block sizes for every call; by default the table's for its device, dtype and head dimensions.

        `form`: one of `ringattn.kernels.launch.FORMS`, by default the best that can do a call (see `forms`).
        `deterministic`: False takes the fused backward, which adds dQ in whatever order. `sm_margin`: multiprocessors
        left to an exchange meanwhile.
        """
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
        """Keep the tiles; their block tables are made for the first call, which brings the dtype and the device."""
        if why := too_steep(softmax):
            raise UnsupportedError(why)
        whole = PassTables(steps, softmax, rows, heads, more, visits)
        return [TritonWork(whole, step) for step in range(len(whole.steps))]

    def begin(self, works: Sequence[TritonWork], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Uninitialized where the first launches of all rows are known. Raises as `attend` does."""
        # The blocks of `attend`: their flags say which launches read a state.
        config = self._forward_config(q, value_dim, _options(works))
        if not works:
            return super().begin(works, q, value_dim, sinks)
        tables = works[0].whole.by_query(config, q.device)
        # All steps, so that a pass is refused before its first launch.
        check_specialized(config, all(tables.single), _options(works), q)
        # Without flags every launch reads the state, so it must be set.
        if not tables.flagged:
            return super().begin(works, q, value_dim, sinks)
        # The FIRST block of a row does not read its lse, so it need not be filled.
        lse = q.new_empty(q.shape[1], q.shape[2], q.shape[0], dtype=torch.float32)
        return SoftmaxState(_uninitialized(q, value_dim, tables.alone), lse, sinks)

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: TritonWork) -> None:
        """Accumulate the tiles into the state, in place. UnsupportedError for float64 and head dimensions > 256."""

        def describe(
            q: Tensor, k: Tensor, v: Tensor, lse: Tensor, out: Tensor | None, result: Tensor | None,
            sinks: Tensor | None,
        ) -> list[LaunchCall]:  # fmt: skip
            options = _options([work])
            config = self._forward_config(q, v.shape[3], options)
            tables = work.whole.by_query(config, q.device)
            table = tables.steps[work.step]
            # The specialized kernel takes one entry in a block, read by descriptors.
            check_specialized(config, tables.single[work.step], options, q, k, v)
            # Strides or borders of tensors may be none that a descriptor can have.
            config = readable(config, q, k, v, architecture(q.device), options, self._named)
            if config.form == "gluon":
                facts = _facts(kv, work)
                return [
                    forward_gluon(
                        q, k, v, out, lse, table, config, scale=facts["scale"], group=facts["group"],
                        first_kv_head=facts["first_kv_head"], result=result, sinks=sinks,
                    )
                ]  # fmt: skip
            return [forward(q, k, v, out, lse, table, config, result=result, sinks=sinks, **_facts(kv, work))]

        operands = (q, kv.k, kv.v, state.lse, *state.out, state.sinks)
        self._launch(work, kv, operands, describe, state.dropout_seed)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """By a kernel, in one pass."""
        delta = dout.new_empty(dout.shape[1], dout.shape[2], dout.shape[0], dtype=torch.float32)
        if dout.dtype not in DTYPES:
            return super().delta(dout, out, dlse)
        with torch.cuda.device_of(dout):
            delta_call(dout, out, dlse, delta).run()
        return delta

    def begin_grad(self, works: Sequence[TritonWork], q: Tensor, value_dim: int) -> Output:
        """Uninitialized where the first launches of all rows are known. Raises as `attend` does."""
        # The same blocks as `attend_grad` takes for dQ: their flags say what is read.
        config = self._gradient_configs(q, value_dim, _options(works)).grad_q
        # The fused backward adds to dQ atomically, so dQ must begin at zero.
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
        """Add the tiles' gradients to `dq` and `dkv`, in place, `dq` first, or write the last sums to `result`.

        Raises as `attend` does.
        """

        def describe(
            q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor | None,
            dv: Tensor | None, k_result: Tensor | None, v_result: Tensor | None, dq: Tensor | None,
            result: Tensor | None,
        ) -> list[LaunchCall]:  # fmt: skip
            results = None if k_result is None or v_result is None else (k_result, v_result)
            options, rows, facts = _options([work]), (q, k, v, dout, lse, delta), _facts(kv, work)
            table = self._configs_for(q, v.shape[3], options)
            if not self._deterministic:
                assert dq is not None
                # Key blocks read q and dout block by block, so these are what a descriptor must be able to read.
                by_key = loadable(table.grad_fused, q, dout)
                keys = work.whole.by_key(by_key, q.device).steps[work.step]
                return [grad_kv(*rows, dk, dv, keys, by_key, results=results, dq=dq, **facts)]
            configs = self._gradient_configs(q, v.shape[3], options)
            configs = gradients_readable(configs, table, (q, k, v, dout), architecture(q.device), options, self._named)
            queries = work.whole.by_query(configs.grad_q, q.device).steps[work.step]
            # Its flags are those of the step: the first on these keys, or the last, or both.
            keys = work.whole.by_key(configs.grad_kv, q.device).steps[work.step]
            # dQ by query blocks, dK and dV by key blocks: no two programs add to one row, so the bits repeat.
            if configs.grad_q.form == "gluon":
                scale, group, held = facts["scale"], facts["group"], facts["first_kv_head"]
                return [
                    grad_q_gluon(
                        *rows, dq, queries, configs.grad_q, scale=scale, group=group, first_kv_head=held, result=result
                    ),
                    grad_kv_gluon(
                        *rows, dk, dv, keys, configs.grad_kv, scale=scale, group=group, first_kv_head=held,
                        results=results,
                    ),
                ]  # fmt: skip
            return [
                grad_q(*rows, dq, queries, configs.grad_q, result=result, **facts),
                grad_kv(*rows, dk, dv, keys, configs.grad_kv, results=results, **facts),
            ]

        sums, results = ((None, None) if one is None else (one.k, one.v) for one in (dkv, result))
        operands = (q, kv.k, kv.v, inputs.dout, inputs.lse, inputs.delta, *sums, *results, *dq)
        self._launch(work, kv, operands, describe, inputs.dropout_seed)

    def workspace_bytes(self, work: TritonWork, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """The tensor descriptors that its launches make in global memory; block tables stay.

        Of launches that are described, what their kernels ask for; before, of the forms that a call would take by
        default, of tensors that descriptors can read.
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
            launches = [(by_key, self._configs_for(q, sizes.value_dim, options).grad_fused, 0)]
        else:
            configs = self._gradient_configs(q, sizes.value_dim, options)
            # By Gluon the rows of dout have a descriptor too.
            launches = [(by_query, configs.grad_q, 1), (by_key, configs.grad_kv, 1)]
        most = 0
        for tables_of, config, more in launches:
            if config.form == "pointers":
                continue
            # Made on the host: this may be asked because memory is short.
            table = tables_of(config, torch.device("cpu")).steps[work.step]
            programs, gluon = grid_of(table, sizes.batch, None)[0], config.form == "gluon"
            if self.sm_margin or (gluon and not backward):
                # One program of Gluon's fills a multiprocessor, two of the others, of 256 threads, at most.
                programs = min(programs, usable(device.index or 0, self.sm_margin) * (1 if gluon else 2))
            most = max(most, programs * (DESCRIPTORS[config.form] + more * gluon) * DESCRIPTOR_BYTES)
        return most

    def _launch(
        self, work: TritonWork, kv: KV, operands: Operands, describe: Callable[..., Sequence[LaunchCall]], seed: int
    ) -> None:
        """Launch what `describe` makes of the operands, once for each kind of them; then repeat it.

        `seed`: of dropout, another one in each launch.
        """
        q = operands[0]
        assert q is not None
        device = q.get_device()
        # Triton launches on the current device, whatever the tensors' own.
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(work, kv, operands, describe, seed)
            return
        # What a compiled launch depends on; addresses are given anew in each call.
        key = (device, kv.first_head, q.dtype, q.shape, kv.v.shape, layouts(operands))
        launches = work.launches.get(key)
        if launches is None:
            # Two operands may be one tensor: each gets an object of its own, by which it is told apart.
            own = [None if x is None else x.detach() for x in operands]
            launches = tuple(kept.repeat(call, own, self.sm_margin) for call in describe(*own))
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
        # One table of block sizes: the wider of keys and values decides.
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
            # What Gluon has no blocks for `begin` refuses.
            configs = configs_for(arch, q.dtype, dim)._replace(forward=CONFIG)
            return configs._replace(grad_q=GRAD_Q[dim], grad_kv=GRAD_KV[dim]) if dim in GRAD_Q else configs
        try:
            if self._form == "specialized":
                return specialized_configs(arch, q.dtype, dim)
            configs = configs_for(arch, q.dtype, dim, self._form)
            return with_dropout(configs) if "dropout_p" in options else configs
        except LookupError as error:
            raise UnsupportedError(f"engine 'triton': {error}; leave the form to the table") from error


def _uninitialized(q: Tensor, dim: int, alone: bool) -> Output:
    """(rows, batch, heads, dim) views, batches outermost: the result, and where not `alone` what is carried."""
    shape = (q.shape[1], q.shape[0], q.shape[2], dim)
    result = q.new_empty(shape).transpose(0, 1)
    # A float32 result is its own state; else the state is float32 beside a result in the dtype of q.
    if alone or q.dtype == torch.float32:
        return Output(None if alone else result, result)
    return Output(q.new_empty(shape, dtype=torch.float32).transpose(0, 1), result)


def _facts(kv: KV, work: TritonWork) -> CallOptions:
    """The keywords of a launch."""
    softmax, slopes, p = work.whole.softmax, work.whole.slopes(kv.k.device), work.whole.softmax.dropout_p
    # The seed comes with each launch.
    dropout = None if p is None else Dropout(0, threshold(p), 1 - p)
    return {
        "scale": softmax.scale, "softcap": softmax.softcap, "group": softmax.group, "first_kv_head": kv.first_head,
        "slopes": slopes, "dropout": dropout,
    }  # fmt: skip


def _options(works: Sequence[TritonWork]) -> Options:
    """Which options of the softmax a pass uses."""
    return tuple(works[0].whole.softmax.options()) if works else ()


@cache
def architecture(device: torch.device) -> int:
    """The architecture with block sizes that `device` runs: 10 * major + minor, the nearest that is not above its own.

    The interpreter takes the oldest. Raises UnsupportedError for a GPU older than that.
    """
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    found = nearest((major, minor))
    if found is None:
        raise UnsupportedError(
            f"engine='triton' needs a GPU from sm_{ARCHITECTURES[0]} on, not sm_{major}{minor}; use engine='plain'"
        )
    return found


def too_steep(softmax: Softmax) -> str | None:
    """Why this engine takes no such slopes, or None."""
    steepest = max((abs(slope) for slope in softmax.alibi_slopes or ()), default=0.0)
    if steepest <= STEEPEST:
        return None
    return f"engine='triton' takes alibi_slopes to {STEEPEST:.0f}, of either sign, not {steepest:g}; use engine='plain'"


def missing(device: torch.device) -> str | None:
    """Why this engine cannot run on `device`, or None."""
    if device.type == "cuda" or triton.knobs.runtime.interpret:
        return None
    return f"engine='triton' needs a CUDA device, not {device}; use engine='auto' or engine='plain'"


# --- block tables of a pass ------------------------------------------------------------------------------------------
# A table is made once for each side, block size and device, when its block size is first known. Its flags say which
# launches are the first and the last to update a row. For query rows `flagged` sets them, for all steps or for none;
# for key rows they follow the step's `Visit`.


class Tables(NamedTuple):
    """The block tables of a pass, one a step. `flagged`: they say which blocks are the first and last on their rows.

    `alone`: every block is both, so that nothing is carried. `single`: the steps whose blocks have one entry each.
    """

    steps: list[Table]
    flagged: bool
    alone: bool
    single: list[bool]


class PassTables:
    """The tiles of a pass's steps with the block tables that were made of them so far."""

    def __init__(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> None:
        """`more`: no step of these is the last that adds to a row. `visits`: of each step to its dK/dV."""
        self.steps, self.softmax, self.rows, self.heads = [tuple(tiles) for tiles in steps], softmax, rows, heads
        # Outputs of other ranks are still merged after these steps, so the state must be kept.
        self.more = more
        self.visits = visits or [Visit()] * len(self.steps)
        self._made: dict[tuple[str, int, int, torch.device], Tables] = {}
        self._slopes: dict[torch.device, Tensor] = {}

    def slopes(self, device: torch.device) -> Tensor | None:
        """Those of ALiBi, one for each query head of the call."""
        if self.softmax.alibi_slopes is None:
            return None
        if device not in self._slopes:
            self._slopes[device] = torch.tensor(self.softmax.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes[device]

    def by_query(self, config: Config, device: torch.device) -> Tables:
        """Query blocks of `config.block_m` rows; their entries are in key blocks of `config.block_n`."""
        own, other = config.block_m, config.block_n
        make = [partial(query_blocks, tiles, softmax=self.softmax) for tiles in self.steps]
        return self._kept("query", make, own, other, device)

    def by_key(self, config: Config, device: torch.device) -> Tables:
        """Key blocks of `config.block_n` rows; their entries are in query blocks of `config.block_m`."""
        # K/V heads own the blocks here, so an entry also says which query heads of its group. Rows that no query sees
        # have a block where they must be set, or converted.
        make = [
            partial(key_blocks, tiles, self.softmax.group, unseen=any(visit), softmax=self.softmax)
            for tiles, visit in zip(self.steps, self.visits, strict=True)
        ]
        return self._kept("key", make, config.block_n, config.block_m, device)

    def _kept(
        self, side: str, make: Sequence[Callable[..., Blocks]], own: int, other: int, device: torch.device
    ) -> Tables:
        # Kernels of equal block sizes share a table.
        key = (side, own, other, device)
        if key not in self._made:
            made = [one(own_rows=own, other_rows=other) for one in make]
            if side == "key":
                # A step is the first, or the last, on all rows of its tiles.
                for one, visit in zip(made, self.visits, strict=True):
                    one.blocks[:, BlockColumn.FLAGS] = FIRST * visit.overwrite | LAST * visit.last
            # Only query rows carry a state between steps; with `more` to come none of these steps is the last.
            known = side == "query" and not self.more and flagged(made, self.rows, self.heads)
            # Every block the first and last on its rows: one step does all its work.
            alone = known and all((one.blocks[:, BlockColumn.FLAGS] == FIRST | LAST).all() for one in made)
            # What the specialized kernel can take: at most one entry in a block.
            single = [one_entry_each(torch.from_numpy(one.blocks)) for one in made]
            # Copied after `flagged`, which writes the flags into the host arrays.
            tables = [_table_on(device, one, side == "key") for one in made]
            self._made[key] = Tables(tables, known, alone, single)
        return self._made[key]


def _table_on(device: torch.device, made: Blocks, keys_own: bool) -> Table:
    places, positions = (None if one is None else _on(device, one) for one in (made.places, made.positions))
    together = 1 if made.positions is None else _together(made.positions[:, 0 if keys_own else 2 :])
    return Table(_on(device, made.blocks), _on(device, made.entries), made.slots, places, positions, together)


def _together(keys: Ints) -> int:
    """`Table.together` of entries whose first key has the position of the first column, the stride being the second."""
    # Blocks have 16 keys or a multiple of it.
    return 1 if (keys[:, 1] != 1).any() or (keys[:, 0] % KEYS_OF_A_COUNTER).any() else KEYS_OF_A_COUNTER


def _on(device: torch.device, columns: Ints) -> Tensor:
    return torch.from_numpy(columns).to(device)
