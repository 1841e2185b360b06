"""Masks as values: the argument `mask=` of attention, in addition to `causal` and `window`.

    out = ring.attention(q, k, v, seq, causal=True, mask=masks.chunked(8192))

A mask lowers itself to branches over the sequences of a call, and has a text that `from_text` reads. Attention, layers,
the compiled operator, `explain` and the adapters pass it on without checking its kind. A new mask is a class and a
constructor here, a row in docs/masks.md, and a line in the reference of `ringattn.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ringattn.core.geometry import CAUSAL, FULL, Band
from ringattn.core.mask import AttentionMask, Branch, Frame, Mask
from ringattn.errors import InputError

__all__ = ["AttentionMask", "Chunked", "GlobalTokens", "Prefix", "chunked", "from_text", "global_tokens", "prefix"]


def chunked(tokens: int) -> Chunked:
    """Cut each document into chunks; a query attends only to keys of the same chunk (Llama 4's chunked attention).

    Args:
        tokens: Tokens of a chunk. Chunks start at the start of each document.

    Returns:
        The mask. It combines with `causal` and `window`.

    Raises:
        InputError: `tokens` is not an integer of at least 1.

    Example:
        ring.attention(q, k, v, seq, causal=True, mask=masks.chunked(8192))
    """
    return Chunked(tokens)


def prefix(tokens: int | Sequence[int]) -> Prefix:
    """Let all queries of a document attend to its first keys, whatever `causal` and `window` exclude (prefix-LM).

    Args:
        tokens: The number of first keys, or one number per document.

    Returns:
        The mask. It needs `causal=True`.

    Raises:
        InputError: A number is not an integer of at least 0.

    Example:
        ring.attention(q, k, v, seq, causal=True, mask=masks.prefix(128))
    """
    return Prefix(tokens if isinstance(tokens, int) else tuple(tokens))


def global_tokens(tokens: int) -> GlobalTokens:
    """Let the first tokens of a document attend to all its tokens, and all tokens to them, whatever `window` excludes.

    With `causal`, only later tokens attend to the first tokens (StreamingLLM); without `causal`, all tokens do
    (Longformer).

    Args:
        tokens: The number of first tokens.

    Returns:
        The mask. It needs a `window`.

    Raises:
        InputError: `tokens` is not an integer of at least 1.

    Example:
        ring.attention(q, k, v, seq, causal=True, window=(4095, 0), mask=masks.global_tokens(64))
    """
    return GlobalTokens(tokens)


def from_text(text: str) -> AttentionMask:
    """Read the text of a mask: `from_text(mask.text) == mask`.

    Args:
        text: A name and its numbers, such as `chunked:8192`, `prefix:128` or `prefix:100,30`.

    Returns:
        The mask.

    Raises:
        InputError: The name is not a mask, or it is not followed by whole numbers.

    Example:
        masks.from_text("chunked:8192")
    """
    name, _, numbers = text.partition(":")
    if name not in _CLASSES:
        raise InputError(f"mask={text!r}: {name!r} is not a mask; choose one of {', '.join(_CLASSES)}")
    try:
        values = tuple(int(number) for number in numbers.removesuffix(",").split(","))
    except ValueError:
        raise InputError(f"mask={text!r}: expected whole numbers after {name}:, as in {name}:128") from None
    return _CLASSES[name](values if "," in numbers else values[0])


def check_mask(mask: AttentionMask | None) -> AttentionMask | None:
    """Return the mask. Raises InputError if it is neither a mask nor None."""
    if mask is not None and not isinstance(mask, AttentionMask):
        raise InputError(f"mask={mask!r} is not a mask; make one with ringattn.masks, as masks.chunked(8192)")
    return mask


def refuse_removed(options: Mapping[str, object]) -> None:
    """Raise InputError for an option that a mask has replaced, with the line to write instead.

    Args:
        options: Keyword arguments that a function does not have.

    Raises:
        InputError: A mask has replaced one of the options.
        TypeError: One of the options does not exist.
    """
    for name, value in options.items():
        if name not in _REPLACED:
            raise TypeError(f"{name!r} is not an option of attention")
        if value is not None:
            call = f"mask=masks.{_REPLACED[name]}({value!r})"
            raise InputError(f"{name}={value!r} is now a mask: write {call}, after `from ringattn import masks`")


@dataclass(frozen=True)
class Chunked(AttentionMask):
    """See `chunked`."""

    tokens: int
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_tokens("masks.chunked", self.tokens, 1)
        _set_text(self, f"chunked:{self.tokens}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`. The n-th chunks of two paired documents form a segment."""
        documents = frame.documents
        # If no document is longer than a chunk, nothing is cut. The branch then equals that of the plain mask.
        if all(max(q_stop - q, k_stop - k) <= self.tokens for q, q_stop, k, k_stop in documents):
            return Mask((Branch(frame.bounds, frame.kv_bounds, frame.band),))
        if frame.bounds == frame.kv_bounds:
            return Mask((Branch(frame.bounds, frame.bounds, frame.band, segment=self.tokens),))
        # Paired documents of different length have different numbers of chunks. Empty chunks fill up the shorter one,
        # because chunks pair by index:
        #    q    |0   |4   |8  10|          k    |0   |4 6||
        starts = [
            (min(q + first, q_stop), min(k + first, k_stop))
            for q, q_stop, k, k_stop in documents
            for first in range(0, max(q_stop - q, k_stop - k), self.tokens)
        ]
        q_starts, k_starts = zip(*starts, strict=True)
        return Mask((Branch((*q_starts, frame.bounds[-1]), (*k_starts, frame.kv_bounds[-1]), frame.band),))


@dataclass(frozen=True)
class Prefix(AttentionMask):
    """See `prefix`."""

    tokens: int | tuple[int, ...]
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        counts = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        for count in counts:
            _check_tokens("masks.prefix", count, 0)
        # A trailing comma marks one number per document of a single document.
        comma = "," if isinstance(self.tokens, tuple) and len(counts) == 1 else ""
        _set_text(self, f"prefix:{','.join(map(str, counts))}{comma}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`."""
        documents = len(frame.documents)
        counts = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,) * documents
        if len(counts) != documents:
            raise InputError(
                f"masks.prefix has {len(counts)} numbers for {documents} documents; give one, or one per document"
            )
        if not frame.causal:
            raise InputError("masks.prefix needs causal=True: without it, all queries attend to all keys already")
        return _with_first(frame, counts, FULL, None)


@dataclass(frozen=True)
class GlobalTokens(AttentionMask):
    """See `global_tokens`."""

    tokens: int
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_tokens("masks.global_tokens", self.tokens, 1)
        _set_text(self, f"global_tokens:{self.tokens}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`."""
        if not frame.windowed:
            raise InputError("masks.global_tokens needs a window: without one, all tokens attend to all tokens already")
        # Under a causal mask the global tokens attend to all keys before them, which their own window may exclude.
        seen, seeing = (CAUSAL, None) if frame.causal else (FULL, FULL)
        return _with_first(frame, (self.tokens,) * len(frame.documents), seen, seeing)


def _with_first(frame: Frame, firsts: tuple[int, ...], seen: Band, seeing: Band | None) -> Mask:
    """Return the branches of a mask in which the first tokens of each document have separate bands.

    All queries attend to the first keys in the band `seen`; the first queries attend to later keys in `seeing`, or in
    the frame's band if that is None; later queries attend to later keys in the frame's band. `firsts`: first tokens
    per document.
    """
    documents = [
        (q, min(q + first, q_stop), q_stop, k, min(k + first, k_stop), k_stop)
        for (q, q_stop, k, k_stop), first in zip(frame.documents, firsts, strict=True)
    ]

    def branch(band: Band, q_starts: list[int], k_starts: list[int]) -> Branch:
        return Branch((*q_starts, frame.bounds[-1]), (*k_starts, frame.kv_bounds[-1]), band)

    if all(k_after == k_stop for *_, k_after, k_stop in documents):
        return Mask((Branch(frame.bounds, frame.kv_bounds, seen),))
    # Branches do not overlap. Parts pair by index, so each branch pairs the tokens that it leaves out with empty parts:
    #    keys           F F L L L     F: first, L: later
    #    queries F      s s g g g     s: seen, queries of the whole document to first keys
    #            L      s s r r r     g: seeing, first queries to later keys; r: the frame's band
    #            L      s s r r r
    branches = [branch(seen, [start for q, _, end, *_ in documents for start in (q, end)],
                       [start for *_, k, k_after, _ in documents for start in (k, k_after)])]  # fmt: skip
    thirds = [start for q, q_after, *_ in documents for start in (q, q, q_after)]
    if seeing is not None:
        k_starts = [start for *_, k, k_after, end in documents for start in (k, k_after, end)]
        branches.append(branch(seeing, thirds, k_starts))
    k_starts = [start for *_, k, k_after, _ in documents for start in (k, k_after, k_after)]
    branches.append(branch(frame.band, thirds, k_starts))
    return Mask(tuple(branches))


def _set_text(mask: AttentionMask, text: str) -> None:
    """Set the text of a frozen mask when it is created.

    torch.compile treats a stored string as a constant, but makes a number that has changed symbolic.
    """
    object.__setattr__(mask, "text", text)


def _check_tokens(name: str, tokens: object, least: int) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < least:
        raise InputError(f"{name} takes whole numbers of tokens from {least} on, got {tokens!r}")


_CLASSES: dict[str, Callable[..., AttentionMask]] = {
    "chunked": Chunked, "prefix": Prefix, "global_tokens": GlobalTokens,
}  # fmt: skip
_REPLACED = {"chunk": "chunked", "prefix": "prefix", "global_tokens": "global_tokens"}
"""Options that attention once had, and the masks that replaced them."""
