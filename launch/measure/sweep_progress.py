"""Progress of a sweep: a live bar with the time left on a terminal, a line for each point anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class SweepProgress:
    """A context manager around the points that are still to run."""

    def __init__(self, points: int) -> None:
        self.points, self.done_points, self._spent_s = points, 0, 0.0
        self._console = Console()
        columns = TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
        self._bar = Progress(*columns, console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("sweep", total=self.points, left="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, line: str, wall_s: float) -> None:
        """One more point has ended after `wall_s` seconds; `line` says which and how."""
        self.done_points += 1
        self._spent_s += wall_s
        left = f"about {self.left_s:.0f} s left"
        if self._bar is None:
            print(f"{self.done_points}/{self.points}  {line}  {left}", flush=True)
            return
        self._bar.console.print(line, markup=False, highlight=False)
        self._bar.update(self._task, completed=self.done_points, left=left)

    @property
    def left_s(self) -> float:
        """Seconds that the other points take if they take as long as those that have ended, on average."""
        return self._spent_s / self.done_points * (self.points - self.done_points)
