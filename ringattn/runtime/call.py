"""The facts of an attention call, which all ranks compare."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields

from ringattn.core.bounded_cache import bounded
from ringattn.core.problem import Problem
from ringattn.engine.base import Engine, Softmax
from ringattn.runtime.consistency import facts_of
from ringattn.schedule.routes import Route


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call except its tensors."""

    problem: Problem
    route: Route
    softmax: Softmax
    engine: Engine
    dropout_seed: int = 0
    """Used with dropout only. Not part of a plan, because it differs in each step."""
    number: int = field(default=0, compare=False)
    """The number that all ranks gave this call when they compared it; its backward pass refers to it."""
    facts: Hashable = field(default=None, compare=False)
    """What makes the same call over another sequence, see `Runtime.recent_passes`; None if this is not supported."""
    graph: bool = field(default=False, compare=False)
    """Whether the outputs carry a graph on every rank, because some rank needs gradients."""

    def summary(self, *extra: str) -> str:
        """Return the text that must be equal on all ranks: a readable line, then a line for each fact (`facts_of`).

        Every field is compared except the engine: messages and results are the same with every engine.
        """
        parts = [part.name for part in fields(self) if part.compare and part.name != "engine"]
        facts = (fact for name in parts for fact in _facts(getattr(self, name), FACT_NAMES.get(name, name)))
        return "\n".join((f"{self.route.name} attention of {self.problem.q_layout.length} tokens", *extra, *facts))


FACT_NAMES = {"problem": "", "softmax": "", "route": "schedule"}
"""How facts of these fields begin in an error; facts of other fields begin with the name of the field."""


@bounded
def _facts(part: Hashable, name: str) -> tuple[str, ...]:
    return tuple(facts_of(part, name))
