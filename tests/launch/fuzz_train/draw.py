"""What a seed draws: a training run, how it is spread, what befalls it and when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from ringattn.launch.train.config import ModelConfig, TrainConfig, check_sizes

KINDS = {
    "undisturbed": 2,
    "stop": 4,
    "flipped": 4,
    "truncated": 3,
    "missing": 3,
    "full disk": 4,
    "nan": 4,
    "nan skipped": 3,
    "second run": 2,
    "kill a rank": 4,
    "kill the command": 4,
    "pause a rank": 2,
}
"""Kinds of fault, and how often each is drawn."""
OF_PROCESSES = ("kill a rank", "kill the command", "pause a rank")
PLACES = ("draw", "update", "save", "write_run", "rename", "remove")
"""Where a run is stopped: before it draws a step's sequences, before its weights change, in the parts of a save."""


@dataclass(frozen=True)
class Case:
    """One run and its fault."""

    seed: int
    kind: str
    plain: TrainConfig
    """The run on one rank, without anything that should change nothing."""
    spread: TrainConfig
    """The same with all that: ranks, layout, recomputation."""
    place: str
    """Where it happens."""
    count: int
    """The call there at which it happens, from 1; or the step, from 0."""
    rank: int
    """To which rank."""
    again: TrainConfig
    """How the run goes on after the fault."""
    dice: random.Random
    """For what only the fault itself can draw."""


def draw(seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Case:
    """The case of a seed, among `kinds`."""
    dice = random.Random(seed)
    kind = dice.choices(kinds, [KINDS[one] for one in kinds])[0]
    plain = _run(dice, kind)
    ranks, replicas = 1, 1
    if kind in OF_PROCESSES:
        ranks, replicas = dice.choice([(2, 1), (2, 1), (1, 2)]) if plain.batch % 2 == 0 else (2, 1)
    elif kind in ("undisturbed", "nan"):
        ranks = dice.choice([1, 2, 3])
    spread = _spread(dice, plain, ranks, replicas)
    if kind in OF_PROCESSES:
        spread = replace(spread, sharding=dice.choice(["none", "none", "zero2", "zero3"]), transport="gloo")
    check_sizes(spread)
    # Some faults come in a save: the first is at the step `checkpoint_every_steps`.
    place = dice.choice(PLACES if kind in ("stop", "kill a rank", "kill the command") else PLACES[:2])
    every = plain.checkpoint_every_steps or 1
    saves = -(-plain.steps // every)
    if place in ("draw", "update"):
        count = dice.randint(1, plain.steps)
    elif place == "remove":
        count = max(1, dice.randint(0, saves - 2))
    else:
        count = dice.randint(1, saves)
    again = _spread(dice, plain, 1, 1) if dice.random() < 0.5 else spread
    return Case(seed, kind, plain, spread, place, count, dice.randrange(ranks * replicas), again, dice)


def _run(dice: random.Random, kind: str) -> TrainConfig:
    """What is trained, by one rank."""
    start = dice.randint(6, 14)
    grows: dict[str, Any] = {}
    length = dice.randint(8, 48)
    if dice.random() < 0.2:
        length = start * dice.choice([2, 4])
        grows = {"curriculum_start_tokens": start, "curriculum_steps": dice.randint(1, 4)}
    packs: dict[str, Any] = {}
    if dice.random() < 0.3:
        packs = {"pack_documents": True, "separator": dice.choice(["\n", " ", "\n\n", "."])}
    dilates: dict[str, Any] = {}
    if dice.random() < 0.2:
        dilates = {"attention": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, dice.choice([2, 3])]}
    heads, kv_heads = dice.choice([(2, 1), (2, 2), (4, 2)])
    optimizers = ["adamw", "sgd"] if kind in (*OF_PROCESSES, "undisturbed", "nan") else ["adamw", "sgd", "adafactor"]
    return TrainConfig(
        tokens=length, batch=dice.choice([1, 2, 4]), steps=dice.randint(4, 8), dtype="fp64",
        optimizer=dice.choice(optimizers), learning_rate=dice.choice([1e-3, 1e-2]), warmup_steps=dice.randint(0, 4),
        clip_norm=dice.choice([0.1, 1.0, 10.0]), seed=dice.randrange(1000), layout="auto", timeout_s=60.0,
        prompt_tokens=dice.choice([0, 0, 1, 3]), checkpoint_every_steps=dice.randint(1, 3),
        model=ModelConfig(dice.choice([1, 1, 2]), 16, heads, kv_heads, 24, tied=dice.random() < 0.7),
        **grows, **packs, **dilates,
    )  # fmt: skip


def _spread(dice: random.Random, plain: TrainConfig, ranks: int, replicas: int) -> TrainConfig:
    """The same run with other switches, none of which may change what it learns."""
    return replace(
        plain,
        ranks=ranks,
        replicas=replicas,
        layout=dice.choice(["auto", "contiguous", "zigzag", "striped"]),
        recompute=dice.choice(["none", "selective", "full"]),
        chunked_loss_tokens=dice.choice([None, 1, 5, 16]),
        micro_batch=None if plain.pack_documents else dice.choice([None, 1, 3]),
    )
