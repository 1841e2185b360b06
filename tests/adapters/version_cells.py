"""Results of one version of transformers over two ranks.

The module runs in a process with that version first on PYTHONPATH, see tests.adapters.versions. Each cell is the
largest error against one process, computed in float64, or the text of the refusal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import DataCollatorWithFlattening

from ringattn import InputError, Ring
from ringattn.adapters.context import recompute_context
from ringattn.adapters.host_versions import UntestedHostWarning
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.trainer import check_trainer
from ringattn.testing import run_ranks
from tests.adapters.models import rotary, tiny_model, with_lora
from tests.adapters.processes import forked, forked_ranks, worst_error
from tests.adapters.ranks import (
    DOCUMENTS,
    TOKENS,
    InDouble,
    batches,
    far_from_one,
    far_off,
    far_off_compiled,
    far_off_sharded,
    forward,
)
from tests.adapters.trainer import RingTrainer, rank, trained

Cell = Callable[[], float]
PLAIN, PACKED, PADDED = batches().values()


def flattened() -> dict[str, Any]:
    """Return the documents of `PACKED` as transformers' collator packs them, with their cumulative lengths."""
    row = batches()["packed"]["input_ids"][0].tolist()
    texts = [{"input_ids": row[start:stop]} for start, stop in pairwise(DOCUMENTS)]
    batch: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(texts)
    return batch


def eager(name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that makes this model with eager attention."""
    return lambda: tiny_model(name, "eager", **options)


# --- exact ----------------------------------------------------------------------------------------------------------


def checkpointed(model: Any) -> Any:
    """Enable gradient checkpointing of every layer, recomputed in float64. Return the model."""

    def contexts() -> Any:
        first, again = recompute_context()

        @contextmanager
        def doubled() -> Iterator[None]:
            with again, InDouble():
                yield

        return first, doubled()

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return model


def train(folder: str, *cases: str) -> float:
    """Return the largest error of a Trainer's weights, losses and counts.

    Trainer rounds the losses of steps to float32, so their errors count only above 1e-6.
    """
    check_trainer(RingTrainer)
    tiny_model("qwen2", "eager")  # imported here, so that no forked process has to
    (expected,) = forked(lambda: {case: trained(folder, case) for case in cases})

    def attempt(number: int) -> dict[str, Any] | str:
        try:
            return rank(folder, 2, expected, number)
        except InputError as error:
            return str(error)

    answers = forked_ranks(2, attempt)[-1]
    if isinstance(answers, str):
        raise InputError(answers)
    return max(_worst(answer) for answer in answers.values())


def _worst(answer: dict[str, Any]) -> float:
    losses = [abs(loss / expected - 1) for loss, expected in zip(*answer["losses"], strict=True)]
    counts, expected_counts = answer["counted"]
    assert counts.keys() == expected_counts.keys()
    counted = [
        (torch.tensor(counts[name], dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
        for name, expected in expected_counts.items()
    ]
    evaluated = losses[-1]
    return max(
        *answer["weights"].values(), worst_error(counted), evaluated, *(error for error in losses if error > 1e-6)
    )


def fine_tuned(folder: str) -> float:
    """Return the largest error of SFTTrainer's weights and logged metrics.

    Losses are rounded to float32, so their errors count only above 1e-6.
    """
    from ringattn.adapters.trl import RingSFTTrainer

    check_trainer(RingSFTTrainer)
    from tests.adapters import sft

    (answer,) = sft.train_errors(folder, "packed").values()
    errors = [answer["weights"]]
    for (loss, *others), (true_loss, *truly) in zip(*answer["logged"], strict=True):
        assert len(others) == 3
        errors += [abs(a - b) / max(1.0, abs(b)) for a, b in zip(others, truly, strict=True)]
        errors += [x for x in [abs(loss / true_loss - 1)] if x > 1e-6]
    return max(errors)


def preferred(folder: str) -> float:
    """Return the largest error of DPOTrainer's weights and logged metrics, with a LoRA adapter.

    Losses and norms of gradients are rounded to float32, so their errors count only above 1e-6.
    """
    from ringattn.adapters.trl import RingDPOTrainer

    check_trainer(RingDPOTrainer)
    from tests.adapters import preferences

    (answer,) = preferences.train_errors(folder, "DPO", "DPO, LoRA").values()
    errors = [answer["weights"]]
    for logged, truly in zip(*answer["logged"], strict=True):
        assert logged.keys() == truly.keys() and len(truly) >= 14
        by_name = {name: abs(logged[name] - true) / max(1.0, abs(true)) for name, true in truly.items()}
        errors += [x for name, x in by_name.items() if x > 1e-6 or name not in ("loss", "grad_norm")]
    return max(errors)


def compiled() -> float:
    """Return the error of a compiled model of one layer. All ranks have equal token counts, so one length compiles."""
    return far_off_compiled(partial(tiny_model, "llama", num_hidden_layers=1), PACKED["input_ids"][:, :24],
                            [*DOCUMENTS[:-1], 24])  # fmt: skip


def generated() -> float:
    """Return how many tokens differ between a model and a prepared model inside `activate(None)`.

    Both generate from padded prompts.
    """
    prompts = {"input_ids": PADDED["input_ids"][[0, 3]], "attention_mask": PADDED["attention_mask"][[0, 3]]}
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "eos_token_id": None}
    with InDouble():
        true = tiny_model("llama", "eager").eval().generate(**prompts, **options)

    def body(ring: Ring) -> float:
        with InDouble(), ring.activate(None):
            found = prepare(tiny_model("llama", "eager").eval()).generate(**prompts, **options)
        return float((found != true).sum())

    return max(run_ranks(2, body))


FORKED: dict[str, Callable[[str], float]] = {
    "Trainer, 3 steps, packed": lambda folder: train(folder, "packed", "packed, labels of each process"),
    "Trainer, metrics, smoothed labels": lambda folder: train(folder, "measured"),
    "Trainer, a stream": lambda folder: train(folder, "streamed"),
    "Trainer, `compute_loss_func`": lambda folder: train(folder, "function"),
    "Trainer, `compute_loss` overridden": lambda folder: train(folder, "z-loss"),
    "`ringattn script`, a plain Trainer": lambda folder: train(folder, "plain by script", "packed by script"),
    "`RingParallelismConfig`, packed": lambda folder: train(folder, "packed by configuration"),
    "`RingParallelismConfig`, checkpointed": lambda folder: train(folder, "packed, checkpointed by configuration"),
    "`RingParallelismConfig`, FSDP2": lambda folder: train(folder, "packed, sharded by configuration"),
    "TRL's SFTTrainer, 3 steps, packed": fine_tuned,
    "TRL's DPOTrainer": preferred,
    "FSDP2, 2 steps, packed": lambda folder: far_off_sharded(eager("llama"), PACKED),
}
"""Cells whose ranks are forked from this process. They run first, because this process has no threads yet."""

EXACT: dict[str, Cell] = {
    "Llama": lambda: far_from_one(eager("llama"), PLAIN),
    "Llama, padded rows": lambda: far_from_one(eager("llama"), PADDED),
    "Llama, packed, `position_ids`": lambda: far_from_one(eager("llama"), PACKED),
    "Llama, packed, `cu_seq_lens_q`": lambda: far_from_one(eager("llama"), flattened()),
    "Mistral: window, GQA": lambda: far_from_one(eager("mistral"), PLAIN),
    "Mistral, packed": lambda: far_from_one(eager("mistral"), PACKED),
    "Gemma 2: windows in turn, softcap": lambda: far_from_one(eager("gemma2"), PACKED),
    "GPT-OSS: sinks, experts": lambda: far_from_one(eager("gpt_oss"), PLAIN),
    "Mixtral: router loss, padded rows": lambda: far_from_one(eager("mixtral"), PADDED),
    "Llama 4: chunks, packed": lambda: far_from_one(eager("llama4_text", attn_temperature_tuning=False), PACKED),
    "gradient checkpointing": lambda: far_from_one(eager("mistral"), PACKED, train=checkpointed),
    "LoRA of PEFT": lambda: far_from_one(eager("llama"), PACKED, train=with_lora),
    "`torch.compile`, packed": compiled,
    "RoPE `dynamic`": lambda: far_off(partial(rotary, "dynamic"), {"input_ids": PLAIN["input_ids"]}),
    "`generate` inside `activate(None)`": generated,
    "RoPE `longrope`": lambda: far_off(partial(rotary, "longrope"), {"input_ids": PLAIN["input_ids"]}),
}


# --- what was silently wrong once -----------------------------------------------------------------------------------


def refused(call: Callable[[Ring], Any]) -> float:
    """Run `call` on two ranks and raise the InputError of rank 0. Return 1.0 if a rank raises none."""

    def body(ring: Ring) -> InputError | None:
        try:
            call(ring)
        except InputError as error:
            return error
        return None

    raised = run_ranks(2, body, timeout_s=20.0)
    for error in raised:
        if error is None:
            return 1.0
    raise raised[0] or AssertionError


def unprepared(ring: Ring) -> None:
    forward(ring.sequence(TOKENS), tiny_model("llama", "sdpa"))


def some_logits(ring: Ring) -> None:
    forward(ring.sequence(TOKENS), prepare(tiny_model("llama", "eager")), logits_to_keep=1)


def decoded_alone(ring: Ring) -> None:
    model, seq = prepare(tiny_model("llama", "eager", use_cache=True).eval()), ring.sequence(TOKENS)
    cache = forward(seq, model, use_cache=True).past_key_values
    with ring.activate(None):
        model(input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[TOKENS]]), past_key_values=cache)


REFUSED: dict[str, Cell] = {
    "forgotten `prepare`": lambda: refused(unprepared),
    "`logits_to_keep=1`": lambda: refused(some_logits),
    "a sharded cache decoded locally": lambda: refused(decoded_alone),
}


def verdict(cell: Cell) -> float | str:
    """Return the error of a cell, or the text of its refusal."""
    try:
        return cell()
    except InputError as error:
        return str(error)


def verdicts(folder: str, *names: str) -> dict[str, float | str]:
    """Return the verdicts of the cells in `names`, or of all."""
    warnings.simplefilter("error", UntestedHostWarning)  # each version here must be among the tested ones
    by_name: dict[str, Cell] = {name: partial(cell, folder) for name, cell in FORKED.items()} | EXACT | REFUSED
    return {name: verdict(cell) for name, cell in by_name.items() if not names or name in names}
