"""A ring on the `cp` dimension of a DeviceMesh with FSDP2, DDP, tensor parallelism and activation checkpointing.

Four processes run every case in one process group, and compare gradients with one process.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringattn import InputError, Ring
from ringattn.adapters.context import recompute_context
from ringattn.adapters.context_parallel import context_parallel, context_parallel_unshard
from ringattn.adapters.context_parallel import recompute_context as redirected_recompute_context
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.launch.ranks import run_ranks_in_processes
from tests.adapters.processes import whole

PAGE = Path(__file__).parents[2] / "docs" / "embedding-pytorch.md"
OPENED: WeakSet[Ring] = WeakSet()
"""The rings that context_parallel opened, one for each mesh."""
TOKENS, ROWS, DIM, VOCABULARY = 19, 2, 16, 11
"""A step has `ROWS` sequences in all, which the data-parallel ranks share."""


class Block(nn.Module):
    """A layer with 4 query heads and 2 key heads, whose projections tensor parallelism may shard."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = ring_sdpa
        self.q, self.k, self.v = (nn.Linear(DIM, width, bias=False) for width in (DIM, DIM // 2, DIM // 2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (DIM,))
        q, k, v = (
            projection(h).unflatten(2, (-1, DIM // 4)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        return x + self.out(self.attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A model from tokens (rows, tokens) to logits. `again`: checkpoint each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(2)), False
        self.context_fn = recompute_context

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
            else:
                x = block(x)
        return self.head(x)


def model_and_tokens() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model().double(), torch.randint(VOCABULARY, (ROWS, TOKENS))


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over this rank's labels, divided by the number of labels on all ranks."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * (TOKENS - 1))


def reference() -> dict[str, Tensor]:
    """Return the gradients of one process. It uses torch's attention, because no ring is open yet."""
    model, tokens = model_and_tokens()
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    loss_of(model, tokens, labels).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by name, without the prefixes that wrappers add."""
    grads = {}
    for name, weight in model.named_parameters():
        grad = weight.grad
        assert grad is not None, name
        grads[name.removeprefix("module.")] = whole(grad)
    return grads


def step(model: nn.Module, ring: Ring, rows: slice, world: int) -> dict[str, Tensor]:
    """Return the gradients of one forward and backward pass over these rows, averaged over `world` ranks."""
    _, tokens = model_and_tokens()
    seq = ring.sequence(TOKENS, layout="zigzag")
    with ring.activate(seq):
        loss = loss_of(model, seq.shard(tokens[rows]), seq.shard_labels(tokens[rows])) * world
    loss.backward()
    return gradients(model)


def rows_of(mesh: DeviceMesh) -> slice:
    """Return this rank's part of the data."""
    each = ROWS // mesh.size()
    return slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)


def mesh_of(names: tuple[str, str]) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def with_fsdp(again: bool) -> dict[str, Tensor]:
    mesh = mesh_of(("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model, _ = model_and_tokens()
    model.again = again
    for block in model.blocks:
        fully_shard(block, mesh=both)
    fully_shard(model, mesh=both)
    with Ring(mesh) as ring:
        return step(model, ring, rows_of(mesh["dp"]), mesh.size())


def with_ddp(again: bool) -> dict[str, Tensor]:
    mesh = mesh_of(("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model, _ = model_and_tokens()
    model.again = again
    wrapped = DistributedDataParallel(model, process_group=both.get_group())
    with Ring(mesh["cp"]) as ring:
        return step(wrapped, ring, rows_of(mesh["dp"]), mesh.size())


def with_tensor_parallel(again: bool) -> dict[str, Tensor]:
    """Return the gradients with half of the heads on each rank of `tp`. They are summed over the ring by hand."""
    mesh = mesh_of(("cp", "tp"))
    model, _ = model_and_tokens()
    model.again = again
    for block in model.blocks:
        heads = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
        parallelize_module(block, mesh["tp"], {**heads, "out": RowwiseParallel()})
    with Ring(mesh) as ring:
        step(model, ring, slice(0, ROWS), 1)
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        ring.all_reduce([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads])
        return gradients(model)


def with_context_parallel(again: bool) -> dict[str, Tensor]:
    """Return the gradients of torch's SDPA inside `context_parallel`, entered twice on one mesh.

    Also check that `context_parallel_unshard` restores the sharded tokens.
    """
    mesh = mesh_of(("dp", "cp"))
    model, tokens = model_and_tokens()
    model.again, model.context_fn = again, redirected_recompute_context
    for block in model.blocks:
        block.attend = F.scaled_dot_product_attention
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    for _ in range(2):
        model.zero_grad()
        x, y = tokens.clone(), labels.clone()
        with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]) as seq:
            loss_of(model, x, y).backward()
            shard = x.clone()
        (unsharded,) = context_parallel_unshard(mesh, [shard], [1])
        assert torch.equal(unsharded, tokens) and torch.equal(x, tokens)
        OPENED.add(seq.ring)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    seq.ring.all_reduce(grads)
    return gradients(model)


CASES = (with_fsdp, with_ddp, with_tensor_parallel, with_context_parallel)


def refusals() -> dict[str, str]:
    """Return the errors for DTensors that are not sharded by heads, and for a mesh without a dimension for the ring."""
    both, messages = mesh_of(("cp", "tp")), dict[str, str]()
    mesh = both["tp"]
    x = torch.zeros(1, 6, 4, 8)

    def q(placement: Shard | Replicate, heads: int = 6) -> DTensor:
        return distribute_tensor(x[:, :heads], mesh, [placement])

    cases = {
        "replicated": (q(Replicate()),) * 3,
        "tokens": (q(Shard(2)),) * 3,
        "mixed": (q(Shard(1)), x, x),
        "uneven": (q(Shard(1)), q(Shard(1), 3), q(Shard(1), 3)),
        "meshes": (q(Shard(1)), *[distribute_tensor(x, both["cp"], [Shard(1)])] * 2),
    }
    for name, tensors in cases.items():
        try:
            ring_sdpa(*tensors, enable_gqa=True)
        except InputError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    try:
        context_parallel(mesh_of(("dp", "ring")), buffers=[x], buffer_seq_dims=[2]).__enter__()
    except InputError as error:
        messages["mesh"] = f"{type(error).__name__}: {error}"
    return messages


def everything(_: dict[str, Any]) -> dict[str, Any]:
    """Return the largest gradient difference of each case, with and without recomputation, and all refusals.

    Also runs the code of the documentation, which raises if it is wrong.
    """
    dist.init_process_group("gloo")
    expected, errors = reference(), {}
    for case in CASES:
        for again in (False, True):
            actual = case(again)
            assert actual.keys() == expected.keys()
            name = f"{case.__name__}{' again' if again else ''}"
            errors[name] = max(float((actual[key] - expected[key]).abs().max()) for key in expected)
    refused = refusals()
    torch._inductor.config.compile_threads = 1
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec("".join(code), {})
    open_before = all(ring.is_open for ring in OPENED) and len(OPENED) == 2
    dist.destroy_process_group()
    gc.collect()
    rings = [open_before, any(ring.is_open for ring in OPENED)]
    greatest = max(float(value.abs().max()) for value in expected.values())
    return {"errors": errors, "refused": refused, "open": rings, "greatest": greatest}


# --- tests -----------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.slow  # four processes that import torch, FSDP and a model: 38 s


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Return the results of `everything` on each of four processes, which run all cases in sequence."""
    return run_ranks_in_processes("tests.adapters.test_mesh:everything", {}, 4, 200.0, 1)


@pytest.mark.parametrize("again", ["", " again"])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gradients_are_those_of_one_process(answers: list[dict[str, Any]], case: str, again: str) -> None:
    """The gradients of every parameter agree in float64, with and without recomputation. The largest is 0.16."""
    for answer in answers:
        assert answer["greatest"] > 0.1
        assert answer["errors"][case + again] < 1e-10, answer["errors"]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("replicated", ("UnsupportedError", "Replicate()", "takes Shard(1)")),
        ("tokens", ("UnsupportedError", "Shard(dim=2)", "takes Shard(1)")),
        ("mixed", ("InputError", "k is a Tensor and q is a DTensor")),
        ("uneven", ("InputError", "k has 3 heads over 2 ranks")),
        ("meshes", ("InputError", "k is on", "all three need the same mesh")),
        ("mesh", ("InputError", "('dp', 'ring')", "needs one called cp")),
    ],
)
def test_other_meshes_and_placements_are_refused_by_name(
    answers: list[dict[str, Any]], case: str, parts: tuple[str, ...]
) -> None:
    for answer in answers:
        assert all(word in answer["refused"][case] for word in parts), answer["refused"]


def test_a_ring_that_context_parallel_opened_ends_with_the_process_group(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["open"] == [True, False]
