"""`ringattn train`: train a small language model on sequences that are sharded over several ranks.

The command starts the ranks as processes, or is one of the ranks if torchrun has started it. It writes one result.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringattn.errors import InputError, RingError
from ringattn.launch.options import help_text
from ringattn.launch.processes import RanksError, end_with_parent
from ringattn.launch.ranks import place_in_torchrun, run_ranks_in_processes
from ringattn.launch.train.config import TrainConfig, check_sizes, check_switches, load_train, unreached

PURPOSE = """\
Trains a byte-level transformer with exact attention over sequences that the ranks share. It starts the ranks
as processes of this machine, or uses those of torchrun, and writes result.json: losses, gradient norms, times, memory.
With checkpoint_every_steps it resumes from the last checkpoint in the folder out; the number of ranks may differ.
Example: ringattn train ranks=4 tokens=2048 steps=60 layout=zigzag model.layers=2"""
ENTRY = "ringattn.launch.train.loop:train_rank"


def main(argv: Sequence[str]) -> int:
    """Train with the overrides `argv` (key=value). Returns the exit code: 0, 1 if a rank failed, 2 for bad input."""
    if any(word in ("-h", "--help") for word in argv):
        print(help_text("train", PURPOSE, TrainConfig))
        return 0
    from ringattn.launch.train.data import load
    from ringattn.launch.train.mesh import agreed_ranks_of_ring, device_type

    place = place_in_torchrun()
    try:
        config = load_train(argv)
        config = replace(config, ranks=agreed_ranks_of_ring(config.ranks, config.replicas))
        check_sizes(config)
        if place is not None and config.restarts:
            raise InputError(f"restarts={config.restarts}: has no effect under torchrun; use torchrun --max-restarts")
        if place is None:  # before any rank starts; torchrun's ranks compare their refusals later
            check_switches(config, device_type(config.transport))
            load(config)
    except RingError as error:
        print(f"ringattn train: {error}", file=sys.stderr)
        return 2
    for warning in unreached(config) if place is None or place.rank == 0 else ():
        print(f"ringattn train: {warning}", file=sys.stderr)
    try:
        result = _run(config)
    except RingError as error:
        print(f"ringattn train: {error}", file=sys.stderr)
        refused = isinstance(error, InputError) or (isinstance(error, RanksError) and error.refused)
        return 2 if refused else 1
    if place is None or place.rank == 0:
        print(summary(result))
        print(f"written: {Path(config.out) / 'result.json'}")
    return 0


def _run(config: TrainConfig) -> dict[str, Any]:
    assert config.ranks is not None
    in_torchrun, processes = place_in_torchrun() is not None, config.ranks * config.replicas
    if in_torchrun:
        end_with_parent(os.getppid())
    else:
        from ringattn.launch.train.mesh import locked_folder

        with locked_folder(config.out):  # raises before any rank starts; later, rank 0 locks the folder
            pass
    if in_torchrun or (processes == 1 and not config.restarts):
        # Run a single rank in this process, because that takes less time than starting a new one.
        from ringattn.launch.train.loop import train_rank

        return dict(train_rank({"runs": [asdict(config)], "keeps_result": True})["runs"][0])
    return _restarted(config, processes)


def _restarted(config: TrainConfig, processes: int) -> dict[str, Any]:
    """Train in new processes and return the result of rank 0.

    If ranks fail, all are started again from the last checkpoint, at most `restarts` times.
    """
    for left in range(config.restarts, -1, -1):
        spec = {"runs": [asdict(config)], "keeps_result": True}
        try:
            answers = run_ranks_in_processes(ENTRY, spec, processes, config.limit_s, config.threads_per_rank)
            break
        except RanksError as error:
            if error.refused or not left:
                raise
            from ringattn.launch.train.checkpoints import latest

            saved = latest(Path(config.out))
            print(f"ringattn train: {error}", file=sys.stderr)
            print(f"ringattn train: starting again from {saved or 'the first step'}", file=sys.stderr)
            # Once the run has saved checkpoints, resume from these, not from the checkpoint that `resume` names.
            config = replace(config, resume="auto") if saved else config
    return dict(answers[0]["runs"][0])


def summary(result: dict[str, Any]) -> str:
    """Return a summary of the run in three lines."""
    memory = " ".join(f"{size / 2**20:.1f}" for size in result["memory_growth_bytes"])
    losses = [loss for loss in result["losses"] if loss is not None]
    skipped = len(result["skipped_steps"])
    return "\n".join(
        [
            f"{result['replicas']} x {result['ranks']} ranks, tokens of each {result['tokens_of_rank']}: "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses) + skipped} steps"
            + (f", {result['first_step']} of them in earlier runs" if result["first_step"] else "")
            + (f", {skipped} skipped, which were not finite" if skipped else ""),
            f"{result['tokens_per_s']:,.0f} tokens/s (median step)",
            f"memory by rank, MiB: {memory} ({result['memory_method']})",
        ]
    )
