"""`python -m ringattn.bench [name] [key=value ...]`: run one benchmark, or all of them one after another."""

from __future__ import annotations

import sys
from importlib import import_module

from ringattn.errors import InputError

NAMES = (
    "memory", "attention_memory", "training_memory", "speed", "dilated", "prediction", "choice",
    "recording", "hop", "control_store", "launch", "faults", "two_nodes", "makespan", "margin", "shm",
    "published", "soak", "latents", "state_bytes", "rollouts",
)  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run the benchmark that the first argument names, with the other arguments as its options.

    Without arguments, run all benchmarks.
    """
    if not arguments:
        for name in NAMES:
            import_module(f"ringattn.bench.{name}").main([])
    elif arguments[0] in NAMES:
        import_module(f"ringattn.bench.{arguments[0]}").main(arguments[1:])
    else:
        raise InputError(f"{arguments[0]}: not a benchmark; choose one of {', '.join(NAMES)}")


if __name__ == "__main__":
    main(sys.argv[1:])
