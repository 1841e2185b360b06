"""Counts of tokens as people write them: 128k, 1M, 1B, 1e6, 128Ki.

k, M, G are powers of 1000, and so is B, a billion; Ki, Mi, Gi are powers of 1024.

Guarantees: where a letter was written, the count can be told, so that nobody takes 128k for 131,072.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ringattn.errors import InputError

WORD = re.compile(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
"""`key=value`, as Hydra has it; its flags are other words."""
NUMBER = re.compile(r"(?<![\w.])\d[\w.]*(?:(?<=[eE])[+-]\d+)?")
"""What begins as a number, with all that hangs on it."""
LENGTH = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMgG]i?|[bB])?(?![\w.])")
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
COUNTS = ("segment_lengths", "cu_seqlens", "left", "right")


def counts_tokens(key: str) -> bool:
    """Whether the values of this key are counts of tokens."""
    last = key.rpartition(".")[2]
    return "tokens" in last or last in COUNTS


def with_lengths(key: str, value: str) -> str:
    """The value of a key that counts tokens, each count in it a plain number.

    Raises `InputError` for a count with a letter that is no whole number, and for letters that mean nothing.
    """
    if re.fullmatch(r"\d{1,3}(,\d{3})*,0\d\d(,\d{3})*", value):
        raise InputError(f"{key}={value}: write {value.replace(',', '')}, without commas")
    for number in NUMBER.findall(value):
        if not LENGTH.fullmatch(number) and any(map(str.isalpha, number)):
            raise no_length(key, number)

    def plain(match: re.Match[str]) -> str:
        size = float(match[1]) * SIZES[(match[2] or "").lower()]
        if match[0].isdecimal() or (size != int(size) and match[2] is None):
            return match[0]
        if size != int(size):
            raise InputError(f"{key}={match[0]}: is {size:g} tokens; write a whole number of them")
        return str(int(size))

    return LENGTH.sub(plain, value)


def no_length(key: str, value: Any) -> InputError:
    """The error for a value of a key that counts tokens which is no length."""
    return InputError(f"{key}={value}: is no length; write 131072, 128k, 128Ki, 1M, 1Mi, 1e6 or 1B")


def lengths_told(words: Sequence[str]) -> Iterator[str]:
    """What the counts with a letter come to: `tokens=128k is 128,000 tokens (128Ki: 131,072)`."""
    for word in words:
        match = WORD.fullmatch(word)
        if match is None or not counts_tokens(match[2]):
            continue
        for length in LENGTH.finditer(match[3]):
            if length[2] is None:
                continue
            told = f"{match[2]}={length[0]} is {int(with_lengths(match[2], length[0])):,} tokens"
            if not length[2].endswith("i"):
                letter = {"k": "K", "b": "G", "B": "G"}.get(length[2], length[2])
                binary = f"{length[1]}{letter}i"
                told += f" ({binary}: {float(length[1]) * SIZES[letter.lower() + 'i']:,.0f})"
            yield told
