"""What is said of a ring before each of TRL's trainers: `python -m tests.adapters.trl_trainers` prints it as JSON."""

from __future__ import annotations

import json

import trl

from ringattn import UnsupportedError
from ringattn.adapters.transformers.trainer import RingTrainerMixin, check_trainer


def said() -> dict[str, str]:
    """By the name of the trainer."""
    found = {}
    for name in sorted(one for one in dir(trl) if one.endswith("Trainer")):
        try:
            check_trainer(type("Ours", (RingTrainerMixin, getattr(trl, name)), {}))
            found[name] = "taken"
        except UnsupportedError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(said()))
