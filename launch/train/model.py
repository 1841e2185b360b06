"""A small decoder-only transformer that does not know where its tokens are.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. Two things come from outside: the *global* positions of
the tokens it is given, and the function that attends. So the same code trains one process and one shard of many.
Guarantees: the same seed gives the same weights in every process and, up to their rounding, in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn.launch.train.config import ModelConfig, head_dim
from ringattn.layers.projection import project_qkv
from ringattn.layers.rotary import Rope
from ringattn.layers.tiled import Tiling, inputs_on_host, tiled

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (batch, tokens, heads, head_dim), k and v (batch, tokens, kv_heads, head_dim) -> like q; causal."""

Head = Callable[[Tensor, nn.Module], Tensor]
"""Normalized hidden states (batch, tokens, dim), and what makes logits of any of them -> what the caller wants."""


class Linear(nn.Linear):
    """A linear layer without bias whose weights take the dtype of its input, so that they may stay in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), dtype of x."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm, computed and learned in the dtype of its weight, returned in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), dtype of x."""
        assert self.weight is not None
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Block(nn.Module):
    """Attention, then SwiGLU, each on a normalized residual stream.

    `recompute`: what backward computes a second time instead of keeping it. full: the block, from its input; ring
    attention then runs and communicates again, on all ranks alike. selective: all but attention, whose inputs and
    output are kept: it is the only part that grows with the square of the length and the only one that communicates,
    and a fused kernel keeps no scores that recomputation could save. offloaded: full, and the input waits in host
    memory. `tile_tokens`: so many tokens at a time pass through norm and SwiGLU, computed again in backward; None: all.
    """

    def __init__(self, config: ModelConfig, recompute: str = "none", tile_tokens: int | None = None) -> None:
        super().__init__()
        self.recompute, self.tile_tokens = recompute, tile_tokens
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, head_dim(config)
        self.rope = Rope(base=config.rope_base)
        self.attention_norm = RMSNorm(config.dim, eps=1e-6)
        self.qkv = Linear(config.dim, (config.heads + 2 * config.kv_heads) * self.head_dim)
        self.attention_out = Linear(config.heads * self.head_dim, config.dim)
        self.hidden_norm = RMSNorm(config.dim, eps=1e-6)
        self.hidden_in = Linear(config.dim, 2 * config.hidden_dim)
        self.hidden_out = Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(batch, tokens, dim) -> the same; `positions` (tokens,)."""
        if self.recompute == "offloaded":
            with inputs_on_host():
                return self._run("offloaded", self._attend_and_feed, x, positions, attend)
        return self._run("full", self._attend_and_feed, x, positions, attend)

    def _attend_and_feed(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._run("selective", self._project, x, positions)
        return self._run("selective", self._feed, x, attend(q, k, v))

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return project_qkv(
            self.attention_norm(x), self.qkv.weight.to(x.dtype), None, self.heads, self.kv_heads, self.head_dim,
            rope=self.rope, positions=positions,
        )  # fmt: skip

    def _feed(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attention_out(attended.flatten(2))
        if self.tile_tokens is None:
            return self._hidden(x)
        parts = self.hidden_norm, self.hidden_in, self.hidden_out
        weights = [weight for part in parts for weight in part.parameters()]
        return tiled(Tiling(self._hidden, self.tile_tokens), x, weights)

    def _hidden(self, x: Tensor) -> Tensor:
        gate, up = self.hidden_in(self.hidden_norm(x)).chunk(2, dim=-1)
        return x + self.hidden_out(F.silu(gate) * up)

    def _run(self, recompute: str, part: Callable[..., Any], *inputs: Any) -> Any:
        """Run a part of the block, and forget its activations if the block recomputes so much."""
        if self.recompute != recompute:
            return part(*inputs)
        return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing here draws numbers


class Transformer(nn.Module):
    """A language model over `vocabulary` tokens.

    Weights are float32, or float64 where `dtype` is; activations are `dtype`. On the CPU; move it with `.to(device)`.
    `recompute` and `tile_tokens` are those of `Block`.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        dtype: torch.dtype,
        seed: int,
        recompute: str = "none",
        tile_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Embedding(vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, recompute, tile_tokens) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, eps=1e-6)
        self.unembedding = Linear(config.dim, vocabulary)
        if config.tied:
            self.unembedding.weight = self.embedding.weight
        self._draw_weights(seed)
        if dtype == torch.float64:
            self.double()

    def _draw_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # The layers that write to the residual stream start smaller, so that depth does not make it louder.
                shrink = math.sqrt(2 * self.config.layers) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(weight, std=0.02 / shrink, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, head: Head | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary) in `dtype`, of tokens (batch, tokens) at global `positions` (tokens,).

        With a `head`, what it returns, such as a loss that never holds the logits of all tokens at once.
        """
        x = self.embedding(tokens).to(self.dtype)
        for block in self.blocks:
            x = block(x, positions, attend)
        x = self.norm(x)
        return self.unembedding(x) if head is None else head(x, self.unembedding)
