"""Probes of a prepared model leave its modules, the random number generators and the user's hooks unchanged."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import PreTrainedConfig

from ringattn import Ring
from ringattn.adapters.transformers import positions, prepare
from ringattn.adapters.transformers.positions import computes_positions, image_positions, model_positions, probe_copy
from ringattn.runtime.activation import activate
from ringattn.testing import run_ranks
from tests.adapters import test_transformers_images as images
from tests.adapters.models import MODELS, rotary, tiny_model
from tests.adapters.ranks import far_off
from tests.adapters.test_transformers_places import COUNTING, counting, ids, opt, padded

FAMILIES: dict[str, Callable[[], Any]] = {
    **{name: partial(tiny_model, name, "eager") for name in MODELS},
    **{name: partial(counting, name) for name in COUNTING},
    **{name: partial(images.model, name) for name in images.MODELS},
    "opt": opt,
    "roberta with dropout": lambda: counting("Roberta", hidden_dropout_prob=0.1),
    "dynamic": lambda: rotary("dynamic"),
    "longrope": lambda: rotary("longrope"),
}


def state_of(model: Any) -> dict[Any, Any]:
    """Return all attributes and buffers of all modules, and the states of the generators, as comparable values."""
    state: dict[Any, Any] = {
        (path, name): _plain(value) for path, module in model.named_modules() for name, value in vars(module).items()
    }
    numpy_state: Any = np.random.get_state()
    state["generators"] = torch.get_rng_state().tolist(), random.getstate(), _plain(list(numpy_state))
    return state


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version, value.dtype, value.detach().flatten().tolist()
    if isinstance(value, PreTrainedConfig):
        return id(value), repr(value.to_dict())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else (type(value), id(value))


def counted(model: Any) -> Counter[str]:
    """Install hooks on every module, and a user-defined forward on embeddings. Return the counter of their calls."""
    calls: Counter[str] = Counter()

    def count(path: str) -> Callable[..., None]:
        return lambda *_: calls.update([path])

    def counting_forward(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted_forward(x: Tensor) -> Any:
            calls.update([path])
            return forward(x)

        return counted_forward

    for path, module in model.named_modules():
        module.register_forward_pre_hook(count(path))
        module.register_forward_hook(count(path))
        if isinstance(module, torch.nn.Embedding):
            vars(module)["forward"] = counting_forward(path, module.forward)
    return calls


@pytest.mark.parametrize("name", FAMILIES)
def test_a_probe_leaves_a_model_as_it_was(name: str) -> None:
    model = prepare(FAMILIES[name]())
    with torch.no_grad():
        model(input_ids=ids(27))  # now rotary embeddings have frequencies for more tokens than a probe has
    calls = counted(model)
    every = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: calls.update(["every module"]))
    before = state_of(model)
    try:
        computes_positions(model)
        model_positions(model, padded())
        model_positions(model, {"inputs_embeds": torch.zeros(2, 5, 32, dtype=torch.float64)})
        if name in images.MODELS:
            assert image_positions(model, images.batch(name)) is not None
    finally:
        every.remove()
    assert state_of(model) == before
    assert not calls


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_after_a_longer_text_elsewhere(kind: str) -> None:
    """After a local call with 40 tokens, a shorter first call over a ring is exact.

    `dynamic` keeps the frequencies of the longer call for 27 tokens, as it does in one process.
    """

    def after_longer(model: Any, inputs: dict[str, Any]) -> Any:
        with torch.no_grad(), activate(None):
            model(input_ids=ids(40))
        return model(**inputs)

    whole = {"input_ids": ids(27)}
    assert far_off(lambda: rotary(kind), whole, call=after_longer, pass_model=False) < 1e-9
    assert far_off(lambda: rotary(kind), {"input_ids": ids(12)}, call=after_longer, pass_model=False) < 1e-9


def test_hooks_of_the_first_ring_call_run_once() -> None:
    def body(ring: Ring) -> Counter[str]:
        model, seq = prepare(tiny_model("llama", "eager")), ring.sequence(27)
        calls = counted(model)
        with ring.activate(seq):
            model(input_ids=seq.shard(ids(27)), position_ids=seq.positions()[None])
        return calls

    for calls in run_ranks(2, body):
        assert calls["model.rotary_emb"] == calls["model.layers.0"] == calls["model"] == 2
        assert calls["model.embed_tokens"] == 3  # two hooks, and its user-defined forward


def test_a_probe_copies_what_a_forward_may_change_and_shares_the_weights() -> None:
    model = rotary("dynamic")
    model.notes = {"lengths": [3], "rotary": model.model.rotary_emb, "bound": model.model.rotary_emb.extra_repr}
    vars(model.model.rotary_emb)["forward"] = lambda *_: pytest.fail("a forward of the user was called")
    model.model = torch.compile(model.model, backend="eager")
    copied = probe_copy(model)
    inner, theirs = copied.model, model.model._orig_mod
    assert inner.embed_tokens.weight is theirs.embed_tokens.weight
    assert copied.config is inner.config is not model.config
    assert inner.rotary_emb.inv_freq is not theirs.rotary_emb.inv_freq
    assert copied.notes["rotary"] is inner.rotary_emb is copied.notes["bound"].__self__
    assert copied.notes["lengths"] is not model.notes["lengths"]
    assert inner.layers[0].self_attn.config is copied.config and not inner.layers[:1][0].training
    assert inner.rotary_emb.forward.__func__ is type(theirs.rotary_emb).forward
    assert not computes_positions(model)


def test_threads_that_share_a_model_probe_it_while_another_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, probing, done = tiny_model("llama", "eager"), threading.Event(), threading.Event()
    expected = model(input_ids=ids(9)).logits
    lookups = positions._lookups

    def slowly(*arguments: Any) -> Any:
        probing.set()
        assert done.wait(20.0)
        return lookups(*arguments)

    monkeypatch.setattr(positions, "_lookups", slowly)
    probe = threading.Thread(target=computes_positions, args=(model,))
    probe.start()
    assert probing.wait(20.0)
    assert torch.equal(model(input_ids=ids(9)).logits, expected)
    done.set()
    probe.join()
