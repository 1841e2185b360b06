"""Runs jobs in worker processes of which each may die, as a compiler that fails an assertion takes its process along.

Promises: every job is run once; those whose process died are named; a dead worker is replaced.
Does not know: what the jobs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any


def run_all(job: Callable[..., None], arguments: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, bool]]:
    """(index, whether its process lived) of each `job(*arguments[index])`, in the order in which they end.

    `job` is importable by name; what it raises ends that job alone.
    """
    context, todo = get_context("spawn"), list(range(len(arguments)))[::-1]
    busy: dict[Connection, int] = {}

    def give(connection: Connection) -> None:
        if todo:
            busy[connection] = todo.pop()
            connection.send(arguments[busy[connection]])
        else:
            connection.close()

    def start() -> None:
        ours, theirs = context.Pipe()
        context.Process(target=_work, args=(job, theirs), daemon=True).start()
        theirs.close()
        give(ours)

    for _ in range(min(workers, len(arguments))):
        start()
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            index = busy.pop(connection)
            try:
                connection.recv()
            except EOFError:
                connection.close()
                if todo:
                    start()
                yield index, False
            else:
                give(connection)
                yield index, True


def _work(job: Callable[..., None], connection: Connection) -> None:
    """Jobs one after another, until nobody sends any more."""
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            job(*arguments)
        except Exception:  # the caller runs it again and reports
            pass
        connection.send(None)
