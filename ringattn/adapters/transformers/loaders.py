"""accelerate's loaders over rings: all ranks of a ring read the same batches, and different rings different ones.

accelerate distributes batches over processes. Here a ring takes the place of a process.

Guarantees: a training epoch gives each ring as many batches as accelerate gives a process; an evaluation reads each
text once, or twice at the end of the last group of batches. Loaders and data for which this cannot hold are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from ringattn.errors import UnsupportedError
from ringattn.ring import Ring


class RoundRobin(BatchSampler):
    """A sampler of batches that yields one ring's share: batch `ring_index` of each group of `rings` batches.

    Each ring gets the same number. If there are too few batches for the last group, the remaining rings repeat the last
    batch.
    """

    def __init__(self, batches: Any, rings: int, ring_index: int) -> None:
        self.batches, self.rings, self.ring_index = batches, rings, ring_index
        # A user's sampler needs none of these. accelerate has the same defaults.
        self.sampler: Any = getattr(batches, "sampler", None)
        self.batch_size: Any = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.rings)

    def __iter__(self) -> Iterator[list[int]]:
        count, batch = 0, []
        for batch in self.batches:
            if count % self.rings == self.ring_index:
                yield batch
            count += 1
        if 0 < count % self.rings <= self.ring_index:
            yield batch


class NewestBatch:
    """A function that collates samples like `collate`, and keeps the batch that it returned last."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate, self.batch = collate, None

    def __call__(self, samples: Any) -> Any:
        self.batch = self.collate(samples)
        return self.batch


def keep_newest(loader: Any) -> NewestBatch | None:
    """Let accelerate's loader keep its newest batch. Return its collate function, or None if other processes collate.

    accelerate reads a batch before it returns the one before, because it has to know the last batch of an epoch. So
    while a batch is in use, the next one is the newest. The order of reads does not change.
    """
    base = getattr(loader, "base_dataloader", None)
    if base is None or base.num_workers:
        return None
    base.collate_fn = NewestBatch(base.collate_fn)
    return base.collate_fn


def is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset)


def shards_of(loader: Any) -> list[Any]:
    """Return the parts of accelerate's loader that divide data among processes."""
    parts = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    return [part for part in parts if hasattr(part, "num_processes") and hasattr(part, "process_index")]


def share_training(loader: Any, rings: int, ring_index: int) -> Any:
    """Set up a loader for training to distribute batches over `rings`, and return it."""
    # accelerate divides data among processes by these two numbers. With the numbers of rings, it divides among rings.
    for shard in shards_of(loader):
        shard.num_processes, shard.process_index = rings, ring_index
        if rings == 1:  # keep the small last batch of an epoch, like one process
            shard.even_batches = False
            if is_stream(shard):
                shard.batch_size = 1
    return loader


def share_evaluation(loader: Any, rings: int, ring_index: int) -> Any:
    """Set up a loader for evaluation, and return it. The rings read each text once.

    At the end, some rings may repeat the last batch (see `RoundRobin`). A stream can only be read by one ring.
    """
    # `RoundRobin` divides the batches instead of accelerate. It repeats the last batch to fill up the last group, while
    # accelerate would start again from the first texts.
    for shard in shards_of(loader):
        shard.num_processes, shard.process_index = 1, 0
        # With batches of one text, accelerate does not fill up the end of a stream with texts that were read before.
        if is_stream(shard):
            shard.batch_size = 1
        elif not isinstance(shard.batch_sampler, RoundRobin):  # a loader with persistent workers is reused
            shard.even_batches, shard.batch_sampler = False, RoundRobin(shard.batch_sampler, rings, ring_index)
    return loader


def last_turn(loader: Any, rings: int) -> int:
    """Return the number of rings that get a new batch in the last group of batches of an evaluation."""
    samplers = [shard.batch_sampler for shard in shards_of(loader) if not is_stream(shard)]
    return (len(samplers[0].batches) - 1) % rings + 1 if samplers else rings


def refuse_data(data: Any, accelerator: Any, evaluated_by: int = 1) -> None:
    """Raise `UnsupportedError` for a stream that accelerate would divide among all processes.

    `evaluated_by`: the number of rings that evaluate it. A stream cannot be distributed over several rings.
    """
    if isinstance(data, dict):
        for part in data.values():
            refuse_data(part, accelerator, evaluated_by)
    if not is_stream(data):
        return
    if evaluated_by > 1:
        raise UnsupportedError(
            f"{type(data).__name__} is an IterableDataset and cannot be evaluated over several rings, because the "
            "number of texts left for each ring is unknown; evaluate a data set with a length"
        )
    if (shards := getattr(data, "n_shards", 0)) >= accelerator.state.num_processes > 1:
        raise UnsupportedError(
            f"accelerate distributes the {shards} shards of {type(data).__name__} over the processes of a ring; wrap "
            "it in a custom torch.utils.data.IterableDataset, or pass a data set with a length"
        )
    if accelerator.dispatch_batches is not False:
        raise UnsupportedError(
            f"{type(data).__name__} is an IterableDataset, whose batches accelerate would split among the ranks of a "
            'ring; pass TrainingArguments(accelerator_config={"dispatch_batches": False}), or to an Accelerator '
            "DataLoaderConfiguration(dispatch_batches=False), so that every rank reads it, or pass a data set with a "
            "length"
        )


def refuse_lone_processes(accelerator: Any, ring: Ring) -> None:
    """Raise `UnsupportedError` if accelerate does not count the ranks, and so would not average gradients."""
    processes = accelerator.state.num_processes
    if processes % ring.world_size:
        raise UnsupportedError(
            f"the ring has {ring.world_size} ranks, but accelerate counts {processes} processes, so it would not "
            "average gradients over the ranks; on CPUs, set ACCELERATE_USE_CPU=true, or use_cpu of TrainingArguments; "
            "with DeepSpeed, name the backend, see 'On CPUs' in docs/embedding-deepspeed.md"
        )


def refuse_split_batches(accelerator: Any) -> None:
    """Raise `UnsupportedError` if accelerate gives each process a part of every batch."""
    for name in ("dispatch_batches", "split_batches"):
        if getattr(accelerator, name):
            raise UnsupportedError(f"{name} would split batches among the ranks of a ring; leave it at False")
