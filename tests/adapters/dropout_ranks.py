"""GPT-2 and Llama that train with attention dropout, over ranks that are processes, against one process.

`python -m tests.adapters.dropout_ranks FOLDER` imports transformers once and forks: a reference process, 2 ranks, 4.
The reference attends by the definition, and drops by the Philox of `tests.philox` with the seeds that the calls have.
Checkpointed layers keep the generator of a process, which ranks that are threads would share.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ringattn import Ring, Sequence
from ringattn.adapters.dropout import seed_from
from ringattn.adapters.transformers import prepare
from tests import philox
from tests.adapters.models import filled, tiny_model
from tests.adapters.processes import forked, worst_error
from tests.adapters.ranks import (
    TOKENS,
    Batch,
    InDouble,
    batches,
    gradients,
    in_double,
    one_process,
    over_ranks,
    save_errors,
)

P, NAME = 0.3, "known_dropout"
HOW: tuple[dict[str, Any], ...] = ({"use_reentrant": True}, {"use_reentrant": False})
"""Of checkpointed layers, which the two world sizes have in turns."""
PARTS: list[list[int]] = [[0], [1, 3], [2]]
"""Rows of the padded batch whose real tokens begin alike, which attend together where attention is causal."""


def made(name: str, attention: str) -> Any:
    """In training mode, with attention dropout alone."""
    if name == "llama":
        return tiny_model("llama", attention, attention_dropout=P)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=P, resid_pdrop=0.0, embd_pdrop=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return filled(transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention))


class KnownDropout:
    """An attention function of transformers whose calls drop by known seeds, each row by that of its part."""

    def __init__(self, batch: Batch, step: int) -> None:
        self.step, self.call, self.is_padded = step, 0, batch.mask is not None

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0,
        scaling: float | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """(batch, heads, tokens, dim) to (batch, tokens, heads, dim)."""
        seed = seed_from(self.step, self.call)
        self.call += 1
        rows, heads, tokens, dim = q.shape
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        parts = [([*range(rows)], seed)]
        if self.is_padded:
            parts = [(part, seed_from(seed, number)) for number, part in enumerate(PARTS)]
        kept = torch.empty(rows, heads, tokens, tokens, dtype=torch.float64)
        for part, own in parts:
            kept[part] = philox.kept(len(part), heads, tokens, tokens, own, dropout)
        assert dropout == P
        scores = q @ k.mT * (dim**-0.5 if scaling is None else scaling) + mask
        return (scores.softmax(-1) * kept @ v).transpose(1, 2).contiguous(), None


def known(name: str, batch: Batch, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients of one process."""
    AttentionInterface.register(NAME, KnownDropout(batch, step))
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["eager"])
    model = made(name, NAME)
    logits, loss = one_process(model, batch)
    return logits.detach(), loss.detach(), gradients(model, loss)


def cases() -> list[tuple[str, str, Batch]]:
    """Models, and batches by their names; the number of a case is its step."""
    each = batches()
    return [*(("gpt2", kind, batch) for kind, batch in each.items()), ("llama", "padded", each["padded"])]


def reference(folder: Path) -> None:
    """Save what one process computes."""
    with InDouble():
        found = [known(name, batch, step) for step, (name, _, batch) in enumerate(cases())]
    torch.save(found, folder / "reference.pt")


def error(seq: Sequence, model: Any, batch: Batch, step: int, true: Any) -> float:
    """The greatest relative error of logits, loss and gradients over ranks."""
    true_logits, true_loss, true_grads = true
    with in_double():  # no mode reaches what is computed again
        logits, loss = over_ranks(model, batch, seq, dropout_seed=step)
        torch.rand(5)
        grads = gradients(model, loss)
    total = loss.detach().clone()
    seq.ring.all_reduce([total, *grads.values()])
    real = slice(None) if batch.mask is None else batch.mask.bool()
    pairs = [(logits[real], true_logits[real]), (total, true_loss), *((grads[of], true_grads[of]) for of in true_grads)]
    return worst_error(pairs, floor=1.0)


def rank(folder: Path, number: int) -> dict[str, float]:
    """Return the errors of one rank."""
    torch.manual_seed(number)  # ranks' generators are their own
    true, found = torch.load(folder / "reference.pt"), {}
    with Ring(timeout_s=60.0) as ring:
        for step, (name, kind, batch) in enumerate(cases()):
            with in_double():
                model = prepare(made(name, "eager"))
            model.gradient_checkpointing_enable(HOW[(step + ring.world_size // 2) % 2])
            model.enable_input_require_grads()  # a reentrant checkpoint has no gradients without
            seq = ring.sequence(TOKENS, cu_seqlens=batch.documents, layout="zigzag")
            found[f"{name} {kind}"] = error(seq, model, batch, step, true[step])
    return found


def main(folder: Path) -> None:
    """The reference, then all ranks of each world size."""
    torch.set_num_threads(1)
    for name in ("gpt2", "llama"):
        made(name, "eager")  # imported here, so that no process that is forked has to
    forked(partial(reference, folder))
    save_errors(folder, partial(rank, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
