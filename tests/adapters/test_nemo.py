"""NeMo Automodel over a ring: a stand-in for NeMo's sharder on threads, and NeMo's own sharder on two processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters import host_versions, nemo
from ringattn.adapters.host_versions import UntestedHostWarning
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.testing import run_ranks

pytest.importorskip("transformers", reason="needs transformers")

from tests.adapters.environments import environment
from tests.adapters.models import tiny_model
from tests.adapters.processes import whole as whole_tensor
from tests.adapters.processes import worst_error
from tests.adapters.versions import packages

TOKENS, DOCUMENTS = 22, [0, 7, 13, 22]
VERSION, PINNED = "0.7.0", "5.18.0"
"""The versions of NeMo Automodel and of transformers, which NeMo requires."""


def batch(packed: bool) -> dict[str, Tensor]:
    """Return a batch as NeMo's collaters build it: each label is at the token that predicts it."""
    tokens = torch.randint(3, 64, (1, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    places = torch.arange(TOKENS)
    for start, stop in pairwise(DOCUMENTS):
        if packed:
            places[start:stop] = torch.arange(stop - start)
    labels = tokens[:, 1:].clone()
    labels[:, 3:6] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels, "position_ids": places[None]}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss that NeMo's MaskedCrossEntropy computes, without its cast to float32."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (TOKENS - 3)


def reference(packed: bool, change: Callable[[Any], Any] = lambda model: model) -> list[Tensor]:
    """Return the gradients and loss of one process that runs each document separately. `change` modifies the model."""
    model, whole = change(tiny_model("mistral", "sdpa")), batch(packed)  # eager has its softmax in float32
    total = torch.zeros((), dtype=torch.float64)
    for start, stop in pairwise(DOCUMENTS) if packed else [(0, TOKENS)]:
        part = {name: x[:, start:stop] for name, x in whole.items()}
        labels = part.pop("labels")
        total = total + loss_of(model(**part).logits, labels)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [*torch.autograd.grad(total, weights), total.detach()]


def attach_context_parallel_hooks(model: nn.Module) -> None:
    """Attach hooks like NeMo's function of this name, which NeMo calls if cp has several ranks."""

    def _self_attn_pre_forward_hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_self_attn_pre_forward_hook, with_kwargs=True, prepend=True)


def attach_cp_sdpa_hooks(model: nn.Module) -> None:
    def _pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None: ...

    model.register_forward_pre_hook(_pre_hook, with_kwargs=True)


def step(model: Any, sharder: Any, whole: dict[str, Tensor]) -> list[Tensor]:
    """Return this rank's gradients and loss, computed as in NeMo's recipe for language models."""
    context, shards = sharder.shard(whole)
    with context():
        labels = shards.pop("labels")
        loss = loss_of(model(**shards).logits, labels)
        grads = torch.autograd.grad(loss, list(model.parameters()))
    return [*grads, loss.detach()]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    return worst_error(zip(actual, expected, strict=True))


# --- stand-ins, ranks as threads -------------------------------------------------------------------------------------


class ContextParallelSharder:
    """The part of NeMo's class that the adapter and these tests use. The slow test runs NeMo's own class."""

    def __init__(self, *, shard_batch: Callable[..., Any], local_token_global_indices: Callable[..., Tensor]) -> None:
        self.shard_batch, self.indices, self.loss_mask = shard_batch, local_token_global_indices, None

    def shard(self, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        context, shards, self.layout = self.shard_batch(None, None, batch, loss_mask=self.loss_mask, padding_token_id=0)
        return context, shards


def install(monkeypatch: pytest.MonkeyPatch, nemo_version: str) -> None:
    """Pretend that this version of NeMo is installed, and clear the cached version checks."""
    monkeypatch.setattr(
        host_versions, "version", lambda package: nemo_version if "nemo" in package else version(package)
    )
    monkeypatch.setattr(nemo, "HOST", replace(nemo.HOST))


@dataclass
class ShardLayout:
    """The fields of NeMo's class: the lengths of a sequence without and with padding."""

    original_seq_len: int
    padded_seq_len: int


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, VERSION)
    package = "nemo_automodel.components.distributed.context_parallel"
    for name in (*(package.rsplit(".", cut)[0] for cut in (3, 2, 1)), package, f"{package}.sharder"):
        module = ModuleType(name)
        module.__dict__.update(ContextParallelSharder=ContextParallelSharder, ShardLayout=ShardLayout)
        monkeypatch.setitem(sys.modules, name, module)


def resolved(model: Any, batch: dict[str, Any]) -> Any:
    """Return the model's sharder, obtained as NeMo obtains it."""
    return model.prepare_model_inputs_for_cp(batch, num_chunks=1)["cp_sharder"]


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_over_two_ranks_equals_one_process(packed: bool) -> None:
    expected = reference(packed)

    def body(ring: Ring) -> float:
        model, whole = tiny_model("mistral", "sdpa"), batch(packed)
        attach_context_parallel_hooks(model)
        assert nemo.prepare(model, ring) is model and nemo.prepare(model, ring) is model
        sharder = resolved(model, whole)
        results = step(model, sharder, whole)
        ring.all_reduce(results)
        rows = sharder.indices(None, TOKENS)
        assert len(rows) == TOKENS // 2 and sharder.layout.original_seq_len == TOKENS
        return worst(results, expected)

    assert max(run_ranks(2, body)) < 1e-10


@pytest.mark.usefixtures("_stand_ins")
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ring() as ring:
        model, whole = nemo.prepare(tiny_model("mistral", "sdpa"), ring), batch(False)
        with pytest.raises(InputError, match="cannot shard the inputs qkv_format, seq_lens"):
            resolved(model, whole).shard({**whole, "qkv_format": "thd", "seq_lens": torch.tensor([[TOKENS]])})
        with pytest.raises(InputError, match="the batch has no labels"):
            resolved(model, whole).shard({"input_ids": whole["input_ids"]})
        sharder = resolved(model, whole)
        sharder.loss_mask = whole["labels"]
        with pytest.raises(InputError, match="loss_mask is not supported over a ring"):
            sharder.shard(whole)
        with pytest.raises(InputError, match=r"a sequence of 20 tokens, but no batch was sharded yet"):
            sharder.indices(None, 20)
        with pytest.raises(UnsupportedError, match=r"num_chunks=2"):
            model.prepare_model_inputs_for_cp(whole, num_chunks=2)
        for compile_ in (attach_cp_sdpa_hooks, lambda model: model.model.layers[0].compile()):
            compiled = tiny_model("mistral", "sdpa")
            compile_(compiled)
            with pytest.raises(UnsupportedError, match=r"enable_compile: .* set it to false"):
                nemo.prepare(compiled, ring)
        nemo_model = tiny_model("mistral", "sdpa")
        nemo_model.prepare_model_inputs_for_cp = lambda batch, *, num_chunks=1: {}
        with pytest.raises(UnsupportedError, match=r"a custom model of NeMo .*force_hf=True"):
            nemo.prepare(nemo_model, ring)
        install(monkeypatch, "0.8.1")
        with pytest.warns(UntestedHostWarning, match=r"with nemo-automodel 0\.7, not with nemo-automodel 0\.8\.1"):
            nemo.prepare(tiny_model("mistral", "sdpa"), ring)
        install(monkeypatch, "0.8.1")
        monkeypatch.setattr(ContextParallelSharder, "__init__", lambda self, *, shard: None)
        with pytest.raises(UnsupportedError, match=r"ContextParallelSharder has no parameter shard_batch"):
            nemo.prepare(tiny_model("mistral", "sdpa"), ring)


@pytest.mark.usefixtures("_stand_ins")
def test_a_batch_that_one_rank_alone_gets_wrong_is_refused_by_all() -> None:
    def body(ring: Ring) -> None:
        model, whole = nemo.prepare(tiny_model("mistral", "sdpa"), ring), batch(False)
        sharder = resolved(model, whole)
        if ring.rank:
            del whole["labels"]
        with pytest.raises(InputError, match="the batch has no labels"):
            sharder.shard(whole)

    run_ranks(2, body, timeout_s=10.0)


# --- the package -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package() -> Path:
    """Return the folder of NeMo Automodel without its requirements, most of which need a GPU."""
    return environment(f"nemo-automodel=={VERSION}")


def with_lora(model: Any) -> Any:
    """Add NeMo's LoRA adapters, including its fused MLP. Their weights are random, because NeMo's start as zeros."""
    from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules

    names = ["*.q_proj", "*.v_proj", "*.gate_proj", "*.up_proj", "*.down_proj"]
    assert apply_lora_to_linear_modules(model, PeftConfig(target_modules=names, dim=2)) == 10
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return model


def of_processes(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the largest relative error of each case with NeMo's mesh, sharder, hooks and loss, on one of two ranks."""
    import transformers
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder, utils
    from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.distributed.mesh_utils import _create_fsdp2_device_mesh
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

    torch.distributed.init_process_group("gloo")
    mesh, _ = _create_fsdp2_device_mesh(ParallelismSizes(cp_size=2), world_size=2)
    criterion = MaskedCrossEntropy(fp32_upcast=False)
    answers: dict[str, Any] = {"transformers": transformers.__version__}

    def sharded(model: Any, checkpointing: bool | str = False) -> Any:
        whole_precision = MixedPrecisionPolicy()  # NeMo's default computes in bfloat16
        config = FSDP2Config(mp_policy=whole_precision, activation_checkpointing=checkpointing)
        return FSDP2Manager(config, mesh).parallelize(model)

    def checked(packed: bool, change: Callable[[Any], Any] = lambda model: model, peft: bool = False) -> float:
        base = with_lora if peft else lambda model: model
        model, whole = change(base(tiny_model("mistral", "sdpa"))), batch(packed)
        utils.attach_context_parallel_hooks(model)
        nemo.prepare(model, mesh)
        expected, kept = reference(packed, base), whole["input_ids"].clone()
        sharder = ContextParallelSharder(model, mesh, whole)
        context, shards = sharder.shard(whole)
        with context():
            labels = shards.pop("labels")
            loss = criterion(logits=model(**shards).logits, labels=labels, num_label_tokens=TOKENS - 3)
            loss.backward()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        # FSDP2 averages gradients over the ranks; the all-reduce of the equal averages turns them into sums.
        actual = [*map(whole_tensor, grads), loss.detach()]
        for x in actual:
            torch.distributed.all_reduce(x)
        shard = sharder.shard_token_tensor(kept)
        assert torch.equal(shard, shards["input_ids"])
        assert torch.equal(sharder.gather_token_tensor(shard, trim=True), kept)
        return worst(actual, expected)

    answers["errors"] = {
        "plain": checked(False),
        "packed": checked(True),
        "PEFT": checked(True, peft=True),
        "FSDP2": checked(True, sharded),
        "checkpointing, full": checked(True, partial(sharded, checkpointing="full")),
        "checkpointing, selective": checked(True, partial(sharded, checkpointing="selective")),
    }
    torch.distributed.destroy_process_group()
    return answers


@pytest.mark.slow
def test_the_package_over_two_processes_equals_one(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(packages(PINNED)))
    monkeypatch.syspath_prepend(str(package))
    answers = run_ranks_in_processes("tests.adapters.test_nemo:of_processes", {}, 2, 200, 1)
    assert {answer["transformers"] for answer in answers} == {PINNED}
    errors = {case: max(answer["errors"][case] for answer in answers) for case in answers[0]["errors"]}
    assert len(errors) == 6 and max(errors.values()) < 1e-10, errors
