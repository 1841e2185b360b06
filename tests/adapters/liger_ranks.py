"""Liger's own kernels in a Llama over two ranks (threads) against one process without Liger, on the CPU.

Run it in a process in which liger-kernel can be imported and TRITON_INTERPRET=1 is set. Triton's interpreter needs
three patches (`as_compiled`) to run these kernels as its compiler does.
"""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from transformers.models.llama import modeling_llama
from triton.language.extra import libdevice
from triton.runtime import interpreter

from ringattn import Ring
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model

TOKENS = torch.randint(0, 64, (1, 27), generator=torch.Generator().manual_seed(4))
PLACES = torch.cat([torch.arange(4), torch.arange(13), torch.arange(10)])[None]
LABELS = torch.where(PLACES == 0, -100, TOKENS)
BATCHES: dict[str, dict[str, Tensor]] = {
    "plain": {"input_ids": TOKENS, "labels": TOKENS},
    "packed": {"input_ids": TOKENS, "labels": LABELS, "position_ids": PLACES},
}
"""No document begins with a label."""
DOCUMENTS = torch.block_diag(*(torch.ones(count, count).tril() for count in (4, 13, 10)))
"""The mask of the packed batch: which key each query attends to."""


def as_compiled() -> None:
    """Patch Triton's interpreter to run Liger's kernels as the compiler does.

    Float arguments of a launch become float32 scalars, `libdevice.rsqrt` becomes `tl.rsqrt`, and a lock lets one launch
    run at a time, because the ranks are threads.
    """
    convert, run, lock = interpreter._implicit_cvt, interpreter.GridExecutor.__call__, threading.Lock()

    def with_floats(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return convert(arg)

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            run(self, *args, **kwargs)

    interpreter._implicit_cvt = with_floats
    interpreter.GridExecutor.__call__ = alone
    libdevice.rsqrt = lambda x: tl.rsqrt(x)


def result(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Run backward from `loss`. Return the loss and the gradients of all parameters."""
    loss.backward()
    return {"loss": loss.detach().clone(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def compute_errors() -> dict[str, Any]:
    """Return the largest error of each batch, and the names of the model's functions that Liger replaced."""
    as_compiled()
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    plain = tiny_model("llama", "eager").float()
    masks = {"plain": {}, "packed": {"attention_mask": torch.where(DOCUMENTS.bool(), 0.0, -torch.inf)[None, None]}}
    truths = {}
    for name, batch in BATCHES.items():
        model = copy.deepcopy(plain)
        truths[name] = result(model, model(**batch, **masks[name]).loss)
    # From here on every Llama of this process uses Liger's rotary embedding.
    apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True, model=plain)
    layer = plain.model.layers[0]
    changed = (plain.forward, plain.model.norm.forward, layer.mlp.forward, modeling_llama.apply_rotary_pos_emb)
    answers: dict[str, Any] = {
        "Liger's": [function.__name__ for function in changed if function.__module__.startswith("liger_kernel.")]
    }

    def body(ring: Ring, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        model = prepare(copy.deepcopy(plain))
        labels = int((batch["labels"][:, 1:] != -100).sum())
        seq, shards = shard_batch(ring, batch, model=model)
        with ring.activate(seq):
            out = model(**shards, num_items_in_batch=labels, return_token_accuracy=True)
        # The fused loss computes no logits. The adapter removes the token accuracy, which covers only local tokens.
        assert out.logits is None and out.token_accuracy is None
        actual = result(model, out.loss)
        ring.all_reduce(list(actual.values()))
        return actual

    for name, batch in BATCHES.items():
        true = truths[name]
        errors = [((actual[of] - true[of]).abs().max() / true[of].abs().max()).item()
                  for actual in run_ranks(2, partial(body, batch=batch), timeout_s=60.0) for of in true]  # fmt: skip
        answers[name] = max(errors)
    return answers
