"""The Trainer of transformers over a ring: equal to one process, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import AcceleratorState
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.mixtral import modeling_mixtral
from transformers.trainer_pt_utils import LabelSmoother

from ringattn import InputError, Ring
from ringattn.adapters import accelerate as by_configuration
from ringattn.adapters import host_versions
from ringattn.adapters import transformers as adapter
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.dropout import seed_from
from ringattn.adapters.local import local_attention
from ringattn.adapters.transformers import trainer as trainer_adapter
from ringattn.adapters.transformers.batches import WholeOutput
from ringattn.adapters.transformers.loaders import RoundRobin
from ringattn.adapters.transformers.trainer import RingTrainerMixin, check_trainer, takes_shards
from ringattn.adapters.transformers.trainer_checks import has_custom_loss
from ringattn.errors import UnsupportedError
from tests.adapters.models import tiny_model
from tests.adapters.processes import call_in_program
from tests.adapters.trainer import CASES, DIVIDED, QUICK, OwnStep, RingTrainer, Stream, UnevenBatches, padded, texts

TOLERANCE = 1e-9


def check_trained(folder: Path, world_size: int, cases: tuple[str, ...]) -> None:
    """Train the cases over processes. Check that weights, losses and counts equal those of one process."""
    entry = "tests.adapters.trainer:compute_errors"
    answers: dict[str, Any] = call_in_program(entry, str(folder), world_size, cases, timeout_s=560.0)
    assert tuple(answers) == cases
    for case, errors in answers.items():
        assert errors["weights"] and max(errors["weights"].values()) <= TOLERANCE, case
        (*losses, evaluated), (*true, truly) = errors["losses"]
        assert len(losses) >= 2 and losses == pytest.approx(true, rel=1e-6), case  # Trainer adds these up in float32
        assert evaluated == pytest.approx(truly, rel=TOLERANCE), case
        counted, truly_counted = errors["counted"]
        for name in ("right", "called"):
            assert counted.pop(name, []) == pytest.approx(truly_counted.pop(name, []), rel=TOLERANCE), case
        assert counted == pytest.approx(truly_counted, rel=TOLERANCE), case
        assert counted["tokens"] > 0 or case not in ("measured", "by configuration")


@pytest.mark.slow
def test_checkpointed_layers_of_both_routes(tmp_path: Path) -> None:
    check_trained(tmp_path, 2, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", CASES)
def test_trainer_over_processes(world_size: int, tmp_path: Path) -> None:
    """Training equals one process on a ring of 2 or 3 processes and on two rings of two ranks (4 processes)."""
    check_trained(tmp_path, world_size, CASES[world_size])


def test_batches_of_a_users_sampler_are_distributed_over_rings() -> None:
    shares = [RoundRobin(UnevenBatches(), 3, ring) for ring in range(3)]
    assert [list(share) for share in shares] == [[[0, 1], [6]], [[2, 3, 4], [6]], [[5], [6]]]
    assert {(len(share), share.batch_size, share.drop_last) for share in shares} == {(2, None, False)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_labels_are_divided_by_three_ranks_in_the_precision_of_the_loss(dtype: torch.dtype) -> None:
    model = SimpleNamespace(dtype=dtype)
    share, loss = trainer_adapter.labels_per_rank(torch.tensor(100), 3, model), torch.ones((), dtype=dtype)
    assert isinstance(share, torch.Tensor)
    assert share.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(share.item() - 100 / 3) <= torch.finfo(share.dtype).eps * 100 / 3
    assert (loss.to(share.dtype) / share).dtype == share.dtype  # no wider than the loss, which is at least float32
    assert trainer_adapter.labels_per_rank(100, 3, model) == 100 / 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hybrid_models_over_processes(tmp_path: Path) -> None:
    """Train for twenty steps on padded texts."""
    check_trained(tmp_path, 2, ("qwen3_5_text", "nemotron_h", "kimi_linear"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_divided_batches_over_processes(tmp_path: Path) -> None:
    """A ring of all processes divides each batch under a limit of tokens per rank; one process has whole batches."""
    check_trained(tmp_path, 2, DIVIDED)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring() as ring:
        yield ring


def build_trainer(
    folder: Path, ring: Ring | None, kind: type = RingTrainer, args: dict[str, Any] | None = None, **given: Any
) -> Any:
    """Return a Trainer in one process, with this ring, or with that of its `parallelism_config` if `ring` is None."""
    options = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 1}
    options |= {"save_strategy": "no"}
    arguments = transformers.TrainingArguments(**options | (args or {}))
    given = {"model": tiny_model("llama", "eager"), "train_dataset": texts(), "data_collator": padded} | given
    return kind(args=arguments, **given, **({} if ring is None else {"ring": ring}))


def test_a_trainer_of_another_form(monkeypatch: pytest.MonkeyPatch, ring: Ring) -> None:
    check_trainer(RingTrainer)
    with pytest.raises(UnsupportedError, match=r"must inherit from RingTrainerMixin and then"):
        check_trainer(RingTrainerMixin)
    host_versions._require.cache_clear()
    monkeypatch.setattr(transformers.Trainer, "_prepare_context_parallel_inputs", lambda self, inputs: None)
    with pytest.raises(UnsupportedError, match=r"adapter's Trainer .*Trainer._prepare_context_parallel_inputs has ch"):
        RingTrainer(ring=ring)
    monkeypatch.undo()
    monkeypatch.delattr(transformers.Trainer, "get_tp_size")
    with pytest.raises(UnsupportedError, match=r"Trainer\.get_tp_size does not exist"):
        RingTrainer(ring=ring)


def test_smoothed_labels_that_are_not_counted_over_ranks_are_refused(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smooth(self: Any, model_output: Any, labels: Any, shift_labels: bool = False) -> None: ...

    monkeypatch.setattr(LabelSmoother, "__call__", smooth)  # as before transformers 5.15
    with pytest.raises(UnsupportedError, match=r"label_smoothing_factor.*5\.15 or later"):
        build_trainer(tmp_path, ring, args={"label_smoothing_factor": 0.1})


def test_tokens_that_would_be_counted_once_per_rank_are_refused(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"include_num_input_tokens_seen": "all"}
    build_trainer(tmp_path, ring, args=options)
    monkeypatch.delattr(transformers.Trainer, "_track_num_input_tokens")  # as before transformers 5.3
    with pytest.raises(UnsupportedError, match=r"once per rank; .*5\.3 or later"):
        build_trainer(tmp_path, ring, args=options)


def test_a_trainer_that_adds_callbacks_before_it_sets_its_options_is_refused(ring: Ring) -> None:
    trainer = RingTrainer.__new__(RingTrainer)  # without options, as before transformers 5.2
    trainer.begin_ring(ring)
    trainer.callback_handler = SimpleNamespace(add_callback=lambda callback: None)
    with pytest.raises(UnsupportedError, match=r"RingParallelismConfig needs transformers 5\.2 or later"):
        trainer.add_callback(transformers.TrainerCallback())


def test_a_router_loss_of_another_function_is_refused(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_trainer(tmp_path, ring, model=tiny_model("mixtral", "eager"))
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *arguments: 0)
    with pytest.raises(UnsupportedError, match=r"MixtralForCausalLM .* computes it in its own way"):
        build_trainer(tmp_path, ring, model=tiny_model("mixtral", "eager"))


def test_label_names_that_batches_lack_are_refused(tmp_path: Path, ring: Ring) -> None:
    trainer = build_trainer(tmp_path, ring, eval_dataset=texts(), args={"label_names": ["labels", "shift_labels"]})
    with pytest.raises(InputError, match=r"label_names: the batch has labels but no shift_labels"):
        trainer.evaluate()


def test_steps_of_evaluation_that_take_shards() -> None:
    class CallsTrainers(transformers.Trainer):
        def prediction_step(self, *args: Any, **options: Any) -> Any:
            return super().prediction_step(*args, **options)

    class TakesWholeTexts(transformers.Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            with local_attention():
                return self.compute_loss(model, inputs), None, None

    kinds = transformers.Trainer, transformers.Seq2SeqTrainer, CallsTrainers, OwnStep, TakesWholeTexts
    trainers, *others = (takes_shards(type("Ours", (RingTrainerMixin, kind), {})) for kind in kinds)
    # Trainer's own step shards from transformers 5.16 on.
    assert others == [trainers, trainers, True, False]


def test_what_needs_logits_of_a_model_that_makes_none(tmp_path: Path, ring: Ring) -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), chunked_loss=7, tiled_mlp=5)
    plain = build_trainer(tmp_path, ring, model=tiny_model("llama", "ringattn"), args={"seed": 3}).train().training_loss
    assert build_trainer(tmp_path, ring, model=model, args={"seed": 3}).train().training_loss == pytest.approx(
        plain, rel=1e-6
    )
    with pytest.raises(UnsupportedError, match=r"^compute_metrics needs logits, .* chunked_loss"):
        build_trainer(tmp_path, ring, model=model, compute_metrics=lambda evaluation: {})
    with pytest.raises(UnsupportedError, match=r"^prediction needs logits, .* chunked_loss"):
        build_trainer(tmp_path, ring, model=model, eval_dataset=texts()).predict(texts())


def test_a_step_drops_by_its_number(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dropout seed of an activation depends on the step's number, so that a resumed run continues alike.

    All batches of one step have the same seed.
    """
    seeds, inner = [], ring.activate

    def seen(seq: Any, *, dropout_seed: int | None = None) -> Any:
        seeds.append(dropout_seed)
        return inner(seq, dropout_seed=dropout_seed)

    monkeypatch.setattr(ring, "activate", seen)
    monkeypatch.setattr(RingTrainer, "_rings", lambda self: (3, 2))
    args = {"seed": 5, "max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    model = tiny_model("llama", "eager", attention_dropout=0.4)
    build_trainer(tmp_path, ring, model=model, args=args).train()
    assert seeds == [seed_from(5, 2, step) for step in (0, 0, 1, 1)]


def test_streams_evaluated_over_several_rings(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation of a stream over several rings is refused when the trainer is created, before any evaluation."""
    monkeypatch.setattr(RingTrainer, "_rings", lambda self: (2, 0))
    args, stream = {"accelerator_config": {"dispatch_batches": False}}, Stream(texts())
    build_trainer(tmp_path, ring, args=args, train_dataset=stream, eval_dataset=texts())
    for data in (stream, {"a": texts(), "b": stream}):
        with pytest.raises(UnsupportedError, match=r"Stream .* cannot be evaluated over several rings"):
            build_trainer(tmp_path, ring, args=args, eval_dataset=data)


def test_smoothed_labels_are_counted_on_all_ranks(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path, ring, args={"label_smoothing_factor": 0.1})
    with pytest.raises(UnsupportedError, match="num_items_in_batch is missing"):
        trainer.label_smoother({"logits": None}, None, shift_labels=True)
    monkeypatch.setattr(type(trainer.model), "accepts_loss_kwargs", False, raising=False)
    with pytest.raises(UnsupportedError, match="label_smoothing_factor: LlamaForCausalLM takes no num_items_in_batch"):
        build_trainer(tmp_path, ring, args={"label_smoothing_factor": 0.1})


def test_a_configuration_that_shards_too(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    config = accelerate.ParallelismConfig()
    trainer_args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for name in ("cp_size", "sp_size"):
        monkeypatch.setattr(config, name, 2)
        trainer_args.parallelism_config = config
        with pytest.raises(UnsupportedError, match=f"{name}=2 of accelerate's .*second time.*RingParallelismConfig"):
            RingTrainer(ring=ring, args=trainer_args, model=tiny_model("llama", "eager"))
        monkeypatch.setattr(config, name, 1)


TRAINERS_OF_TRL = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((f"{name}Trainer", rf"use ringattn\.adapters\.trl\.Ring{name}Trainer") for name in TRAINERS_OF_TRL),
        ("ORPOTrainer", "has a custom loss, which was not compared with one process"),
    ],
)
def test_trainers_of_trl(name: str, reason: str) -> None:
    theirs = type(name, (transformers.Trainer,), {"__module__": f"trl.trainer.{name.lower()}"})
    with pytest.raises(UnsupportedError, match=f"TRL's {name} .*{reason}"):
        check_trainer(type("Ours", (RingTrainerMixin, theirs), {}))


class OwnLoss:
    """A mixin with its own `compute_loss`, which calls that of the next class."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)  # type: ignore[misc]


class Between(OwnLoss, transformers.Trainer):
    pass


def own_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss from the logits only; a user's `compute_loss_func`."""
    return outputs.logits.square().sum() / num_items_in_batch


@pytest.mark.parametrize("by_tp_size", [True, False])
def test_the_scale_of_a_custom_loss_counts_rings(
    by_tp_size: bool, tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tmp_path, ring, type("Ours", (RingTrainerMixin, Between), {}))
    assert has_custom_loss(trainer)
    monkeypatch.setattr(trainer_adapter, "scales_by_tp_size", lambda: by_tp_size)  # False: before transformers 5.19
    monkeypatch.setattr(trainer.accelerator.state, "num_processes", 6)
    monkeypatch.setattr(trainer, "ring", SimpleNamespace(world_size=2))
    with suppress(KeyError), trainer._whole_step(trainer.model, trainer.model, 0):
        scale = trainer.accelerator.num_processes // (trainer.get_tp_size() if by_tp_size else 1)
        assert scale == 3
        raise KeyError
    assert trainer.accelerator.num_processes == 6 and trainer.get_tp_size() == 1


def test_a_loss_that_is_set_later(tmp_path: Path, ring: Ring) -> None:
    """A `compute_loss` that a user sets on the trainer instance later gets whole outputs too."""
    trainer, seen = build_trainer(tmp_path, ring), []

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        seen.append(outputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer.compute_loss = compute_loss
    trainer.train()
    assert all(isinstance(outputs, WholeOutput) for outputs in seen) and seen


def test_metrics_with_a_custom_loss(tmp_path: Path, ring: Ring) -> None:
    metrics = {
        "compute_metrics": lambda evaluation: {"shape": evaluation.predictions.shape},
        "eval_dataset": texts()[:2],
    }
    trainer = build_trainer(tmp_path, ring, compute_loss_func=own_function, **metrics)
    assert tuple(trainer.evaluate()["eval_shape"]) == (2, 11, 64)


class Weighted(RingTrainer):
    """A Trainer whose labels have other names than those of the model."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        tokens, weights = inputs["input_ids"], inputs["weights"]
        outputs = model(input_ids=tokens)
        losses = cross_entropy(outputs.logits[:, :-1].mT, tokens[:, 1:], reduction="none").mean(1)
        loss = (weights * losses).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("names", [["labels", "weights"], ["weights"]], ids=str)
def test_labels_of_other_names(names: list[str], tmp_path: Path, ring: Ring) -> None:
    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = padded(rows)
        return {"input_ids": batch["input_ids"], names[0]: batch["labels"], "weights": torch.arange(1.0, len(rows) + 1)}

    args = {"label_names": names, "remove_unused_columns": False}
    trainer = build_trainer(tmp_path, ring, Weighted, args, data_collator=collate)
    prediction = trainer.predict(texts()[:2])
    assert prediction.metrics["test_loss"] > 0
    labels = prediction.label_ids if len(names) > 1 else (prediction.label_ids,)
    assert [x.shape for x in labels] == [(2, 11), (2,)][-len(names) :] and labels[-1].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["loss", "logits"])
def test_gradients_of_weights_inside_a_loss_are_refused(name: str, tmp_path: Path, ring: Ring) -> None:
    """Gradients with respect to an output are whole, and those of weights are not."""
    is_of_weights = False

    class Scaled(RingTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            outputs = model(**inputs)
            term = outputs.logits.square().mean()
            torch.autograd.grad(term, outputs.logits, retain_graph=True)
            if is_of_weights:
                torch.autograd.grad(outputs[name].sum(), self.model.lm_head.weight, retain_graph=True)
            return outputs.loss + term

    assert build_trainer(tmp_path, ring, Scaled).train().training_loss > 0
    is_of_weights = True
    with pytest.raises(UnsupportedError, match=r"calls torch\.autograd\.grad .* a part of the gradient"):
        build_trainer(tmp_path, ring, Scaled).train()


def test_weights_that_are_thawed_during_training_are_refused(tmp_path: Path, ring: Ring) -> None:
    trainer = build_trainer(tmp_path, ring)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, second = trainer.model.model.layers
        second.requires_grad_(False)
        model = DistributedDataParallel(trainer.model)
        trainer._refuse_thawed(model)
        first.requires_grad_(False)  # weights may be frozen, and thawed again
        trainer._refuse_thawed(model)
        first.requires_grad_(True)
        trainer._refuse_thawed(model)
        first.requires_grad_(False)
        second.requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"\(model\.layers\.1\..*\) was thawed .* create another Trainer"):
            trainer._refuse_thawed(model)
        trainer._refuse_thawed(DistributedDataParallel(trainer.model))
        second.requires_grad_(False)
        model = DistributedDataParallel(trainer.model)
        second.requires_grad_(True)
        with pytest.raises(UnsupportedError, match="a weight was thawed"):
            trainer._refuse_thawed(model)
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_not_of_transformers(tmp_path: Path, ring: Ring) -> None:
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model; shard its batches in"):
        build_trainer(tmp_path, ring, model=torch.nn.Linear(2, 2))


def test_an_overridden_loss_of_sfttrainer() -> None:
    loss = {"compute_loss": OwnLoss.compute_loss}
    mixin = type("RingSFTMixin", (RingTrainerMixin,), {**loss, "loss_of_shards": True})
    sft = type("SFTTrainer", (transformers.Trainer,), {**loss, "__module__": "trl.trainer"})
    check_trainer(type("RingSFTTrainer", (mixin, sft), {}))
    for bases in ((mixin, sft), (mixin, type("Theirs", (sft,), loss))):
        with pytest.raises(UnsupportedError, match="Ours overrides compute_loss of RingSFTTrainer"):
            check_trainer(type("Ours", bases, loss if bases[1] is sft else {}))


def test_a_model_that_was_not_prepared(tmp_path: Path, ring: Ring) -> None:
    trainer = build_trainer(tmp_path, ring)
    trainer.train()
    trainer.model = trainer.model_wrapped = tiny_model("llama", "eager")
    with pytest.raises(InputError, match=r"LlamaForCausalLM is not the model .* this rank's tokens only; .*prepare"):
        trainer.train()
    trainer = build_trainer(tmp_path, ring, model=None, model_init=lambda: tiny_model("llama", "eager"))
    first = trainer.model
    trainer.train()
    assert trainer.model is not first and trainer.model.config._attn_implementation == "ringattn"


def test_outputs_that_are_not_of_tokens(tmp_path: Path, ring: Ring) -> None:
    trainer = build_trainer(
        tmp_path, ring, eval_dataset=texts(), compute_metrics=lambda evaluation: {"texts": len(evaluation.predictions)}
    )
    assert trainer.evaluate()["eval_texts"] == len(texts())
    with pytest.raises(UnsupportedError, match=r"the model returns a \(3, 5\), .*name it in ignore_keys"):
        trainer._gather_tokens([torch.zeros(3, 5)])


def test_streams(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, cut = (
        Stream(texts()),
        r"Stream is an IterableDataset.*\{\"dispatch_batches\": False\}.*a data set with a le",
    )
    for options in ({"train_dataset": stream}, {"eval_dataset": stream}, {"eval_dataset": {"a": texts(), "b": stream}}):
        with pytest.raises(UnsupportedError, match=cut):
            build_trainer(tmp_path, ring, **options)
    with pytest.raises(UnsupportedError, match=cut):
        build_trainer(tmp_path, ring).evaluate(stream)
    trainer = build_trainer(tmp_path, ring)
    trainer.train_dataset = trainer.eval_dataset = stream
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(UnsupportedError, match=cut):
            call()
    for name in ("dispatch_batches", "split_batches"):
        with pytest.raises(UnsupportedError, match=f"{name} would split batches among the ranks of a ring"):
            build_trainer(tmp_path, ring, args={"accelerator_config": {name: True}})
    with pytest.raises(UnsupportedError, match="batch_rebalance' distributes texts over the processes of a ring"):
        build_trainer(tmp_path, ring, args={"train_sampling_strategy": "batch_rebalance"})

    trainer = build_trainer(
        tmp_path, ring, args={"accelerator_config": {"dispatch_batches": False}}, train_dataset=stream
    )
    shard = IterableDatasetShard(stream, batch_size=3, num_processes=4)
    monkeypatch.setattr(transformers.Trainer, "get_eval_dataloader", lambda *_: SimpleNamespace(dataset=shard))
    monkeypatch.setattr(trainer, "_rings", lambda: (2, 0))
    with pytest.raises(UnsupportedError, match="cannot be evaluated over several rings"):
        trainer.evaluate(stream)
    monkeypatch.setattr(trainer, "_rings", lambda: (1, 0))
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "num_processes", 4)
    stream.n_shards = 4  # the attribute that data sets of Hugging Face have
    with pytest.raises(UnsupportedError, match="accelerate distributes the 4 shards of Stream over the processes"):
        trainer.evaluate(stream)


# --- accelerate's configuration -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sp_size", "tp_size"])
def test_other_sizes(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=2 cannot be combined with a ring; set cp_size"):
        RingParallelismConfig(cp_size=1, **{name: 2})


def test_ways_to_send() -> None:
    with pytest.raises(UnsupportedError, match="cp_backend belongs to another form of parallelism"):
        RingParallelismConfig(cp_size=2, cp_backend="torch")
    config = RingParallelismConfig(cp_size=3)
    assert config.cp_enabled and config.cp_backend != "torch"  # Trainer and accelerate would implement that backend
    with pytest.raises(InputError, match="1 ranks are not a multiple of cp_size and the other sizes, 3"):
        config.build_device_mesh("cpu")


class Alone(RingParallelismConfig):
    """A configuration for one process that behaves as if the process were both ranks of a ring."""

    def build_device_mesh(self, device_type: str) -> Any:
        """Return a stand-in for a mesh, without dimension names."""
        return type("Mesh", (dict,), {"mesh_dim_names": ()})(cp=None)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[RingParallelismConfig]:
    """Yield a configuration with cp_size=2 whose ring has one rank."""
    AcceleratorState._reset_state(True)
    with Ring() as ring:
        monkeypatch.setattr(by_configuration, "ring_of", lambda mesh: ring)
        yield Alone(cp_size=2)
    AcceleratorState._reset_state(True)


def test_a_trainer_gets_the_ring(tmp_path: Path, config: RingParallelismConfig) -> None:
    class Theirs(transformers.Trainer):
        pass

    trainer = build_trainer(tmp_path, None, Theirs, {"parallelism_config": config})
    assert isinstance(trainer, RingTrainerMixin) and isinstance(trainer, Theirs) and type(trainer).__name__ == "Theirs"
    assert not issubclass(Theirs, RingTrainerMixin) and trainer.ring.world_size == 1
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"args": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha: the noise is scaled by the tokens of a row"),
        ({"train_dataset": Stream(texts())}, r"Stream is an IterableDataset.*\"dispatch_batches\": False"),
    ],
)
def test_what_is_refused_when_the_trainer_is_made(
    options: dict[str, Any], says: str, tmp_path: Path, config: RingParallelismConfig
) -> None:
    args = options.get("args", {}) | {"parallelism_config": config}
    with pytest.raises(UnsupportedError, match=says):
        build_trainer(tmp_path, None, transformers.Trainer, **{**options, "args": args})


def test_loops_of_ones_own(config: RingParallelismConfig) -> None:
    with pytest.raises(UnsupportedError, match="RingParallelismConfig is for a Trainer of transformers; in your own"):
        Accelerator(cpu=True, parallelism_config=config)
