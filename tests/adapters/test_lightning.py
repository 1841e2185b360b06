"""Lightning over a ring: training on two processes equals training on one process with whole batches."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ringattn import InputError, Ring
from ringattn.errors import ClosedError
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.testing import run_ranks

pytest.importorskip("lightning", reason="needs lightning")

from lightning.pytorch import LightningModule, Trainer

from ringattn.adapters.attend import attend
from ringattn.adapters.context import sequence_of
from ringattn.adapters.lightning import RingMixin
from tests.adapters.processes import whole

DIM, VOCABULARY, TOKENS = 16, 30, 13
DOCUMENTS, OTHERS = [0, 4, 13], {0: [0, 4, 13], 1: [0, 5, 13]}
REFUSALS = (
    "the ranks of a ring hold different batches, .*use_distributed_sampler=False",
    "the ranks of a ring hold different batches, cu_seqlens differ",
    r"tensor_parallel_size=2: .* ModelParallelStrategy\(data_parallel_size=2, tensor_parallel_size=1\)",
)


class Net(nn.Module):
    """A model with one attention layer, from tokens and positions to logits. `again`: checkpoint that layer."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embed, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCABULARY)
        generator = torch.Generator().manual_seed(6)
        self.double()
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator) * 0.3)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(positions)
        return self.head(checkpoint(self.mix, x, use_reentrant=False) if self.again else self.mix(x))

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, DIM // 2)).unbind(2)
        return x + attend(sequence_of(), q, k, v, causal=True).flatten(2)


class Model(RingMixin, LightningModule):
    def __init__(
        self,
        ring_size: int | None = None,
        sampler: str = "ring",
        again: bool = False,
        documents: dict[int, list[int]] | list[int] | None = None,
    ) -> None:
        """`documents`: bounds of documents, for all ranks or by rank."""
        super().__init__()
        self.net, self.ring_size, self.sampler, self.documents = Net(again), ring_size, sampler, documents

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        data = dataset()
        if self.sampler == "ring":
            return DataLoader(data, 2, sampler=self.ring_sampler(data, shuffle=False))
        return DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        cuts = self.documents[self.ring.rank] if isinstance(self.documents, dict) else self.documents
        seq, tokens, labels = self.ring_shard(batch[0], cu_seqlens=cuts)
        with self.ring.activate(seq):
            logits = self.net(tokens, seq.positions(per_document=True))
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = self.ring_mean(total, (labels != -100).sum())
        self.log("loss", loss.detach(), sync_dist=True)
        return loss


class Sharded(Model):
    """A model whose weights are sharded over the ranks."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def dataset() -> TensorDataset:
    return TensorDataset(torch.randint(VOCABULARY, (8, TOKENS), generator=torch.Generator().manual_seed(8)))


def trainer(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip


def of_processes(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the weights and last logged loss of each case after an epoch, and the refusals, on one of two ranks."""
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit(model: Model, strategy: Strategy | None = None) -> dict[str, Any]:
        run = trainer(devices=2, strategy=strategy or DDPStrategy(process_group_backend="gloo"))
        run.fit(model)
        weights = [whole(weight) for weight in model.parameters()]
        answer = {"weights": [weight.tolist() for weight in weights], "open": model.ring.is_open}
        return {**answer, "loss": float(run.callback_metrics["loss"])}

    def sharded(data_parallel: int) -> Strategy:
        return ModelParallelStrategy(data_parallel, 2 // data_parallel, process_group_backend="gloo")

    compiled = Model()
    compiled.net.compile(backend="eager")
    answers: dict[str, Any] = {
        "one ring": fit(Model()),
        "two rings": fit(Model(1)),
        "packed": fit(Model(documents=DOCUMENTS)),
        "checkpointing": fit(Model(again=True)),
        "compile": fit(compiled),
        "FSDP2": fit(Sharded(), sharded(2)),
    }

    class Bad(Model):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            raise RuntimeError("planted")

    answers["after a fault"] = []
    for bad in (Bad(), Bad()):  # the second fault occurs as the first did
        with suppress(RuntimeError):
            trainer(devices=2, strategy=DDPStrategy(process_group_backend="gloo")).fit(bad)
        answers["after a fault"].append(bad.ring.is_open)
    answers["again"] = fit(Model())
    Net()(torch.zeros(1, 4, dtype=torch.long), torch.arange(4))  # attends locally, because no ring is open
    answers["refusals"] = []
    cases = (Model(sampler="other"), None), (Model(documents=OTHERS), None), (Sharded(), sharded(1))
    for model, strategy in cases:
        try:
            fit(model, strategy)
        except InputError as error:
            answers["refusals"].append(str(error))
    return answers


def alone(replicas: int, documents: list[int] | None = None) -> tuple[list[Tensor], float]:
    """Train on one process with the batches of all `replicas`, averaging their losses. Return weights and last loss."""
    net, (tokens,) = Net(), dataset().tensors
    loss = torch.zeros(())
    for step in range(4 // replicas):
        batches = [tokens[r::replicas][2 * step : 2 * step + 2] for r in range(replicas)]
        losses = []
        for batch in batches:
            logits, labels = [], []
            for start, stop in pairwise(documents or [0, TOKENS]):
                logits.append(net(batch[:, start:stop], torch.arange(stop - start))[:, :-1].flatten(0, 1))
                labels.append(batch[:, start + 1 : stop].flatten())
            losses.append(nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels)))
        loss = torch.stack(losses).mean()
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.5 * weight.grad
    return list(net.parameters()), float(loss.detach())


@pytest.mark.slow
def test_training_goes_the_way_of_one_process_or_is_refused() -> None:
    single, cases = alone(1), ("one ring", "again", "checkpointing", "compile", "FSDP2")
    expected = {**dict.fromkeys(cases, single), "two rings": alone(2), "packed": alone(1, DOCUMENTS)}
    for answers in run_ranks_in_processes("tests.adapters.test_lightning:of_processes", {}, 2, 120, 1):
        for case, (weights, loss) in expected.items():
            answer = answers[case]
            for actual, reference in zip(answer["weights"], weights, strict=True):
                weight = torch.tensor(actual, dtype=torch.float64)
                torch.testing.assert_close(weight, reference, rtol=1e-10, atol=1e-10)
            assert answer["loss"] == pytest.approx(loss, rel=1e-6)  # Lightning logs the loss in float32
            assert not answer["open"]
        assert answers["after a fault"] == [False, False]
        for pattern, refusal in zip(REFUSALS, answers["refusals"], strict=True):
            assert re.search(pattern, refusal), refusal


def test_a_mean_over_ranks_of_which_some_have_no_target() -> None:
    def body(ring: Ring) -> tuple[float, float]:
        mixin = RingMixin()
        mixin.ring = ring
        loss = mixin.ring_mean(torch.tensor(3.0 * ring.rank), 2 * ring.rank)
        return float(loss), float(mixin.ring_mean(torch.tensor(0.0), 0))

    by_rank = run_ranks(3, body)
    assert sum(loss for loss, _ in by_rank) / 3 == pytest.approx(9 / 6) and {none for _, none in by_rank} == {0.0}


def test_given_labels_are_compared_too() -> None:
    def body(ring: Ring) -> None:
        mixin, tokens = RingMixin(), torch.arange(8)[None]
        mixin.ring = ring
        with pytest.raises(InputError, match=r"different batches, labels differ; .*use_distributed_sampler=False"):
            mixin.ring_shard(tokens, tokens + ring.rank)
        mixin.ring_shard(tokens, tokens)

    run_ranks(2, body, timeout_s=10.0)


def test_an_exception_ends_the_ring() -> None:
    class Bad(Model):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            assert self.ring.is_open
            raise RuntimeError("planted")

    model, run = Bad(), trainer(devices=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            run.fit(model)
        assert not model.ring.is_open
    with pytest.raises(ClosedError, match="it was aborted: planted"):
        model.ring.barrier()
    assert len([x for x in run.callbacks if type(x).__module__ == "ringattn.adapters.lightning"]) == 1


def test_rings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="ring_size=2 does not divide the trainer's 1 ranks"):
        trainer(devices=1).fit(Model(2))
