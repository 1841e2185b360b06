"""What a step trains on: which tokens, and how each sequence of them lies over the ring.

Guarantees: a pure function of the configuration, the text and the number of the step, the same on all ranks of a
replica; all replicas together draw the same sequences however many they are. So the number of the step is all that a
resumed run needs to know of the data.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ringattn import Ring, Sequence
from ringattn.errors import InputError
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.curriculum import shortened
from ringattn.launch.train.documents import Documents, load_documents, packed
from ringattn.launch.train.text import windows


class BatchPart(NamedTuple):
    """Sequences that pass the model at once."""

    seq: Sequence
    """How each lies over the ring."""
    tokens: Tensor
    """All of theirs: int64 (sequences, tokens), the same on every rank of the ring."""


def load(config: TrainConfig) -> Documents:
    """The text that the configuration names. Raises `InputError`, with the key first, also if it is too short."""
    text = load_documents(config.text, config.separator, config.tokenizer)
    if not len(text.tokens):
        raise InputError(f"tokenizer={config.tokenizer}: makes no token of the text; choose another, or another text")
    if config.pack_documents and max(stop - start for start, stop in pairwise(text.cuts)) < 2:
        raise InputError(
            f"text={config.text}: no document has a second token, so there is nothing to learn; documents end with "
            f"{config.separator!r}, choose another separator or another text"
        )
    if not config.pack_documents and len(text.tokens) < config.tokens:
        raise InputError(
            f"tokens={config.tokens}: the text has only {len(text.tokens)} tokens; choose a longer file "
            "with text=PATH, or pack_documents=true"
        )
    return text


def drawn(ring: Ring, replica: int, text: Documents, step: int, config: TrainConfig) -> list[BatchPart]:
    """This replica's sequences of a step, in the parts in which they pass; on its device."""
    shorter = shortened(step, config.curriculum_start_tokens, config.tokens, config.curriculum_steps)
    length, batch = config.tokens // shorter, config.batch * shorter
    mine = range(batch // config.replicas * replica, batch // config.replicas * (replica + 1))
    if config.pack_documents:
        parts = []
        for index in mine:
            tokens, cuts = packed(text, step * batch + index, length, config.seed)
            seq = ring.sequence(cu_seqlens=cuts, layout=config.layout, for_=_purpose(config))
            parts.append(BatchPart(seq, tokens[None].to(ring.device)))
        return parts
    seq = ring.sequence(length, layout=config.layout, for_=_purpose(config))
    tokens = windows(text.tokens, step, batch, length, config.seed)[mine.start : mine.stop].to(ring.device)
    return [BatchPart(seq, some) for some in tokens.split((config.micro_batch or config.batch) * shorter)]


def _purpose(config: TrainConfig) -> str:
    return "dilated" if config.attention == "dilated" else "causal"
