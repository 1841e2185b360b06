"""How accelerate's loaders deal batches to rings, whose ranks all read the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from ringattn.errors import UnsupportedError


class RoundRobin(BatchSampler):
    """Batches given to rings in turn, as many to each: where the last turn ends early, the last batch is repeated."""

    def __init__(self, batches: Any, rings: int, mine: int) -> None:
        self.batches, self.rings, self.mine = batches, rings, mine
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return -(-len(self.batches) // self.rings)

    def __iter__(self) -> Iterator[list[int]]:
        count, batch = 0, []
        for batch in self.batches:
            if count % self.rings == self.mine:
                yield batch
            count += 1
        if 0 < count % self.rings <= self.mine:
            yield batch


def is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset)


def shards_of(loader: Any) -> list[Any]:
    """What of accelerate's loader cuts the data into parts of processes."""
    parts = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    return [part for part in parts if hasattr(part, "num_processes") and hasattr(part, "process_index")]


def share_training(loader: Any, rings: int, mine: int) -> Any:
    """The loader, dealing to `rings` of which this process is in the one numbered `mine`."""
    for shard in shards_of(loader):
        shard.num_processes, shard.process_index = rings, mine
        if rings == 1:  # the last batch of an epoch stays as small as it is in one process
            shard.even_batches = False
            if is_stream(shard):
                shard.batch_size = 1
    return loader


def share_evaluation(loader: Any, rings: int, mine: int) -> Any:
    """The same for evaluation, which reads every text once, or at its end twice; of a stream with one ring."""
    for shard in shards_of(loader):
        shard.num_processes, shard.process_index = 1, 0
        if is_stream(shard):
            shard.batch_size = 1
        elif not isinstance(shard.batch_sampler, RoundRobin):  # a loader with persistent workers comes again
            shard.even_batches, shard.batch_sampler = False, RoundRobin(shard.batch_sampler, rings, mine)
    return loader


def last_turn(loader: Any, rings: int) -> int:
    """How many rings have a batch of their own in the last turn of an evaluation."""
    found = [shard.batch_sampler for shard in shards_of(loader) if not is_stream(shard)]
    return (len(found[0].batches) - 1) % rings + 1 if found else rings


def refuse_data(data: Any, host: Any, evaluated_by: int = 1) -> None:
    """Raise `UnsupportedError` for a stream of which accelerate would give each process its own part.

    `evaluated_by`: the rings that evaluate it, which a stream cannot be dealt to.
    """
    if isinstance(data, dict):
        for part in data.values():
            refuse_data(part, host, evaluated_by)
    if not is_stream(data):
        return
    if evaluated_by > 1:
        raise UnsupportedError(
            f"{type(data).__name__} is an IterableDataset and cannot be evaluated over several rings, which cannot "
            "tell how many of its texts are left for each; give evaluate a data set with a length"
        )
    if (shards := getattr(data, "n_shards", 0)) >= host.args.world_size > 1:
        raise UnsupportedError(
            f"accelerate deals the {shards} shards of {type(data).__name__} to processes, also those of one ring; "
            "wrap it in a torch.utils.data.IterableDataset of your own, or pass a data set with a length"
        )
    if host.accelerator.dispatch_batches is not False:
        raise UnsupportedError(
            f"{type(data).__name__} is an IterableDataset, whose batches accelerate would cut among the ranks of a "
            'ring; pass TrainingArguments(accelerator_config={"dispatch_batches": False}), with which every rank '
            "reads it, or a data set with a length"
        )
