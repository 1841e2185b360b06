"""Hybrid models over a ring against one process: convolutions, delta rules and state-space layers between attention."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from functools import wraps
from itertools import product
from statistics import mean
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import CONFIG_MAPPING

from ringattn import InputError, Ring
from ringattn.adapters.transformers import prepare
from ringattn.testing import run_ranks
from tests.adapters.hybrids import (
    HYBRIDS,
    Batch,
    Results,
    batch,
    batch_over_ring,
    errors,
    hybrid_model,
    one_process,
    over_ring,
    wide,
)
from tests.adapters.processes import call_in_program
from tests.covering import Cell, covering_cells

_KNOWN = [name for name in HYBRIDS if name in CONFIG_MAPPING]
_LAYOUTS = "contiguous", "zigzag", "per_document", "documents"
_BATCHES = {
    "plain": batch((0, 29)),
    "packed": batch((0, 1, 2, 20, 21, 33)),
    "padded": batch((0, 29), padded=True),
}


def _cells(names: list[str]) -> list[Cell]:
    cells = product(names, (1, 2, 3, 4), _LAYOUTS, _BATCHES, ("kept", "recomputed", "reentrant"))
    # One document cannot be cut by documents. A model of one rank is in the tests of the adapter.
    return covering_cells([cell for cell in cells if cell[2] != "documents" or (cell[3] == "packed" or cell[1] == 1)])


def _grid() -> list[Any]:
    """Return cells with every pair of values. Those of the first family run in `make test`."""
    quick = _cells(_KNOWN[:1])
    slow = [cell for cell in _cells(_KNOWN) if cell not in quick]
    return [pytest.param(*cell) for cell in quick] + [pytest.param(*cell, marks=pytest.mark.slow) for cell in slow]


def _errors(model: Any, data: Batch, ranks: int, layout: str) -> dict[str, float]:
    expected = one_process(model, data)
    return errors(expected, run_ranks(ranks, lambda ring: over_ring(ring, model, data, layout)), data)


@pytest.mark.parametrize(("name", "ranks", "layout", "kind", "recomputation"), _grid())
def test_results_are_those_of_one_process(name: str, ranks: int, layout: str, kind: str, recomputation: str):
    model = prepare(hybrid_model(name))
    if recomputation != "kept":
        model.gradient_checkpointing_enable({"use_reentrant": recomputation == "reentrant"})
    data = _BATCHES[kind]
    if name == "recurrent_gemma" and data.padding is not None:  # it refuses padding before tokens
        data = data._replace(padding=data.padding[1:].repeat(2, 1), labels=data.labels[1:].repeat(2, 1))
    with wide():
        results = _errors(model, data, ranks, layout)
    assert {name: error for name, error in results.items() if not error < 1e-8} == {}


@pytest.mark.parametrize("name", [name for name in ("mamba2", "mamba", "qwen3_5_text") if name in _KNOWN])
def test_gradients_of_some_weights_are_computed_alone(name: str):
    """Weights that a mixer passes to its recurrence without a projection, so that only the recurrence reaches them."""
    model, data = prepare(hybrid_model(name)), _BATCHES["plain"]
    with wide():
        expected = one_process(model, data).gradients

    def body(ring: Ring, weight: str) -> tuple[list[str], list[torch.Tensor]]:
        copied, seq = copy.deepcopy(model), ring.sequence(data.bounds[-1], layout="contiguous")
        weights = {name: value for name, value in copied.named_parameters() if name.endswith(weight)}
        with ring.activate(seq):
            logits = copied(input_ids=seq.shard(data.tokens), position_ids=seq.positions()[None]).logits
        labels = seq.shard(data.labels)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / data.count
        gradients = torch.autograd.grad(loss, list(weights.values()))
        ring.all_reduce(list(gradients))
        return list(weights), list(gradients)

    for weight in ("A_log", "dt_proj.bias" if name == "mamba" else "dt_bias"):
        with wide():
            ((names, gradients), _) = run_ranks(2, lambda ring, weight=weight: body(ring, weight))
        for each, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(gradient, expected[each], rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name in ("qwen3_5_text", "nemotron_h", "mamba2") if name in _KNOWN])
def test_a_batch_over_all_ranks(name: str, ranks: int):
    """Scans and convolutions follow the samples of each micro-batch, of which long ones are cut over ranks."""
    model, data = prepare(hybrid_model(name)), batch((0, 1, 4, 44, 45, 61, 70, 93))
    with wide():
        expected = one_process(model, data)
        results = errors(expected, run_ranks(ranks, lambda ring: batch_over_ring(ring, model, data, 60)), data)
    assert {name: error for name, error in results.items() if not error < 1e-8} == {}


_PRECISIONS = [
    *((name, "float32") for name in _KNOWN),
    *((name, kind) for name in ("qwen3_5_text", "mamba2", "mamba") for kind in ("bfloat16", "autocast")),
]


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(*cell, marks=pytest.mark.slow if number else ()) for number, cell in enumerate(_PRECISIONS)],
)
def test_errors_of_rounding_are_those_of_one_process(name: str, precision: str):
    model, data = hybrid_model(name), _BATCHES["packed"]
    with wide():
        exact = one_process(model, data)
    model = model.bfloat16() if precision == "bfloat16" else model.float()

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")

    def body(ring: Ring) -> Results:
        with cast():
            return over_ring(ring, model, data, "zigzag")

    with cast():
        alone = errors(exact, [one_process(model, data)], data)
    prepare(model)
    over_ranks = errors(exact, run_ranks(3, body), data)
    for what in ("logits", "loss"):
        assert over_ranks[what] < 2 * alone[what] + (1e-6 if precision == "float32" else 5e-3)
    if precision == "float32":
        # The mean over weights: the largest error, up to 3e-4, is often that of a single number whose terms cancel,
        # such as a temperature, and differs by a factor of three between processors.
        average, average_alone = (
            mean(error for name, error in each.items() if "." in name) for each in (over_ranks, alone)
        )
        assert average < 2 * average_alone + 1e-6


@pytest.mark.parametrize(("name", "cache"), [("qwen3_5_text", "past_key_values"), ("mamba", "cache_params")])
def test_caches_of_shards_are_refused(name: str, cache: str):
    model = prepare(hybrid_model(name).float()).eval()
    tokens = _BATCHES["plain"].tokens

    @torch.no_grad()
    def body(ring: Ring) -> list[str]:
        seq = ring.sequence(tokens.shape[1])
        with ring.activate(seq):
            out = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None], use_cache=True)
            calls = [lambda: model(input_ids=tokens[:, :1], position_ids=tokens[:, :1], **{cache: out[cache]})]
            messages = [refusal(calls[0])]
        with ring.activate(None):
            messages.append(refusal(calls[0]))
            out = model(input_ids=tokens, use_cache=True)
            assert model(input_ids=tokens[:, :1], **{cache: out[cache]}).logits.isfinite().all()
        return messages

    for messages in run_ranks(2, body):
        assert "decoding from states" in messages[0] and "this cache holds only this rank's tokens" in messages[1]


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as raised:
        call()
    return str(raised.value)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "striped": ({"layout": "striped"}, "use layout='zigzag'"),
    "seq_idx": ({"seq_idx": torch.zeros(2, 29, dtype=torch.int32)}, "seq_idx: over a ring, documents are those of"),
    "padding": ({"attention_mask": _BATCHES["padded"].padding}, "pad after the tokens"),
    "cu_seq_lens_q": ({"cu_seq_lens_q": torch.tensor([0, 9, 29])}, "cu_seq_lens_q cuts at .0, 9, 29."),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_are_refused(what: str):
    options, message = CALLS[what]
    name = "recurrent_gemma" if what == "padding" else "qwen3_5_text"
    model, tokens = prepare(hybrid_model(name).float()), _BATCHES["plain"].tokens

    def body(ring: Ring) -> str:
        arguments = dict(options)
        seq = ring.sequence(tokens.shape[1], layout=arguments.pop("layout", "zigzag"))
        if what == "padding":
            arguments = {"attention_mask": seq.shard(options["attention_mask"])}
        with ring.activate(seq):
            return refusal(lambda: model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None], **arguments))

    for text in run_ranks(2, body):
        assert re.search(message, text)


def packing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes packed documents, as the kernels of fla and mamba-ssm do. It counts its calls."""
    is_new_implementation = True

    @wraps(function)
    def kernel(*args: Any, cu_seqlens: Any = None, seq_idx: Any = None, **kwargs: Any) -> Any:
        assert is_new_implementation
        kernel.calls += 1  # type: ignore[attr-defined]
        if cu_seqlens is None and seq_idx is None:
            return function(*args, **kwargs)
        tokens = args[0].shape[1]
        lengths = cu_seqlens.diff() if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1]

        def cut(start: int, stop: int) -> Any:
            def of(x: Any) -> Any:
                return x[:, start:stop] if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[1] == tokens else x

            return function(*map(of, args), **{name: of(x) for name, x in kwargs.items()})

        ends = lengths.cumsum(0).tolist()
        parts = [cut(stop - length, stop) for stop, length in zip(ends, lengths.tolist(), strict=True)]
        return (torch.cat([out for out, _ in parts], 1), None) if seq_idx is None else torch.cat(parts, 1)

    kernel.calls = 0  # type: ignore[attr-defined]
    return kernel


@pytest.mark.parametrize(
    ("name", "function"), [("qwen3_5_text", "torch_chunk_gated_delta_rule"), ("mamba2", "mamba2_chunk_scan")]
)
def test_kernels_compute_whole_documents_at_once(name: str, function: str, monkeypatch: pytest.MonkeyPatch):
    model = hybrid_model(name)
    file = importlib.import_module(
        f"transformers.models.{name.removesuffix('_text')}.modeling_{name.removesuffix('_text')}"
    )
    kernel = packing(inspect.unwrap(getattr(file, function)))
    monkeypatch.setattr(file, function, kernel)
    data = batch((0, 1, 2, 20, 21, 33))
    data = data._replace(tokens=data.tokens[:1], labels=data.labels[:1])
    with wide():
        expected = one_process(model, data)
        kernel.calls = 0  # type: ignore[attr-defined]
        results = errors(expected, run_ranks(1, lambda ring: over_ring(ring, prepare(model), data, "contiguous")), data)
    assert max(results.values()) < 1e-8
    assert kernel.calls == sum(hasattr(layer, "A_log") for layer in model.modules())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_sharded_weights_over_processes():
    names = "qwen3_5_text", "nemotron_h", "kimi_linear"
    results: dict[str, float] = call_in_program("tests.adapters.hybrids:sharded_errors", names)
    assert len(results) == len(names) and max(results.values()) < 1e-8


@pytest.mark.slow
def test_sharded_weights_of_compiled_models():
    results: dict[str, float] = call_in_program("tests.adapters.hybrids:sharded_errors", ["lfm3"], True)
    assert len(results) == 1 and max(results.values()) < 1e-9


@pytest.mark.slow
def test_tensor_parallelism_next_to_a_ring():
    """The largest error is 4e-14."""
    names = ["qwen3_5_text", "olmo_hybrid", "kimi_linear", "nemotron_h", "minimax"]
    results: dict[str, float] = call_in_program("tests.adapters.hybrids:tensor_parallel_errors", names)
    assert len(results) == len(names) and max(results.values()) < 1e-9
