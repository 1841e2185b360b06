"""Run jobs in worker processes, because a job may crash or hang: a compiler assertion, a kernel that never ends.

Guarantees: each job runs once and for at most its time limit. If a job raises, crashes or takes longer, its process is
ended, because its CUDA context may be broken, and the next job gets a new process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any


class JobFailed(Exception):
    """The error of a job without a result. Its message is one line with the reason."""


class Budget:
    """The seconds that all jobs together may take, counted from the creation of this object."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Return the seconds left, which are negative if the budget is exceeded."""
        return self._end - monotonic()

    def limit(self, limit_s: float) -> float:
        """Return the seconds that the next job may take: `limit_s`, or the rest of the budget if that is less.

        Raises JobFailed if the budget is spent.
        """
        left_s = self.left_s
        if left_s <= 0:
            raise JobFailed(f"not tried: the {self._seconds:.0f} s of budget_s are spent")
        return min(limit_s, left_s)


class Worker:
    """A process that does one job after another."""

    def __init__(self) -> None:
        self._running: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, job: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """Return `job(*arguments)`, where `job` is importable by name. The limit includes the start of a new process.

        Raises JobFailed if there is no result.
        """
        process, connection = self._running = self._running or _start_process()
        connection.send((job, arguments))
        try:
            if not connection.poll(limit_s):
                raise JobFailed(f"no answer within {limit_s:.0f} s")
            failed, result = connection.recv()
            if failed:
                raise JobFailed(failed)
        except EOFError:
            process.join(10)
            self.close()
            raise JobFailed(f"its process ended with exit code {process.exitcode}") from None
        except JobFailed:
            self.close()
            raise
        return result

    def close(self) -> None:
        """Kill the process."""
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.join(10)  # a process blocked in the driver may survive even this


def run_all(
    job: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], workers: int, limit_s: float, budget: Budget
) -> Iterator[tuple[int, Any]]:
    """Run `job` for each of `arguments` in `workers` processes; yield (index, result or JobFailed) as each job ends.

    `limit_s` is the limit of a single job.
    """
    todo, done = deque(enumerate(arguments)), SimpleQueue[tuple[int, Any]]()

    def work() -> None:
        with Worker() as worker:
            while todo:
                try:
                    index, job_arguments = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    done.put((index, worker.ask(job, *job_arguments, limit_s=budget.limit(limit_s))))
                except Exception as error:
                    done.put((index, error if isinstance(error, JobFailed) else JobFailed(one_line(error))))

    for _ in range(min(workers, len(arguments))):
        Thread(target=work, daemon=True).start()
    for _ in arguments:
        yield done.get()


def one_line(error: BaseException) -> str:
    """Return an error as one line of at most 200 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _start_process() -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(connection: Connection) -> None:
    """Run jobs one after another until one raises or the parent closes the connection."""
    while True:
        try:
            job, arguments = connection.recv()
        except EOFError:
            return
        try:
            result = job(*arguments)
        except Exception as error:
            connection.send((one_line(error), None))
            return
        connection.send(("", result))
