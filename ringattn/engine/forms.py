"""The choice of the kernels' form (gluon, descriptors or pointers) for the Triton engine.

Guarantees: a form that was requested by name runs, or the call is refused with an error. Otherwise the choice is the
first of gluon, descriptors and pointers that supports the call; gluon on sm_100 has not run on a GPU, so only its name
chooses it. Block sizes are chosen before a pass. A tensor that no
descriptor can read changes only the form, never the block sizes, so the block tables and their flags stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.errors import UnsupportedError
from ringattn.kernels.attention_gluon import (
    DIMS,
    TENSOR_MEMORY,
    TENSOR_MEMORY_CONFIGS,
    WIDE_KEYS,
    gluon_adds,
    gluon_configs,
    gluon_lacks,
    gluon_missing,
    gluon_takes,
    unreadable,
)
from ringattn.kernels.attention_tiles import describable
from ringattn.kernels.configs import ARCHITECTURES, Configs, configs_for
from ringattn.kernels.launch import Config

Options = Sequence[str]
"""Names of the options of the softmax that a call uses."""


def forward_config(table: Config, q: Tensor, value_dim: int, arch: int, options: Options, named: bool) -> Config:
    """Return the form and the block sizes of forward, as far as they follow from the call alone.

    `table`: the choice without Gluon. `named`: the user requested the form of `table`, so no other may replace it.
    Raises UnsupportedError if "gluon" was requested and does not support the call.
    """
    if named and table.form == "gluon":
        # K and V are not available yet: `readable` checks them.
        why = gluon_lacks(arch, q.dtype, (q.shape[3], value_dim), options)
        if refusal := why or unreadable(q) or _other_kernel(table, TENSOR_MEMORY_CONFIGS.forward, arch):
            raise _refused(refusal)
    chosen = not named and not not_chosen(arch, q.dtype, (q.shape[3], value_dim), options)
    return gluon_configs(q.shape[3], options).forward if chosen else table


def readable(config: Config, q: Tensor, k: Tensor, v: Tensor, arch: int, options: Options, named: bool) -> Config:
    """Return `config` with the same block sizes, in a form that can read these tensors.

    Raises UnsupportedError if "gluon" was requested and cannot read them.
    """
    if config.form == "gluon" and (why := gluon_takes(q, k, v, arch, options)):
        if named:
            raise _refused(why)
        config = config._replace(num_warps=8, form="descriptors")
    return loadable(config, k, v)


def gradient_configs(table: Configs, q: Tensor, value_dim: int, arch: int, options: Options, named: bool) -> Configs:
    """Return the form and the blocks of the backward kernels; arguments as for `forward_config`."""
    if named or not_chosen(arch, q.dtype, (q.shape[3], value_dim), options):
        return table
    gluon = gluon_configs(q.shape[3], options)
    return table._replace(grad_q=gluon.grad_q, grad_kv=gluon.grad_kv, grad_fused=gluon.grad_fused)


def named_gluon(arch: int, dtype: torch.dtype, dim: int, options: Options) -> Configs:
    """Return the blocks of form "gluon". If it has none for a call, `forward_config` or a backward refuses the call."""
    configs = gluon_configs(dim if dim in (*DIMS, WIDE_KEYS[0]) else DIMS[-1], options, arch)
    if arch in TENSOR_MEMORY:
        # A fused backward keeps its default form.
        configs = configs._replace(grad_fused=configs_for(arch, dtype, dim).grad_fused)
    return configs


def gradients_readable(
    configs: Configs, table: Configs, rows: tuple[Tensor, Tensor, Tensor, Tensor], arch: int, options: Options,
    named: bool,
) -> Configs:  # fmt: skip
    """Return `configs` in forms that can read q, k, v and dout: Gluon for both kernels, or the table's forms for both.

    Blocks of dQ keep their number of queries, so the flags stay valid. Raises UnsupportedError if "gluon" was requested
    and cannot read the tensors.
    """
    q, k, v, dout = rows
    refusal = gluon_takes(q, k, v, arch, options, dout) or _other_kernel(
        configs.grad_kv, TENSOR_MEMORY_CONFIGS.grad_kv, arch
    )
    if configs.grad_q.form == "gluon" and refusal:
        if named:
            raise _refused(refusal)
        grad_q = table.grad_q
        if grad_q.block_m != configs.grad_q.block_m:
            grad_q = configs.grad_q._replace(num_warps=8, form="descriptors")
        configs = table._replace(grad_q=grad_q)
    return configs._replace(grad_q=loadable(configs.grad_q, k, v), grad_kv=loadable(configs.grad_kv, q, dout))


def fused_readable(
    configs: Configs, table: Configs, rows: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, arch: int,
    options: Options, named: bool,
) -> Config:  # fmt: skip
    """Return the form and the blocks of a fused backward that reads q, k, v and dout and adds to `dq`.

    Raises UnsupportedError if "gluon" was requested and does not support the tensors.
    """
    q, k, v, dout = rows
    refusal = gluon_takes(q, k, v, arch, options, dout) or gluon_adds(dq, arch, options)
    if configs.grad_fused.form == "gluon" and refusal:
        if named:
            raise _refused(refusal)
        configs = table
    # Key blocks read q and dout block by block, so a descriptor must be able to read these two.
    return loadable(configs.grad_fused, q, dout)


def loadable(config: Config, *read: Tensor) -> Config:
    """Return `config`, with plain loads if a descriptor cannot read the rows of all these tensors."""
    if config.form == "pointers" or describable(*read):
        return config
    return config._replace(num_warps=8, form="pointers")


def describe_forms(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Options) -> str:
    """Describe the form that runs by default, and why a better form does not support the call."""
    form = configs_for(arch, dtype, max(dims)).forward.form
    if why := not_chosen(arch, dtype, dims, options):
        return f"forward uses form {form} ({why})"
    return f"forward uses form gluon, or {form} for tensors that gluon cannot read"


def default_form(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Options) -> str:
    """Return the form that runs by default, for tensors that it can read."""
    why = not_chosen(arch, dtype, dims, options)
    return configs_for(arch, dtype, max(dims)).forward.form if why else "gluon"


def not_chosen(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Options) -> str | None:
    """Return why a call that names no form does not use Gluon, or None."""
    return gluon_lacks(arch, dtype, dims, options) or _untested(arch)


def _other_kernel(config: Config, wide: Config, arch: int) -> str | None:
    """Return why a config that the caller chose is for the kernel of another architecture, or None.

    `wide`: the config of the kernel for tensor memory, which has more queries in a block.
    """
    if (config.block_m == wide.block_m) == (arch in TENSOR_MEMORY):
        return None
    return f"blocks of {config.block_m} queries are for a kernel of another architecture than sm_{arch}"


def _untested(arch: int) -> str | None:
    if arch not in TENSOR_MEMORY:
        return None
    return f"the Gluon kernels for sm_{arch} have not run on a GPU; form='gluon' chooses them"


def nearest(capability: tuple[int, int]) -> int | None:
    """Return the newest architecture with block sizes that the GPU supports, as 10 * major + minor; None if none."""
    return max((arch for arch in ARCHITECTURES if arch <= 10 * capability[0] + capability[1]), default=None)


def on_device(capability: tuple[int, int]) -> str:
    """Describe the forms that would run on a GPU in half precision, the best first."""
    arch, name = nearest(capability), f"sm_{capability[0]}{capability[1]}"
    if arch is None:
        return f"engine='triton' does not run on {name}: it needs sm_{ARCHITECTURES[0]}"
    table = configs_for(arch, torch.bfloat16, DIMS[-1]).forward.form
    rest = "pointers" if table == "pointers" else f"{table}, or pointers for rows that TMA cannot describe"
    if why := gluon_missing(arch) or _untested(arch):
        return f"engine='triton' on {name}: {rest} ({why})"
    dims = f"{', '.join(map(str, DIMS))}, and keys of {WIDE_KEYS[0]} with values of {WIDE_KEYS[1]},"
    return f"engine='triton' on {name}: gluon for head dimensions {dims} without dropout, else {rest}"


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"engine 'triton' with form='gluon': {why}; leave form unset")
