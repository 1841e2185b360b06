"""The active sequence, for code whose signature cannot carry it (for example Hugging Face attention functions).

The sequence is kept in a context variable: activations nest, and threads and tasks do not see each other's. The
innermost `Ring.activate` wins. When backward recomputes a checkpointed region, its code runs a second time, often
outside of the `with`, and on a GPU in another thread. In this second run the innermost activation that is entered
inside the region wins. If there is none, the activation around the region in forward wins, which is stored on the
region (see `Regions`).
Guarantees: under a sequence of several ranks, attention over the local tokens only is refused: an operator that attends
is refused where it is called, and a model that computed no attention over a ring is refused at the end of the `with`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence

# --- the checkpointed regions around a call --------------------------------------------------------------------------
#
# A checkpointed region is code that runs in forward and again during backward to recompute its activations. Both runs
# can reach one object that lives exactly as long as the region's graph, the *region*:
#
# - For an autograd function that runs code in its `forward(ctx, ...)` and again in its `backward(ctx, ...)`, it is
#   `ctx`. This covers torch's reentrant checkpoint, those of Megatron and DeepSpeed, and compiled code whose backward
#   recomputes.
# - For torch's non-reentrant checkpoint it is the checkpoint's frame: a local variable of the suspended generator in
#   forward, and a variable of the unpack hook in backward. Neither name is public.
#   `tests/runtime/test_activation.py` fails if torch renames them, and recomputation is then refused.
#
# Regions of the following kinds are not found: autograd functions with a separate `setup_context`, checkpoints that
# other libraries build on saved-tensor hooks, compiled autograd, and the forward run of torch's composable
# `checkpoint`.

_CHECKPOINT_FILE = torch_checkpoint.__file__
_ENGINE_CALLS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_RECOMPUTES = frozenset({"backward", "vjp", "unpack_hook"})
_CHECKPOINTS = frozenset({"checkpoint", "_checkpoint_impl"})  # the latter from torch 2.14 on
_NAMES = _RECOMPUTES | _CHECKPOINTS | {"forward"} | {code.co_name for code in _ENGINE_CALLS}


class Regions(NamedTuple):
    """The checkpointed regions around a call, from the call outward to the innermost running backward pass.

    Attributes:
        entered: Regions in their forward run, innermost first. In a recomputation: only those inside `recomputed`.
        recomputed: The innermost region that is being recomputed, or None.
        backward: The number of the running backward pass, -1 outside backward.
    """

    entered: tuple[Any, ...] = ()
    recomputed: Any = None
    backward: int = -1

    @property
    def is_recomputation(self) -> bool:
        """Whether the call is made during backward, whether or not its region was found."""
        return self.recomputed is not None or self.backward != -1

    def shares_recomputation(self, other: Regions) -> bool:
        """Return whether both calls were made in the same recomputation of the same region."""
        return self.recomputed is other.recomputed and self.backward == other.backward


def enclosing_regions() -> Regions:
    """Return the regions around the caller. Costs a few microseconds: it walks the call stack."""
    entered: list[Any] = []
    backward = torch._C._current_graph_task_id()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NAMES:
            if code in _ENGINE_CALLS:
                break  # the code that called backward is not part of what backward recomputes
            region = _region_of(frame)
            if region is not None:
                if code.co_name in _RECOMPUTES:
                    return Regions(tuple(entered), region, backward)
                entered.append(region)
        frame = frame.f_back
    return Regions(tuple(entered), None, backward)


def _region_of(frame: FrameType) -> Any:
    """Return the region that this stack frame runs, or None."""
    code = frame.f_code
    if code.co_filename == _CHECKPOINT_FILE and code.co_name in _CHECKPOINTS | {"unpack_hook"}:
        if code.co_name == "unpack_hook":
            return frame.f_locals.get("frame")
        # A checkpoint calls the function while its generator is suspended; reentrant calls have no generator.
        generator = frame.f_locals.get("gen")
        suspended = generator.gi_frame if isinstance(generator, GeneratorType) else None
        return None if suspended is None else suspended.f_locals.get("new_frame")
    # Most frames of this name are module methods. Reading the local variables is the expensive step.
    if not code.co_argcount or code.co_varnames[0] == "self":
        return None
    first_argument = frame.f_locals.get(code.co_varnames[0])
    return first_argument if isinstance(first_argument, FunctionCtx) else None


# --- selective checkpointing -----------------------------------------------------------------------------------------

_COUNTING = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def unseen() -> AbstractContextManager[Any]:
    """Hide the operators inside the `with` from torch's selective checkpointing, which counts operators of a region.

    A second run of the region may call different operators: buffers may be bound already, or a disagreement of the
    ranks may cause messages. So attention is one hidden step that is always recomputed; only the operators of
    `adapters.torch_ops` can be saved. If a mode of torch's dispatcher belongs to selective checkpointing, all modes are
    disabled inside.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    if not any(isinstance(mode, _COUNTING) for mode in _get_current_dispatch_mode_stack()):
        return nullcontext()
    return _disable_current_modes()


# --- the active sequence ---------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """The arguments of one `Ring.activate`.

    Attributes:
        seq: The sequence, None for local attention.
        dropout_seed: The seed from which attention with dropout draws the seeds of its calls.
    """

    seq: Sequence | None
    dropout_seed: int | None = None


class _Entered(NamedTuple):
    """An activation and the regions around the `with` that entered it."""

    activation: Activation
    regions: Regions


_active: ContextVar[_Entered | None] = ContextVar("ringattn_activation", default=None)
_NOTES = "_ringattn_activations"
"""The attribute of a region that holds the activations around it in forward; None stands for no activation."""
_OUTSIDE = Regions()


@contextmanager
def activate(seq: Sequence | None, *, dropout_seed: int | None = None, throughout: bool = False) -> Iterator[None]:
    """See `Ring.activate`. `throughout`: observe all operators, also after the first attention over a ring."""
    with entered(Activation(seq, dropout_seed)):
        if seq is None or seq.ring.world_size == 1:
            yield
        else:
            with _watched(seq, throughout):
                yield


@contextmanager
def entered(activation: Activation, *, outside_regions: bool = False) -> Iterator[None]:
    """Make `activation` the innermost one, without observing operators.

    `outside_regions`: Treat the activation as entered outside of every checkpointed region, so that regions around this
    `with` store it. Use it if a recomputation does not enter this `with` again.
    """
    token = _active.set(_Entered(activation, _OUTSIDE if outside_regions else enclosing_regions()))
    try:
        yield
    finally:
        _active.reset(token)


def activation() -> Activation | None:
    """Return the innermost activation, or None if nothing is active.

    In a recomputation, return the activation of the forward run. Raises `InputError` in backward if the recomputed
    region is not found, or if not exactly one activation is stored on it.
    """
    innermost, regions = _active.get(), enclosing_regions()
    if regions.is_recomputation and (innermost is None or not innermost.regions.shares_recomputation(regions)):
        active, new = _noted_on(regions.recomputed), regions.entered
    else:
        active = None if innermost is None else innermost.activation
        around = () if innermost is None else innermost.regions.entered
        new = tuple(region for region in regions.entered if all(region is not outer for outer in around))
    for region in new:
        vars(region).setdefault(_NOTES, set()).add(active)
    return active


def _noted_on(region: Any) -> Activation | None:
    notes: set[Activation | None] = set() if region is None else vars(region).get(_NOTES, set())
    if len(notes) == 1:
        return next(iter(notes))
    if notes:
        problem = f"in forward {len(notes)} sequences were active in turn around the checkpointed region it recomputes"
    else:
        problem = "the checkpointed region it recomputes is not known"
    raise InputError(
        f"backward computes attention, and {problem}: enter `with ring.activate(seq):` inside the checkpointed function"
    )


def active_sequence() -> Sequence | None:
    """Return the active sequence, over which an adapter attends.

    Returns:
        The sequence of the innermost `Ring.activate`, or None.
    """
    active = activation()
    return None if active is None else active.seq


# --- refusal of attention over the local tokens only -----------------------------------------------------------------

_watch: ContextVar[_Watch | None] = ContextVar("ringattn_watch", default=None)
_proven: WeakKeyDictionary[Any, set[bool]] = WeakKeyDictionary()
"""The gradient modes in which a whole activation of a ring was observed without a refusal."""

_ATTENDING = "scaled_dot_product", "attention", "flash_attn", "_safe_softmax", "transformer_encoder_layer"
"""Parts of the names of attention operators in torch, flash-attn, xformers and other libraries."""
_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm})


def attended() -> None:
    """Record that attention is computed over a ring, is refused, or is local on purpose."""
    if (watch := _watch.get()) is not None:
        watch.has_attended = True
        watch.leave()


class _Watch(TorchDispatchMode):
    """The observer of the operators inside one activation, including TorchScript and kernels that are called by name.

    It costs about 5 us per operator, so it stops at the first attention over a ring, except in the first activation.
    """

    supports_higher_order_operators = True

    def __init__(self, seq: Sequence, throughout: bool) -> None:
        super().__init__()
        self.seq, self.throughout = seq, throughout
        self.is_on = self.has_attended = self.has_multiplied = False
        self.refusal: InputError | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch to switch this mode off only while it compiles (True), so that compiled code stays compiled."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _attends(func):
            self._refuse_local(func.__name__.partition(".")[0])
        elif getattr(func, "overloadpacket", None) in _PRODUCTS and self._is_meant():
            self.has_multiplied = True
        return func(*args, **(kwargs or {}))

    def enter(self) -> None:
        """Begin to observe operators."""
        self.is_on = True
        self.__enter__()

    def leave(self, at_end: bool = False) -> None:
        """Stop observing operators, unless `throughout`, another mode was entered since, or compiled code runs.

        `at_end`: stop in any case.
        """
        if self.is_on and (at_end or (not self.throughout and self._is_innermost())):
            self.is_on = False
            self.__exit__(None, None, None)

    def _is_innermost(self) -> bool:
        return _get_current_dispatch_mode() is self and not _is_in_compiled_code()

    def _is_meant(self) -> bool:
        """Return whether this sequence is active. False in backward, which recomputes operators observed before."""
        innermost = _active.get()
        is_active = innermost is not None and innermost.activation.seq is self.seq
        return is_active and torch._C._current_graph_task_id() == -1

    def _refuse_local(self, name: str) -> None:
        if self._is_meant():
            self.refusal = UnsupportedError(
                f"rank {self.seq.ring.rank}: {name} under an active sequence attends to this rank's tokens only: "
                + _ADVICE
            )
            _refuse(self.seq, self.refusal)


_ADVICE = (
    "prepare the model (for transformers ringattn.adapters.transformers.prepare(model)), or attend with "
    "ringattn.adapters.sdpa.ring_sdpa, ringattn.adapters.flex.flex_attention or ring.attention. A part of the model "
    "whose whole input is on every rank, such as an image tower, is called inside `with ring.activate(None):`, or its "
    "module is marked once with ringattn.adapters.context.attends_locally(module)"
)


@cache
def _attends(func: Any) -> bool:
    """Return whether an operator of torch or another library computes attention over the tensors that it receives."""
    name = func.__name__
    ours = getattr(func, "namespace", "") == "ringattn"
    return not ours and "backward" not in name and any(part in name for part in _ATTENDING)


def _is_in_compiled_code() -> bool:
    """Return whether the current code runs inside a call of a function that torch.compile has wrapped.

    At the end of a call, compiled code restores the dispatch keys from its beginning. If a mode was left in between,
    its key would be restored without the mode, and every later operator would fail.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    context = getattr(dynamo, "_TorchDynamoContext", None)
    if context is None:  # a torch version with other wrappers: True is always safe
        return True
    wrappers = {id(code) for code in context.__call__.__code__.co_consts if isinstance(code, CodeType)}
    frame: FrameType | None = sys._getframe()
    while frame is not None and id(frame.f_code) not in wrappers:
        frame = frame.f_back
    return frame is not None


@contextmanager
def _watched(seq: Sequence, throughout: bool) -> Iterator[None]:
    proven, grad = _proven.setdefault(seq.ring, set()), torch.is_grad_enabled()
    watch, outer = _Watch(seq, throughout or grad not in proven), _watch.get()
    token = _watch.set(watch)
    watch.enter()
    try:
        yield
    except RuntimeError as error:
        if watch.refusal is not None and not isinstance(error, InputError):
            raise watch.refusal from error  # TorchScript raises another error without the message
        raise
    finally:
        watch.leave(at_end=True)
        _watch.reset(token)
        if outer is not None:
            outer.has_attended |= watch.has_attended
    if watch.has_multiplied and not watch.has_attended:
        _refuse(seq, InputError(
            f"rank {seq.ring.rank}: a model ran inside activate and computed no attention over the ring: {_ADVICE}. "
            "Call a model without attention outside activate"
        ))  # fmt: skip
    if watch.has_attended:
        proven.add(grad)


def _refuse(seq: Sequence, error: InputError) -> None:
    if seq.ring.is_open:
        seq.ring.check_consistency("", error)
    raise error
