"""Race detection in shared memory by vector clocks.

Every thread counts its releases (arrivals at barriers). `known[t, a]` is the count of agent `a` up to which its actions
happened before whatever thread `t` does next. Agents are the threads, the matrix unit of each warp, which counts groups
of products, the unit of each warp that adds to global memory, which counts groups too, the copy engine of each
mbarrier, which counts copies, and in programs with `cp.async` the copy unit of each thread, which counts groups of
copies. Each word of shared memory has its last writer, its readers and the count of each; an access races with an
earlier one whose count it does not know.
`fenced` is the same for the asynchronous proxy: TMA and wgmma see a write of a thread only if a proxy fence is on the
way from the write to them. `Rules.fenced_copies` says whether this holds for copies by `cp.async`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.rules import Rules

NO_WRITER = -1
BARRIER = -2
"""The writer of a word that belongs to an mbarrier."""
COPY_ENGINES = 64
"""The largest number of mbarriers."""
NO_READERS = -1
"""The row of a word that nothing has read."""
IN_FLIGHT = np.uint32(0xFFFFFFFF)
"""The count of a load or store of tensor memory that has not ended, which no thread knows."""


class RaceDetector:
    """The clocks of a thread block and the last accesses to each word of its shared memory."""

    def __init__(self, threads: int, size: int, copies: bool, rules: Rules) -> None:
        """Start without any access. `copies`: threads copy to shared memory by `cp.async`."""
        self._rules = rules
        self.threads, warps = threads, threads // 32
        self.first_matrix_unit, self.first_adder, self.first_copy_engine = threads, threads + warps, threads + 2 * warps
        self.first_copy_unit = self.first_copy_engine + COPY_ENGINES
        agents = self.first_copy_unit + (threads if copies else 0)
        self.known = np.zeros((threads, agents), np.uint32)
        self.fenced = np.zeros((threads, agents), np.uint32)
        self.counts = np.ones(threads, np.uint32)
        """The current count of each thread; its own actions have it."""
        numbers = np.arange(threads)
        self.known[numbers, numbers] = self.counts
        words = size // 4
        self._writer = np.full(words, NO_WRITER, np.int32)
        self._written = np.zeros(words, np.uint32)
        self._in_parts = np.zeros(words, bool)
        """The words of which threads have written single bytes. Each of these bytes has a writer."""
        self._part_writer = np.full((words, 4), NO_WRITER, np.int32)
        self._part_written = np.zeros((words, 4), np.uint32)
        self._multiplied = np.zeros((words, 2 * warps), np.uint32)
        """The last group that reads a word, of the products of each warp and then of the additions of each warp."""
        self._row = np.full(words, NO_READERS, np.int32)
        self._reads = np.zeros((256, threads), np.uint32)
        self._rows = 0

    # --- what happened before what ------------------------------------------------------------------------------

    def join(self, threads: Lanes) -> None:
        """Synchronize threads: afterwards each knows what any of them knew."""
        for clocks in (self.known, self.fenced):
            clocks[threads] = clocks[threads].max(0)
        self._advance(threads)

    def release(self, threads: Lanes) -> tuple[Lanes, Lanes]:
        """Return what the threads know, to be acquired by others, and begin a new count of each."""
        clocks = self.known[threads].max(0), self.fenced[threads].max(0)
        self._advance(threads)
        return clocks

    def acquire(self, threads: Lanes, clocks: tuple[Lanes, Lanes]) -> None:
        """Let threads know what was released."""
        self.known[threads] = np.maximum(self.known[threads], clocks[0])
        self.fenced[threads] = np.maximum(self.fenced[threads], clocks[1])

    def before(self, thread: int) -> tuple[Lanes, Lanes]:
        """Return what happened before an asynchronous action that a thread starts: what it knows of other agents."""
        clocks = self.known[thread].copy(), self.fenced[thread].copy()
        for clock in clocks:
            # What the thread did since its last release is not ordered before the action ends.
            clock[thread] = min(clock[thread], self.counts[thread] - 1)
        return clocks

    def nothing(self) -> tuple[Lanes, Lanes]:
        """Return clocks without any knowledge."""
        return np.zeros(self.known.shape[1], np.uint32), np.zeros(self.known.shape[1], np.uint32)

    def fence(self, threads: Lanes) -> None:
        """Let the asynchronous proxy see what the threads know."""
        self.fenced[threads] = self.known[threads]

    def _advance(self, threads: Lanes) -> None:
        self.counts[threads] += 1
        self.known[threads, threads] = self.counts[threads]

    def multiplied(self, warp: int, group: int) -> None:
        """Let a warp know that its products up to a group have ended."""
        threads = slice(32 * warp, 32 * warp + 32)
        self.known[threads, self.first_matrix_unit + warp] = group
        self.fenced[threads, self.first_matrix_unit + warp] = group

    def added(self, thread: int, group: int) -> None:
        """Let a thread know that its additions up to a group have read shared memory."""
        self.known[thread, self.first_adder + thread // 32] = group
        self.fenced[thread, self.first_adder + thread // 32] = group

    def copied(self, threads: Lanes, group: int) -> None:
        """Let threads know that their own copies up to a group have ended."""
        self.known[threads, self.first_copy_unit + threads] = group
        if not self._rules.fenced_copies:
            self.fenced[threads, self.first_copy_unit + threads] = group

    # --- accesses -----------------------------------------------------------------------------------------------

    def _unknown(self, clocks: Lanes, threads: Lanes, words: Lanes) -> Lanes:
        """Return which of the words were last written by an action that the thread next to it does not know."""
        writer = self._writer[words]
        unknown = (writer >= 0) & (clocks[threads, writer] < self._written[words])
        if (parts := self._in_parts[words]).any():
            writers, counts = self._part_writer[words], self._part_written[words]
            later = (writers >= 0) & (clocks[np.asarray(threads)[..., None], writers] < counts)
            unknown |= parts & later.any(-1)
        return unknown

    def _set_writer(self, words: Lanes, writer: Lanes | int, counts: Lanes | int) -> None:
        self._writer[words], self._written[words], self._in_parts[words] = writer, counts, False

    def _check_readers(self, threads: Lanes, words: Lanes, what: str, known: Lanes | None = None) -> None:
        """Raise Fault if a word has a reader whose read may come after the write that threads do now.

        `known`: a row of what all of the threads know, if they write each of the words.
        """
        rows = self._row[words]
        read = rows >= 0
        if read.any():
            clocks = self.known[threads[read], : self.threads] if known is None else known[:, : self.threads]
            if (self._reads[rows[read]] > clocks).any():
                raise Fault(f"race: {what} writes memory that another thread may still read")
        units = slice(self.first_matrix_unit, self.first_matrix_unit + self._multiplied.shape[1])
        if (self._multiplied[words] > (self.known[threads, units] if known is None else known[:, units])).any():
            raise Fault(f"race: {what} writes memory that a product or an addition may still read")

    def _check_barriers(self, words: Lanes, what: str) -> None:
        if (self._writer[words] == BARRIER).any():
            raise Fault(f"{what} accesses the memory of an mbarrier")

    def read(self, threads: Lanes, words: Lanes) -> None:
        """Record reads of words by threads."""
        self._check_barriers(words, "a load")
        if (self._writer[words] == NO_WRITER).any():
            raise Fault("a load of shared memory that nothing has written")
        if self._unknown(self.known, threads, words).any():
            raise Fault("race: a load of shared memory that another agent may still write")
        self._record_reads(threads, words)

    def _record_reads(self, threads: Lanes, words: Lanes, count: Any = None) -> None:
        new = np.unique(words[self._row[words] == NO_READERS])
        if len(new):
            self._row[new] = np.arange(self._rows, self._rows + len(new))
            self._rows += len(new)
            while self._rows > len(self._reads):
                self._reads = np.concatenate((self._reads, np.zeros_like(self._reads)))
        self._reads[self._row[words], threads] = self.counts[threads] if count is None else count

    def write(self, threads: Lanes, words: Lanes, same: Lanes | None = None) -> None:
        """Record writes of words by threads.

        `same`: which words already have the new value. Threads may store equal values at once, as all threads of a
        group do when Triton starts its roles.
        """
        self._check_barriers(words, "a store")
        unknown = self._unknown(self.known, threads, words)
        if (unknown if same is None else unknown & ~same).any():
            raise Fault("race: a store to shared memory that another agent may still write")
        self._check_readers(threads, words, "a store")
        self._set_writer(words, threads, self.counts[threads])

    def write_parts(self, threads: Lanes, offsets: Lanes, size: int, same: Lanes) -> None:
        """Record writes of `size` bytes of a word. Threads may write different bytes of a word at once."""
        words = offsets // 4
        self._check_barriers(words, "a store")
        self._check_readers(threads, words, "a store")
        new = words[~self._in_parts[words]]
        self._part_writer[new], self._part_written[new] = self._writer[new][:, None], self._written[new][:, None]
        for byte in range(size):
            parts = words, offsets % 4 + byte
            writer = self._part_writer[parts]
            unknown = (writer >= 0) & (self.known[threads, writer] < self._part_written[parts])
            if (unknown & ~same).any():
                raise Fault("race: a store to a part of a word of shared memory that another agent may still write")
            self._part_writer[parts], self._part_written[parts] = threads, self.counts[threads]
        self._set_writer(words, threads, self.counts[threads])
        self._in_parts[words] = True

    def make_barrier(self, words: Lanes) -> None:
        """Give words to an mbarrier."""
        self._writer[words] = BARRIER

    def use_barrier(self, threads: Lanes, words: Lanes) -> None:
        """Record that threads use the mbarrier in words, which must not end before they have."""
        self._record_reads(threads, np.full(len(threads), words[0]))

    def end_barrier(self, thread: int, words: Lanes) -> None:
        """Let a thread take words back from an mbarrier."""
        self._check_readers(np.full(len(words), thread), words, "the end of an mbarrier")
        self._set_writer(words, thread, int(self.counts[thread]))

    def start_copies(self, threads: Lanes, words: Lanes, group: int) -> None:
        """Record that copies of threads, in a group of each, write words from now on until the group ends."""
        self._check_barriers(words, "a copy")
        if self._unknown(self.known, threads, words).any():
            raise Fault("race: a copy to shared memory that another agent may still write")
        self._check_readers(threads, words, "a copy")
        self._set_writer(words, self.first_copy_unit + threads, group)

    def copy(self, thread: int, words: Lanes, engine: int, count: int) -> None:
        """Record the copy number `count` of a copy engine, which a thread starts and which writes words."""
        self._check_barriers(words, "a copy")
        threads = np.full(len(words), thread)
        if self._unknown(self.fenced, threads, words).any():
            raise Fault("race: a copy to shared memory that another agent may still write, or without a proxy fence")
        self._check_readers(threads, words, "a copy")
        self._set_writer(words, self.first_copy_engine + engine, count)

    def multiply(self, warp: int, words: Lanes, group: int, thread: int | None = None, fenced: bool = True) -> None:
        """Record that a product in a group of a warp reads words from now on until the group ends.

        `thread`: the one that issues it; None if all of the warp do. `fenced`: False in tensor memory, which has no
        proxies.
        """
        clocks = self.fenced if fenced else self.known
        # If all lanes start the product, what the least informed one knows counts.
        least = clocks[32 * warp : 32 * warp + 32].min(0) if thread is None else clocks[thread]
        self._check_fenced(least, words, "a product")
        self._multiplied[words, warp] = group

    def add(self, thread: int, words: Lanes, group: int) -> None:
        """Record that an addition in a group of a thread reads words from now on until the group is waited for."""
        self._check_fenced(self.fenced[thread], words, "an addition")
        self._multiplied[words, self.first_adder - self.first_matrix_unit + thread // 32] = group

    def _check_fenced(self, clock: Lanes, words: Lanes, what: str) -> None:
        """Raise Fault unless all words were written, by what the asynchronous proxy sees with this clock."""
        self._check_barriers(words, what)
        writer = self._writer[words]
        if (writer == NO_WRITER).any():
            raise Fault(f"{what} of shared memory that nothing has written")
        if (clock[writer] < self._written[words]).any():
            raise Fault(f"race: {what} of shared memory that may still be written, or without a proxy fence")

    def accumulate(self, thread: int, words: Lanes, group: int, adds: bool, pipelined: Lanes) -> None:
        """Record that a product that a thread issues writes words of tensor memory until its group ends.

        `adds`: it also reads them. `pipelined`: which words may still be written by products of the same warp.
        """
        unit, threads = self.first_matrix_unit + thread // 32, np.full(len(words), thread)
        if adds and (self._writer[words] == NO_WRITER).any():
            raise Fault("a product adds to tensor memory that nothing has written")
        pipelined = pipelined & (self._writer[words] == unit)
        if (self._unknown(self.known, threads, words) & ~pipelined).any():
            raise Fault("race: a product writes tensor memory that another agent may still write")
        self._check_readers(threads, words, "a product", self.known[thread][None])
        self._set_writer(words, unit, group)

    def _known_by(self, warp: Lanes) -> Lanes:
        """Return what all threads of a warp know, as a row. In tensor memory a warp does what it does as a whole."""
        least = self.known[warp].min(0)
        least[warp] = self.counts[warp]
        return least[None]

    def start_read(self, warp: Lanes, words: Lanes) -> None:
        """Record that the threads of a warp load words of tensor memory from now on until `end_read`."""
        if (self._writer[words] == NO_WRITER).any():
            raise Fault("a load of tensor memory that nothing has written")
        if self._unknown(self._known_by(warp), np.array(0), words).any():
            raise Fault("race: a load of tensor memory that another agent may still write")
        self._record_reads(warp[0], words, IN_FLIGHT)

    def end_read(self, warp: Lanes, words: Lanes) -> None:
        """Let the loads of words of tensor memory by the threads of a warp end. Its first thread counts."""
        self._record_reads(warp[0], words, self.counts[warp[0]])

    def start_write(self, warp: Lanes, words: Lanes, same: Lanes) -> None:
        """Record that a warp stores words of tensor memory from now on until `end_write`. Its first thread counts.

        `same`: which words already have the new values. Two warps may store equal values at once.
        """
        known = self._known_by(warp)
        if (self._unknown(known, np.array(0), words) & ~same).any():
            raise Fault("race: a store to tensor memory that another agent may still write")
        self._check_readers(warp, words, "a store", known)
        self._set_writer(words, warp[0], IN_FLIGHT)

    def end_write(self, warp: Lanes, words: Lanes) -> None:
        """Let the stores of words of tensor memory by a warp end."""
        # Another warp may have stored the same values since.
        own = words[self._writer[words] == warp[0]]
        self._set_writer(own, warp[0], self.counts[warp[0]])

    def forget(self, words: Lanes) -> None:
        """Let words of tensor memory be as at the start: nothing has written them."""
        self._set_writer(words, NO_WRITER, 0)

    def knows(self, thread: int, stamp: tuple[int, int], fenced: bool = False) -> bool:
        """Return whether an action, by its thread and count, happened before what a thread does now."""
        return bool((self.fenced if fenced else self.known)[thread, stamp[0]] >= stamp[1])

    def stamp(self, thread: int) -> tuple[int, int]:
        """Return the stamp of what a thread does now."""
        return thread, int(self.counts[thread])
