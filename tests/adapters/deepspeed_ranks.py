"""DeepSpeed over processes, compared with the same training in one process without DeepSpeed, in float64.

Two processes form one ring, four processes two rings. `engine` trains with DeepSpeed's own engine, `trainer` with
transformers' Trainer, `loop` with accelerate.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # DeepSpeed's engine imports it, which would take seconds in each rank
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, PartialState
from accelerate.utils import DummyOptim, DummyScheduler
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ringattn import Ring, UnsupportedError
from ringattn.adapters.accelerate import RingAccelerator
from ringattn.adapters.groups import ring_of_ranks
from ringattn.adapters.loss import loss_scale
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked_ranks, worst_error
from tests.adapters.ranks import in_double
from tests.adapters.trainer import CHECKPOINTED, ZLoss, padded, texts

STEPS, MICRO_BATCHES = 3, 2
CLIPPING = 3.6
"""The largest norm of gradients, which some steps exceed and others do not: clipping hides the scale of gradients."""
OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ZERO: dict[str, dict[str, Any]] = {
    **{str(stage): {"stage": stage} for stage in range(4)},
    **{f"{stage}, offloaded": {"stage": stage, **OFFLOADED} for stage in (1, 2)},
    "3, offloaded": {"stage": 3, **OFFLOADED, "offload_param": {"device": "cpu"}},
}
for _zero in ("3", "3, offloaded"):
    ZERO[_zero]["stage3_param_persistence_threshold"] = 0  # otherwise small weights stay whole


def configuration(zero: str, **options: Any) -> dict[str, Any]:
    """Return a configuration of DeepSpeed with torch's optimizers, which DeepSpeed calls untested."""
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING, "zero_optimization": dict(ZERO[zero]),
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **options,
    }  # fmt: skip


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return copies of the whole weights, which DeepSpeed may have partitioned. A collective call."""
    import deepspeed

    weights = {}
    for name, weight in model.named_parameters():
        with deepspeed.zero.GatheredParameters(weight, enabled=hasattr(weight, "ds_id")):
            weights[name.removeprefix("module.")] = weight.detach().clone()
    return weights


def compile_nothing() -> None:
    """Import DeepSpeed, and keep it from compiling an operator that training does not use."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# --- DeepSpeed's engine ----------------------------------------------------------------------------------------------


def batch(step: int, micro: int, ring_index: int) -> dict[str, Tensor]:
    """Return one of the batches of a step, with a different number of labels in each."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + ring_index)
    tokens = torch.randint(3, 64, (2, 21), generator=generator)
    labels = tokens.clone()
    labels[0, : 3 + 4 * ring_index + 2 * micro] = -100
    return {"input_ids": tokens, "labels": labels}


def optimizer_of(model: Any) -> Any:
    # The weights of SGD show the scale of gradients. Adam's do not.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_engine(zero: str, rings: int) -> dict[str, Tensor]:
    """Train with torch in one process."""
    model = tiny_model("qwen2", "eager")
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        batches = [batch(step, micro, index) for micro in range(MICRO_BATCHES) for index in range(rings)]
        labels = sum((each["labels"][:, 1:] != -100).sum() for each in batches)
        for each in batches:
            model(**each, num_items_in_batch=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def engine(zero: str, rings: int, reentrant: bool | None = None, calls: int = 1, **options: Any) -> dict[str, Tensor]:
    """Train with DeepSpeed's engine over rings of two processes.

    `reentrant`: the kind of activation checkpoints, or None for none. `calls`: how often a step calls the model before
    its backward pass, for the mean of the losses. `options`: those of `prepare`.
    """
    import deepspeed

    deepspeed.init_distributed("gloo")
    mesh = init_device_mesh("cpu", (rings, 2), mesh_dim_names=("dp", "cp"))
    model = prepare(tiny_model("qwen2", "eager"), **options)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=configuration(zero))
    with Ring(mesh, timeout_s=60.0) as ring:
        for step in range(STEPS):
            batches = [batch(step, micro, mesh["dp"].get_local_rank()) for micro in range(MICRO_BATCHES)]
            parts = [shard_batch(ring, each, model=model) for each in batches]
            labels = [shards["shift_labels"] for _, shards in parts]
            scale = loss_scale(labels, ring, gradients="mean", data_parallel=mesh["dp"].get_group())
            for seq, shards in parts:
                with ring.activate(seq):
                    losses = [ours(**shards, num_items_in_batch=torch.tensor(1.0)).loss for _ in range(calls)]
                    ours.backward(sum(losses) / calls * scale * ours.gradient_accumulation_steps())
                ours.step()
    return weights_of(model)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of one length, with different numbers of labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, 64, (21,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: 2 + index] = -100
        return {"input_ids": tokens, "labels": labels}


def engine_losses(create: Any, **options: Any) -> dict[str, Tensor]:
    """Train with an engine of whole batches, from `create`: its own loader, a loss of the user, an evaluation.

    The losses are means over ranks.
    """
    model = tiny_model("qwen2", "eager")
    given = {"model": model, "optimizer": optimizer_of(model), "training_data": Texts()}
    engine, _, loader, _ = create(**given, **options)
    evaluation = engine.deepspeed_io(Texts(), route="eval")
    losses = []
    for batch in loader:
        outputs = engine(**batch)
        loss = outputs.loss + 1e-2 * outputs.logits.logsumexp(-1)[batch["labels"] != -100].square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.eval()
    with torch.no_grad():
        losses += [engine(**batch).loss for batch in evaluation]
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    return {**weights_of(engine), "losses": total / torch.distributed.get_world_size()}


def plain_whole(zero: str, rings: int) -> dict[str, Tensor]:
    """Train with DeepSpeed with one process for each ring, without ZeRO."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    return engine_losses(deepspeed.initialize, config=configuration("0", train_batch_size=4 * rings))


def whole(zero: str, rings: int) -> dict[str, Tensor]:
    """Train with an engine of whole batches over rings of two processes."""
    import deepspeed

    from ringattn.adapters.deepspeed import initialize

    deepspeed.init_distributed("gloo")
    return engine_losses(initialize, config=configuration(zero, train_batch_size=4 * rings), cp_size=2)


def refused() -> None:
    """Check what `initialize` refuses before it creates an engine."""
    from ringattn.adapters.deepspeed import initialize

    linear, llama = torch.nn.Linear(2, 2), tiny_model("llama", "eager")
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model"):
        initialize(model=linear, config={})
    with pytest.raises(UnsupportedError, match="mpu would divide the ranks of a ring among other groups"):
        initialize(model=llama, config={}, mpu=object())


def refused_partitions() -> None:
    """Check what the options for less memory refuse with ZeRO 3."""
    forked_ranks(1, _refused_partitions)


def _refused_partitions(_: int) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    tokens = batch(0, 0, 0)["input_ids"]

    def check(message: str, engine: Any) -> None:
        with pytest.raises(UnsupportedError, match=message):
            engine(input_ids=tokens)

    def engine_of(model: Any) -> Any:
        return deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=configuration("3"))[0]

    for options, part in (({"tiled_mlp": 5}, "LlamaMLP"), ({"head_groups": 2}, "LlamaAttention")):
        model = tiny_model("llama", "eager")
        engine = engine_of(model)
        prepare(model, **options)
        check(rf"^{next(iter(options))}: .* not gathered the weights of {part}; call prepare\(\) before", engine)
    model = prepare(tiny_model("llama", "eager"), tiled_mlp=5)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    check("^tiled_mlp: .* a hook or a replaced forward of up_proj would be ignored", engine_of(model))


# --- transformers' Trainer -------------------------------------------------------------------------------------------


def deepspeed_on_cpus() -> None:
    """Let accelerate run DeepSpeed over gloo; without a backend, it takes several CPUs for one process."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]


LOSSES: dict[str, tuple[type[Trainer], dict[str, Any], dict[str, Any]]] = {
    "padded": (Trainer, {}, {}),
    "packed": (Trainer, {}, {"data_collator": DataCollatorWithFlattening()}),
    "z-loss": (ZLoss, {}, {}),
    "loaded": (Trainer, {}, {}),
    "checkpointed": (Trainer, CHECKPOINTED, {}),
    "labels of each process": (Trainer, {"average_tokens_across_devices": False}, {}),
}


def settings_of(zero: str) -> dict[str, Any]:
    """Return the TrainingArguments for DeepSpeed on CPUs."""
    batches = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    return {
        "deepspeed": configuration(zero, **batches), "accelerator_config": {"use_configured_state": True},
        "use_cpu": False,
    }  # fmt: skip


def trained(case: str, zero: str, rings: int, texts_of_batch: int = 2) -> dict[str, Tensor]:
    """Return the weights and losses of a Trainer, over `rings` with DeepSpeed, or with 0 in one process without it."""
    kind, arguments, differs = LOSSES[case]
    if rings:
        arguments = arguments | settings_of(zero)
    data = {"train_dataset": texts(), "eval_dataset": texts()[:4], "data_collator": padded, **differs}
    model = tiny_model("qwen2", "eager")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(os.path.join(folder, "model"))
        if rings:
            deepspeed_on_cpus()
        args = TrainingArguments(**{
            "output_dir": folder, "per_device_train_batch_size": texts_of_batch, "per_device_eval_batch_size": 2,
            "max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": 1e-2, "use_cpu": True,
            "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "optim": "sgd",
            "max_grad_norm": CLIPPING, "remove_unused_columns": False, **arguments,
        })  # fmt: skip
        if case == "loaded":  # after the arguments, so with ZeRO 3 weights are partitioned while they are loaded
            model = type(model).from_pretrained(os.path.join(folder, "model"), dtype=torch.float64)
        data |= {"args": args, "model": model}
        if rings:
            data |= {"ring": ring_of_ranks(2, "cpu")}
            kind = type("Ours", (RingTrainerMixin, kind), {})
        host = kind(**data)
        host.train()
        losses = [entry["loss"] for entry in host.state.log_history if "loss" in entry]
        losses.append(host.evaluate()["eval_loss"])
    return {**weights_of(host.model), "losses": torch.tensor(losses, dtype=torch.float64)}


def plain_trainer(case: str, zero: str, rings: int) -> dict[str, Tensor]:
    """Train in one process, with the batches of all rings in one."""
    return trained(case, zero, 0, texts_of_batch=2 * rings)


# --- accelerate's loop -----------------------------------------------------------------------------------------------


def updates(create: Any, *arguments: Any, dummies: bool = False, **options: Any) -> dict[str, Tensor]:
    """Train with the Accelerator that `create` returns: accumulation, clipping, a learning rate, a metric."""
    model = tiny_model("qwen2", "eager")  # before the Accelerator, with which ZeRO 3 would partition its weights
    accelerator = create(*arguments, **options)
    loader = DataLoader(texts(), batch_size=2, collate_fn=padded)
    steps = len(texts()) // 2 // MICRO_BATCHES  # of one process; a prepared scheduler counts for several
    optimizer: Any = DummyOptim(model.parameters(), lr=0.1) if dummies else optimizer_of(model)
    scheduler: Any = (
        DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=1)
        if dummies
        else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: max(0.1, 1 - done / steps))
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, rates, counts = [], [], []
    for _ in range(2):
        for each in loader:
            with accelerator.accumulate(model):
                loss = model(**each).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses += accelerator.gather(loss.detach().reshape(1)).tolist()
            rates += scheduler.get_last_lr()
            counts.append(int(accelerator.reduce((each["labels"] != -100).sum(), "sum")))
    values = {"losses": losses, "rates": rates, "counts": counts}
    return {**weights_of(model), **{name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}}


def accelerator_of(kind: Any, zero: str, **options: Any) -> Any:
    """Return an Accelerator with DeepSpeed over gloo."""
    config = configuration(zero, train_batch_size="auto", train_micro_batch_size_per_gpu="auto", **options)
    ring = {"cp_size": 2} if kind is RingAccelerator else {}
    handlers = [InitProcessGroupKwargs(backend="gloo")]
    return kind(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=handlers, **ring)


DUMMIES = {
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}


def plain_loop(zero: str, rings: int) -> dict[str, Tensor]:
    """Train with accelerate with one process for each ring, without DeepSpeed."""
    return updates(Accelerator, cpu=True, gradient_accumulation_steps=MICRO_BATCHES)


def plain_dummies(zero: str, rings: int) -> dict[str, Tensor]:
    """Train with accelerate with one process for each ring, with DeepSpeed."""
    return updates(accelerator_of, Accelerator, zero, dummies=True, **DUMMIES)


def loop(zero: str, rings: int) -> dict[str, Tensor]:
    return updates(accelerator_of, RingAccelerator, zero)


def dummies(zero: str, rings: int) -> dict[str, Tensor]:
    return updates(accelerator_of, RingAccelerator, zero, dummies=True, **DUMMIES)


# --- runs ------------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, Any]] = {
    "engine": (plain_engine, engine),
    **{
        f"engine, less memory, reentrant {reentrant}": (
            plain_engine,
            partial(engine, reentrant=reentrant, tiled_mlp=5, chunked_loss=4, head_groups=2),
        )
        for reentrant in (None, False, True)
    },
    "engine, less memory, two calls": (plain_engine, partial(engine, calls=2, tiled_mlp=5, head_groups=2)),
    "whole": (plain_whole, whole),
    "loop": (plain_loop, loop),
    "dummies": (plain_dummies, dummies),
    **{f"trainer, {case}": (partial(plain_trainer, case), partial(trained, case)) for case in LOSSES},
}


VALUES = "losses", "rates", "counts"


def errors(kind: str, rings: int, zero: list[str]) -> dict[str, list[float]]:
    """Return the largest relative errors of the weights and of the other values after training, by kind of ZeRO."""
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc, assignment]  # DeepSpeed's factor of clipping
    with in_double():
        compile_nothing()
        plain, ours = KINDS[kind]
        # Loops with a mean for each batch are compared with one process for each ring.
        processes = rings if kind in ("whole", "loop", "dummies") else 1
        expected = forked_ranks(processes, partial(run, plain, zero[0], rings))[0]
        compare = partial(compared, ours, rings, expected)
        return {one: forked_ranks(2 * rings, partial(compare, one))[-1] for one in zero}


def run(train: Any, zero: str, rings: int, number: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    result: dict[str, Tensor] = train(zero, rings)
    return result


def compared(train: Any, rings: int, expected: dict[str, Tensor], zero: str, number: int) -> list[float]:
    actual = run(train, zero, rings, number)
    assert actual.keys() == expected.keys()
    values = [name for name in expected if name in VALUES]
    weights = [name for name in expected if name not in VALUES]
    return [worst_error((actual[name], expected[name]) for name in names) for names in (weights, values)]
