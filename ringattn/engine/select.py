"""Which engine computes a call, and why.

Guarantees that a named engine comes or is refused with a reason, before any rank communicates. `auto` takes aten; for
options of the softmax, which aten lacks, triton on a GPU where it can do the call, and else plain, which has all.
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
KNOWN: dict[str, tuple[str, ...]] = {"plain": OPTIONAL, "triton": OPTIONAL}
"""Which options of the softmax an engine computes; the others none."""
IN_WORDS = {"softcap": "a softcap", "alibi_slopes": "alibi_slopes", "dropout_p": "this dropout"}


class Choice(NamedTuple):
    """An engine, and why it was taken: one sentence that begins with its name."""

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
    """The engine called `name`, one of `ENGINES`, for inputs of `dtype` on `device` with heads of `d_k` and `d_v`.

    `softmax`: of the call; None for one without options. `sm_margin`: multiprocessors to leave free, where the
    engine's kernels can.
    Raises `UnsupportedError` where a named engine cannot do the call.
    """
    call = _Call(device, dtype, (d_k, d_v), softmax or Softmax(1.0), sm_margin)
    found = _first_in_order(call) if name == "auto" else Choice(_engine(name, call), f"{name}: asked for by name")
    if found.engine.name == "triton":
        found = found._replace(why=f"{found.why}; {_forms(call)}")
    if sm_margin and not found.engine.sm_margin:
        return found._replace(why=f"{found.why}; it leaves no multiprocessor to exchanges")
    return found


class _Call(NamedTuple):
    """What decides whether an engine can do a call. `dims`: of keys and of values."""

    device: torch.device
    dtype: torch.dtype
    dims: tuple[int, int]
    softmax: Softmax
    sm_margin: int

    @property
    def dim(self) -> int:
        """The greater of its head dimensions."""
        return max(self.dims)

    @property
    def inputs(self) -> str:
        """Its inputs in words."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def place(self) -> str:
        """Its device in words: a GPU by the name that the driver gives it."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)


def _engine(name: str, call: _Call) -> Engine:
    """The engine called `name`. Raises UnsupportedError where it cannot do the call."""
    for option in call.softmax.options():
        if option not in KNOWN.get(name, ()):
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
    """What `auto` takes."""
    options = call.softmax.options()
    if not options:
        return Choice(AtenEngine(call.device), _why_aten(call))
    words = [IN_WORDS[name] for name in options]
    if call.device.type != "cuda":
        return Choice(PlainEngine(), f"plain: no fused kernel knows {words[0]} on {call.place}")
    asked = " and ".join(words)
    try:
        return Choice(_triton(call), f"triton: the only fused kernels with {asked}")
    except UnsupportedError as error:
        return Choice(PlainEngine(), f"plain: no fused kernel here knows {asked} ({error})")


def _why_aten(call: _Call) -> str:
    what = f"{call.inputs}, head_dim {call.dim} on {call.place}"
    if aten.choose(call.device, call.dtype, call.dim) is None:
        return f"aten: torch has no fused kernel for {what}, so it computes as plain does"
    if call.device.type == "cpu":
        return "aten: the only fused kernels for cpu"
    return f"aten: torch has a fused kernel for {what}"


def _triton(call: _Call) -> Engine:
    """The engine on our own kernels. Raises UnsupportedError where it cannot do the call."""
    try:  # only now: triton comes with CUDA builds of torch alone
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
    """Which of our own kernels will do the call."""
    from ringattn.engine import forms, triton

    return forms.told(triton.architecture(call.device), call.dtype, call.dims, tuple(call.softmax.options()))
