"""The choice of the engine that computes a call, with its reason.

Guarantees: a named engine runs or is refused with a reason, before any rank communicates. `auto` chooses aten for calls
without options of the softmax. For options, which aten does not support, it chooses triton on a GPU if triton supports
the call, and otherwise plain, which supports every option.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch

from ringattn.engine import aten
from ringattn.engine.aten import AtenEngine
from ringattn.engine.base import OPTIONAL, Engine, Softmax
from ringattn.engine.flash import NEEDS, flash_engine
from ringattn.engine.plain import PlainEngine
from ringattn.errors import UnsupportedError

ENGINES = ("auto", "aten", "plain", "triton", *NEEDS)
EngineName = Literal["auto", "aten", "plain", "triton", "fa3", "fa4"]
SUPPORTED_OPTIONS: dict[str, tuple[str, ...]] = {"plain": OPTIONAL, "triton": OPTIONAL}
"""The options of the softmax that an engine supports. Engines that are not listed support none."""
OPTION_NAMES = {"softcap": "a softcap", "alibi_slopes": "alibi_slopes", "dropout_p": "this dropout"}


class Choice(NamedTuple):
    """An engine with the reason for the choice: one sentence that begins with the engine's name."""

    engine: Engine
    why: str


@cache
def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    d_k: int,
    d_v: int,
    softmax: Softmax | None = None,
    sm_margin: int = 0,
) -> Choice:
    """Return the engine `name`, one of `ENGINES`, for `dtype` inputs on `device` with head dimensions `d_k` and `d_v`.

    `softmax`: None for a call without options. `sm_margin`: multiprocessors to leave free, if the engine's kernels can.
    Raises `UnsupportedError` if a named engine does not support the call.
    """
    call = _Call(device, dtype, (d_k, d_v), softmax or Softmax(1.0), sm_margin)
    choice = _first_in_order(call) if name == "auto" else Choice(_engine(name, call), f"{name}: asked for by name")
    if choice.engine.name == "triton":
        choice = choice._replace(why=f"{choice.why}; {_forms(call)}")
    if sm_margin and not choice.engine.sm_margin:
        return choice._replace(why=f"{choice.why}; it leaves no multiprocessor free for exchanges")
    return choice


class _Call(NamedTuple):
    """The properties of a call that decide which engines support it. `dims`: of keys and of values."""

    device: torch.device
    dtype: torch.dtype
    dims: tuple[int, int]
    softmax: Softmax
    sm_margin: int

    @property
    def dim(self) -> int:
        """The larger of the two head dimensions."""
        return max(self.dims)

    @property
    def inputs(self) -> str:
        """The dtype of the inputs, as text for messages."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def place(self) -> str:
        """The device, as text for messages: a GPU by the name that its driver reports."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)


def _engine(name: str, call: _Call) -> Engine:
    """Return the engine called `name`. Raises UnsupportedError if it does not support the call."""
    for option in call.softmax.options():
        if option not in SUPPORTED_OPTIONS.get(name, ()):
            raise UnsupportedError(f"engine={name!r} has no {option}; use engine='auto' or engine='plain'")
    if name == "plain":
        return PlainEngine()
    if name == "triton":
        return _triton(call)
    return (
        AtenEngine(call.device)
        if name == "aten"
        else flash_engine(name, call.device, call.dtype, call.dim, call.sm_margin)
    )


def _first_in_order(call: _Call) -> Choice:
    """Return the choice of `auto`."""
    options = call.softmax.options()
    if not options:
        return Choice(AtenEngine(call.device), _why_aten(call))
    options_text = [OPTION_NAMES[name] for name in options]
    if call.device.type != "cuda":
        return Choice(PlainEngine(), f"plain: no fused kernel supports {options_text[0]} on {call.place}")
    requested = " and ".join(options_text)
    try:
        return Choice(_triton(call), f"triton: the only fused kernels with {requested}")
    except UnsupportedError as error:
        return Choice(PlainEngine(), f"plain: no fused kernel here supports {requested} ({error})")


def _why_aten(call: _Call) -> str:
    what = f"{call.inputs}, head_dim {call.dim} on {call.place}"
    if aten.choose(call.device, call.dtype, call.dim) is None:
        return f"aten: torch has no fused kernel for {what}, so it computes as plain does"
    if call.device.type == "cpu":
        return "aten: the only fused kernels for cpu"
    return f"aten: torch has a fused kernel for {what}"


def _triton(call: _Call) -> Engine:
    """Return the engine on ringattn's own kernels. Raises UnsupportedError if it does not support the call."""
    try:  # imported late: only CUDA builds of torch bring triton
        import ringattn.engine.triton as triton
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"engine='triton' needs the package triton, which is not installed ({error}); use engine='auto'"
        ) from error
    if why := triton.missing(call.device):
        raise UnsupportedError(why)
    if call.dtype not in triton.DTYPES:
        raise UnsupportedError(f"engine='triton' does not support {call.dtype}; use engine='plain'")
    if call.dim > triton.DIMS[-1]:
        raise UnsupportedError(
            f"engine='triton' takes head dimensions to {triton.DIMS[-1]}, not {call.dim}; use engine='plain'"
        )
    if why := triton.too_steep(call.softmax):
        raise UnsupportedError(why)
    triton.architecture(call.device)  # raises for a GPU that is too old
    return triton.TritonEngine(sm_margin=call.sm_margin)


def _forms(call: _Call) -> str:
    """Describe which of ringattn's own kernels will run."""
    from ringattn.engine import forms, triton

    return forms.describe_forms(triton.architecture(call.device), call.dtype, call.dims, tuple(call.softmax.options()))
