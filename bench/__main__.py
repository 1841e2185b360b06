"""`python -m ringattn.bench [name] [key=value ...]`: one benchmark, or all of them one after another."""

from __future__ import annotations

import sys
from importlib import import_module

from ringattn.errors import InputError

NAMES = (
    "memory", "attention_memory", "training_memory", "speed", "dilated", "prediction", "choice",
    "recording", "hop", "control_store", "launch", "faults", "two_nodes", "makespan", "margin", "shm",
    "published", "soak",
)  # fmt: skip


def main(words: list[str]) -> None:
    """Run the benchmark that the first word names with the other words as its options; without words run all."""
    if not words:
        for name in NAMES:
            import_module(f"ringattn.bench.{name}").main([])
    elif words[0] in NAMES:
        import_module(f"ringattn.bench.{words[0]}").main(words[1:])
    else:
        raise InputError(f"{words[0]}: not a benchmark; choose one of {', '.join(NAMES)}")


if __name__ == "__main__":
    main(sys.argv[1:])
