"""The refusals that the definitions require. Any other refusal is a failure, and so is a result of an invalid call."""

from __future__ import annotations

import re
from itertools import pairwise

from ringattn.schedule.routes import NUMBERED
from tests.fuzz.choices import OF_DOCUMENTS
from tests.fuzz.draw import Case
from tests.fuzz.reference import slice_pairs


def must_refuse(case: Case, call: Case) -> str | None:
    """Return why every rank must refuse the call, or None."""
    options = call["options"] | (call["bad"] or {})
    if call["bad"]:
        return f"{call['bad']} has no meaning"
    if case["engine"] == "aten" and (lacked := {"softcap", "alibi_slopes", "dropout_p"} & options.keys()):
        return f"torch's fused kernels do not support {', '.join(sorted(lacked))}"
    if case["engine"] == "triton" and case["dtype"] == "float64":
        return "the Triton kernels do not support float64"
    if "kv_wire_dtype" in case["ring"] and case["dtype"] == "float64":
        return "float64 keys are not sent in eight bits"
    if options.get("schedule") in NUMBERED and _nodes_are_uneven(case):
        return f"{options['schedule']} needs equally many ranks on each node"
    for seq in (call["seq"], call["kv_seq"]):
        if seq and (reason := has_no_layout(seq)):
            return reason
    kind, _, text = (options.get("mask") or "").partition(":")
    if kind == "slices" and options["causal"]:
        lengths = (call["seq"]["length"], (call["kv_seq"] or call["seq"])["length"])
        if slice_pairs(*lengths, text).triu(1).any():
            return "slices have keys that causal excludes"
    if "alibi_slopes" in options and "tree" in (options.get("mask") or ""):
        return "distances in a tree are not those of packed positions"
    if options.get("grad") == "detached" and call["sinks"]:
        return "a sink belongs to no branch"
    if options.get("tail") == "zero_pad":
        if options.get("alibi_slopes") is not None:
            return "zero keys have no positions"
        longest = max(stop - start for start, stop in pairwise(call["seq"]["documents"] or (0, call["seq"]["length"])))
        branches = zip(options["segment_lengths"], options["dilation_rates"], strict=True)
        if any(w % r and w < longest for w, r in branches):
            return "torchscale moves the rows of later segments"
    return None


def has_no_layout(seq: Case) -> str | None:
    """Return why no rank can make this sequence, or None."""
    if seq["layout"] in OF_DOCUMENTS and seq["documents"] is None:
        return f"{seq['layout']} needs documents"
    if seq["layout"] != "mask":
        return None
    kind, _, text = (seq["mask"] or "").partition(":")
    if kind == "slices" and any(_end(item) > seq["length"] for item in text.split(",") if item):
        return "the keys of slices are not those of the sequence"
    if kind in ("", "global_tokens"):
        return "layout=mask needs a mask that needs no window"
    if seq["for_"] not in ("causal", "full"):
        return f"for_={seq['for_']} has no meaning for layout=mask"
    if seq["for_"] == "full" and kind in ("prefix", "bidirectional_blocks"):
        return f"{kind} needs causal"
    return None


def _end(item: str) -> int:
    """Return where the queries and keys of a slice end; 0 for a slice without pairs, which says nothing."""
    end = max(map(int, re.findall(r"-(\d+)", item)))
    return end if slice_pairs(end, end, item).any() else 0


def _nodes_are_uneven(case: Case) -> bool:
    """Return whether there are several nodes and the last one is not full."""
    nodes = case.get("nodes")
    return bool(nodes) and case["ranks"] > nodes["ranks"] and case["ranks"] % nodes["ranks"] > 0


def calls_differ(case: Case) -> bool:
    """Return whether the first call of one rank differs in effect from that of the others.

    A change of `causal` has no effect if the window ends at the query, or if there are no queries or no keys.
    """
    change, call = case.get("odd", {}).get("change"), case["calls"][0]
    window = call["options"].get("window")
    is_empty = not call["seq"]["length"] or (call["kv_seq"] is not None and not call["kv_seq"]["length"])
    same = change in ({"causal": True}, {"causal": False}) and (is_empty or (window is not None and window[1] == 0))
    return change is not None and not same and case["ranks"] > 1
