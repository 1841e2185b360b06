"""Whether all ranks train the same run: their keys, what they read, where it goes, compared before the first step.

Guarantees: what differs is refused on every rank, by its key; what one rank alone cannot do is refused on all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ringattn.errors import DisagreementError, InputError
from ringattn.launch.folders import FolderLock, locked
from ringattn.launch.options import leaves
from ringattn.launch.train.batches import load
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.documents import Documents
from ringattn.launch.train.memory_switches import check_switches
from ringattn.runtime.rank_group import RankGroup

OF_A_PROCESS = frozenset({"text", "tokenizer", "threads_per_rank", "timeout_s", "limit_s"})
"""Keys in which ranks may differ: machines keep files where they like, and what these say is compared instead."""
DYING_S = 5.0
"""How long to wait for the folder of a run: the ranks of a command that was killed need a while to end."""


def load_alike(everyone: RankGroup, ring: RankGroup, config: TrainConfig) -> Documents:
    """The text, once all ranks of `everyone` have the same, and the same configuration; all call it together.

    `ring`: the ranks that share this rank's sequences. Raises `InputError` with the key first, `DisagreementError` for
    a key that differs.
    """
    text, refusal = None, None
    try:
        check_switches(config, ring.device.type)
        if everyone.world_size != config.replicas * ring.world_size:
            rings = f"{everyone.world_size} ranks train in rings of {ring.world_size}"
            raise InputError(f"replicas={config.replicas}: {rings}")
        text = load(config)
    except InputError as error:
        refusal = error
    everyone.check_consistency("what to train", refusal, always=True)
    assert text is not None
    _compare_all(everyone, config, {**_keys(config), "text": text.digest()})
    return text


def check_keys(everyone: RankGroup, config: TrainConfig) -> None:
    """Raise `DisagreementError` on all ranks of `everyone`, with the key first, unless they have the same words."""
    _compare_all(everyone, config, _keys(config))


@contextmanager
def folder_of_run(everyone: RankGroup, config: TrainConfig, keeps_result: bool) -> Iterator[FolderLock | None]:
    """`out_dir` for this run alone, locked by rank 0, which gets the lock; nothing where the run writes nothing there.

    All ranks call it together. Raises `InputError` on all of them where it cannot be written or another run has it.
    """
    if not keeps_result and config.checkpoint_every_steps is None:
        yield None
        return
    with ExitStack() as stack:
        lock, refusal = None, None
        try:
            if everyone.rank == 0:
                lock = stack.enter_context(locked_folder(config.out_dir))
        except InputError as error:
            refusal = error
        everyone.check_consistency("where the result goes", refusal, always=True)
        yield lock


def locked_folder(out_dir: str) -> AbstractContextManager[FolderLock]:
    """The folder of a run's results and checkpoints for this process alone; see `locked`."""
    return locked(Path(out_dir), "out_dir", "run", "give this run a folder of its own", DYING_S)


def _keys(config: TrainConfig) -> dict[str, Any]:
    """What must be the same on all ranks; first the key of which `ranks` is made under torchrun."""
    facts = {key: value for key, value, _ in leaves(config) if key not in OF_A_PROCESS}
    return {"replicas": config.replicas, **facts}


def _compare_all(everyone: RankGroup, config: TrainConfig, facts: dict[str, Any]) -> None:
    told = [json.loads(words) for words in everyone.all_gather_text(json.dumps(facts))]
    for rank, theirs in enumerate(told):
        _compare(config, rank, theirs, told[0])


def _compare(config: TrainConfig, rank: int, theirs: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise `DisagreementError` for the first key in which `rank` differs from rank 0."""
    key = next((key for key in theirs if theirs[key] != first.get(key)), None)
    if key == "text":
        raise DisagreementError(
            f"text={config.text}: rank {rank} reads other tokens or documents than rank 0; give every machine the same "
            "text and tokenizer"
        )
    if key is not None:
        raise DisagreementError(
            f"{key}: rank {rank} has {theirs[key]} and rank 0 {first.get(key)}; start all ranks with the same words"
        )
