"""A group of ranks that make the same calls together, and end together when one of them fails.

Guarantees: a call that the ranks do not agree on raises on all of them; after a failure the group is dead on every rank
and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import torch
from torch import Tensor

from ringattn.errors import ClosedError, DisagreementError, InputError, RingError
from ringattn.runtime.activation import attended, unseen
from ringattn.runtime.consistency import ComparedCall, ConsistencyCheck, GradientNeeds, Inputs, gradient_needs
from ringattn.transport import collectives
from ringattn.transport.base import FORKED, ProcessBound, Transport, close_dropped


class RankGroup(ProcessBound):
    """One rank's end of the group. A context manager. A group that is dropped is closed."""

    def __init__(self, transport: Transport) -> None:
        """Owns the transport, which closes with it.

        Args:
            transport: An open transport.

        Raises:
            Nothing.
        """
        self.transport = transport
        self._agreement = ConsistencyCheck(transport)
        # Why the group can no longer be used; None while it can.
        self._end: str | None = None
        # Refers to the transport alone, so nothing of the transport may refer to the group.
        self._if_dropped = finalize(self, close_dropped, transport)
        self._if_dropped.atexit = False

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
        # A ring of one exchanges nothing, so it takes the caller's current device.
        if self.world_size == 1 and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return self.transport.device

    @property
    def is_open(self) -> bool:
        """Whether it can still be used: neither closed nor aborted."""
        return self._end is None

    def barrier(self) -> None:
        """Returns when every rank has called it. A collective call.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: A peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        self.check_consistency("barrier", always=True)

    def synchronize(self) -> None:
        """Returns when all exchanges have arrived. Local, not a barrier.

        On a GPU the host runs ahead and notices a lost peer at a later call: synchronize before results are kept.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: An exchange failed.
        """
        with self.guarded():
            self.transport.drain()

    def all_reduce(self, tensors: Iterable[Tensor | None]) -> None:
        """Sums tensors over the ranks, in place; the same bits on every rank. A collective call.

        Args:
            tensors: Tensors of any shape, stride and dtype but bool, with the same shapes and dtypes on all ranks.
                Floats of 8 and 16 bits are summed in float32 and rounded once, all others in their own dtype. An entry
                that is None on all ranks, like the gradient of a frozen parameter, is skipped.

        Raises:
            InputError: An entry is neither a tensor nor None, on any rank; or a tensor is bool, which ends the ring.
            DisagreementError: Shapes, dtypes, or which entries are None differ between ranks.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or the deadline passed (DeadlineError).

        Example:
            ring.all_reduce([weight.grad for weight in model.parameters()])
        """
        entries: list[Tensor | None] = []

        def described() -> str:
            entries.extend(tensors)
            return f"all_reduce of {collectives.summary(entries)}"

        try:
            self.check_same_call(described)
        except DisagreementError as error:
            if collectives.ARE_NONE not in str(error):
                raise
            raise DisagreementError(
                f"{error}\nall_reduce skips an entry only where it is None on all ranks; on a rank without a gradient "
                "pass torch.zeros_like(parameter)"
            ) from None
        with self.guarded():
            collectives.all_reduce(self.transport, [entry for entry in entries if entry is not None])

    def broadcast(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Copies the tensors of one rank to every rank, in place. A collective call.

        Args:
            tensors: Tensors of any shape, stride and dtype, with the same shapes and dtypes on all ranks.
            src: The rank whose tensors are copied.

        Raises:
            InputError: There is no rank `src`, or an entry is not a tensor, on any rank.
            DisagreementError: `src`, shapes or dtypes differ between ranks.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        entries: list[Tensor] = []

        def described() -> str:
            if type(src) is not int or not 0 <= src < self.world_size:
                raise InputError(f"broadcast: there is no rank {src}")
            entries.extend(tensors)
            if missing := [index for index, entry in enumerate(entries) if entry is None]:
                raise InputError(f"broadcast: tensors[{missing[0]}] is None; leave it out on all ranks")
            return f"broadcast from {src} of {collectives.summary(entries)}"

        self.check_same_call(described)
        with self.guarded():
            collectives.broadcast(self.transport, entries, src)

    def replay(self, graph: Any) -> None:
        """Replays a captured CUDA graph of calls of this ring on the current stream, under one deadline for all of it.

        All ranks capture and replay the same calls. Run a call once before capturing it, capture with
        `capture_error_mode="thread_local"`, and drop the graph before the ring is closed.

        Args:
            graph: A `torch.cuda.CUDAGraph`.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: An exchange failed, or the deadline passed (DeadlineError).
        """
        self.check_consistency("replay of a captured graph")
        with self.guarded():
            self.transport.replay(graph.replay)

    def check_consistency(
        self,
        summary: str,
        refusal: RingError | None = None,
        always: bool = False,
        backward_of: int | None = None,
        needs: GradientNeeds | None = None,
    ) -> ComparedCall:
        """All ranks make the same call, or all raise. A collective call.

        Where the transport itself notices a rank that makes another call, one check of a call is enough.

        Args:
            summary: The call in words; equal on all ranks.
            refusal: Why this rank refuses the call. None: it does not.
            always: Check also a call that was checked before.
            backward_of: The number of the forward call whose backward pass this is; the same on all ranks. None: no
                backward.
            needs: Which gradients this rank needs. None: the call is not differentiable.

        Returns:
            The number of this call, and whether any rank needs gradients.

        Raises:
            RingError: `refusal`, on the rank that gave it.
            InputError: Another rank refused the call.
            DisagreementError: The ranks make different calls, or a rank cannot take part in the backward pass that
                another one needs.
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        if refusal is not None:
            attended()
        needed = needs is not None and bool(needs.inputs)
        # Alone there is nobody to ask.
        if self.world_size == 1:
            if refusal is not None:
                raise refusal
            return ComparedCall(0, needed)
        message = self._agreement.announced(summary, refusal, always, backward_of, needs)
        # Compared before: the transport notices a rank that makes another call.
        if message is None:
            return ComparedCall(self._agreement.calls, needed)
        try:
            with self.guarded(), unseen():
                answers = self._agreement.ask(message, needs)
        except RingError:
            # The own refusal says more than that the check failed.
            if refusal is not None:
                raise refusal from None
            raise
        # Raised after the check, so that the other ranks have been told and do not wait for this one.
        if refusal is not None:
            raise refusal
        graph = self._agreement.settle(summary, backward_of, answers, needs)
        return ComparedCall(self._agreement.calls, graph)

    def check_same_call(
        self, describe: Callable[[], str], inputs: Inputs | GradientNeeds | None = None
    ) -> ComparedCall:
        """`check_consistency` on the call that `describe` describes; an error of `describe` makes all ranks refuse it.

        Args:
            describe: Checks the call and returns it in words.
            inputs: The differentiable inputs, or which of them need a gradient. None: the call is not differentiable.

        Returns:
            The number of this call, and whether any rank needs gradients.

        Raises:
            InputError: `describe` raised, on any rank; every rank raises.
            DisagreementError: The ranks make different calls, or a rank cannot take part in the backward pass that
                another one needs.
            ClosedError: The ring was closed or has failed.
        """
        with self.refused_by_all():
            words = describe()
            needs = gradient_needs(inputs) if isinstance(inputs, Mapping) else inputs
        return self.check_consistency(words, needs=needs)

    @contextmanager
    def refused_by_all(self) -> Iterator[None]:
        """What this rank raises inside is raised by the next call of every rank, so that none waits for this one.

        Inside must be no collective call.

        Returns:
            A context manager.

        Raises:
            InputError: Something that is not a `RingError` was raised inside; it is the cause. A `RingError` stays as
                it is.
        """
        try:
            yield
        except RingError as error:
            if not str(error).startswith("rank "):  # checks of options do not know the rank
                error.args = (f"rank {self.rank}: {error}",)
            self.check_consistency("", error)
        except Exception as error:
            refusal = InputError(f"rank {self.rank}: {type(error).__name__}: {error}")
            refusal.__cause__ = error
            self.check_consistency("", refusal)

    def check_open(self) -> None:
        """Does nothing while the ring can be used.

        Raises:
            ClosedError: The ring was closed or has failed, or belongs to the process that this one was forked from.
        """
        self.check_process()
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring cannot be used any more, {self._end}; open a new Ring")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever is raised inside ends the ring on every rank, with this rank's error as the cause.

        Returns:
            A context manager.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        try:
            yield
        # Also KeyboardInterrupt: peers must not wait for a rank that has left a call half way.
        except BaseException as error:
            self.end(error)
            raise

    def end(self, cause: BaseException) -> None:
        """Ends the group on all ranks.

        Args:
            cause: The error that later calls name.

        Raises:
            Nothing.
        """
        if self.forked:
            return
        # First the reason, then the abort: a call that comes meanwhile already finds it.
        self._end = f"it was aborted: {cause}"
        self._if_dropped.detach()
        self.transport.abort(cause)

    def all_gather_text(self, words: str) -> list[str]:
        """Gathers a text from every rank. A collective call.

        Args:
            words: This rank's text.

        Returns:
            The texts, by rank.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: A peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        self.check_consistency("words of all ranks", always=True)
        with self.guarded():
            return [told.decode() for told in self.transport.all_gather_bytes(words.encode())]

    def close(self) -> None:
        """Leave in good order. Idempotent; any later call raises `ClosedError`."""
        if self._end is None:
            self._end = "it was closed"
            self._if_dropped.detach()
            self.transport.close()

    def leave_to_parent(self) -> None:
        """See `ProcessBound`."""
        self._end = FORKED
        self._if_dropped.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # An error inside `with` may have left peers waiting: abort, where close would wait for them.
        if error is not None and self._end is None:
            self.end(error)
        self.close()
