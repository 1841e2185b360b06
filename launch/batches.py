"""What a step trains on: which tokens, and how each sequence of them lies over the ring.

Promises: a pure function of the configuration, the text and the number of the step, the same on all ranks of a replica;
all replicas together draw the same sequences however many they are. So the number of the step is all that a resumed
run needs to know of the data.
Does not know: models, losses.
"""

from __future__ import annotations

from torch import Tensor

from ringattn import Ring, Sequence
from ringattn.launch.text import windows
from ringattn.launch.train_config import TrainConfig


def sequence_of(ring: Ring, config: TrainConfig) -> Sequence:
    """How a sequence of `length_tokens` lies over the ring."""
    purpose = "dilated" if config.attention == "dilated" else "causal"
    return ring.sequence(config.length_tokens, layout=config.layout, for_=purpose)


def drawn(ring: Ring, replica: int, text: Tensor, step: int, config: TrainConfig) -> tuple[Sequence, Tensor]:
    """How the sequences of a step lie, and this replica's: int64 (batch / replicas, length_tokens), on its device.

    `text`: uint8 (bytes,). Raises `InputError` if it is shorter than a sequence.
    """
    mine = config.batch // config.replicas
    of_all = windows(text, step, config.batch, config.length_tokens, config.seed)
    return sequence_of(ring, config), of_all[replica * mine : (replica + 1) * mine].to(ring.device)
