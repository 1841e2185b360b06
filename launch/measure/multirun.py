"""The records of `ringattn run -m`. A callback of Hydra stores their folder; a table is printed after all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ringattn.launch.calls import AUTOMATIC
from ringattn.launch.measure.points import POINTS, Folder, read_points, table_of


class Multirun(Callback):
    """A callback of Hydra that stores the folder of the multirun that this process has started."""

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See `hydra.experimental.callback.Callback`."""
        Multirun.folder = Path(config.hydra.sweep.dir).absolute()


def print_multirun() -> None:
    """Collect the records of the jobs in the folder of the multirun, if there was one, and print their table."""
    folder, Multirun.folder = Multirun.folder, None
    if folder is None:
        return
    list(Folder(folder).collect())
    records = list(read_points(folder).values())
    if records:
        keys = [key for key in records[0]["config"] if len({str(each["config"][key]) for each in records}) > 1]
        keys += [key for key in AUTOMATIC if key not in keys and len({_taken(each, key) for each in records}) > 1]
        rows = [(" ".join(f"{key}={_taken(each, key)}" for key in keys), each) for each in records]
        # Sort the rows, because jobs of some launchers end in any order.
        print(table_of(sorted(rows, key=lambda row: (row[1]["tokens"], row[1]["world_size"], row[0]))))
        print(f"records of all jobs: {folder / POINTS}; charts: ringattn report {folder}", flush=True)


def _taken(record: Mapping[str, Any], key: str) -> str:
    """Return the value of an option. If it is auto, the value that auto took is appended."""
    value, ran = record["config"][key], (record["resolved"] or {}).get(key)
    return f"auto:{ran}" if value == "auto" and ran else str(value)
