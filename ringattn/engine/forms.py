"""Which form of the forward and the gradient kernels the Triton engine runs: the best that can do a call.

Guarantees: gluon and specialized, asked for by name, run, or the call is refused by name; else a form gives way, for
the calls that it cannot take, to the next of gluon, descriptors and pointers. What decides about block sizes is known
before a pass; a tensor that no descriptor can read changes the form and not the blocks, so that tables and flags hold.
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
    """The form and the blocks of forward, by what is known before a pass.

    `table`: what there is without Gluon. `named`: that is what was asked for, and no other will do.
    Raises UnsupportedError where "gluon" was asked for and cannot do the call.
    """
    why = gluon_lacks(arch, q.dtype, (q.shape[3], value_dim), options)
    if named and table.form == "gluon":
        # Head dimensions that fit are equal, so q stands for k and v, which are not there yet.
        if refusal := why or gluon_takes(q, q, q, arch, options):
            raise _refused(refusal)
    return table if named or why else CONFIG


def readable(config: Config, q: Tensor, k: Tensor, v: Tensor, arch: int, options: Options, named: bool) -> Config:
    """The same blocks in a form that can read these tensors. Raises UnsupportedError as `forward_config` does."""
    if config.form == "gluon" and (why := gluon_takes(q, k, v, arch, options)):
        if named:
            raise _refused(why)
        config = config._replace(num_warps=8, form="descriptors")
    return loadable(config, k, v)


def check_specialized(config: Config, single: bool, options: Options, *rows: Tensor) -> None:
    """Refuse, where `config` has the form "specialized", what its kernel cannot run; no one has it but by name.

    `single`: every block of queries meets one run of keys. `rows`: what is read by descriptors.
    Raises UnsupportedError.
    """
    if config.form != "specialized":
        return
    if lacks := [name for name in options if name != "softcap"]:
        raise _refused(f"the specialized kernel has no {lacks[0]}", "specialized")
    if not single:
        why = "a block of queries meets several runs of keys, and the specialized kernel takes one"
        raise _refused(why, "specialized")
    if not describable(*rows):
        strides = ", ".join(f"{x.dtype} of strides {x.stride()}" for x in rows)
        why = f"the specialized kernel takes bases and strides that are multiples of 16 bytes, not {strides}"
        raise _refused(why, "specialized")


def gradient_configs(table: Configs, q: Tensor, value_dim: int, arch: int, options: Options, named: bool) -> Configs:
    """The forms and the blocks of dQ and of dK with dV, by what is known before a pass. `table`, `named`: as above."""
    if named or gluon_lacks(arch, q.dtype, (q.shape[3], value_dim), options):
        return table
    return table._replace(grad_q=GRAD_Q[value_dim], grad_kv=GRAD_KV[value_dim])


def gradients_readable(
    configs: Configs, table: Configs, rows: tuple[Tensor, Tensor, Tensor, Tensor], arch: int, options: Options,
    named: bool,
) -> Configs:  # fmt: skip
    """The same in forms that can read q, k, v and dout: Gluon or, for all of them, those of the table.

    The table's blocks of dQ have as many queries as Gluon's, so flags hold. Raises UnsupportedError as the above.
    """
    q, k, v, dout = rows
    if configs.grad_q.form == "gluon" and (why := gluon_takes(q, k, v, arch, options, dout)):
        if named:
            raise _refused(why)
        configs = table
    return configs._replace(grad_q=loadable(configs.grad_q, k, v), grad_kv=loadable(configs.grad_kv, q, dout))


def loadable(config: Config, *read: Tensor) -> Config:
    """The same blocks by plain loads where a tensor descriptor cannot read the rows of all the tensors."""
    if config.form == "pointers" or describable(*read):
        return config
    return config._replace(num_warps=8, form="pointers")


def told(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Options) -> str:
    """Which form runs where none is asked for, and what keeps a better one from it, in words."""
    form = configs_for(arch, dtype, max(dims)).forward.form
    if why := gluon_lacks(arch, dtype, dims, options):
        return f"forward by the form {form} ({why})"
    return f"forward by the form gluon, or {form} for tensors that it cannot take"


def nearest(capability: tuple[int, int]) -> int | None:
    """The architecture with block sizes that a GPU runs: 10 * major + minor, the nearest that is not above its own."""
    return max((one for one in ARCHITECTURES if one <= 10 * capability[0] + capability[1]), default=None)


def on_device(capability: tuple[int, int]) -> str:
    """Which forms would run on a GPU, in half precision the best first, in words."""
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


def _refused(why: str, form: str = "gluon") -> UnsupportedError:
    return UnsupportedError(f"engine 'triton' with form={form!r}: {why}; leave the form to the table")
