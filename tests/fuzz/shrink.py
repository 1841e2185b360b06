"""Makes a failing case smaller, step by step, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy

from tests.fuzz.choices import OF_DOCUMENTS
from tests.fuzz.draw import Case
from tests.fuzz.session import error_of

USUAL = {
    "kv_seq": None, "cut_later": False, "batch": 1, "sinks": None, "grads": "qkv", "strides": ["plain"] * 3,
    "size": 1.0, "uses": {"out": "weighted", "lse": False}, "twice": False, "in_place": False,
    "backward_twice": False, "mode": "train", "via": "ring",
}  # fmt: skip


FAULTS = ("raised", "refused on some", "is answered", "is refused", "NaN came back", "nan at", "off by")


def fault(error: str) -> str:
    """What sort of fault an error tells of."""
    return next((one for one in FAULTS if one in error), error)


def shrunk(case: Case, error: str, seconds: float) -> Case | None:
    """A smaller case with a fault of the same sort; None where none was found in time."""
    until, best = time.monotonic() + seconds, None
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(best or case):
            if time.monotonic() > until:
                return best
            try:
                failed = error_of(smaller)
            except Exception:  # no case at all
                continue
            if failed and fault(failed) == fault(error):
                best, progress = smaller, True
                break
    return best


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that are one step simpler."""

    def changed(**keys: object) -> Case:
        return deepcopy(case) | keys

    calls = case.get("calls", [])
    if "odd" not in case:
        for index in range(len(calls)):
            kept = [deepcopy(call) for at, call in enumerate(calls) if at != index]
            if kept and all(call["like"] is None or call["like"] < index for call in kept):
                yield changed(calls=kept, order=None)
        for ranks in range(1, case["ranks"]):
            yield changed(ranks=ranks)
    for key, usual in (
        ("autocast", None),
        ("nodes", None),
        ("ring", {}),
        ("dtype", "float64"),
        ("order", None),
        ("steps", 1),
    ):
        if key in case and case[key] != usual and not ("odd" in case and key in ("order", "dtype")):
            yield changed(**{key: usual})
    for index in range(len(calls) or 1):
        for smaller in _smaller_call(calls[index] if calls else case):
            if not calls:
                yield deepcopy(case) | smaller
                continue
            new = deepcopy(case)
            for at, call in enumerate(new["calls"]):
                if at == index or call["like"] is not None:  # what is alike stays so
                    call |= deepcopy(smaller)
            yield new


def _smaller_call(call: Case) -> Iterator[Case]:
    """What to change in a call, or in a layer."""
    for key, usual in USUAL.items():
        if key in call and call[key] != usual:
            yield {key: usual}
    for key in ("seq", "kv_seq"):
        if call.get(key):
            for seq in _smaller_sequence(call[key]):
                yield {key: seq}
    options = call.get("options", {})
    for key in options:
        if key not in ("causal", "schedule", "segment_lengths", "dilation_rates", "head_dim", "num_kv_heads", "bias",
                       "qk_norm", "rope"):  # fmt: skip
            yield {"options": {name: value for name, value in options.items() if name != key}}
    if options.get("schedule", "auto") != "auto":
        yield {"options": options | {"schedule": "auto"}}
    branches, names = len(options.get("segment_lengths", ())), ("segment_lengths", "dilation_rates")
    for at in range(branches if branches > 1 else 0):
        yield {"options": options | {name: [*options[name][:at], *options[name][at + 1 :]] for name in names}}
    if isinstance(call.get("heads"), list):
        for heads in ([1, 1], [2, 1], [2, 2], [4, 4]):
            if heads[0] < call["heads"][0]:
                yield {"heads": heads}
        if max(call["dims"]) > 2:
            yield {"dims": [2, 2]}


def _smaller_sequence(seq: Case) -> Iterator[Case]:
    length, cuts = seq["length"], seq["documents"]
    if cuts is not None:
        yield seq | {"documents": None} | ({"layout": "zigzag"} if seq["layout"] in OF_DOCUMENTS else {})
        for at in range(1, len(cuts) - 1):
            yield seq | {"documents": [*cuts[:at], *cuts[at + 1 :]]}
    for less in sorted({length // 2, length * 3 // 4, length - 1} - {length}):
        if less >= 0:
            yield seq | {"length": less} | ({} if cuts is None else {"documents": [min(cut, less) for cut in cuts]})
    if seq["layout"] not in ("contiguous", "auto") and cuts is None:
        yield seq | {"layout": "contiguous"}
