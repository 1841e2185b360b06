"""The shape of the model that `ringattn train` trains; `model` builds it, with torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelConfig:
    """The shape of the model. The metadata of a field is its line in `ringattn train --help`."""

    layers: int = field(default=2, metadata={"about": "transformer blocks", "least": 1})
    dim: int = field(default=128, metadata={"about": "width of the residual stream", "least": 2})
    heads: int = field(default=4, metadata={"about": "query heads", "least": 1})
    kv_heads: int = field(default=2, metadata={"about": "key/value heads; divides heads", "least": 1})
    hidden_dim: int = field(default=384, metadata={"about": "width inside the feed-forward block", "least": 1})
    rope_base: float = field(default=10_000.0, metadata={"about": "base of the rotary frequencies", "least": 1.0})
    tied: bool = field(default=True, metadata={"about": "the output layer shares the embedding's weights"})


def head_dim(config: ModelConfig) -> int:
    """Elements of one head."""
    return config.dim // config.heads
