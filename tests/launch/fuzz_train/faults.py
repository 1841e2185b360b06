"""What befalls a run: functions of the trainer that stop, fail or spoil at a drawn call; files that are spoiled."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ringattn.launch.train import checkpoints, loop

TARGETS: dict[str, tuple[Any, str]] = {
    "draw": (loop, "drawn"),
    "update": (loop, "update"),
    "save": (checkpoints.dcp, "save"),
    "write_run": (checkpoints, "write_run"),
    "rename": (Path, "rename"),
    "remove": (checkpoints, "remove"),
}


class StoppedError(BaseException):
    """The machine stopped: nothing is tidied up after it."""


def stop() -> None:
    """Stop the machine."""
    raise StoppedError


@contextmanager
def at(place: str, count: int, act: Callable[[], None], after: bool = False) -> Iterator[None]:
    """`act` before, or after, the `count`-th call of the trainer at `place`; calls of the warm-up do not count."""
    owner, name = TARGETS[place]
    kept, calls = getattr(owner, name), 0

    def acts(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        warms_up = place in ("draw", "update") and not _is_of_the_run(arguments)
        if place == "rename":  # of a checkpoint that gets its name
            warms_up = not arguments[0].name.endswith(".partial") or arguments[0].name.startswith("result")
        calls += not warms_up
        now = calls == count and not warms_up
        if now and not after:
            act()
        answer = kept(*arguments, **named)
        if now and after:
            act()
        return answer

    with mock.patch.object(owner, name, acts):
        yield


def _is_of_the_run(arguments: tuple[Any, ...]) -> bool:
    """Whether a call of `drawn` or `update` is not that of the warm-up, whose model is 16 wide inside."""
    for one in arguments:
        config = getattr(one, "model", None) or getattr(one, "config", None)
        if config is not None:
            return bool(config.hidden_dim != 16)
    return True


@contextmanager
def spoiled(step: int, rank: int, value: float, what: str) -> Iterator[None]:
    """The loss, or a gradient alone, of one step (from 0) of one rank is `value`."""
    drawn, local_part = loop.drawn, loop.local_part
    now: dict[int, int] = {}

    def drawn_now(ring: Any, replica: int, text: Any, number: int, config: Any) -> Any:
        now[ring.rank] = number if _is_of_the_run((config,)) else -1
        return drawn(ring, replica, text, number, config)

    def part(seq: Any, *more: Any) -> Tensor:
        loss = local_part(seq, *more)
        if now[seq.ring.rank] != step or seq.ring.rank != rank:
            return loss
        if what == "loss":
            return torch.where(torch.ones_like(loss, dtype=torch.bool), loss + value, loss)
        loss.register_hook(lambda grad: grad * value)
        return loss * 1.0

    with mock.patch.object(loop, "drawn", drawn_now), mock.patch.object(loop, "local_part", part):
        yield


@contextmanager
def full_disk(save: int, limit_bytes: int) -> Iterator[None]:
    """In the `save`-th save no file takes more than `limit_bytes`: real writes fail, at any byte."""
    kept, calls = checkpoints.Checkpoints.save, 0

    def limited(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if calls == save:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            kept(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with mock.patch.object(checkpoints.Checkpoints, "save", limited):
        yield


def spoil(kind: str, path: Path, dice: random.Random) -> None:
    """Flip a bit of a file, cut it, or take it away."""
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, dice.randrange(path.stat().st_size))
    else:
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
