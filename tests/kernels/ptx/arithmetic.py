"""Instructions that read and write only registers: a table from opcodes to functions of 32 lanes.

A register is an array of 32 unsigned integers of its width; predicates are Booleans. Functions never change their
arguments. Fused operations are computed in float64 and then rounded to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Lanes = np.ndarray[Any, Any]

F2, F4, F8, I1, I2, I4, I8 = np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64
U2, U4, U8 = np.uint16, np.uint32, np.uint64
SMALLEST_NORMAL = np.finfo(F4).tiny


def _floats(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    return lambda *args: function(*(x.view(F4) for x in args)).view(U4)


def _float_pairs(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    return lambda *args: function(*(np.ascontiguousarray(x).view(F4) for x in args)).view(U8)


def _signed(function: Callable[..., Lanes], kind: type) -> Callable[..., Lanes]:
    unsigned = {I4: U4, I8: U8}[kind]
    return lambda *args: function(*(x.view(kind) for x in args)).view(unsigned)


def _compared(function: Callable[..., Lanes], kind: type) -> Callable[..., Lanes]:
    return lambda a, b: function(a.view(kind), b.view(kind))


def _flushed(x: Lanes) -> Lanes:
    """Replace subnormal numbers by 0 of the same sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, x * F4(0), x)


def _fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (a.astype(F8) * b + c).astype(F4)


def _exp2(x: Lanes) -> Lanes:
    return _flushed(np.exp2(_flushed(x)))


def _quotient(a: Lanes, b: Lanes) -> Lanes:
    """Divide integers and round towards zero; a division by 0 gives 0."""
    whole = np.where(b == 0, 1, b)
    # Floor division is exact for 64 bits; it differs for quotients that are negative and not whole.
    down = a // whole
    return np.where(b == 0, 0, down + ((a % whole != 0) & ((a < 0) != (whole < 0)))).astype(a.dtype)


def _remainder(a: Lanes, b: Lanes) -> Lanes:
    return a - _quotient(a, b) * b


def packed(low: Lanes | None, high: Lanes | None, half: type[np.generic]) -> Lanes:
    """Return numbers of two halves. LLVM may pack a register without a value, and then never reads that half."""
    undefined = np.full(32, -1).astype(half)
    halves = np.stack([undefined if part is None else part.astype(half) for part in (low, high)], 1)
    return halves.view(U8 if half is U4 else U4).reshape(-1)


def to_bf16(x: Lanes) -> Lanes:
    """Round float32 bits to the bits of bfloat16, ties to even."""
    rounded = ((x + U4(0x7FFF) + ((x >> U4(16)) & U4(1))) >> U4(16)).astype(U2)
    return np.where(np.isnan(x.view(F4)), U2(0x7FFF), rounded)


def to_f16(x: Lanes) -> Lanes:
    """Round float32 bits to the bits of float16, ties to even."""
    return x.view(F4).astype(np.float16).view(U2)


def from_bf16(x: Lanes) -> Lanes:
    """Return the float32 bits of the bits of bfloat16."""
    return x.astype(U4) << U4(16)


def from_f16(x: Lanes) -> Lanes:
    """Return the float32 bits of the bits of float16."""
    return x.view(F2).astype(F4).view(U4)


E4M3_MAGNITUDES = np.array(
    [(1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) if code >= 8 else code * 2.0**-9 for code in range(127)]
)
"""The finite magnitudes of an eight-bit float with 4 bits of exponent and 3 of mantissa, by code; code 127 is NaN."""


def to_e4m3(x: Lanes) -> Lanes:
    """Round float32 bits to the bits of e4m3, ties to even; larger numbers become the largest one."""
    numbers = x.view(F4).astype(F8)
    magnitude = np.minimum(np.abs(numbers), E4M3_MAGNITUDES[-1])
    above = np.searchsorted(E4M3_MAGNITUDES, magnitude).clip(1, len(E4M3_MAGNITUDES) - 1)
    to_upper, to_lower = E4M3_MAGNITUDES[above] - magnitude, magnitude - E4M3_MAGNITUDES[above - 1]
    code = np.where((to_lower < to_upper) | ((to_lower == to_upper) & (above % 2 == 1)), above - 1, above)
    return (np.where(np.isnan(numbers), 127, code) + np.where(np.signbit(numbers), 128, 0)).astype(U2)


def _pair_from_e4m3(x: Lanes) -> Lanes:
    """Return the two float16 numbers, in 32 bits, of two e4m3 numbers in 16 bits."""
    codes = np.stack((x & U2(0xFF), x >> U2(8)))
    magnitude = np.append(E4M3_MAGNITUDES, np.nan)[codes & 127]
    low, high = np.where(codes > 127, -magnitude, magnitude).astype(F2).view(U2)
    return _packed(high, low)


def _permuted_bytes(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    """Select four of the eight bytes of `a` and `b` (`prmt`); with bit 3 of a selector, repeat the byte's sign."""
    both, result = a.astype(U8) | b.astype(U8) << U8(32), np.zeros_like(a)
    for byte in range(4):
        choice = selector >> U4(4 * byte) & U4(15)
        chosen = (both >> (8 * (choice & U4(7))).astype(U8)).astype(U4) & U4(0xFF)
        sign = np.where(chosen >> U4(7), U4(0xFF), U4(0))
        result |= np.where(choice > 7, sign, chosen) << U4(8 * byte)
    return result


def _truncated(x: Lanes) -> Lanes:
    """Round float32 bits towards zero to 16-bit integers, saturating; NaN becomes 0."""
    return np.nan_to_num(np.trunc(x.view(F4)).clip(-(1 << 15), (1 << 15) - 1), nan=0.0).astype(I2).view(U2)


def _packed(high: Lanes, low: Lanes) -> Lanes:
    return high.astype(U4) << U4(16) | low


def _shifted(function: Callable[[Lanes, Lanes], Lanes], width: int) -> Callable[..., Lanes]:
    """Return a shift that gives 0 for a count of at least the width."""

    def shift(a: Lanes, count: Lanes) -> Lanes:
        return np.where(count < width, function(a, np.minimum(count, width - 1).astype(a.dtype)), a.dtype.type(0))

    return shift


def _bit_field(a: Lanes, start: Lanes, length: Lanes) -> Lanes:
    return (a >> start) & ((U4(1) << length) - U4(1))


def _signed_bit_field(a: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """Extract bits whose last one is the sign. `length` is at least 1, and the bits are inside the word."""
    left = U4(32) - length - start
    return ((a << left).view(I4) >> (U4(32) - length).view(I4)).view(U4)


def _wide(a: Lanes, b: Lanes) -> Lanes:
    return (a.view(I4).astype(I8) * b.view(I4)).view(U8)


def _max(*values: Lanes) -> Lanes:
    """Return the largest of two or three numbers without the NaNs."""
    return np.fmax.reduce(values)


def _max_or_nan(*values: Lanes) -> Lanes:
    """Return the largest of two or three numbers, or NaN if one is NaN."""
    return np.maximum.reduce(values)


PLAIN: dict[str, Callable[..., Lanes]] = {
    "add.f32": _floats(np.add), "sub.f32": _floats(np.subtract), "mul.f32": _floats(np.multiply),
    "neg.f32": _floats(np.negative), "abs.f32": _floats(np.abs), "max.f32": _floats(_max),
    "max.NaN.f32": _floats(_max_or_nan), "div.full.f32": _floats(np.divide), "div.rn.f32": _floats(np.divide),
    "rsqrt.approx.ftz.f32": _floats(lambda x: _flushed(F4(1) / np.sqrt(_flushed(x)))),
    "abs.bf16": lambda a: a & U2(0x7FFF),
    "cvt.rmi.ftz.f32.f32": _floats(lambda x: np.floor(_flushed(x))),
    "fma.rn.f32": _floats(_fma), "fma.rn.ftz.f32": _floats(lambda a, b, c: _flushed(_fma(*map(_flushed, (a, b, c))))),
    "add.f32x2": _float_pairs(np.add), "sub.f32x2": _float_pairs(np.subtract), "mul.f32x2": _float_pairs(np.multiply),
    "fma.rn.f32x2": _float_pairs(_fma),
    "ex2.approx.ftz.f32": _floats(_exp2), "ex2.approx.f32": _floats(np.exp2),
    "add.s32": np.add, "add.s64": np.add, "sub.s32": np.subtract, "sub.s64": np.subtract,
    "mul.lo.s32": np.multiply, "mul.lo.s64": np.multiply, "mad.lo.s32": lambda a, b, c: a * b + c,
    "mul.wide.s32": _wide, "mad.wide.s32": lambda a, b, c: _wide(a, b) + c,
    "mul.wide.u16": lambda a, b: a.astype(U4) * b, "mul.wide.u32": lambda a, b: a.astype(U8) * b,
    "mul.hi.u32": lambda a, b: (a.astype(U8) * b >> U8(32)).astype(U4),
    "mad.lo.s64": lambda a, b, c: a * b + c, "mad.wide.u32": lambda a, b, c: a.astype(U8) * b + c,
    "neg.s32": lambda a: (~a) + U4(1),
    "div.s32": _signed(_quotient, I4), "div.s64": _signed(_quotient, I8), "div.u32": _quotient,
    "rem.s32": _signed(_remainder, I4), "rem.u32": _remainder,
    "min.s32": _signed(np.minimum, I4), "max.s32": _signed(np.maximum, I4),
    "shl.b16": _shifted(np.left_shift, 16), "shl.b32": _shifted(np.left_shift, 32),
    "shl.b64": _shifted(np.left_shift, 64), "shr.u32": _shifted(np.right_shift, 32),
    "shr.u64": _shifted(np.right_shift, 64),
    "shr.u16": _shifted(np.right_shift, 16),
    "shr.s32": lambda a, count: (a.view(I4) >> np.minimum(count, 31).view(I4)).view(U4),
    "shr.s64": lambda a, count: (a.view(I8) >> np.minimum(count, 63).astype(I8)).view(U8),
    "bfe.u32": _bit_field, "bfe.s32": _signed_bit_field, "prmt.b32": _permuted_bytes,
    "cvt.s64.s32": lambda a: a.view(I4).astype(I8).view(U8), "cvt.u64.u32": lambda a: a.astype(U8),
    "cvt.u32.u64": lambda a: a.astype(U4), "cvt.u32.u16": lambda a: a.astype(U4), "cvt.u16.u32": lambda a: a.astype(U2),
    "cvt.rn.f32.s32": lambda a: a.view(I4).astype(F4).view(U4),
    "cvt.rn.f32.u32": lambda a: a.astype(F4).view(U4),
    "cvt.rn.f32.s16": lambda a: a.view(I2).astype(F4).view(U4), "cvt.rzi.s16.f32": _truncated,
    "cvt.s8.s32": lambda a: a.astype(I1).astype(I2).view(U2),
    "cvt.rn.bf16.f32": to_bf16, "cvt.rn.f16.f32": to_f16, "cvt.f32.bf16": from_bf16, "cvt.f32.f16": from_f16,
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: to_e4m3(high) << U2(8) | to_e4m3(low),
    "cvt.rn.f16x2.e4m3x2": _pair_from_e4m3,
    "cvt.rn.bf16x2.f32": lambda high, low: _packed(to_bf16(high), to_bf16(low)),
    "cvt.rn.f16x2.f32": lambda high, low: _packed(to_f16(high), to_f16(low)),
    "cvta.global.u64": lambda a: a,
    "not.pred": np.logical_not, "not.b32": np.invert,
    **{f"{name}.{kind}": function for kind in ("pred", "b16", "b32", "b64")
       for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor))},
    **{f"selp.{kind}": lambda a, b, chosen: np.where(chosen, a, b) for kind in ("f32", "b16", "b32", "b64")},
    **{f"mov.{kind}": lambda a: a for kind in ("b16", "u16", "b32", "u32", "b64", "u64", "pred", "f32")},
    **{f"setp.{name}.{kind}{width}": _compared(function, view)
       for name, function in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less), ("le", np.less_equal),
                              ("gt", np.greater), ("ge", np.greater_equal))
       for kind, width, view in (("s", 32, I4), ("u", 32, U4), ("b", 32, U4), ("f", 32, F4), ("s", 64, I8),
                                 ("u", 64, U8), ("b", 64, U8), ("u", 16, U2), ("b", 16, U2))},
    "setp.neu.f32": _compared(np.not_equal, F4),
}  # fmt: skip
"""The function of each opcode. Its arguments are the operands after the first, which is the destination."""
