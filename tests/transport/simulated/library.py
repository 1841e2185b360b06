"""A simulated libnccl for one rank: a `Binding` on the simulated world that checks every rule of use.

Guarantees: a call that NCCL refuses gets NCCL's status; a call that NCCL leaves undefined is also recorded in
`SimWorld.violations`; a call that may hang in NCCL hangs here until its communicator is aborted.
Sources: nccl.h of 2.23 to 2.32; NCCL user guide, "Group calls", "Fault tolerance", "User buffer registration".
Not covered: how bytes move (`streams.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ringattn.transport.nccl.binding import UNIQUE_ID_BYTES, Capability, CommConfig, MissingError, NcclError, Status
from tests.transport.simulated.streams import COMPUTE, Communicator, Launch, Op, Phase, Range
from tests.transport.simulated.world import SimWorld

# --- the rules for one process ----------------------------------------------------------------------------------------


class Checks:
    """The rules of NCCL that are checked in the process of `rank`.

    `last_refusal`: the message of the last refused call. The "end" of a communicator is the part that belongs to one
    rank; `handle` is the number by which the rank names it.

    The caller must hold the world's lock, except for `enter`, `capability` and `config`.
    """

    def __init__(self, world: SimWorld, rank: int, capabilities: frozenset[Capability]) -> None:
        self.last_refusal = ""
        self._world, self._rank, self._capabilities = world, rank, capabilities

    def enter(self, function: str) -> None:
        """Apply the scripted faults of `function` when a call begins. Raises `NcclError` if that is the fault."""
        if (answer := self._world.script.enter(self._rank, function)) is not None:
            raise self.refusal(function, answer, "scripted")

    def refusal(self, function: str, status: int, text: str = "") -> NcclError:
        """Return the error of a refused call. If `text` is empty, it is the message of the last refusal."""
        self.last_refusal = text or self.last_refusal
        return NcclError(function, status, self.last_refusal)

    def broken(self, function: str, text: str) -> int:
        """Record that a call of `function` breaks a rule, and return the status that the call must return."""
        self.last_refusal = f"{function}: {text}"
        self._world.violate(self._rank, self.last_refusal)
        return Status.INVALID_ARGUMENT

    def capability(self, needed: Capability) -> None:
        """Raise `MissingError` if the library lacks this capability."""
        if needed not in self._capabilities:
            raise MissingError(f"the simulated library of rank {self._rank} lacks {needed.value}")

    def config(self, config: CommConfig) -> None:
        """Raise `MissingError` if the library lacks a capability that the configuration needs."""
        for needed in config.needs():
            self.capability(needed)

    def no_graph(self, function: str, end: Communicator) -> None:
        """Raise if a live graph uses this end: NCCL would spin in destroy and abort (commDestroySync)."""
        if self._world.in_graph(end):
            self.broken(function, f"{end} is used by a live CUDA graph; reset the graph first")
            raise self.refusal(function, Status.INVALID_USAGE)

    def find(self, function: str, handle: int) -> Communicator | None:
        """Return this rank's end with this handle, or None if `handle` is NULL, invalid, freed or of another rank."""
        end = self._world.registry.by_handle.get(handle)
        if not handle:
            self.last_refusal = f"{function}: NULL communicator"
            return None
        if end is None or end.process != self._rank:
            self.broken(function, f"handle {handle:#x} is no communicator of this rank")
            return None
        if end.gone:
            self.broken(function, f"{end} is {end.phase.value}")
            return None
        return end

    def usable(self, function: str, handle: int, also: Phase = Phase.READY) -> Communicator | None:
        """Return this rank's end of a communicator, or None if it cannot be used now.

        The end must be ready, or in phase `also`, and no other thread may use it.
        """
        end = self.find(function, handle)
        if end is None:
            return None
        if end.phase not in (Phase.READY, also):
            self.broken(function, f"{end} is {end.phase.value}")
        elif end.polls_left:
            self.broken(function, f"{end} is still in progress: state() has not returned SUCCESS")
        elif end.user not in (None, threading.get_ident()):
            self.broken(function, f"two threads use {end} at once")
        else:
            return end
        return None

    @contextmanager
    def inside(self, function: str, handle: int, also: Phase = Phase.READY) -> Iterator[Communicator]:
        """Mark this rank's end as used by this thread within the context. Raises `NcclError` if it is not usable."""
        end = self.usable(function, handle, also)
        if end is None:
            raise self.refusal(function, Status.INVALID_ARGUMENT)
        before, end.user = end.user, threading.get_ident()
        try:
            yield end
        finally:
            end.user = before

    def own_memory(self, function: str, pointer: int, nbytes: int) -> bool:
        """Return whether these bytes are live memory of this rank. Record a violation if not."""
        owned = self._world.memory.view(self._rank, pointer, nbytes) is not None
        if not owned:
            self.broken(function, f"illegal address {pointer:#x}: not {nbytes} live bytes of this rank")
        return owned

    def registered(self, memory: Range) -> bool:
        """Return whether any of these bytes are registered with a communicator."""
        ends = self._world.registry.of(self._rank)
        return any(_overlap(memory, each) for end in ends for each in end.registered.values())

    def in_flight(self, memory: Range) -> bool:
        """Return whether a group that has not completed sends from or receives into this memory."""
        launches = (launch for end in self._world.registry.of(self._rank) for launch in end.in_flight())
        return any(_overlap(memory, (op.address, op.nbytes)) for launch in launches for op in launch.ops)


def _overlap(a: Range, b: Range) -> bool:
    """Return whether two ranges share a byte."""
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


# --- the library ------------------------------------------------------------------------------------------------------


class QueuedCall(NamedTuple):
    """A send or receive in a group that `group_end` has not ended yet."""

    comm: Communicator
    op: Op
    stream: str


class OpenGroup(threading.local):
    """The open group of the calling thread: how deeply `group_start` is nested, and the queued calls."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[QueuedCall] = []

    def take(self) -> list[QueuedCall]:
        """Return all queued calls and empty the queue."""
        calls, self.calls = self.calls, []
        return calls


class SimLibrary:
    """The copy of libnccl in the process of `rank`, which needs a `SimDevice` before it opens a communicator."""

    name = "simulated"
    path = "tests/transport/simulated/library.py"
    version = 22809

    def __init__(self, world: SimWorld, rank: int, capabilities: frozenset[Capability] = frozenset(Capability)) -> None:
        self.capabilities = capabilities
        self._world, self._rank = world, rank
        self._group = OpenGroup()
        self._checks = Checks(world, rank, capabilities)

    # --- opening and ending ------------------------------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """See `Binding.unique_id`."""
        self._checks.enter("unique_id")
        return os.urandom(UNIQUE_ID_BYTES)

    def init(self, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        """See `Binding.init`. It is in progress until `world_size` ranks have called it with this id and size."""
        self._checks.enter("init")
        self._checks.config(config)
        world = self._world
        with world.changed:
            if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < world_size:
                raise self._checks.refusal("init", Status.INVALID_ARGUMENT, f"rank {rank} of {world_size}, or no id")
            if self._rank not in world.devices:
                raise self._checks.refusal("init", Status.UNHANDLED_CUDA_ERROR, "this rank has no device")
            comm = world.registry.join(unique_id, world_size, self._rank, rank, config)
            return self._opened("init", comm)

    def state(self, comm: int) -> int:
        """See `Binding.state`. A pending group is launched when this returns SUCCESS."""
        if (answer := self._world.script.enter(self._rank, "state")) is not None:
            return answer
        with self._world.changed:
            end = self._checks.find("state", comm)
            if end is None:
                return Status.INVALID_ARGUMENT
            if end.error is not Status.SUCCESS:
                return end.error
            if not self._all_ranks_ready(end) or not self._connected(end):
                return Status.IN_PROGRESS
            if end.polls_left:
                end.polls_left -= 1
                return Status.IN_PROGRESS
            if end.phase is Phase.OPENING:
                end.phase = Phase.READY
            launch, end.unlaunched = end.unlaunched, None
            if launch is not None:
                self._world.submit(launch)
        self._world.script.leave(self._rank)
        return Status.SUCCESS

    def finalize(self, comm: int) -> None:
        """See `Binding.finalize`. It is in progress until all ranks have called it and this rank's groups have run."""
        self._checks.enter("finalize")
        self._checks.capability(Capability.FINALIZE)
        with self._world.changed, self._checks.inside("finalize", comm) as end:
            end.phase, end.polls_left = Phase.FINALIZED, self._world.polls
            self._world.changed.notify_all()
            if end.config.blocking:
                self._block("finalize", end)
                end.polls_left = 0

    def destroy(self, comm: int) -> None:
        """See `Binding.destroy`. The call blocks until all ranks have called it and this rank's groups have run."""
        self._checks.enter("destroy")
        with self._world.changed, self._checks.inside("destroy", comm, Phase.FINALIZED) as end:
            self._checks.no_graph("destroy", end)
            end.phase = Phase.LEAVING
            self._world.changed.notify_all()
            self._block("destroy", end)
            end.phase = Phase.DESTROYED

    def abort(self, comm: int) -> None:
        """See `Binding.abort`. Wakes the threads that wait on this rank's communicator. The peers do not notice."""
        self._checks.enter("abort")
        with self._world.changed:
            if (end := self._checks.find("abort", comm)) is None:
                raise self._checks.refusal("abort", Status.INVALID_ARGUMENT, "no live communicator")
            self._checks.no_graph("abort", end)
            end.phase = Phase.ABORTED
            self._world.drop(end)

    # --- a hop -------------------------------------------------------------------------------------------------------

    def group_start(self) -> int:
        """See `Binding.group_start`. Groups nest."""
        if (answer := self._world.script.enter(self._rank, "group_start")) is not None:
            return answer
        self._group.depth += 1
        return Status.SUCCESS

    def send(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """See `Binding.send`. Outside of a group, this call is a group of its own."""
        return self._post("send", pointer, nbytes, peer, comm, stream)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """See `Binding.recv`. Outside of a group, this call is a group of its own."""
        return self._post("recv", pointer, nbytes, peer, comm, stream)

    def group_end(self) -> int:
        """See `Binding.group_end`. Returns IN_PROGRESS if a communicator is non-blocking."""
        answer = self._world.script.enter(self._rank, "group_end")
        if self._group.depth == 0:
            return Status.INVALID_USAGE
        self._group.depth -= 1
        if answer is not None:
            for call in self._group.take():
                call.comm.user = None
                call.comm.fail(answer, "the group failed")
            return answer
        return self._launch(self._group.take()) if self._group.depth == 0 else Status.SUCCESS

    def _post(self, kind: str, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """Queue a send or receive in the open group, or launch it if no group is open.

        A call that is refused does not change the group.
        """
        if (answer := self._world.script.enter(self._rank, kind)) is not None:
            return answer
        with self._world.changed:
            end = self._checks.usable(kind, comm)
            if end is None:
                return Status.INVALID_ARGUMENT
            if end.error is not Status.SUCCESS:
                return end.error
            if not 0 <= peer < end.clique.world_size or nbytes < 0:
                return Status.INVALID_ARGUMENT
            owner, name = self._world.streams.get(stream, (-1, ""))
            if owner != self._rank or name == COMPUTE:
                return self._checks.broken(kind, f"stream {stream:#x} is no communication stream of this rank")
            if not self._checks.own_memory(kind, pointer, nbytes):
                return Status.INVALID_ARGUMENT
            call = QueuedCall(end, Op(kind, peer, nbytes, pointer), name)
            if not self._group.depth:
                return self._launch([call])
            end.user = threading.get_ident()
            self._group.calls.append(call)
            return Status.SUCCESS

    def _launch(self, calls: list[QueuedCall]) -> int:
        """End a group: launch its sends and receives, with one launch per communicator."""
        world, answer = self._world, Status.SUCCESS
        if calls:
            world.script.ending_group(self._rank)
        with world.changed:
            ends = list(dict.fromkeys(call.comm for call in calls))
            for end in ends:
                end.user = None
            if any(end.gone for end in ends):  # aborted by another thread while the group was open
                return Status.INVALID_USAGE
            group = world.next_group(self._rank)
            for end in ends:
                queued = [call for call in calls if call.comm is end]
                captured = world.capturing(self._rank)
                launch = Launch(self._rank, queued[0].stream, end, tuple(call.op for call in queued), group, captured)
                if not captured:
                    end.number(launch)
                if end.config.blocking or not world.polls:
                    world.submit(launch)
                else:
                    end.unlaunched, end.polls_left, answer = launch, world.polls, Status.IN_PROGRESS
        world.script.leave(self._rank)
        return answer

    # --- memory ------------------------------------------------------------------------------------------------------

    def mem_alloc(self, nbytes: int) -> int:
        """See `Binding.mem_alloc`."""
        self._checks.enter("mem_alloc")
        self._checks.capability(Capability.MEMORY)
        with self._world.changed:
            pointer = self._world.memory.nccl(self._rank, nbytes)
            if pointer is None:
                text = "Cuda failure 2 'out of memory'"
                raise NcclError("ncclMemAlloc", Status.UNHANDLED_CUDA_ERROR, text)
            return pointer

    def mem_free(self, pointer: int) -> None:
        """See `Binding.mem_free`. The call is refused while the memory is registered, in flight or used by compute."""
        self._checks.enter("mem_free")
        self._checks.capability(Capability.MEMORY)
        with self._world.changed:
            nbytes = self._world.memory.nccl_size(self._rank, pointer)
            if nbytes is None:
                self._checks.broken("mem_free", f"{pointer:#x} is no live NCCL memory of this rank")
            elif self._checks.registered((pointer, nbytes)):
                self._checks.broken("mem_free", f"{pointer:#x} is still registered")
            elif self._checks.in_flight((pointer, nbytes)):
                self._checks.broken("mem_free", f"{pointer:#x} is still in flight")
            elif (touch := self._world.touching(self._rank, (pointer, nbytes))) is not None:
                self._checks.broken("mem_free", f"{pointer:#x} is still used by {touch} on stream {touch.stream}")
            else:
                self._world.memory.free(self._rank, pointer)
                return
            raise self._checks.refusal("mem_free", Status.INVALID_ARGUMENT)

    def register(self, comm: int, pointer: int, nbytes: int) -> int:
        """See `Binding.register`."""
        self._checks.enter("register")
        self._checks.capability(Capability.REGISTER)
        with self._world.changed, self._checks.inside("register", comm) as end:
            if not self._checks.own_memory("register", pointer, nbytes):
                raise self._checks.refusal("register", Status.INVALID_ARGUMENT)
            handle = self._world.registry.new_handle()
            end.registered[handle] = (pointer, nbytes)
            return handle

    def deregister(self, comm: int, handle: int) -> None:
        """See `Binding.deregister`. The call is refused while the memory is in flight."""
        self._checks.enter("deregister")
        self._checks.capability(Capability.REGISTER)
        with self._world.changed, self._checks.inside("deregister", comm, Phase.FINALIZED) as end:
            if handle not in end.registered:
                self._checks.broken("deregister", f"{handle:#x} is no registration of {end}")
            elif self._checks.in_flight(end.registered[handle]):
                self._checks.broken("deregister", f"{end.registered[handle][0]:#x} is still in flight")
            else:
                del end.registered[handle]
                return
            raise self._checks.refusal("deregister", Status.INVALID_ARGUMENT)

    def last_error(self, comm: int) -> str:
        """See `Binding.last_error`."""
        self._checks.capability(Capability.LAST_ERROR)
        with self._world.changed:
            end = self._checks.find("last_error", comm) if comm else None
            return end.error_text if end is not None else self._checks.last_refusal

    # --- waiting inside a call ---------------------------------------------------------------------------------------

    def _all_ranks_ready(self, end: Communicator) -> bool:
        """Return whether the call that is in progress on this end (init, finalize or destroy) can complete.

        All ranks must have made this call. For finalize and destroy, the groups of this end must also have run.
        """
        clique = end.clique
        if end.phase is Phase.OPENING:
            return clique.full
        if end.phase is Phase.FINALIZED:
            return not end.launches and clique.reached(Phase.FINALIZED, Phase.LEAVING, Phase.DESTROYED)
        if end.phase is Phase.LEAVING:
            return not end.launches and clique.reached(Phase.LEAVING, Phase.DESTROYED)
        return True

    def _connected(self, end: Communicator) -> bool:
        """Return whether this rank is connected with the peers of the group in progress."""
        launch, members = end.unlaunched, end.clique.members
        return launch is None or self._world.connected(self._rank, [members[op.peer].process for op in launch.ops])

    def _opened(self, function: str, end: Communicator) -> int:
        """Return the handle of a new end. If its communicator is blocking, wait until it is ready."""
        self._world.changed.notify_all()
        if end.config.blocking:
            self._block(function, end)
            end.phase, end.polls_left = Phase.READY, 0
        return end.handle

    def _block(self, function: str, end: Communicator) -> None:
        """Block until `_all_ranks_ready`. Raises `NcclError` if the communicator fails or is aborted meanwhile."""

        def ended() -> bool:
            return end.gone or end.error is not Status.SUCCESS

        self._world.block(
            self._rank, f"{function} of {end}", lambda: ended() or self._all_ranks_ready(end), lambda: end.launches
        )
        if ended():
            text = end.error_text or "aborted by another thread"
            raise self._checks.refusal(function, end.error or Status.INTERNAL_ERROR, text)
