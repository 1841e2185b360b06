"""`ringattn.bench.many_ranks` with cases that go wrong: `python -m tests.bench.many_faulty JOB.json`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ringattn.bench import many_ranks
from ringattn.errors import UnsupportedError

right = many_ranks.hop


def hop(case: many_ranks.Case) -> Any:
    """By bytes: 1 dies on rank 1, 2 leaves a file there and hangs, 3 raises there, 4 is refused on both; else right."""
    kind, culprit = case["bytes"][0], os.environ["RANK"] == "1"
    if kind == 4:
        raise UnsupportedError("no such transport")
    if culprit and kind == 1:
        os._exit(9)
    if culprit and kind == 2:
        Path(os.environ["RINGATTN_TEST_HANGS"]).touch()
        time.sleep(1000)
    if culprit and kind == 3:
        raise ArithmeticError("a wrong byte")
    return right(case)


many_ranks.hop = hop

if __name__ == "__main__":
    many_ranks.main(Path(sys.argv[1]))
