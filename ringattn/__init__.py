"""ringattn: exact attention over sequences that no single device can hold."""

from ringattn.activation import active_sequence
from ringattn.dilated_modules import (
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)
from ringattn.errors import (
    ClosedError,
    DeadlineError,
    DisagreementError,
    InputError,
    PeerLostError,
    PlanError,
    RingError,
    TransportError,
    UnsupportedError,
)
from ringattn.modules import RingAttention, RingMultiheadAttention
from ringattn.ring import Ring
from ringattn.sequence import Sequence

__all__ = [
    "ClosedError",
    "DeadlineError",
    "DilatedAttention",
    "DisagreementError",
    "InputError",
    "MultiheadDilatedAttention",
    "PeerLostError",
    "PlanError",
    "Ring",
    "RingAttention",
    "RingDilatedAttention",
    "RingError",
    "RingMultiheadAttention",
    "RingMultiheadDilatedAttention",
    "Sequence",
    "TransportError",
    "UnsupportedError",
    "active_sequence",
]
