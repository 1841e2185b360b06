"""A Llama with a head that predicts the token after the next, like that of DeepSeek-V3, as a user writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ringattn.adapters.multi_token import tokens_ahead
from tests.adapters.models import filled, tiny_model


class MultiTokenForCausalLM(LlamaForCausalLM):
    """A Llama whose loss adds 0.3 times that of a head for the second token ahead."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.norms = nn.ModuleList([LlamaRMSNorm(width), LlamaRMSNorm(width), LlamaRMSNorm(width)])
        self.project = nn.Linear(2 * width, width, bias=False)
        self.further_layer = LlamaDecoderLayer(config, config.num_hidden_layers)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        states = self.model(input_ids, attention_mask, position_ids).last_hidden_state
        logits, loss = self.lm_head(states), None
        if labels is not None:
            following = tokens_ahead(input_ids, position_ids, fill=0)
            further = self.lm_head(self.further(states, following, attention_mask, position_ids))
            first = others.get("shift_labels")  # a parameter of this name would be one of Trainer's label_names
            first = tokens_ahead(labels, position_ids) if first is None else first
            second = tokens_ahead(first, position_ids)
            if attention_mask is not None:  # the state of the padding before a text predicts nothing
                second = second.masked_fill(attention_mask == 0, -100)
            count = (first != -100).sum() if num_items_in_batch is None else num_items_in_batch
            parts = [
                self.loss_function(x, y, self.vocab_size, shift_labels=y, num_items_in_batch=count)
                for x, y in ((logits, first), (further, second))
            ]
            loss = parts[0] + 0.3 * parts[1]
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def further(self, states: Tensor, following: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Return the states that predict the second token ahead, from the states and ids of the following tokens."""
        embedded = self.get_input_embeddings()(following)
        states = self.project(torch.cat([self.norms[0](states), self.norms[1](embedded)], -1))
        masks = create_causal_mask(self.config, states, mask, None, positions)
        rotary = self.model.rotary_emb(states, position_ids=positions)
        states = self.further_layer(
            states, attention_mask=masks, position_embeddings=rotary, position_ids=positions, use_cache=False
        )
        return self.norms[2](states)


def multi_token_llama() -> Any:
    """Return a small model with random float64 weights."""
    return filled(MultiTokenForCausalLM._from_config(tiny_model("llama", "eager").config, attn_implementation="eager"))
