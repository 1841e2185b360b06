"""Inputs and labels of heads that predict several tokens ahead, inside a model.

    following = tokens_ahead(input_ids, position_ids, fill=0)
    second_labels = tokens_ahead(shift_labels, position_ids)

The token ahead of a rank's token may be on another rank. A training loop that has whole batches can use
`Sequence.shard_labels` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.adapters.context import sequence_of

__all__ = ["tokens_ahead"]


@torch.compiler.disable
def tokens_ahead(tokens: Tensor, position_ids: Tensor | None = None, *, shift: int = 1, fill: int = -100) -> Tensor:
    """Return for each token the one that is `shift` positions ahead in the same document, or `fill` past its end.

    Under an active sequence, `tokens` are this rank's, and this is a collective call. Otherwise they are whole rows, so
    a model that calls this function also runs in one process.

    Args:
        tokens: Integers, such as input ids or labels.
        position_ids: The positions of whole rows, 0 for the first token of each document. Not read under an active
            sequence, which has the documents. None: each row is one document.
        shift: How many positions ahead.
        fill: The value for the last `shift` tokens of each document.

    Shape:
        tokens: (rows, tokens)
        position_ids: (rows or 1, tokens)

    Returns:
        int64, (rows, tokens).

    Raises:
        InputError: The tokens are not this rank's, `shift` is not positive, or see `context.sequence_of`.

    Example:
        hidden = project(torch.cat([hidden, embed(tokens_ahead(input_ids, position_ids, fill=0))], -1))
    """
    seq = sequence_of()
    if seq is not None:
        return seq.shard_labels(seq.gather(tokens, dim=1), ignore_index=fill, shift=shift)
    documents = torch.zeros_like(tokens)
    if position_ids is not None:
        documents = (position_ids == 0).cumsum(1).expand_as(tokens)
    crosses = documents.roll(-shift, 1) != documents
    crosses[:, -shift:] = True
    return tokens.long().roll(-shift, 1).masked_fill(crosses, fill)
