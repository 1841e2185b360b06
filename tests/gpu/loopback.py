"""A ring of threads whose bytes travel through real NCCL: one communicator of one rank, which sends to itself.

When all virtual ranks wait, everything they have posted goes into one group: P sends and P receives for a ring of P.
NCCL matches a rank's sends to itself with its receives in the order in which they are posted, so pairs are posted
side by side. Drives the library, streams, events, slots and registration of a real hop with no second process.
Not covered: CUDA, whether the library is real; a simulated one rehearses it on CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.transport.base import Message, Opening
from ringattn.transport.deadline import Deadline
from ringattn.transport.device import Device, Event
from ringattn.transport.local import LocalTransport, LocalWorkHandle, LocalWorld, _Operation
from ringattn.transport.nccl.binding import Binding, CommConfig
from ringattn.transport.nccl.communicator import Communicator, PeerCall
from ringattn.transport.nccl.transport import RingMemory

Result = TypeVar("Result")


class LoopbackWorld(LocalWorld):
    """The meeting place of `world_size` virtual ranks on one device."""

    def __init__(
        self, world_size: int, binding: Binding, gpu: Device, *, timeout_s: float = 60.0, blocking: bool = False,
        registered: bool = True, synchronize: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`synchronize` returns when the device is idle: memory that one rank drops, another's stream may read."""
        super().__init__(world_size, timeout_s)
        self.gpu, self.synchronize = gpu, synchronize
        self.stream = gpu.new_stream()
        config = CommConfig(blocking=blocking, max_ctas=4, name="loopback")
        self.lane = Communicator(Opening(HashStore(), 0, 1, timeout_s), binding, gpu, config)
        self.lane.open(binding.unique_id(), self._never)
        self.slots = RingMemory(binding, gpu, self.lane, registered)
        self.group_sizes: list[int] = []
        self._batch: list[tuple[_Operation, _Operation]] = []
        self._ready: dict[int, Event] = {}

    def transport(self, rank: int) -> LoopbackTransport:
        """The end of `rank`, once per rank."""
        super().transport(rank)
        return LoopbackTransport(self, rank)

    def end(self) -> None:
        """Free the communicator."""
        self.lane.close(Deadline(10.0))
        self.slots.free()

    def posted(self, operation: _Operation, ready: Event) -> None:
        """The operation may run after `ready`."""
        self._ready[id(operation)] = ready

    def _deliver(self, send: _Operation, recv: _Operation) -> None:
        self._batch.append((send, recv))

    def _stuck(self) -> bool:
        if not super()._stuck():
            return False
        if not self._batch:
            return True
        self._launch()
        return False

    def _launch(self) -> None:
        """All messages that wait, as one group behind what their ranks have computed."""
        calls = []
        for pair in self._batch:
            for operation in pair:
                self.stream.wait_event(self._ready.pop(id(operation)))
                calls.append(PeerCall(operation.sends, operation.buffer.data_ptr(), operation.nbytes, 0))
        self.lane.launch(calls, self.stream.cuda_stream, self._never)
        arrived = self.gpu.new_event()
        arrived.record(self.stream)
        for operation in (operation for pair in self._batch for operation in pair):
            operation.arrived = arrived  # type: ignore[attr-defined]
            operation.done = True
        self.group_sizes.append(len(calls))
        self._batch.clear()
        self.changed.notify_all()

    def quiet(self) -> bool:
        """Whether nothing on the device can touch memory that was dropped; waits for it."""
        self.synchronize()
        return True

    @staticmethod
    def _never() -> None:
        """Nobody else can fail here."""


class LoopbackTransport(LocalTransport):
    """One virtual rank."""

    name = "loopback"

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.device = world.gpu.torch_device
        self._loop = world

    def allocate(self, nbytes: int) -> torch.Tensor:
        """NCCL's own memory, registered."""
        with self._loop.changed:
            return self._loop.slots.allocate(nbytes, self._loop.quiet)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> LocalWorkHandle:
        """See `Transport.exchange`."""
        ready = self._loop.gpu.new_event()
        ready.record(self._loop.gpu.current_stream())
        with self._loop.changed:
            ticket = super().exchange(sends, recvs)
            for operation in ticket._operations:
                self._loop.posted(operation, ready)
        return ticket

    def _finish(self, posted: list[_Operation]) -> None:
        super()._finish(posted)
        for operation in posted:
            self._loop.gpu.current_stream().wait_event(operation.arrived)  # type: ignore[attr-defined]


def on_loopback(
    world: LoopbackWorld,
    body: Callable[[Ring], Result],
    own_stream: Callable[[], AbstractContextManager] = nullcontext,
    **ring_options: object,
) -> list[Result]:
    """`body(ring)` on a thread a virtual rank, each inside `own_stream()`; the results by rank, or the first error."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            world.gpu.activate()
            # Else the backward passes of all threads share one autograd thread, where one would wait for the other.
            with torch.autograd.set_multithreading_enabled(False), own_stream():
                with Ring(transport=world.transport(rank), **ring_options) as ring:  # type: ignore[arg-type]
                    results[rank] = body(ring)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(world.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world.world_size)]
