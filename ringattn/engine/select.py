"""The choice of the engine that computes a call, with its reason.

Guarantees: a named engine runs or is refused with a reason, before any rank communicates. For calls without options of
the softmax, `auto` chooses aten or triton: the one with the least predicted time for a forward and a backward pass, if
the rates of both are known on this GPU (`rates`), and otherwise aten. For options, which aten does not support, it
chooses triton on a GPU if triton supports the call, and otherwise plain, which supports every option.
Not predicted: exchanges that no free multiprocessor can overlap, and merging the results of ring steps. `auto` does not
choose fa3 and fa4, because they have not run on a GPU here.
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
from ringattn.engine.rates import rate_of
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
    # The flag decides which kernels of torch run. It may change between calls.
    repeats = torch.are_deterministic_algorithms_enabled()
    return _choose(name, _Call(device, dtype, (d_k, d_v), softmax or Softmax(1.0), sm_margin, repeats))


@cache
def _choose(name: str, call: _Call) -> Choice:
    """Return the choice for a call; see `choose`."""
    choice = _first_in_order(call) if name == "auto" else Choice(_engine(name, call), f"{name}: chosen by name")
    if choice.engine.name == "triton":
        choice = choice._replace(why=f"{choice.why}; {_forms(call)}")
    if call.sm_margin and not choice.engine.sm_margin:
        return choice._replace(why=f"{choice.why}; it leaves no multiprocessor free for exchanges")
    return choice


class _Call(NamedTuple):
    """The properties of a call that decide which engines support it. `dims`: of keys and of values.

    `repeats`: torch must use deterministic algorithms.
    """

    device: torch.device
    dtype: torch.dtype
    dims: tuple[int, int]
    softmax: Softmax
    sm_margin: int
    repeats: bool

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
        return _fastest(call) or Choice(AtenEngine(call.device), _why_aten(call))
    options_text = [OPTION_NAMES[name] for name in options]
    if call.device.type != "cuda":
        return Choice(PlainEngine(), f"plain: no fused kernel supports {options_text[0]} on {call.place}")
    requested = " and ".join(options_text)
    try:
        return Choice(_triton(call), f"triton: the only fused kernels with {requested}")
    except UnsupportedError as error:
        return Choice(PlainEngine(), f"plain: no fused kernel here supports {requested} ({error})")


def _fastest(call: _Call) -> Choice | None:
    """Return the choice between aten and triton by the least predicted time.

    Return None if the rate of one of them is not known on this GPU, or if triton does not support the call.
    """
    if call.device.type != "cuda" or call.dims[0] != call.dims[1]:
        return None
    op, gpu = aten.choose(call.device, call.dtype, call.dim), torch.cuda.get_device_name(call.device)
    of_aten = None if op is None else rate_of(gpu, op.name, call.dim)
    if op is None or of_aten is None:
        return None
    try:
        engine = _triton(call)
    except UnsupportedError:
        return None
    form = _form(call)
    of_triton = rate_of(gpu, form, call.dim, call.sm_margin)
    if of_triton is None:
        return None
    rates = {f"aten ({op.name})": of_aten, f"triton ({form})": of_triton}
    compared = ", ".join(f"{name} {rate.both:.0f}" for name, rate in rates.items())
    sources = "; ".join(dict.fromkeys(f"{rate.source}" for rate in rates.values()))
    chosen = "triton" if of_triton.both > of_aten.both else "aten"
    why = (
        f"{chosen}: least predicted time on {gpu}, head_dim {call.dim}, forward and backward, in TFLOP/s: "
        f"{compared} ({sources})"
    )
    return Choice(engine if chosen == "triton" else AtenEngine(call.device), why)


def _why_aten(call: _Call) -> str:
    what = f"{call.inputs}, head_dim {call.dim} on {call.place}"
    if aten.choose(call.device, call.dtype, call.dim) is None:
        return f"aten: torch has no fused kernel for {what}, so it uses the same operations as plain"
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


def _form(call: _Call) -> str:
    """Return the form of ringattn's own kernels that runs forward, for tensors that it can read."""
    from ringattn.engine import forms, triton

    return forms.default_form(triton.architecture(call.device), call.dtype, call.dims, tuple(call.softmax.options()))


def _forms(call: _Call) -> str:
    """Describe which of ringattn's own kernels will run."""
    from ringattn.engine import forms, triton

    return forms.describe_forms(triton.architecture(call.device), call.dtype, call.dims, tuple(call.softmax.options()))
