"""Real text for the demo and the tests: bytes in, the same windows of tokens out on every rank.

Without a file it is the language reference that every Python carries (`pydoc_data.topics`, about 460 kB), so nothing
is downloaded. One byte is one token. A batch is a pure function of (text, seed, step).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import Tensor

from ringattn.errors import InputError

VOCABULARY = 256
"""Number of different tokens: the values of a byte."""


def load_text(path: str = "") -> Tensor:
    """The bytes of the file at `path`, or of Python's language reference if `path` is empty: uint8, (bytes,).

    Raises `InputError` if the file cannot be read or is empty.
    """
    if path:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"text={path}: {error.strerror or error}") from error
    else:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    if not content:
        raise InputError(f"text={path}: the file is empty")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def windows(text: Tensor, step: int, batch: int, tokens: int, seed: int) -> Tensor:
    """The batch of one step: int64, (batch, tokens), windows of `text` at random places.

    The places depend on (seed, step) alone, so every rank draws the same ones and a run can start at any step.
    Raises `InputError` if the text is shorter than one window.
    """
    places = len(text) - tokens + 1
    if places < 1:
        raise InputError(f"tokens={tokens}: the text has only {len(text)} bytes; choose a longer file with text=PATH")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(places, (batch, 1), generator=generator)
    return text[starts + torch.arange(tokens)].long()
