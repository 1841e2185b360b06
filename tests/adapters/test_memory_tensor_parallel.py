"""Options of `prepare` for less memory with the tensor parallelism of transformers: a ring of two, two ranks each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers 5.23 or newer is not installed")

import torch.distributed as dist
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from ringattn import Ring
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.errors import InputError, UnsupportedError
from tests.adapters.models import tiny_model
from tests.adapters.processes import call_in_program, forked_ranks, whole, worst_error
from tests.adapters.ranks import batches, gradients, in_double, labels_of

EXACT = 1e-12
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Two K/V heads for each rank of tensor parallelism."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 head_groups": ("qwen3", {"head_groups": 2}),
    "qwen2 head_groups": ("qwen2", {"head_groups": 2}),
    "llama head_groups, biases": ("llama with biases", {"head_groups": 2}),
    "llama tiled_mlp": ("llama", {"tiled_mlp": 3}),
    "llama chunked_loss": ("llama", {"chunked_loss": 4}),
    "qwen3 all": ("qwen3", {"head_groups": 2, "tiled_mlp": 3, "chunked_loss": 4}),
}


def model_of(name: str) -> Any:
    """Return a model in float64, after random biases were drawn where it has them."""
    name, _, biases = name.partition(" with ")
    model = tiny_model(name, "eager", **HEADS, **({"attention_bias": True} if biases else {}))
    model.config.use_cache = False
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def over_ring(ring: Ring, mesh: DeviceMesh, case: str, checkpoints: bool) -> float:
    """Return the largest error of the loss and all gradients of a case against one process."""
    name, options = CASES[case]
    batch = batches()["packed"]
    count, model = labels_of(batch), model_of(name)
    plain = copy.deepcopy(model)
    loss = plain(**batch, num_items_in_batch=count).loss
    true = {"loss": loss.detach(), **gradients(plain, loss)}
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    model = prepare(apply_tensor_parallelism(model, mesh["tp"], plan), **options).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seq, shards = shard_batch(ring, batch, model=model)
    with ring.activate(seq):
        loss = model(**shards, num_items_in_batch=count).loss
    actual = {"loss": loss.detach().clone(), **gradients(model, loss)}
    ring.all_reduce([grad.to_local() if hasattr(grad, "to_local") else grad for grad in actual.values()])
    assert actual.keys() == true.keys()
    return worst_error(((whole(actual[key]), true[key]) for key in true), floor=1e-6)


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Return the errors of shardings that are not known."""
    messages = {}

    def record(what: str, call: Any) -> None:
        try:
            call()
        except (InputError, UnsupportedError) as error:
            messages[what] = f"{type(error).__name__}: {error}"

    model = model_of("llama")
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    record("groups", lambda: prepare(apply_tensor_parallelism(model, mesh["tp"], plan), head_groups=4))
    tokens = batches()["plain"]["input_ids"]
    by_torch = prepare(model_of("llama"), head_groups=2)
    for layer in by_torch.model.layers:
        parallelize_module(layer.self_attn, mesh["tp"], {"q_proj": ColwiseParallel()})
    record("torch", lambda: by_torch(input_ids=tokens))
    mixed = model_of("llama")
    gathered = {key: "colwise_gather_output" if "v_proj" in key else style for key, style in plan.items()}
    mixed = prepare(apply_tensor_parallelism(mixed, mesh["tp"], gathered), head_groups=2)
    record("gathered", lambda: mixed(input_ids=tokens))
    return messages


def everything() -> list[dict[str, Any]]:
    """Return what each of four processes finds. Needs a process that has not started threads."""
    return forked_ranks(4, _of_rank)


def _of_rank(_: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    errors = {}
    for case in CASES:
        for checkpoints in (False, True):
            with in_double(), Ring(mesh, timeout_s=60.0) as ring:
                errors[f"{case}, checkpoints {checkpoints}"] = over_ring(ring, mesh, case, checkpoints)
    messages = refusals(mesh)
    dist.destroy_process_group()
    return {"errors": errors, "messages": messages}


pytestmark = pytest.mark.slow  # four processes


@pytest.fixture(scope="module")
def results() -> Any:
    return call_in_program("tests.adapters.test_memory_tensor_parallel:everything")


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(results: Any, case: str, checkpoints: bool) -> None:
    for rank in results:
        assert rank["errors"][f"{case}, checkpoints {checkpoints}"] < EXACT


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("groups", "InputError: head_groups=4: must divide the 2 K/V heads of a rank"),
        ("torch", "UnsupportedError: head_groups: a projection has hooks"),
        ("gathered", "UnsupportedError: head_groups: a projection has hooks, a forward that was replaced"),
    ],
)
def test_other_shardings_are_refused_by_name(results: Any, case: str, message: str) -> None:
    assert all(rank["messages"][case].startswith(message) for rank in results)
