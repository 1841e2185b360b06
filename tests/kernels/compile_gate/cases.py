"""The cases of the compile gate: each entry of the block-size tables, compiled by the library's launch functions.

Guarantees: a case is a name such as `sm_90/half/128/descriptors/forward`, followed by a variant of the call if there is
one. `call_of` returns the launch of a case with small tensors on the CPU. If the name has no variant, the call has the
arguments of an engine's last step in a pass, which writes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_gluon import WIDE_KEYS, forward_gluon, gluon_configs, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.attention_options import CallOptions, Dropout
from ringattn.kernels.configs import ARCHITECTURES, DIMS, configs_for, with_dropout
from ringattn.kernels.launch import FORMS, PLACES, POSITIONS, LaunchCall, Table

DTYPES = {"half": torch.bfloat16, "single": torch.float32}
KERNELS = ("forward", "grad_q", "grad_kv", "grad_fused")
WIDE = {"wide_keys": WIDE_KEYS[0]}
"""For each variant with wide keys, the dimension of a key. Values have 128, and the calls use the entries for 256."""

DROPOUT = {"dropout": 4, "apart": 1}
"""For each variant with dropout, the number of adjacent keys that share a call of the random generator."""


def arch_of(name: str) -> int:
    """Return the architecture of a case: 10 * major + minor of the compute capability."""
    return int(name.split("/")[0].removeprefix("sm_"))


def _entries() -> list[str]:
    """Return the cases of all kernels for each entry of the tables, without entries that use another form instead."""
    names = []
    for arch in ARCHITECTURES:
        for precision, dtype in DTYPES.items():
            for width in DIMS:
                for form in FORMS:
                    try:
                        configs = configs_for(arch, dtype, width, form)
                    except LookupError:
                        continue
                    kernels = [kernel for kernel in KERNELS if getattr(configs, kernel).form == form]
                    names += [f"sm_{arch}/{precision}/{width}/{form}/{kernel}" for kernel in kernels]
    return names


def _variants() -> list[str]:
    """Return the cases of calls with options such as a softcap, for one architecture of each generation."""
    forms = {80: "pointers", 90: "descriptors", 100: "descriptors"}
    of_128 = (
        "forward/softcap", "forward/sinks", "grad_q/softcap", "grad_kv/softcap",
        "forward/alibi", "grad_q/alibi", "grad_kv/alibi",
        "forward/dropout", "grad_q/dropout", "grad_kv/dropout", "forward/apart", "grad_kv/apart",
    )  # fmt: skip
    of_256 = ("forward/wide_keys", "grad_q/wide_keys", "grad_kv/wide_keys")
    widths = [(128, variant) for variant in of_128] + [(256, variant) for variant in of_256]
    return [f"sm_{arch}/half/{width}/{form}/{variant}" for arch, form in forms.items() for width, variant in widths]


ATTENTION = (*_entries(), *_variants())

GLUON_OPTIONS = {
    "": (), "softcap": ("softcap",), "alibi": ("alibi_slopes",), "both": ("softcap", "alibi_slopes"),
}  # fmt: skip
"""For each variant of a call of Gluon's kernels, the names of its options."""

GLUON_VARIANTS = {
    64: ("", "softcap", "alibi", "both"), 128: ("", "softcap", "alibi", "both"), 192: ("",), 256: ("", "softcap"),
}  # fmt: skip
"""The variants of each dimension of keys. With keys of 192, values have 128."""

TENSOR_MEMORY = tuple(
    f"sm_100/half/{width}/gluon/{kernel}" for width in (64, 128) for kernel in ("forward", "grad_q", "grad_kv")
)
"""The cases of the Gluon kernels for tensor memory."""

GLUON = (
    *(
        f"sm_90/half/{width}/gluon/{kernel}{variant and '/' + variant}"
        for width, variants in GLUON_VARIANTS.items()
        for kernel in ("forward", "grad_q", "grad_kv")
        for variant in variants
    ),
    *(f"sm_90/half/{width}/gluon/grad_fused" for width in (64, 128)),
    *TENSOR_MEMORY,
)

ENTRIES = (*ATTENTION, *GLUON)


def value_dim_of(key_dim: int) -> int:
    """Return the head dimension of values in calls with keys of `key_dim`."""
    return WIDE_KEYS[1] if key_dim == WIDE_KEYS[0] else key_dim


def entries_of(version: str, names: Sequence[str] = ENTRIES) -> tuple[str, ...]:
    """Return the cases that a version of Triton compiles."""
    return tuple(name for name in names if not (version.startswith("3.9.") and name in TENSOR_MEMORY))


def options_of(name: str) -> tuple[str, ...]:
    """Return the names of the options in a case of Gluon's kernels."""
    return GLUON_OPTIONS[(*name.split("/")[5:], "")[0]]


def _tested(name: str) -> bool:
    """Return whether the tests compile the case. (`renew` compiles every case.)

    The tests compile half precision on one architecture of each generation, and float32 and variants on sm_90.
    """
    _, precision, _, _, _, *variant = name.split("/")
    return arch_of(name) in ((80, 90, 100) if precision == "half" and not variant else (90,))


TESTED = tuple(name for name in ENTRIES if _tested(name))


def _counted(name: str) -> bool:
    """Return whether the instructions in the inner loops of the case are counted.

    They are counted for all forms of half precision on sm_90, and for the default forms of sm_80 and sm_100 and Gluon
    on sm_100 up to dimension 128.
    """
    arch, precision, width, form, _, *variant = name.split("/")
    elsewhere = (arch, form) in (("sm_80", "pointers"), ("sm_100", "descriptors"), ("sm_100", "gluon"))
    elsewhere = elsewhere and width != "256"
    return precision == "half" and not variant and (arch == "sm_90" or elsewhere)


COUNTED = tuple(name for name in ENTRIES if _counted(name))
"""The cases whose inner loops are in the table of instruction counts (`loops.py`)."""


SPILLS_OF_TRITON_3_9 = (
    *(f"sm_{arch}/half/256/pointers/grad_fused" for arch in (80, 86, 89, 120)), "sm_90/half/256/descriptors/grad_fused",
    "sm_90/half/128/descriptors/grad_kv/softcap", "sm_90/half/128/gluon/forward/softcap",
    "sm_90/half/128/gluon/grad_fused", "sm_90/half/192/gluon/grad_kv", "sm_90/half/256/gluon/forward",
    "sm_90/half/256/gluon/forward/softcap", "sm_90/half/256/gluon/grad_kv", "sm_90/half/256/gluon/grad_kv/softcap",
)  # fmt: skip
"""The cases that spill in their loop with Triton 3.9 only. Its code needs more registers (docs/internals/log.md)."""


SPILLS_OF_TRITON_3_6 = tuple(name for name in TENSOR_MEMORY if name.endswith("forward"))
"""The cases that spill in their loops with Triton 3.6 only."""


def may_spill(name: str, version: str) -> bool:
    """Return whether the case may spill in its loop over matrix products, as much as the golden table allows."""
    # A consumer of this kernel loads five bounds of the mask again in each masked block. The programs of a launch share
    # their work by a counter, which takes the registers, and end up to 20 % sooner (`ringattn.bench.makespan`).
    known = "/single/" in name or name == "sm_90/half/128/gluon/grad_kv"
    of_version = {"3.6": SPILLS_OF_TRITON_3_6, "3.9": SPILLS_OF_TRITON_3_9}
    return known or name in of_version.get(version[:3], ())


def call_of(name: str) -> LaunchCall:
    """Return the launch to compile, with the sizes and alignments of ordinary calls."""
    _, precision, width, form, kernel, *variants = name.split("/")
    variant, dtype = (*variants, "")[0], DTYPES[precision]
    d_k = WIDE.get(variant, int(width))
    d_v = value_dim_of(d_k)
    if name in GLUON:
        config = getattr(gluon_configs(d_k, options_of(name), arch_of(name)), kernel)
    else:
        configs = configs_for(arch_of(name), dtype, d_k, form)
        config = getattr(with_dropout(configs) if variant in DROPOUT else configs, kernel)
    rows = _rows(d_k, dtype), _rows(d_k, dtype), _rows(d_v, dtype)
    lse, delta = (torch.zeros(1, 16, 64) for _ in range(2))
    columns = [torch.zeros(16, n, dtype=torch.int32) for n in (8, 16, PLACES, POSITIONS)]
    slopes = torch.zeros(16) if variant in ("alibi", "both") else None
    dropout = Dropout(1, 1, 0.5) if variant in DROPOUT else None
    table = Table(
        columns[0],
        columns[1],
        16,
        None if slopes is None else columns[2],
        None if dropout is None else columns[3],
        together=DROPOUT.get(variant, 1),
    )
    scale, softcap = 0.1, 5.0 if variant in ("softcap", "both") else None
    options: CallOptions = {"scale": scale, "softcap": softcap, "slopes": slopes, "dropout": dropout}
    gluon = name in GLUON
    if kernel == "forward":
        sinks = torch.zeros(16) if variant == "sinks" else None
        launch_forward = forward_gluon if gluon else forward
        return launch_forward(
            *rows, _rows(d_v), lse, table, config, result=_rows(d_v, dtype), sinks=sinks, **options
        )  # fmt: skip
    seed = *rows, _rows(d_v, dtype), lse, delta
    if kernel == "grad_q":
        launch_q = partial(grad_q_gluon, arch=arch_of(name)) if gluon else grad_q
        return launch_q(*seed, _rows(d_k), table, config, result=_rows(d_k, dtype), **options)
    grads, results = (_rows(d_k), _rows(d_v)), (_rows(d_k, dtype), _rows(d_v, dtype))
    dq = _rows(d_k) if kernel == "grad_fused" else None
    launch_kv = partial(grad_kv_gluon, arch=arch_of(name)) if gluon else grad_kv
    return launch_kv(*seed, *grads, table, config, results=results, dq=dq, **options)


def _rows(dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(64, 1, 16, dim, dtype=dtype)
