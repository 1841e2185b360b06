"""A group of ranks that make the same calls together, and end together when one of them fails.

Guarantees: a call that the ranks do not agree on raises on all of them; after a failure the group is dead on every rank
and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ringattn.errors import ClosedError, InputError, RingError
from ringattn.runtime.activation import attended
from ringattn.runtime.consistency import ConsistencyCheck
from ringattn.runtime.selective import unseen
from ringattn.transport import collectives
from ringattn.transport.base import Transport


class RankGroup:
    """One rank's end of the group. A context manager."""

    def __init__(self, transport: Transport) -> None:
        """Owns the transport, which closes with it."""
        self.transport = transport
        self._agreement = ConsistencyCheck(transport)
        self._end: str | None = None

    @property
    def rank(self) -> int:
        """This rank, 0 .. world_size - 1."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Ranks of the ring."""
        return self.transport.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        if self.world_size == 1 and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return self.transport.device

    @property
    def is_open(self) -> bool:
        """Whether it can still be used: neither closed nor aborted."""
        return self._end is None

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.agree("barrier", always=True)

    def synchronize(self) -> None:
        """Return when all exchanges have arrived; raises what has failed. Local, not a barrier.

        On a GPU the host runs ahead and hears of a lost peer at a later call: synchronize before results are kept.
        """
        with self.guarded():
            self.transport.drain()

    def all_reduce(self, tensors: Many[Tensor]) -> None:
        """Sum tensors over the ranks, in place; the same bits on every rank."""
        self.agree_on(lambda: f"all_reduce of {collectives.shapes(list(tensors))}")
        tensors = list(tensors)
        with self.guarded():
            collectives.all_reduce(self.transport, tensors)

    def broadcast(self, tensors: Many[Tensor], src: int = 0) -> None:
        """Copy `src`'s tensors to every rank, in place."""

        def described() -> str:
            if type(src) is not int or not 0 <= src < self.world_size:
                raise InputError(f"broadcast: there is no rank {src}")
            return f"broadcast from {src} of {collectives.shapes(list(tensors))}"

        self.agree_on(described)
        tensors = list(tensors)
        with self.guarded():
            collectives.broadcast(self.transport, tensors, src)

    def replay(self, graph: Any) -> None:
        """Replay a `torch.cuda.CUDAGraph` of calls of this ring on the current stream, under one deadline for it all.

        All ranks capture and replay the same calls. Run a call once before capturing it, capture with
        `capture_error_mode="thread_local"`, and drop the graph before the ring is closed.
        """
        self.agree("replay of a captured graph")
        with self.guarded():
            self.transport.replay(graph.replay)

    def agree(
        self, summary: str, refusal: RingError | None = None, always: bool = False, backward_of: int | None = None
    ) -> int:
        """All ranks make the same call or all raise: `refusal` here, `InputError` or `DisagreementError` elsewhere.

        `backward_of`: the number of the forward call whose backward pass this is; it must be the same call too. Where
        the transport itself notices a rank that makes another call, one agreement on a call is enough, unless `always`.
        Returns the number of this call, the same on all ranks; 0 alone.
        """
        self.check_open()
        if refusal is not None:
            attended()
        if self.world_size == 1:
            if refusal is not None:
                raise refusal
            return 0
        mine = self._agreement.announced(summary, refusal, always, backward_of)
        if mine is None:
            return self._agreement.calls
        try:
            with self.guarded(), unseen():
                answers = self._agreement.ask(mine)
        except RingError:
            if refusal is not None:
                raise refusal from None
            raise
        if refusal is not None:
            raise refusal
        self._agreement.settle(summary, backward_of, answers)
        return self._agreement.calls

    def agree_on(self, describe: Callable[[], str]) -> int:
        """`agree` on the call that `describe` gives in words; whatever it raises, all ranks refuse the call for."""
        with self.refused_by_all():
            words = describe()
        return self.agree(words)

    @contextmanager
    def refused_by_all(self) -> Iterator[None]:
        """Whatever this rank raises inside is raised by the next call of every rank, so that none waits for this one.

        Inside must be no collective call. What is no `RingError` becomes an `InputError`, with the other as its cause.
        """
        try:
            yield
        except RingError as error:
            self.agree("", error)
        except Exception as error:
            refusal = InputError(f"rank {self.rank}: {type(error).__name__}: {error}")
            refusal.__cause__ = error
            self.agree("", refusal)

    def check_open(self) -> None:
        """Raise `ClosedError` unless the ring is alive."""
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring cannot be used any more, {self._end}; open a new Ring")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever is raised inside ends the ring on every rank, with this rank's error as the cause."""
        self.check_open()
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise

    def end(self, cause: BaseException) -> None:
        """End the group on all ranks, with this cause."""
        self._end = f"it was aborted: {cause}"
        self.transport.abort(cause)

    def told_by_all(self, words: str) -> list[str]:
        """What every rank says, by rank."""
        self.agree("words of all ranks", always=True)
        with self.guarded():
            return [told.decode() for told in self.transport.agree(words.encode())]

    def close(self) -> None:
        """Leave in good order. Idempotent; any later call raises `ClosedError`."""
        if self._end is None:
            self._end = "it was closed"
            self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._end is None:
            self.end(error)
        self.close()
