"""How long the engines were measured to take, which is what engine="auto" decides by.

Guarantees the rows of measured.json as a benchmark wrote them; without any, nothing is claimed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

TABLE = "measured.json"


class Measurement(NamedTuple):
    """One engine folding `tokens` queries into `tokens` keys on one GPU.

    `device`: the name that the driver gives it. `dtype`: of the inputs, such as bfloat16. `commit`: of this project.
    """

    device: str
    dtype: str
    head_dim: int
    tokens: int
    engine: str
    forward_us: float
    backward_us: float
    commit: str

    @property
    def total_us(self) -> float:
        """A training step's part: forward and backward."""
        return self.forward_us + self.backward_us


@cache
def measurements() -> tuple[Measurement, ...]:
    """The whole table. Raises TypeError where a row does not have exactly the fields of a measurement."""
    rows = json.loads(files("ringattn.engine").joinpath(TABLE).read_text(encoding="utf-8"))
    return tuple(Measurement(**row) for row in rows)


def ranked(rows: Iterable[Measurement], head_dim: int) -> list[Measurement]:
    """Those of `rows` that can be compared for a call, fastest first; empty where no two engines can.

    Compared are the engines measured at one head dimension, the nearest (of two equally near ones the greater), with
    as many tokens as at least two of them share.
    """
    alike: dict[tuple[int, int], dict[str, Measurement]] = {}
    for row in rows:
        alike.setdefault((row.head_dim, row.tokens), {})[row.engine] = row
    contests = [at for at, engines in alike.items() if len(engines) > 1]
    if not contests:
        return []
    nearest = min(contests, key=lambda at: (abs(at[0] - head_dim), -at[0], -at[1]))
    return sorted(alike[nearest].values(), key=lambda row: row.total_us)
