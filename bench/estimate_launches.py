"""The launches whose speed is estimated: our kernels by form and head dimension, and a plain one to compare with.

Guarantees: ordinary calls, with small tensors on the CPU, as an engine makes them in a middle step that can end a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ringattn.bench.plain_attention import plain_call
from ringattn.kernels.attention_backward import grad_fused, grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_gluon import CONFIG, DIMS, forward_gluon
from ringattn.kernels.attention_gluon_backward import GRAD_KV, GRAD_Q, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch_call import Config, LaunchCall, Table

PRODUCTS = {"forward": 2, "grad_q": 3, "grad_kv": 4, "grad_fused": 5}
"""Matrix products of a block of queries with a block of keys."""
PLAIN = Config(128, 128, 8, 2)


class Launch(NamedTuple):
    """`form`: of `launch_call.FORMS`, or "plain"."""

    form: str
    kernel: str
    dim: int
    call: Callable[[], LaunchCall]


def launches(arch: int, dims: tuple[int, ...]) -> Iterator[Launch]:
    """Those that there are for a GPU; beside sm_90, in the form that it runs by."""
    forms = ("descriptors", "pointers") if arch == 90 else ("descriptors",) if arch > 90 else ("pointers",)
    for dim in dims:
        if arch == 90:
            yield Launch("plain", "forward", dim, partial(plain_call, dim, PLAIN))
        if arch == 90 and dim in DIMS:
            for kernel, config in (("forward", CONFIG), ("grad_q", GRAD_Q[dim]), ("grad_kv", GRAD_KV[dim])):
                yield Launch("gluon", kernel, dim, partial(_call, "gluon", kernel, dim, config))
        for form in forms:
            try:
                configs = configs_for(arch, torch.bfloat16, dim, form)
            except LookupError:
                continue
            for kernel in PRODUCTS:
                config = getattr(configs, kernel)
                if config.form == form:
                    yield Launch(form, kernel, dim, partial(_call, form, kernel, dim, config))


def _call(form: str, kernel: str, dim: int, config: Config) -> LaunchCall:
    q, k, v, dout, half = (torch.zeros(64, 1, 16, dim, dtype=torch.bfloat16) for _ in range(5))
    sum_q, sum_k, sum_v = (torch.zeros(64, 1, 16, dim) for _ in range(3))
    lse, delta = (torch.zeros(1, 16, 64) for _ in range(2))
    table = Table(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32), 16)
    if kernel == "forward":
        made = forward_gluon if form == "gluon" else forward
        return made(q, k, v, sum_q, lse, table, config, scale=0.1, result=half)
    if kernel == "grad_q":
        of_q = grad_q_gluon if form == "gluon" else grad_q
        return of_q(q, k, v, dout, lse, delta, sum_q, table, config, scale=0.1, result=half)
    if kernel == "grad_kv":
        of_kv = grad_kv_gluon if form == "gluon" else grad_kv
        return of_kv(q, k, v, dout, lse, delta, sum_k, sum_v, table, config, scale=0.1, results=(half, half))
    return grad_fused(q, k, v, dout, lse, delta, sum_q, sum_k, sum_v, table, config, scale=0.1, results=(half, half))
