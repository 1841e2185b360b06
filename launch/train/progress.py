"""Progress of a training run: a live bar on a terminal, about ten plain lines, or as many as wanted, anywhere else.

Not covered: ranks; whoever should be silent makes none.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """A context manager around the steps of one run, `title` in front of each line."""

    def __init__(self, title: str, steps: int, lines: int = 10) -> None:
        self.title, self.steps, self.lines = title, steps, lines
        console = Console()
        self._bar = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
            )
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, figures="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, step: int, loss: float | None, tokens_per_s: float, skipped: int = 0) -> None:
        """Step number `step` (from 0) has ended with this loss, None if it was skipped as `skipped` in all were."""
        figures = f"loss {'skipped' if loss is None else f'{loss:.4f}'}  {tokens_per_s:,.0f} tokens/s"
        figures += f"  {skipped} skipped" if skipped else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, figures=figures)
        elif step == self.steps - 1 or (self.lines > 1 and (step == 0 or (step + 1) % self._every == 0)):
            print(f"{self.title}  step {step + 1}/{self.steps}  {figures}", flush=True)

    @property
    def _every(self) -> int:
        return max(1, self.steps // self.lines)
