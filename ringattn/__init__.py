"""ringattn: exact attention over sequences that no single device can hold.

Names are loaded at their first use, so that a command's `--help` does not wait for torch. Messages go to the logger
"ringattn".
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringattn.batch import MicroBatch
    from ringattn.errors import (
        ClosedError,
        DeadlineError,
        DisagreementError,
        InputError,
        NonFiniteError,
        OutOfMemoryError,
        PeerLostError,
        PlanError,
        RingError,
        TransportError,
        UnsupportedError,
    )
    from ringattn.layers.attention import RingAttention, RingMultiheadAttention
    from ringattn.layers.dilated import (
        DilatedAttention,
        MultiheadDilatedAttention,
        RingDilatedAttention,
        RingMultiheadDilatedAttention,
    )
    from ringattn.layers.recurrent import GatedDeltaRule, SelectiveState, ShortConvolution
    from ringattn.ring import Ring
    from ringattn.runtime.activation import active_sequence
    from ringattn.sequence import Sequence
    from ringattn.transport.nccl.options import NcclOptions

    __version__: str

__all__ = [
    "ClosedError",
    "DeadlineError",
    "DilatedAttention",
    "DisagreementError",
    "GatedDeltaRule",
    "InputError",
    "MicroBatch",
    "MultiheadDilatedAttention",
    "NcclOptions",
    "NonFiniteError",
    "OutOfMemoryError",
    "PeerLostError",
    "PlanError",
    "Ring",
    "RingAttention",
    "RingDilatedAttention",
    "RingError",
    "RingMultiheadAttention",
    "RingMultiheadDilatedAttention",
    "SelectiveState",
    "Sequence",
    "ShortConvolution",
    "TransportError",
    "UnsupportedError",
    "__version__",
    "active_sequence",
]

_MODULES = {
    "MicroBatch": "batch",
    "NcclOptions": "transport.nccl.options",
    "Ring": "ring",
    "Sequence": "sequence",
    "active_sequence": "runtime.activation",
    **dict.fromkeys(("RingAttention", "RingMultiheadAttention"), "layers.attention"),
    **dict.fromkeys((name for name in __all__ if "Dilated" in name), "layers.dilated"),
    **dict.fromkeys(("GatedDeltaRule", "SelectiveState", "ShortConvolution"), "layers.recurrent"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
}

logging.getLogger("ringattn").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
    return getattr(import_module(f"ringattn.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ringattn")
    except PackageNotFoundError:
        return "0+checkout"
