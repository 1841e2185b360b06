"""One rank's memory in training, weighed by two meters at once: resident size and torch's storages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ringattn import Ring
from ringattn.launch.train.config import load_train
from ringattn.launch.train.loop import train
from ringattn.observe.memory import StorageMeter

M_MMAP_THRESHOLD = -3
"""The parameter of glibc's mallopt (malloc.h)."""
MAPPED_FROM_BYTES = 1 << 16


def weigh(ring: Ring, words: Sequence[str]) -> dict[str, Any]:
    """Train on this rank of a fresh process as `words` (key=value of `ringattn train`) say.

    Returns peak growth by both meters and what is kept between steps (`kept_bytes`), in bytes, and the losses.
    """
    # Else glibc keeps freed tensors in its heap, and resident size says what was once used.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
    with StorageMeter() as storages:
        result = train(ring, load_train(words))
    return {
        "resident_bytes": result["memory_growth_bytes"][ring.rank],
        "storage_bytes": storages.peak_bytes,
        "kept_bytes": result["replicated_bytes"],
        "losses": result["losses"],
    }
