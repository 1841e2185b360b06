"""Durations as people read them: predicted times lie between a microsecond and a year."""

from __future__ import annotations

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def duration(seconds: float) -> str:
    """Four digits in the unit that suits: `163.2 us`, `15.32 ms`, `3,088 s`; never a power of ten."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if seconds >= 0.99995 * scale), UNITS[-1])
    number = seconds / scale
    if number >= 999.95:
        return f"{number:,.0f} {unit}"
    return f"{number:.4g} {unit}" if number >= 0.01 or not number else f"<0.01 {unit}"
