"""What differs between the versions of transformers that the adapter runs with: 4.57 and 5.18 to 5.23.

Guarantees: no other module of the adapter asks for a version, or for a name that one of these versions lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ringattn.adapters.hosts import require_checked

CHECKED = ("4.57", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")
"""Minor versions; docs/embedding-transformers.md has a table of what was tried with each."""


def require_known() -> None:
    """Raise `UnsupportedError` unless the installed transformers is one of these."""
    require_checked("transformers", *CHECKED)


def query_places(arguments: Mapping[str, Any]) -> tuple[int, int | Tensor]:
    """How many queries a mask function is asked for, and where the first of them is.

    4.57 gives the places of all of them instead of the two numbers.
    """
    places = arguments.get("cache_position")
    if places is None:
        return arguments["q_length"], arguments.get("q_offset", 0)
    return len(places), int(places[0])


def mask_functions() -> Mapping[Callable[..., Any], str]:
    """The functions that masks are made of, and what each means. Documents are those of the sequence."""
    from transformers import masking_utils as host

    nothing: Any = None
    meanings = {
        host.causal_mask_function: "causal",
        host.sliding_window_overlay(nothing): "window",
        host.chunked_overlay(nothing, nothing): "chunks",
        host.packed_sequence_mask_function(nothing): "documents",
        host.and_masks(): "and",
    }
    # Not of 4.57, whose encoders make their masks by themselves.
    if hasattr(host, "bidirectional_mask_function"):
        meanings[host.bidirectional_mask_function] = "full"
    if hasattr(host, "sliding_window_bidirectional_overlay"):
        meanings[host.sliding_window_bidirectional_overlay(nothing)] = "both ways"
    if chunks_begin_with_documents():
        meanings[host.remap_positions_for_packed_sequence(nothing, nothing)] = "documents"
    return meanings


def chunks_begin_with_documents() -> bool:
    """Whether chunks of packed documents are counted from the start of each. Before 5.23: from that of the row."""
    from transformers import masking_utils as host

    return hasattr(host, "remap_positions_for_packed_sequence")
