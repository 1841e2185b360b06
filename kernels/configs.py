"""Which block sizes the attention kernels get: data, by precision, form, GPU architecture and head dimension.

The data is configs.json, `[block_m, block_n, num_warps, num_stages]` for each kernel. Float32, whose products run
without matrix units, each thread holding whole rows, has small blocks and many warps, alike on every architecture.
Guarantees: every entry compiles within the architecture's shared memory, and in half precision without spills in its
loop over matrix products (tests/kernels/test_compile_gate.py). Nothing is timed or tuned at run time; not yet tuned for
speed on any GPU.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ringattn.kernels.launch import Config

TABLE = Path(__file__).with_name("configs.json")


class Configs(NamedTuple):
    """One for each kernel. By default `grad_fused` has blocks so small that they suit every GPU and head dimension."""

    forward: Config
    grad_q: Config
    grad_kv: Config
    grad_fused: Config = Config(32, 32, 8, 1)


DIMS = (64, 128, 256)
"""A head dimension is served by the first of these that holds it."""

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""10 * major + minor of the compute capability."""


def configs_for(arch: int, dtype: torch.dtype, dim: int, form: str | None = None) -> Configs:
    """The entry for `arch` (90 for sm_90), inputs of `dtype` and the greater of the two head dimensions.

    `form`: one of `launch.FORMS`; by default "descriptors" for half precision where there is an entry, and else
    "pointers", which serves every tensor. Other forms keep their block sizes beside their kernels.
    Raises LookupError, naming what there is, for anything else.
    """
    if arch not in ARCHITECTURES:
        supported = ", ".join(f"sm_{one}" for one in ARCHITECTURES)
        raise LookupError(f"no block sizes for sm_{arch}; there are some for {supported}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise LookupError(f"no block sizes for {dtype}; there are some for float32, float16 and bfloat16")
    width = next((one for one in DIMS if dim <= one), None)
    if width is None:
        raise LookupError(f"no block sizes for head dimension {dim}; there are some for dimensions to {DIMS[-1]}")
    entries = _entries(arch, dtype == torch.float32, width)
    chosen = form or ("descriptors" if "descriptors" in entries else "pointers")
    if chosen not in entries:
        there = ", ".join(entries)
        raise LookupError(
            f"no block sizes of form {chosen!r} for sm_{arch}, {dtype}, head dimension {dim}; there are some of {there}"
        )
    return entries[chosen]


def with_dropout(configs: Configs) -> Configs:
    """The same with fewer rows of the other side at once: draws take registers, which must not spill in a loop."""
    forward, grad_q, *by_key = configs
    return Configs(
        *(one._replace(block_n=max(16, one.block_n // 2)) for one in (forward, grad_q)),
        *(one._replace(block_m=max(16, one.block_m // 4)) for one in by_key),
    )


def put_config(arch: int, dim: int, form: str, kernel: str, config: Config) -> None:
    """Write an entry of half precision into configs.json; the table of this process stays as it was read."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table.setdefault(f"half/{form}/sm_{arch}/{dim}", {})[kernel] = list(config[:4])
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@cache
def _entries(arch: int, single: bool, width: int) -> dict[str, Configs]:
    """Those of one architecture, precision and dimension, by form."""
    found: dict[str, Configs] = {}
    for form in ("pointers", "descriptors"):
        place = f"single/{form}/any/{width}" if single else f"half/{form}/sm_{arch}/{width}"
        own = {kernel: Config(m, n, w, s, form) for kernel, (m, n, w, s) in _table().get(place, {}).items()}
        if own:
            found[form] = Configs(**own)
    return found


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
