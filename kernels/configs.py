"""Block sizes of the attention kernels, by precision, form, GPU architecture and head dimension.

The data is in configs.json: `[block_m, block_n, num_warps, num_stages]` for each kernel. Float32 has small blocks and
many warps, the same on every architecture: its products run without matrix units, and each thread holds whole rows.
Guarantees: every entry compiles within the architecture's shared memory, and in half precision without spills in its
loop over matrix products (tests/kernels/test_compile_gate.py). Nothing is timed or tuned at run time, and the entries
are not yet tuned for speed on any GPU.
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
    """A config for each kernel. The default blocks of `grad_fused` fit every GPU and head dimension."""

    forward: Config
    grad_q: Config
    grad_kv: Config
    grad_fused: Config = Config(32, 32, 8, 1)


DIMS = (64, 128, 256)
"""The head dimensions with entries. A call uses the smallest that is not below its own."""

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""10 * major + minor of the compute capability."""


def configs_for(arch: int, dtype: torch.dtype, dim: int, form: str | None = None) -> Configs:
    """Return the entry for `arch` (90 for sm_90), inputs of `dtype` and the larger of the two head dimensions.

    `form`: one of `launch.FORMS`. The default for half precision is "descriptors" if there is an entry, else
    "pointers", which supports every tensor. The block sizes of other forms are defined next to their kernels.
    Raises LookupError, with the available entries, if there is no entry.
    """
    if arch not in ARCHITECTURES:
        supported = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise LookupError(f"no block sizes for sm_{arch}; there are some for {supported}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise LookupError(f"no block sizes for {dtype}; there are some for float32, float16 and bfloat16")
    width = next((entry_dim for entry_dim in DIMS if dim <= entry_dim), None)
    if width is None:
        raise LookupError(f"no block sizes for head dimension {dim}; there are some for dimensions to {DIMS[-1]}")
    entries = _entries(arch, dtype == torch.float32, width)
    chosen = form or ("descriptors" if "descriptors" in entries else "pointers")
    if chosen not in entries:
        available = ", ".join(entries)
        raise LookupError(
            f"no block sizes of form {chosen!r} for sm_{arch}, {dtype}, head dimension {dim}; there are some of "
            f"{available}"
        )
    return entries[chosen]


def with_dropout(configs: Configs) -> Configs:
    """Return configs with smaller blocks of the other side: random words take registers, and loops must not spill."""
    forward, grad_q, *by_key = configs
    return Configs(
        *(config._replace(block_n=max(16, config.block_n // 2)) for config in (forward, grad_q)),
        *(config._replace(block_m=max(16, config.block_m // 4)) for config in by_key),
    )


def put_config(arch: int, dim: int, form: str, kernel: str, config: Config) -> None:
    """Write a half-precision entry to configs.json. The table that this process has read does not change."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table.setdefault(f"half/{form}/sm_{arch}/{dim}", {})[kernel] = list(config[:4])
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(kernels)}" for key, kernels in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@cache
def _entries(arch: int, single: bool, width: int) -> dict[str, Configs]:
    """Return the entries of an architecture, precision and dimension, by form."""
    configs: dict[str, Configs] = {}
    for form in ("pointers", "descriptors"):
        place = f"single/{form}/any/{width}" if single else f"half/{form}/sm_{arch}/{width}"
        entry = {kernel: Config(m, n, w, s, form) for kernel, (m, n, w, s) in _table().get(place, {}).items()}
        if entry:
            configs[form] = Configs(**entry)
    return configs


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
