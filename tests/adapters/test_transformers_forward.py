"""The adapter's checks run around every call of a prepared model's forward, and a replaced forward is detected."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import os
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters import host_versions
from ringattn.adapters.host_versions import Host, UntestedHostWarning
from ringattn.adapters.transformers import checks, prepare
from ringattn.adapters.transformers.calls import _refuse_replaced, around_forward, is_wrapped
from ringattn.testing import run_ranks
from tests.adapters.environments import environment
from tests.adapters.models import tiny_model
from tests.adapters.processes import ROOT, call_in_program

TOKENS = torch.arange(3, 17)[None]
LIGER = "0.8.5"


class Tuner(nn.Module):
    """A wrapper that calls the model's forward directly, like PEFT's tuners."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        return self.model.forward(**arguments)


def refused(ring: Ring, model: Any, **arguments: Any) -> str:
    """Call the model with this rank's tokens, and return the text of the InputError that it raises."""
    seq = ring.sequence(TOKENS.shape[1])
    with pytest.raises(InputError) as raised, ring.activate(seq):
        model(input_ids=seq.shard(TOKENS), **arguments)
    return str(raised.value)


def test_a_wrapper_that_calls_forward_is_checked() -> None:
    model = Tuner(prepare(tiny_model("llama", "eager")))
    assert all("position_ids are missing" in message for message in run_ranks(2, lambda ring: refused(ring, model)))


def test_a_forward_that_was_replaced_is_missed() -> None:
    model = prepare(tiny_model("llama", "eager"))
    model.forward = MethodType(type(model).forward, model)

    def body(ring: Ring) -> str:
        return refused(ring, model, position_ids=ring.sequence(TOKENS.shape[1]).positions()[None])

    for message in run_ranks(2, body):
        assert "the forward of LlamaForCausalLM was replaced after prepare(model)" in message
    assert not is_wrapped(model) and is_wrapped(prepare(model))
    assert all("position_ids are missing" in message for message in run_ranks(2, lambda ring: refused(ring, model)))


class Doubling(nn.Module):
    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        if twice:
            raise ValueError("twice")
        return 2 * x


def test_steps_around_a_forward() -> None:
    seen: list[Any] = []
    model = Doubling()
    for _ in range(2):  # the second call has no effect
        around_forward(model, lambda *x: seen.append(x[1:]), lambda *x: seen.append(x[1:]))
    copied = copy.deepcopy(model)
    ones = torch.ones(())
    assert model.forward(ones) == copied(ones) == 2 and copied.forward.__self__ is copied
    assert seen == [((ones,), {}), ((ones,), 2)] * 2
    with pytest.raises(ValueError, match="twice"):
        model(ones, twice=True)
    assert seen[-1] == ((ones,), None)
    assert list(inspect.signature(model.forward).parameters) == ["x", "twice"]
    assert not hasattr(model.forward, "__wrapped__")  # accelerate's unwrapping ends here
    around_forward(changed := Doubling(), lambda *_: None, lambda *_: "other")
    assert changed(ones) == "other"


def lce_forward(self: Any, **arguments: Any) -> Any:
    """Call the model and compute the loss from shifted labels, like the forward of Liger with this name."""
    out = self.base_model(
        **{name: x for name, x in arguments.items() if "label" not in name and name != "num_items_in_batch"}
    )
    logits = self.lm_head(out.last_hidden_state).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, arguments["shift_labels"].flatten(), reduction="sum")
    out.loss = loss / arguments["num_items_in_batch"]
    return out


def test_the_loss_of_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(kind: str = "lce_forward") -> Any:
        model = tiny_model("llama", "eager")
        named: Any = lce_forward
        monkeypatch.setattr(named, "__module__", "liger_kernel.transformers.model.llama")
        monkeypatch.setattr(named, "__name__", kind)
        model.forward = MethodType(named, model)
        return model

    def install(version: str) -> None:
        real = importlib.metadata.version
        monkeypatch.setattr(host_versions, "version", lambda name: version if name == "liger-kernel" else real(name))
        # Liger is not installed here, so its source is not checked. The slow test below runs the real package.
        monkeypatch.setattr(checks, "_LIGER", Host("liger-kernel", checks._LIGER.tested))

    monkeypatch.setattr(host_versions, "version", lambda name: LIGER)
    with pytest.raises(UnsupportedError, match=r"LigerForCausalLMLoss does not exist"):
        prepare(ours())
    install("0.9.0")
    with pytest.warns(UntestedHostWarning, match=r"tested with liger-kernel 0\.8, not with liger-kernel 0\.9\.0"):
        prepare(ours())
    install(LIGER)
    with pytest.raises(UnsupportedError, match="Liger's mtp_forward of LlamaForCausalLM was not compared"):
        prepare(ours("mtp_forward"))
    model = prepare(ours())

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(TOKENS.shape[1])
        labels = seq.shard_labels(TOKENS)
        arguments = {"labels": labels, "shift_labels": labels, "position_ids": seq.positions()[None]}
        with ring.activate(seq):
            with pytest.raises(InputError, match="labels without shift_labels"):
                model(input_ids=seq.shard(TOKENS), labels=labels, position_ids=arguments["position_ids"])
            loss: Tensor = model(input_ids=seq.shard(TOKENS), num_items_in_batch=13, **arguments).loss.detach()
        ring.all_reduce([loss])
        return loss

    logits = prepare(tiny_model("llama", "eager"))(input_ids=TOKENS).logits[0, :-1]
    true = nn.functional.cross_entropy(logits, TOKENS[0, 1:]).detach()
    torch.testing.assert_close(run_ranks(2, body)[1], true, rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(300)  # about 8 s on an idle machine
def test_the_kernels_of_liger_over_two_ranks(tmp_path: Path) -> None:
    """Liger's fused loss, RMS norm, rotary embedding and SwiGLU equal one process without Liger, in float32.

    Triton's interpreter runs the kernels.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    path = os.pathsep.join([str(environment(f"liger-kernel=={LIGER}")), str(ROOT)])
    env = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    answers = call_in_program("tests.adapters.liger_ranks:compute_errors", **env)
    assert answers.pop("Liger's") == ["lce_forward", "forward", "forward", "liger_rotary_pos_emb"]
    assert answers.keys() == {"plain", "packed"}
    assert max(answers.values()) <= 1e-5, answers


def test_the_check_of_a_replaced_forward_does_not_break_compiled_graphs() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(_refuse_replaced)
    x = torch.ones(1, 2)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))
