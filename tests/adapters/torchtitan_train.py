"""torchtitan's own Trainer on a machine without a GPU: ten steps of a tiny Llama 3 for each of the cases.

torchrun starts it with a file and the names of cases. Rank 0 writes the loss and the gradient norm of each step into
the file, as JSON. Stand-ins replace what torchtitan imports and the machine lacks: the GPU, and packages that load data
and draw curves. Model, sharding, checkpointing, loss, optimizer and steps are torchtitan's.
"""

# ruff: noqa: E402  (stand-ins come before what imports them)

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


class Device(ModuleType):
    """torch.cpu with the additional attributes of torch.cuda that torchtitan uses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any) -> str:
        return "cpu"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def stand_in(name: str, **names: Any) -> None:
    """Add an importable module with these names if it does not exist."""
    try:
        exists = find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        exists = False
    if not exists:
        module = ModuleType(name)
        module.__dict__.update(names, __spec__=ModuleSpec(name, None), __path__=[])
        sys.modules[name] = module


stand_in("torchdata")
stand_in("torchdata.stateful_dataloader", StatefulDataLoader=torch.utils.data.DataLoader)
stand_in("datasets", Dataset=object, load_dataset=None)
stand_in("datasets.distributed", split_dataset_by_node=None)
if find_spec("tensorboard") is None:
    sys.modules["torch.utils.tensorboard"] = MagicMock()
if not hasattr(torch.distributed, "set_timeout"):  # newer torch has it; torchtitan's Trainer shortens deadlines by it
    torch.distributed.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]

from torchtitan.tools import utils

if not torch.cuda.is_available():  # before any module of torchtitan imports the two names
    utils.device_type, utils.device_module = "cpu", Device("cpu")

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, parallelize, parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from ringattn.adapters.torchtitan import RingAttention, RingTrainerMixin, over_ring

if torch.__version__ < "2.14":
    # This fully_shard does not read spmd_types' annotations of weights yet, and refuses weights that are not DTensors.
    # Without tensor parallelism all weights are replicated, so a mesh of all ranks describes them as well.
    parallelize.resolve_fsdp_mesh = lambda dims: (
        init_device_mesh("cpu", (dims.world_size,), mesh_dim_names=("fsdp",)), None
    )  # fmt: skip

DIM, HEADS, VOCABULARY, TOKENS, BATCH, STEPS = 32, 4, 64, 64, 2, 10
CASES: dict[str, dict[str, Any]] = {
    "torchtitan": {"inner": "torchtitan", "packed": False},
    "dense, packed": {"inner": "dense"},
    "plain": {"packed": False},
    "packed": {},
    "by over_ring": {"inner": "over_ring"},
    "full checkpointing": {"checkpointing": FullAC.Config()},
    "partial_dtensor": {"backend": "partial_dtensor"},
}
"""The options of each case that differ from the defaults of `trained`."""


class Dense(ScaledDotProductAttention):
    """torch's attention with a mask from the batch, (batch, 1, tokens, tokens): True if a query attends to a key."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Tensor, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        rows = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(*rows, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


class Tokens(BaseDataLoader):
    """Random tokens, the same in every run, in documents of random lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        packed: bool = True

    def __init__(self, config: Config, **_: Any) -> None:
        self.packed = config.packed

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(5)
        while True:
            tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
            starts = torch.rand(BATCH, TOKENS, generator=generator) < (0.06 if self.packed else 0.0)
            starts[:, 0] = True
            places = torch.arange(TOKENS).expand(BATCH, TOKENS)
            first = torch.where(starts, places, 0).cummax(1).values
            yield {"input": tokens[:, :-1], "positions": places - first}, tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Tokenizer(BaseTokenizer):
    """A stand-in: the tokens are random, but the Trainer always builds a tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Metrics(MetricsProcessor):
    """torchtitan's metrics processor, which also keeps the loss and the gradient norm of every step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, loss: float, greatest: float, grad_norm: float, extra_metrics: Any = None) -> None:
        super().log(step, loss, greatest, grad_norm, extra_metrics)
        self.__dict__.setdefault("kept", []).append((loss, grad_norm))


class RingTrainer(RingTrainerMixin, Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


class DenseTrainer(Trainer):
    """A Trainer for one process with dense attention. Its mask keeps attention within each document."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, Any]:
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        documents = (extra["positions"] == 0).cumsum(1)
        seen = (documents[:, :, None] == documents[:, None, :]).tril()
        return inputs, labels, {**extra, "attention_masks": seen[:, None]}


def model(inner: Any) -> Llama3Model.Config:
    """Return the configuration of a Llama 3 of two layers. `inner`: the configuration of its attention."""
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=TOKENS, theta=10000, scaling="none")
    layers = _build_llama3_layers(
        n_layers=2, dim=DIM, n_heads=HEADS, n_kv_heads=2, hidden_dim=48, rope=rope, attn_backend="flex"
    )
    for layer in layers:
        layer.attention.inner_attention = inner
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM),
        norm=RMSNorm.Config(normalized_shape=DIM),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY),
        layers=layers,
    )


@torch.no_grad()
def fill(part: torch.nn.Module) -> None:
    """Fill the weights with the same values for any number of ranks.

    Values drawn for each shard on a CPU would depend on the number of ranks.
    """
    for name, weight in sorted((n.replace("_checkpoint_wrapped_module.", ""), w) for n, w in part.named_parameters()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(weight.shape, generator=generator) * 0.1 + ("norm" in name)
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements)
                     if isinstance(weight, DTensor) else whole)  # fmt: skip
    for module in part.modules():
        if isinstance(module, FSDPModule):  # gloo has no sum of premultiplied gradients
            module.set_force_sum_reduction_for_comms(True)


def trained(
    folder: Path,
    inner: str = "ring",
    packed: bool = True,
    checkpointing: Any = SelectiveAC.Config(),  # noqa: B008
    backend: str = "spmd_types",
) -> list[tuple[float, float]]:
    """Train for ten steps. Return the loss and the gradient norm of each step, over all ranks."""
    attention, trainer = {
        "ring": (RingAttention, RingTrainer), "dense": (Dense, DenseTrainer),
        "torchtitan": (ScaledDotProductAttention, Trainer), "over_ring": (FlexAttention, Trainer),
    }[inner]  # fmt: skip
    spec = ModelSpec("llama3", "tiny", model(attention.Config()), parallelize_llama, None, None, None)
    config = trainer.Config(
        model_spec=spec,
        dump_folder=str(folder),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        tokenizer=Tokenizer.Config(),
        dataloader=Tokens.Config(packed=packed),
        metrics=Metrics.Config(log_freq=1, disable_color_printing=True),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH, seq_len=TOKENS, steps=STEPS, mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            context_parallel_degree=int(os.environ["WORLD_SIZE"]), spmd_backend=backend
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=checkpointing,
    )  # fmt: skip
    if inner == "over_ring":
        config = over_ring(config)
    run = config.build()
    fill(run.model_parts[0])
    try:
        run.train()
    finally:
        run.close()
    kept: list[tuple[float, float]] = run.metrics_processor.kept
    return kept


def main() -> None:
    """Run the cases named by the command line. Its first argument is the file to write, the others are the cases."""
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    results = {name: trained(file.parent, **CASES[name]) for name in sys.argv[2:]}
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
