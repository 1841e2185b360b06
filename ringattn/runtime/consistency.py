"""Consistency check: all ranks make the same call, or all of them raise.

Guarantees: each call is compared before anything else is sent; if one rank refuses a call, all ranks refuse it; if one
rank needs gradients of a call, all ranks learn it before the outputs are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.errors import DisagreementError, InputError, RingError, UnsupportedError
from ringattn.transport.base import COMPARED, Transport

KEPT_AGREEMENTS = 4096
"""Calls that a ring remembers to have compared, the latest ones. Every rank forgets the same one at the same time."""
FEW_VALUES = 3
"""A longer tuple of dataclasses is one fact in `facts_of`."""
LONGEST_FACT = 96
"""Characters of a value in `facts_of`; a longer one is shortened, and its digest is added."""


Inputs = Mapping[str, Tensor | None]
"""The differentiable inputs of a call, by name."""


class GradientNeeds(NamedTuple):
    """The inputs of a differentiable call that need a gradient on this rank.

    `obstacle`: why the outputs of this rank cannot carry a graph, with the remedy; empty if they can.
    """

    inputs: tuple[str, ...] = ()
    obstacle: str = ""


def anchor(graph: bool, *inputs: Tensor | None) -> Tensor | None:
    """Return an additional input that requires a gradient, or None if it is not needed.

    It is needed if the outputs must carry a graph (`graph`) and none of this rank's `inputs` requires a gradient. The
    outputs then require a gradient as on the other ranks, and so does a loss computed from them. So this rank's
    backward pass runs too, for which the other ranks wait.
    """
    if not graph or any(x is not None and x.requires_grad for x in inputs):
        return None
    return torch.zeros((), device="cpu", requires_grad=True)


class ComparedCall(NamedTuple):
    """A call that all ranks make. `number`: its number, equal on all ranks; 0 in a ring of one rank.

    `graph`: whether the outputs of every rank carry a graph, because some rank needs gradients.
    """

    number: int
    graph: bool

    def anchor(self, *inputs: Tensor | None) -> Tensor | None:
        """See `anchor`."""
        return anchor(self.graph, *inputs)


def check_kinds(tensors: Inputs) -> None:
    """Raise `InputError` for a sparse tensor, and `UnsupportedError` for a DTensor.

    The shape of a DTensor is that of the tensors of all ranks.
    """
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.layout != torch.strided:
            raise InputError(f"{name} is {x.layout}; give {name}.to_dense()")
        if hasattr(x, "to_local"):  # does not import torch.distributed.tensor, which is slow
            raise UnsupportedError(
                f"{name} is a {type(x).__name__}; give {name}.to_local(), this rank's tokens of this rank's heads. "
                "ringattn.adapters.torch_ops.ring_attention takes DTensors of sharded heads"
            )


def gradient_needs(tensors: Inputs) -> GradientNeeds:
    """Return which of these inputs need a gradient in the current gradient mode."""
    if not torch.is_grad_enabled():
        return GradientNeeds(
            obstacle=("it made the call without gradient mode; use torch.no_grad on all ranks, or on none")
        )
    inputs = tuple(name for name, x in tensors.items() if x is not None and x.requires_grad)
    for name, x in tensors.items():
        if not inputs and x is not None and x.is_inference():
            return GradientNeeds(obstacle=f"its {name} was created under torch.inference_mode; pass {name}.clone()")
    return GradientNeeds(inputs)


class ConsistencyCheck:
    """The comparison of one rank's calls with those of the other ranks. It numbers the calls.

    A transport may notice by itself that ranks make different calls. Then calls of the same description are compared
    only the first time, separately for calls with and without gradients. If some ranks needed gradients and others did
    not, later calls of the description are compared every time, so that each rank learns what the others need.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._agreed: dict[bytes, None] = {}
        self.calls = 0
        """Calls so far: the number of the latest one, which all ranks that make the same calls give it."""

    def announced(
        self,
        words: str,
        refusal: RingError | None,
        always: bool,
        backward_of: int | None,
        needs: GradientNeeds | None = None,
    ) -> str | None:
        """Announce this rank's next call to the transport. Return the message to compare with the other ranks.

        Return None if no comparison is needed, because the transport would notice a different call. `words`: the
        description of the call. The transport also receives `backward_of`, so the backward passes of all calls of the
        same description need only one comparison.
        """
        self.calls += 1
        message = words if backward_of is None else f"backward of call {backward_of}: {words}"
        if refusal is not None:
            message = f"refused {refusal}"
        skips = refusal is None and not always and self._used(words, backward_of, needs)
        gradients = "" if needs is None else "needed" if needs.inputs else "not needed"
        notices = self._transport.announce(self.calls, _digest(message), message, gradients if skips else COMPARED)
        return None if notices and skips else message

    def ask(self, message: str, needs: GradientNeeds | None = None) -> list[str]:
        """Send this rank's message and gradient needs, and return the answers of all ranks."""
        answer = json.dumps([f"{self.calls}: {message}", needs])
        return [answer.decode() for answer in self._transport.all_gather_bytes(answer.encode())]

    def settle(
        self, words: str, backward_of: int | None, answers: list[str], needs: GradientNeeds | None = None
    ) -> bool:
        """Compare the answers of all ranks, and return whether any rank needs gradients.

        Raises `InputError` if another rank refused the call, and `DisagreementError` if the ranks make different calls
        or a rank cannot take part in the backward pass that another rank needs.
        """
        calls, patterns = zip(*map(json.loads, answers), strict=True)
        for rank, call in enumerate(calls):
            message = call.partition(": ")[2]
            if message.startswith("refused "):
                raise InputError(
                    f"rank {rank} refused the call, so all ranks refuse it: {message.removeprefix('refused ')}"
                )
        if len(set(calls)) > 1:
            raise DisagreementError(f"the ranks made different calls:\n{_differences(calls)}")
        every_need = [GradientNeeds(*(pattern or ())) for pattern in patterns]
        graph = any(each.inputs for each in every_need)
        _check_needs(every_need)
        if needs is not None and len({bool(each.inputs) for each in every_need}) > 1:
            for kind in (True, False):
                self._agreed.pop(_key(words, backward_of, kind), None)
            self._remember(_key(words, backward_of, None))
        elif needs is None or not self._moved_to_end(_key(words, backward_of, None)):
            self._remember(_key(words, backward_of, graph))
        return graph

    def _remember(self, key: bytes) -> None:
        self._agreed.pop(key, None)
        self._agreed[key] = None
        if len(self._agreed) > KEPT_AGREEMENTS:
            del self._agreed[next(iter(self._agreed))]

    def _used(self, words: str, backward_of: int | None, needs: GradientNeeds | None) -> bool:
        """Return whether the ranks have compared a call of this description before.

        If so, it becomes the most recently used one, as on every other rank.
        """
        return self._moved_to_end(_key(words, backward_of, needs is not None and bool(needs.inputs)))

    def _moved_to_end(self, key: bytes) -> bool:
        if key not in self._agreed:
            return False
        self._agreed[key] = self._agreed.pop(key)
        return True


def _check_needs(every_need: list[GradientNeeds]) -> None:
    """Raise `DisagreementError` if a rank needs gradients and another rank cannot take part in the backward pass."""
    needing = [(rank, needs) for rank, needs in enumerate(every_need) if needs.inputs]
    unable = [(rank, needs) for rank, needs in enumerate(every_need) if not needs.inputs and needs.obstacle]
    if needing and unable:
        (first, needs), (rank, without) = needing[0], unable[0]
        raise DisagreementError(
            f"rank {first} needs gradients of {', '.join(needs.inputs)}, and rank {rank} could not take part in the "
            f"backward pass: {without.obstacle}"
        )


def _differences(calls: tuple[str, ...]) -> str:
    """Return a line for each rank: its call, and its facts (see `facts_of`) that are not equal on all ranks."""
    rows = [call.split("\n") for call in calls]
    common = set.intersection(*map(set, rows))
    lines = []
    for rank, (call, *facts) in enumerate(rows):
        differing = [fact for fact in facts if fact not in common]
        lines.append(f"  rank {rank}: call {call}" + (f": {'; '.join(differing)}" if differing else ""))
    return "\n".join(lines)


def facts_of(value: Any, name: str = "") -> Iterator[str]:
    """Yield a line "name value" for every field that takes part in the equality of a dataclass or named tuple.

    The fields of nested dataclasses and tuples have separate lines. Two values give the same lines, in any process, if
    and only if they are equal (up to the collisions of a digest).
    """
    if is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value) if field.compare]
    elif hasattr(value, "_fields") and "__str__" not in vars(type(value)):
        parts = list(zip(value._fields, value, strict=True))
    elif isinstance(value, tuple) and 0 < len(value) <= FEW_VALUES and all(map(is_dataclass, value)):
        parts = [(str(index), inner) for index, inner in enumerate(value)]
    else:
        text = str(value) if hasattr(value, "_fields") else repr(value)
        if callable(value):  # use the name, because `repr` contains the address
            text = f"{value.__module__}.{value.__qualname__}"
        if len(text) > LONGEST_FACT:
            text = f"{text[: LONGEST_FACT // 2]}...{text[-LONGEST_FACT // 4 :]} [{_digest(text).hex()}]"
        yield f"{name} {text}"
        return
    for part, inner in parts:
        yield from facts_of(inner, f"{name}.{part}" if name else part)


def _key(words: str, backward_of: int | None, gradients: bool | None) -> bytes:
    """Return the key of a compared call.

    `gradients`: True if every rank needs gradients, False if no rank does, None if the ranks have differed in this.
    """
    return _digest(f"{gradients} {words}" if backward_of is None else f"backward of {words}")


def _digest(words: str) -> bytes:
    return sha256(words.encode()).digest()[:8]
