"""The option of a command that names a schedule."""

from __future__ import annotations

from typing import Any

from ringattn.launch.options import option
from ringattn.schedule.routes import ALIASES, NUMBERED, ROUTES


def schedule_option() -> Any:
    """A schedule, by any name that `Ring.attention` takes."""
    return option("auto", "how keys and values travel", choices=("auto", *ROUTES), aliases=ALIASES, numbered=NUMBERED)
