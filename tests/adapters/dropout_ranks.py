"""GPT-2 and Llama trained with attention dropout, over ranks that are processes, against one process.

The reference computes attention by its definition, and drops weights by `tests.philox` with the same seeds as the ring.
Ranks are processes because checkpointed layers save and restore the process's generator, which threads would share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ringattn import Ring
from ringattn.adapters.dropout import seed_from
from ringattn.adapters.transformers import prepare
from tests import philox
from tests.adapters.models import filled, tiny_model
from tests.adapters.processes import forked, forked_ranks
from tests.adapters.ranks import Batch, InDouble, batches, in_double, one_process, over_ranks

P, NAME = 0.3, "known_dropout"
HOW: tuple[dict[str, Any], ...] = ({"use_reentrant": True}, {"use_reentrant": False})
"""The options of checkpointed layers. They alternate from step to step, and differ between the two world sizes."""
PARTS: list[list[int]] = [[0], [1, 3], [2]]
"""Groups of rows of the padded batch whose real tokens begin at the same position. A causal model attends to each group
in a separate call, so each has a separate seed."""
CASES = (("gpt2", "plain"), ("gpt2", "packed"), ("gpt2", "padded"), ("llama", "padded"))
"""Models and batches; the number of a case is its step."""


def build(name: str, attention: str) -> Any:
    """Return a model in training mode, whose only dropout is that of attention."""
    if name == "llama":
        return tiny_model("llama", attention, attention_dropout=P)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=P, resid_pdrop=0.0, embd_pdrop=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return filled(transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention))


class KnownDropout:
    """An attention function for transformers that drops weights by known seeds.

    The seed is derived from the step and the number of the call; in a padded batch each part of `PARTS` has its own.
    """

    def __init__(self, batch: Batch, step: int) -> None:
        self.step, self.call, self.is_padded = step, 0, "attention_mask" in batch

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0,
        scaling: float | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return the output (batch, tokens, heads, dim) for q, k and v (batch, heads, tokens, dim)."""
        seed = seed_from(self.step, self.call)
        self.call += 1
        rows, heads, tokens, dim = q.shape
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        parts = [([*range(rows)], seed)]
        if self.is_padded:
            parts = [(part, seed_from(seed, number)) for number, part in enumerate(PARTS)]
        kept = torch.empty(rows, heads, tokens, tokens, dtype=torch.float64)
        for part, part_seed in parts:
            kept[part] = philox.kept(len(part), heads, tokens, tokens, part_seed, dropout)
        assert dropout == P
        scores = q @ k.mT * (dim**-0.5 if scaling is None else scaling) + mask
        return (scores.softmax(-1) * kept @ v).transpose(1, 2).contiguous(), None


def reference_values(name: str, batch: Batch, step: int) -> dict[str, Tensor]:
    """Return the logits, the loss and the gradients of one process that attends by `KnownDropout`."""
    AttentionInterface.register(NAME, KnownDropout(batch, step))
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["eager"])
    with InDouble():
        return one_process(build(name, NAME), batch)


def rank(expected: list[dict[str, Tensor]], number: int) -> list[float]:
    """Return the largest error on one rank, by case."""
    torch.manual_seed(number)  # each rank's generator has a different state
    errors = []
    with Ring(timeout_s=60.0) as ring, in_double():  # `InDouble` is not active in recomputation
        for step, (name, kind) in enumerate(CASES):
            model = prepare(build(name, "eager"))
            model.gradient_checkpointing_enable(HOW[(step + ring.world_size // 2) % 2])
            model.enable_input_require_grads()  # a reentrant checkpoint needs an input that requires gradients
            errors.append(over_ranks(ring, model, batches()[kind], expected[step], dropout_seed=step))
    return errors


def compute_errors() -> list[list[float]]:
    """Return the errors on rank 0, by number of ranks (2 and 4) and case."""
    for name in ("gpt2", "llama"):
        build(name, "eager")  # imported here, so that no forked process has to
    (expected,) = forked(
        lambda: [reference_values(name, batches()[kind], step) for step, (name, kind) in enumerate(CASES)]
    )
    return [forked_ranks(world_size, partial(rank, expected))[0] for world_size in (2, 4)]
