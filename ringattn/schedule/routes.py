"""All schedules by name.

In turn t every rank attends to the shard of (rank - t) mod ranks, so to its local shard first. A *relay* (ring)
forwards the block that it received; otherwise the owner sends directly to the reader. *At once* (all-gather) sends
everything in the first step.
       4 ranks, the keys that rank 3 attends to and the messages that bring them
       turn         0      1       2       3
       owner        3      2       1       0
       ring         -      2 -> 3  2 -> 3  2 -> 3    from the neighbour, one hop per step
       direct       -      2 -> 3  1 -> 3  0 -> 3    from the owner, one message per step
       all_gather   -      2 -> 3  1 -> 3  0 -> 3    from the owner, all in the first step
Each schedule class is in a module of this folder. This module imports all modules of the folder to register them.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from ringattn import schedule
from ringattn.errors import InputError
from ringattn.schedule.route import (
    ROUTES,
    Route,
    forward_of_rank,
    grid_of,
    joined,
    parameter_of,
    part_of_rank,
    schedule_of,
)

__all__ = [
    "ALIASES",
    "NUMBERED",
    "ROUTES",
    "Route",
    "forward_of_rank",
    "grid_of",
    "joined",
    "part_of_rank",
    "route_named",
    "schedule_of",
]

for _module in iter_modules(schedule.__path__):
    if _module.name != "routes":
        import_module(f"{schedule.__name__}.{_module.name}")

ALIASES = {"all_to_all": "ulysses"}
"""Alternative names of schedules, accepted everywhere."""
NUMBERED = tuple(name for name, route in ROUTES.items() if route.parameter)
"""Names that may be followed by a number of ranks, for example double_ring:4."""


def route_named(name: str, ranks: int | None = None) -> Route:
    """Return the schedule called `name`.

    "double_ring:M" has inner rings of M neighbouring ranks, "ulysses_ring:M" and "node_gather:M" have groups of M
    neighbouring ranks. Raises `InputError` for an unknown name.
    """
    word, colon, text = name.partition(":") if isinstance(name, str) else ("", "", "")
    word, number = ALIASES.get(word, word), parameter_of(text)
    if word not in ROUTES or (colon and (word not in NUMBERED or number is None)):
        numbered = ", ".join(f"{schedule_name}:{ROUTES[schedule_name].parameter}" for schedule_name in NUMBERED)
        near = get_close_matches(word, ("auto", *ROUTES), 1)
        meant = f"; did you mean {near[0]}?" if near and near[0] != word else ""
        raise InputError(
            f"schedule={name!r} is not known{meant}; choose auto or one of {', '.join(ROUTES)}, or {numbered} for "
            "inner rings or groups of M ranks"
        )
    route = ROUTES[word]
    return route if number is None or ranks is None else route.with_parameter(number, ranks)
