"""`python -m ringattn.launch.run`: `ringattn run`, for torchrun, debuggers and Hydra's users."""

from __future__ import annotations

import sys

from ringattn.launch.extras import advice
from ringattn.launch.measure.run import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if (told := advice(error)) is None:
            raise
        sys.exit(f"ringattn run: {told}")
