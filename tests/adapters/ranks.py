"""Language models of transformers over ranks that are processes, against eager attention in one process.

`python -m tests.adapters.ranks FOLDER` imports transformers once and forks: a reference process, 2 ranks, then 4.
Everything is computed in float64, also where a model rounds to float32 on the way (norms, rotary positions, eager's
softmax, routers, the loss), on both sides alike: rounding would hide errors below 1e-7.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import create_masks_for_generate

from ringattn import Ring, Sequence
from ringattn.adapters.transformers import prepare, register
from tests.adapters.models import MODELS, tiny_model
from tests.adapters.processes import forked, forked_ranks, worst_error

TOKENS = 27
DOCUMENTS = [0, 4, 17, 27]
LAYOUTS = ("zigzag", "contiguous")
WORLDS = (2, 4)


class InDouble(TorchFunctionMode):
    """No tensor becomes float32: whoever asks for it gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        if func is Tensor.float:
            return args[0].double()
        args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: wide.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_double() -> Iterator[None]:
    """The same where layers are computed again in backward, which knows no modes."""
    found = torch.float32, Tensor.float
    torch.float32 = torch.float = torch.float64  # type: ignore[misc, assignment]
    Tensor.float = Tensor.double  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:  # torch.load and torch.save compare dtypes with those of storages
        torch.float32 = torch.float = found[0]  # type: ignore[misc]
        Tensor.float = found[1]  # type: ignore[method-assign]


class Batch(NamedTuple):
    """A whole batch: tokens and labels (rows, tokens), -100 where there is none; mask: 1 for real tokens."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor | None = None
    documents: list[int] | None = None

    @property
    def labels_count(self) -> int:
        return int((self.labels[:, 1:] != -100).sum())


def batches() -> dict[str, Batch]:
    """plain, packed documents, and padding before, after and on both sides of a row."""
    tokens = torch.randint(3, 64, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    packed = tokens[:1].clone()
    packed[:, DOCUMENTS[:-1]] = -100
    mask = torch.ones_like(tokens)
    mask[0, :6], mask[1, -9:], mask[2, :3], mask[2, -2:] = 0, 0, 0, 0
    labels = torch.where(mask.bool() & mask.roll(1, 1).bool(), tokens, -100)
    return {
        "plain": Batch(tokens[:2], tokens[:2].clone()),
        "packed": Batch(tokens[:1], packed, documents=DOCUMENTS),
        "padded": Batch(torch.where(mask.bool(), tokens, 0), labels, mask),
    }


def restarting(documents: list[int]) -> Tensor:
    """Positions that count from 0 in every document, (1, tokens)."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(documents)])[None]


def one_process(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and loss of the whole batch."""
    places = None if batch.documents is None else restarting(batch.documents)
    mask: Any = batch.mask
    if places is not None and model.config.model_type == "gpt_oss":  # alone it makes its masks without the positions
        mask = create_masks_for_generate(model.config, batch.tokens[..., None].double(), None, None, places)
    out = model(
        input_ids=batch.tokens, labels=batch.labels, attention_mask=mask, num_items_in_batch=batch.labels_count,
        position_ids=places,
    )  # fmt: skip
    return out.logits, out.loss


def over_ranks(model: Any, batch: Batch, seq: Sequence, dropout_seed: int | None = None) -> tuple[Tensor, Tensor]:
    """The same from this rank's shard: all logits, this rank's part of the loss."""
    shifted = seq.shard_labels(batch.labels)
    with seq.ring.activate(seq, dropout_seed=dropout_seed):
        out = model(
            input_ids=seq.shard(batch.tokens), position_ids=seq.positions(per_document=True)[None],
            attention_mask=None if batch.mask is None else seq.shard(batch.mask),
            labels=shifted, shift_labels=shifted, num_items_in_batch=batch.labels_count,
        )  # fmt: skip
    return seq.gather(out.logits.detach()), out.loss


def forward(seq: Sequence, model: Any, **inputs: Any) -> Any:
    """One row over ranks, with other inputs where they are given."""
    tokens = batches()["plain"].tokens[:1]
    given = {"input_ids": seq.shard(tokens), "position_ids": seq.positions()[None], **inputs}
    with seq.ring.activate(seq):
        return model(**given)


def llama(**other: Any) -> Any:
    """A small model that attends through the ring, its inputs not checked."""
    return tiny_model("llama", "ringattn", **other)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient, zeros where there is none."""
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def reference(folder: Path) -> None:
    """Save what one process with eager attention computes."""
    found = {}
    with InDouble():
        for name in MODELS:
            model = tiny_model(name, "eager")
            for kind, batch in batches().items():
                logits, loss = one_process(model, batch)
                found[name, kind] = logits.detach(), loss.detach(), gradients(model, loss)
    torch.save(found, folder / "reference.pt")


def errors(ring: Ring, folder: Path) -> Iterator[tuple[str, float]]:
    """For each model, batch and layout the greatest relative error of logits, loss and gradients, and whose it is."""
    register()
    true = torch.load(folder / "reference.pt")
    for name in MODELS:
        model = prepare(tiny_model(name, "ringattn"))
        for number, (kind, batch) in enumerate(batches().items()):
            layout = LAYOUTS[(number + ring.world_size // 2) % 2]  # the two world sizes take turns
            seq = ring.sequence(TOKENS, cu_seqlens=batch.documents, layout=layout)
            logits, loss = over_ranks(model, batch, seq)
            grads = gradients(model, loss)
            total = loss.detach().clone()
            ring.all_reduce([total, *grads.values()])
            true_logits, true_loss, true_grads = true[name, kind]
            real = slice(None) if batch.mask is None else batch.mask.bool()
            pairs = {"logits": (logits[real], true_logits[real]), "loss": (total, true_loss)}
            pairs |= {of: (grads[of], true_grads[of]) for of in true_grads}
            for of, (mine, theirs) in pairs.items():
                yield f"{name} {kind} {layout} {of}", worst_error([(mine, theirs)], floor=1.0)


def rank(folder: Path, number: int) -> dict[str, float]:
    """Return the errors of one rank."""
    with Ring(timeout_s=60.0) as ring, InDouble():
        return dict(errors(ring, folder))


def save_errors(folder: Path, rank: Callable[[int], dict[str, float]]) -> None:
    """Save the errors of the first rank of each world in `folder`."""
    for world_size in WORLDS:
        found = forked_ranks(world_size, rank)[0]
        (folder / f"errors-{world_size}.json").write_text(json.dumps(found), encoding="utf-8")


def main(folder: Path) -> None:
    """The reference, then all ranks of each world size."""
    torch.set_num_threads(1)
    for name in MODELS:
        tiny_model(name, "eager")  # imported here, so that no process that is forked has to
    forked(partial(reference, folder))
    save_errors(folder, partial(rank, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
