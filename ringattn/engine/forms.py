"""The choice of the kernels' form (gluon, descriptors or pointers) for the Triton engine.

Guarantees: a form that was requested by name runs, or the call is refused with an error. Otherwise the choice is the
first of gluon, descriptors and pointers that supports the call. Block sizes are chosen before a pass. A tensor that no
descriptor can read changes only the form, never the block sizes, so the block tables and their flags stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.errors import UnsupportedError
from ringattn.kernels.attention_gluon import (
    CONFIG,
    DIMS,
    GRAD_KV,
    GRAD_Q,
    gluon_lacks,
    gluon_missing,
    gluon_takes,
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
    why = gluon_lacks(arch, q.dtype, (q.shape[3], value_dim), options)
    if named and table.form == "gluon":
        # K and V are not available yet. Gluon needs equal head dimensions, so q can represent them.
        if refusal := why or gluon_takes(q, q, q, arch, options):
            raise _refused(refusal)
    return table if named or why else CONFIG


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
    """Return the form and the blocks of the dQ kernel and of the dK/dV kernel; arguments as for `forward_config`."""
    if named or gluon_lacks(arch, q.dtype, (q.shape[3], value_dim), options):
        return table
    return table._replace(grad_q=GRAD_Q[value_dim], grad_kv=GRAD_KV[value_dim])


def gradients_readable(
    configs: Configs, table: Configs, rows: tuple[Tensor, Tensor, Tensor, Tensor], arch: int, options: Options,
    named: bool,
) -> Configs:  # fmt: skip
    """Return `configs` in forms that can read q, k, v and dout: Gluon for both kernels, or the table's forms for both.

    Blocks of dQ have the same number of queries in the table and in Gluon, so the flags stay valid. Raises
    UnsupportedError if "gluon" was requested and cannot read the tensors.
    """
    q, k, v, dout = rows
    if configs.grad_q.form == "gluon" and (why := gluon_takes(q, k, v, arch, options, dout)):
        if named:
            raise _refused(why)
        configs = table
    return configs._replace(grad_q=loadable(configs.grad_q, k, v), grad_kv=loadable(configs.grad_kv, q, dout))


def loadable(config: Config, *read: Tensor) -> Config:
    """Return `config`, with plain loads if a descriptor cannot read the rows of all these tensors."""
    if config.form == "pointers" or describable(*read):
        return config
    return config._replace(num_warps=8, form="pointers")


def describe_forms(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Options) -> str:
    """Describe the form that runs by default, and why a better form does not support the call."""
    form = configs_for(arch, dtype, max(dims)).forward.form
    if why := gluon_lacks(arch, dtype, dims, options):
        return f"forward uses form {form} ({why})"
    return f"forward uses form gluon, or {form} for tensors that gluon cannot read"


def default_form(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Options) -> str:
    """Return the form that runs by default, for tensors that it can read."""
    missing = gluon_lacks(arch, dtype, dims, options)
    return configs_for(arch, dtype, max(dims)).forward.form if missing else "gluon"


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
    if why := gluon_missing(arch):
        return f"engine='triton' on {name}: {rest} ({why})"
    dims = " and ".join(map(str, DIMS))
    return (
        f"engine='triton' on {name}: gluon for head dimensions {dims} without softcap, ALiBi and dropout, else {rest}"
    )


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"engine 'triton' with form='gluon': {why}; leave form unset")
