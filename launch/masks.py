"""Masks in the words of each command: `mask=window mask.window_tokens=512` is `causal=true left=511` elsewhere.

`mask.window_tokens`, and `window_tokens` of `ringattn plan`, count the query's own key; `left` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ringattn.errors import InputError
from ringattn.launch.lengths import with_lengths

BOUNDS = ("causal", "left", "right")
SIZES = ("mask.window_tokens", "window_tokens")


def mask_words(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words, where a mask in another command's words is said in those of the command with the keys `known`.

    Raises `InputError` for a mask that this command does not have.
    """
    given = {key: value for key, equals, value in (word.partition("=") for word in words) if equals}
    asked = [key for key in ("mask", "mask.kind", *SIZES, *BOUNDS) if key in given and key not in known]
    if "mask.kind" in known:
        asked = [key for key in asked if key in BOUNDS]
    if not asked:
        return list(words)
    rest = [word for word in words if word.partition("=")[0] not in asked]
    if several := [f"{key}={given[key]}" for key in asked if "," in given[key]]:
        raise InputError(f"{several[0]}: give several values in this command's own words; --help lists the keys")
    if "causal" in known:
        return rest + _as_bounds(given, asked, known)
    if "mask.kind" in known:
        return rest + _as_mask(given, asked, "mask.window_tokens")
    if "mask" in known:
        return rest + _as_mask(given, asked, "window_tokens")
    return list(words)


def _as_bounds(given: dict[str, str], asked: Sequence[str], known: Collection[str]) -> list[str]:
    """`causal=` and `left=`, for commands that have these."""
    kind = next((given[key].lower() for key in ("mask", "mask.kind") if key in asked), None)
    size = next((given[key] for key in SIZES if key in asked), None)
    if kind not in ("causal", "full", "window") or (kind == "window") != (size is not None):
        wrong = next(f"{key}={given[key]}" for key in asked)
        raise InputError(f"{wrong}: here masks are full, causal, or window with its window_tokens=")
    if kind == "window" and "left" not in known:
        raise InputError("mask=window: this command has no windows; choose causal or full")
    if clash := [key for key in BOUNDS if key in given]:
        raise InputError(f"{clash[0]}: is part of mask={kind}, which is given too; give only one of them")
    words = [f"causal={'false' if kind == 'full' else 'true'}"]
    return words if size is None else [*words, f"left={_tokens(asked, given) - 1}"]


def _tokens(asked: Sequence[str], given: dict[str, str]) -> int:
    """The window's size, its own key included."""
    key = next(key for key in SIZES if key in asked)
    text = with_lengths(key, given[key])
    if not text.isdecimal() or text == "0":
        raise InputError(f"{key}={given[key]}: must be at least 1")
    return int(text)


def _as_mask(given: dict[str, str], asked: Sequence[str], size: str) -> list[str]:
    """`mask=`, for commands that have it; a window counts the query's own key."""
    if clash := [key for key in ("mask", "mask.kind") if key in given]:
        raise InputError(f"{asked[0]}: is part of a mask, and {clash[0]} is given too; give only one of them")
    causal = given.get("causal", "true").lower()
    if causal not in ("true", "false"):
        raise InputError(f"causal={given['causal']}: should be true or false")
    left, right = (with_lengths(key, given.get(key, "-1")) for key in ("left", "right"))
    if left in ("-1", "null") and right in ("-1", "null"):
        return [f"mask={'causal' if causal == 'true' else 'full'}"]
    if not left.isdecimal() or causal == "false" or right not in ("-1", "0", "null"):
        key = "left" if "left" in asked else "right"
        raise InputError(f"{key}={given[key]}: here windows are causal; give left= of at least 0, and no right=")
    return ["mask=window", f"{size}={int(left) + 1}"]
