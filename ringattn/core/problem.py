"""The facts of one attention call, as one hashable value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal

from ringattn.core.layout import Layout
from ringattn.core.mask import HeadPart, Mask
from ringattn.errors import InputError

FLOATS = ("float64", "float32", "float16", "bfloat16")
FloatName = Literal["float64", "float32", "float16", "bfloat16"]
EIGHT_BIT = ("int8", "float8_e4m3fn")
EightBitName = Literal["int8", "float8_e4m3fn"]
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Problem:
    """One attention call on all ranks.

    `wire_dtype`: the dtype in which dK and dV are sent; None: the accumulator dtype. `kv_wire_dtype`: the dtype in
    which K and V are sent, one of `EIGHT_BIT`; None: `dtype`. `out_wire_dtype`: the dtype in which partial outputs are
    sent; None: the accumulator dtype. `latent_dims`: the sizes of a rotary key and of a latent, if these are stored
    and sent in place of K and V, and every step expands them into the K and V of all heads; None: K and V are sent.
    `keep_received`: see `Ring`.
    """

    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    wire_dtype: str | None = None
    kv_wire_dtype: str | None = None
    out_wire_dtype: str | None = None
    latent_dims: tuple[int, int] | None = None
    keep_received: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` if the facts contradict each other."""
        if self.dtype not in FLOATS:
            raise InputError(f"q, k and v are {self.dtype}, which is not supported; use one of {', '.join(FLOATS)}")
        for name, wire in (("dkv_wire_dtype", self.wire_dtype), ("out_wire_dtype", self.out_wire_dtype)):
            if wire is not None and wire not in FLOATS:
                raise InputError(f"{name} {wire} is not supported; use one of {', '.join(FLOATS)}")
        if self.kv_wire_dtype is not None and self.kv_wire_dtype not in EIGHT_BIT:
            raise InputError(f"kv_wire_dtype {self.kv_wire_dtype} is not supported; use one of {', '.join(EIGHT_BIT)}")
        if self.kv_wire_dtype is not None and self.dtype == "float64":
            raise InputError(f"float64 K and V cannot be sent as {self.kv_wire_dtype}; use kv_wire_dtype=None")
        for name, size in (("q_heads", self.q_heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim)):
            if size < 1:
                raise InputError(f"{name}={size}, where attention needs at least 1")
        if self.q_heads % self.kv_heads:
            raise InputError(f"q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}")

    @property
    def record_dims(self) -> tuple[int, int]:
        """The sizes of the two vectors of a K/V record: K and V, or a rotary key and a latent."""
        return self.latent_dims or (self.head_dim, self.value_dim)

    @property
    def world_size(self) -> int:
        """Number of ranks of the ring."""
        return self.q_layout.world_size

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.q_heads // self.kv_heads

    @property
    def accumulator_dtype(self) -> str:
        """The dtype of partial outputs and gradient accumulators."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def kv_dtype(self) -> str:
        """The dtype in which K and V are sent."""
        return self.kv_wire_dtype or self.dtype

    @cached_property
    def parts(self) -> tuple[HeadPart, ...]:
        """The K/V heads that are sent together (see `Mask.parts`)."""
        return self.mask.parts(self.q_heads, self.kv_heads)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ if any fact differs."""
        return sha256(repr(self).encode()).digest()


def wire_name(option: str, dtype: object, supported: tuple[str, ...]) -> str | None:
    """Return the name of a dtype in which data is sent, given as torch's dtype or its name.

    Raises `InputError` if it is not supported.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and name not in supported:
        raise InputError(f"{option}={dtype} is not supported; use one of {', '.join(supported)}")
    return name
