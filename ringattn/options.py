"""The options of attention, declared once: their names, types, defaults, help and checks. Imports without torch.

`AttentionOptions` holds the options of one call. Public functions take them as keywords (`AttentionKeywords`), layers
keep them, the compiled operator serialises them, and everything else passes the value on. A new option is a field of
`AttentionOptions` with an entry of the same name in `LayerKeywords`, and goes into `engine.base.Softmax`.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar

from ringattn.core.mask import AttentionMask, Banded, check_causal, window_sides
from ringattn.core.problem import FLOATS
from ringattn.errors import InputError
from ringattn.integers import whole_number
from ringattn.masks import check_mask, refuse_removed

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[int | None, int | None] | None
Function = TypeVar("Function", bound=Callable[..., Any])


class LayerKeywords(TypedDict, total=False):
    """The options that a layer takes as keywords: all except `sinks`, which are a parameter of the layer."""

    causal: bool
    window: Window
    mask: AttentionMask | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | Many[float] | None
    dropout_p: float
    dropout_seed: int | None
    schedule: str


class AttentionKeywords(LayerKeywords, total=False):
    """The options that a call takes as keywords."""

    sinks: Tensor | None


# --- checks: each returns the value in the form that `AttentionOptions` keeps ----------------------------------------


def _checked_causal(causal: bool) -> bool:
    check_causal(causal)
    return causal


def _checked_window(window: Window) -> Window:
    window_sides(window)
    return None if window is None else (window[0], window[1])


def _checked_scale(scale: float | None) -> float | None:
    if scale is not None and not _is_finite(scale):
        raise InputError(f"scale must be a finite number or None, got {scale!r}")
    return None if scale is None else float(scale)


def _checked_softcap(softcap: float | None) -> float | None:
    if softcap is not None and (not _is_finite(softcap) or softcap <= 0):
        raise InputError(f"softcap must be positive and finite, or None, got {softcap!r}")
    return None if softcap is None else float(softcap)


def _checked_sinks(sinks: Tensor | None) -> Tensor | None:
    if sinks is not None and not hasattr(sinks, "requires_grad"):
        raise InputError(f"sinks must be a tensor of shape (q_heads,), one per query head, got {type(sinks).__name__}")
    return sinks


def _checked_slopes(slopes: Any) -> tuple[float, ...] | None:
    """Return the slopes as numbers: the host reads a tensor once, here."""
    if slopes is None:
        return None
    if not hasattr(slopes, "requires_grad"):
        if not isinstance(slopes, (tuple, list)) or not all(map(_is_finite, slopes)):
            raise InputError(f"alibi_slopes must be a tensor or finite numbers, one for each head, got {slopes!r}")
        return tuple(map(float, slopes))
    if hasattr(slopes, "to_local"):
        raise InputError("alibi_slopes are a DTensor; give those of this rank's heads, alibi_slopes.to_local()")
    if slopes.requires_grad:
        raise InputError("alibi_slopes require a gradient, and attention gives them none; pass alibi_slopes.detach()")
    if slopes.dim() != 1 or slopes.is_meta or str(slopes.dtype).removeprefix("torch.") not in FLOATS:
        raise InputError(
            f"alibi_slopes must be a tensor of shape (q_heads,) and one of {', '.join(FLOATS)}, alike for all batches, "
            f"got {slopes.dtype} of {tuple(slopes.shape)} on {slopes.device}"
        )
    return _checked_slopes(slopes.tolist())


def _checked_dropout(p: float) -> float:
    if not _is_finite(p) or not 0 <= p < 1:
        raise InputError(f"dropout_p must be a probability from 0 to less than 1, got {p!r}")
    return float(p)


def check_dropout_seed(seed: int | None) -> int | None:
    """Return the seed. Raises InputError if it is neither a seed of dropout nor None."""
    if seed is None:
        return None
    return whole_number(seed, "dropout_seed must be a whole number from 0 to 2**64 - 1, or None", 0, 2**64 - 1)


def _checked_schedule(schedule: str) -> str:
    if not isinstance(schedule, str):
        raise InputError(f"schedule must be a name of docs/schedules.md, got {schedule!r}")
    return schedule


def _is_finite(x: object) -> bool:
    """Return whether `x` is a number that a float can hold. False for booleans and NaN."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


# --- the declaration -------------------------------------------------------------------------------------------------


def option(default: Any, check: Callable[[Any], Any], help: str, compare: bool = True) -> Any:
    """Return a field of `AttentionOptions`. `check` returns the value to keep, or raises InputError."""
    return field(default=default, compare=compare, metadata={"help": help, "check": check})


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """All options of an attention call, that is, everything except q, k, v and their sequences.

    The order of operations is: scale, softcap, ALiBi, mask, softmax with sinks, dropout. ALiBi subtracts
    slope * |q position - k position|, as flash-attn does; positions count from the starts of the documents, and with
    `kv_seq` from 0 in both sequences. Which weights dropout drops depends on the seed and on the batch, the query head
    and the positions of a pair; lse includes the dropped weights.

    `fields(AttentionOptions)` lists the options; `metadata["help"]` of a field is its help.
    """

    causal: bool = option(False, _checked_causal, "A query attends to the keys at its position and before.")
    window: Window = option(
        None, _checked_window, "(left, right) keys before and after the query, in addition to the query itself; None "
        "or -1 is unbounded. With causal, right is 0, None or -1. None: no window.")  # fmt: skip
    mask: AttentionMask | None = option(
        None, check_mask, "A mask of `ringattn.masks` in addition to causal and window, such as `masks.chunked(8192)`. "
        "None: that of the sequence (`Sequence.with_mask`), if it has one.")  # fmt: skip
    scale: float | None = option(
        None, _checked_scale, "Factor of the scores, any finite number. None: 1 / sqrt(d_k).")  # fmt: skip
    softcap: float | None = option(
        None, _checked_softcap, "Scores become softcap * tanh(score / softcap). None: no cap.")  # fmt: skip
    sinks: Tensor | None = option(
        None, _checked_sinks, "Logits (q_heads,) of a float dtype that take weight and give no value. Their gradient "
        "is this rank's part, to be summed over the ranks. None: no sinks.", compare=False)  # fmt: skip
    alibi_slopes: Tensor | Many[float] | None = option(
        None, _checked_slopes, "ALiBi: score -= slope * |q position - k position|, after the cap. One number per query "
        "head: a tensor (q_heads,) of a float dtype, read by the host, or numbers; the same on all ranks, without a "
        "gradient. None: no bias.")  # fmt: skip
    dropout_p: float = option(
        0.0, _checked_dropout, "Each weight is dropped with this probability, from 0 to less than 1, and the others "
        "are divided by 1 - p; lse is that of all weights.")  # fmt: skip
    dropout_seed: int | None = option(
        None, check_dropout_seed, "The seed of dropout, from 0 to 2**64 - 1: the same on all ranks, and a different "
        "one for each layer and step. None: no dropout.")  # fmt: skip
    schedule: str = option(
        "auto", _checked_schedule, "How blocks travel, see docs/schedules.md. auto: by predicted time if machines are "
        "named, calibrated or recognised (see `Ring`); otherwise by mask and bytes.")  # fmt: skip

    def __post_init__(self) -> None:
        """Check and normalise each option. Raises InputError for a value that its option does not take."""
        for each in fields(self):
            object.__setattr__(self, each.name, each.metadata["check"](getattr(self, each.name)))

    @classmethod
    def of(cls, keywords: Mapping[str, Any], refused: Mapping[str, str] = {}) -> Self:
        """Return the options that were given as keywords.

        `refused`: the options that the caller does not take, each with the remedy. Raises InputError if one of these
        differs from its default or if a mask has replaced an option, and TypeError for an unknown name.
        """
        check_names(keywords)
        options = cls(**keywords)
        for name, instead in refused.items():
            if name in options.changed():
                raise InputError(f"{name}: {instead}")
        return options

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value is not default and value != default}

    @property
    def pairs(self) -> Banded:
        """The pairs of queries and keys that causal, window and mask allow."""
        return Banded(self.causal, self.window, self.mask)


NAMES = tuple(each.name for each in fields(AttentionOptions))


def check_names(keywords: Mapping[str, object]) -> None:
    """Raise InputError if a mask has replaced one of these options, and TypeError if there is no such option."""
    refuse_removed({name: value for name, value in keywords.items() if name not in NAMES})


def takes_options(refused: Mapping[str, str] = {}) -> Callable[[Function], Function]:
    """Return a decorator of functions with `**options`, which lists each option in their signature and docstring.

    The options replace the entry `options:` of the docstring.

    `refused`: the options that the function does not take, as for `AttentionOptions.of`; these are not listed.
    """

    def described(function: Function) -> Function:
        listed = [each for each in fields(AttentionOptions) if each.name not in refused]
        signature = inspect.signature(function)
        kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in listed
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*kept, *keywords])
        lines = []
        for line in (function.__doc__ or "").splitlines():
            if line.strip().startswith("options: "):
                indent = line[: len(line) - len(line.lstrip())]
                entries = (
                    textwrap.wrap(f"{each.name}: {each.metadata['help']}", 120, initial_indent=indent,
                                  subsequent_indent=f"{indent}    ")
                    for each in listed
                )  # fmt: skip
                lines += [part for entry in entries for part in entry]
            else:
                lines.append(line)
        function.__doc__ = "\n".join(lines) if function.__doc__ else None
        return function

    return described
