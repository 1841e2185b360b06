"""Options of `prepare` that save memory: equal loss and gradients with a lower peak of memory, and refusals."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn import Ring
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers import shard_batch
from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError, UnsupportedError
from ringattn.layers import tiled
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.processes import call_in_program, forked_ranks, worst_error
from tests.adapters.ranks import InDouble, batches, far_off_sharded, gradients, labels_of, summed_gradients

EXACT = 1e-12
ALL = {"tiled_mlp": 5, "chunked_loss": 7}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the copies from and to a GPU's host memory by numpy arrays. Return a list of the moved element counts."""
    moved: list[int] = []

    def to_host(x: Tensor) -> Any:
        moved.append(x.numel())
        return x.detach().numpy().copy()

    monkeypatch.setattr(tiled, "to_host", to_host)
    monkeypatch.setattr(tiled, "from_host", lambda array: tiled.DeviceCopy(torch.from_numpy(array), None))
    monkeypatch.setattr("ringattn.adapters.transformers.memory.check_device", lambda device, option: None)
    return moved


PLAIN = batches()["plain"]


def called(model: Any, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    """Call the model with labels in one process. Return the output and all gradients."""
    out = model(**{**PLAIN, "num_items_in_batch": labels_of(PLAIN), **changes})
    return out, gradients(model, out.loss)


def worst(actual: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return the largest error, relative to the largest number of its tensor, or to 1 if that is larger."""
    return worst_error(((actual[name], true[name]) for name in true), floor=1.0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "granite", "phi3"])  # softcap, scales, one gate_up
def test_one_process_has_the_same_loss_and_gradients(name: str) -> None:
    with InDouble():
        true, _ = called(adapter.prepare(tiny_model(name, "ringattn")))
        model = adapter.prepare(tiny_model(name, "ringattn"), **ALL).train()
        for counts in ({}, {"num_items_in_batch": None}):  # a sum divided by all ranks' labels, and transformers' mean
            expected = called(adapter.prepare(tiny_model(name, "ringattn")), **counts)
            out, grads = called(model, **counts)
            torch.testing.assert_close(out.loss, expected[0].loss, rtol=EXACT, atol=0)
            assert worst(grads, expected[1]) < EXACT
            assert out.logits is None and "logits" not in out
        without = model(input_ids=PLAIN["input_ids"])
        torch.testing.assert_close(without.logits, true.logits, rtol=EXACT, atol=EXACT)


def test_checkpoints_on_the_host_change_no_bit(host: list[int]) -> None:
    true, expected = called(adapter.prepare(tiny_model("llama", "ringattn")).train())
    model = adapter.prepare(tiny_model("llama", "ringattn"), offload_checkpoints=True).train()
    out, grads = called(model)
    assert torch.equal(out.loss, true.loss) and all(torch.equal(grads[of], expected[of]) for of in expected)
    assert host == [PLAIN["input_ids"].numel() * model.config.hidden_size] * model.config.num_hidden_layers
    again = adapter.prepare(tiny_model("llama", "ringattn"), **ALL, offload_checkpoints=True).train()
    assert worst(called(again)[1], expected) < 1e-6  # transformers' own loss is rounded to float32


def loss_over(ring: Ring, model: Any) -> Tensor:
    """Return this rank's part of the loss of `PLAIN`."""
    seq, shards = shard_batch(ring, PLAIN, layout="zigzag")
    with ring.activate(seq):
        loss: Tensor = model(**shards, num_items_in_batch=labels_of(PLAIN)).loss
    return loss


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_two_ranks_have_the_loss_and_gradients_of_one(name: str) -> None:
    with InDouble():
        true, grads = called(tiny_model(name, "eager"))

    def body(ring: Ring) -> float:
        with InDouble():
            model = adapter.prepare(tiny_model(name, "ringattn"), **ALL)
            loss = loss_over(ring, model)
            total, sums = loss.detach().clone(), summed_gradients(ring, model, loss)
            ring.all_reduce([total])
        return max(worst(sums, grads), abs(total.item() / true.loss.item() - 1))

    assert max(run_ranks(2, body)) < EXACT


def sharded_errors() -> list[float]:
    """Return the errors under FSDP2: with the head in the root's group, in a separate group, and with frozen weights.

    Needs a process that has not started threads.
    """

    def make(frozen: str = "") -> Any:
        model = adapter.prepare(tiny_model("llama", "ringattn"), **ALL)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, weight in model.named_parameters():
            weight.requires_grad_(not frozen or frozen not in name)
        return model

    return [
        *(far_off_sharded(make, PLAIN, parts) for parts in ((), ("lm_head",))),
        far_off_sharded(partial(make, "up_proj"), PLAIN),
    ]


@pytest.mark.slow
def test_sharded_weights_learn_the_same() -> None:
    assert max(call_in_program("tests.adapters.test_transformers_memory:sharded_errors")) < EXACT


EVERY = {**ALL, "head_groups": 2}


def under_fsdp1(number: int) -> dict[str, Any]:
    """Return the error of a step with all options under FSDP1 with original parameters, and messages without them."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    dist.init_process_group("gloo")

    def stepped(frozen: str, original: bool, options: dict[str, Any], grads: bool = True) -> dict[str, Tensor]:
        """Return the weights after a step of SGD, or the logits without gradients."""
        model = adapter.prepare(tiny_model("llama", "ringattn").double(), **options)
        for name, weight in model.named_parameters():
            weight.requires_grad_(not frozen or frozen not in name)
        policy, device = ModuleWrapPolicy({LlamaDecoderLayer}), torch.device("cpu")
        sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=original)
        if not grads:
            with torch.no_grad():
                return {"logits": sharded(input_ids=PLAIN["input_ids"]).logits}
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        sharded(**PLAIN, num_items_in_batch=labels_of(PLAIN)).loss.backward()
        optimizer.step()
        with FullyShardedDataParallel.summon_full_params(sharded):
            return {name: weight.detach().clone() for name, weight in sharded.named_parameters()}

    def message(options: dict[str, Any]) -> str:
        with pytest.raises(UnsupportedError) as refusal:
            stepped("", False, options)
        return str(refusal.value)

    result: dict[str, Any] = {name: message({name: EVERY[name]}) for name in EVERY}
    result["error"] = max(
        worst(stepped(frozen, True, EVERY), stepped(frozen, True, {})) for frozen in ("", "up_proj", "v_proj")
    )
    result["error without gradients"] = worst(stepped("", False, ALL, False), stepped("", False, {}, False))
    return result


def results_under_fsdp1() -> list[dict[str, Any]]:
    """Return the results of two processes. Needs a process that has not started threads."""
    return forked_ranks(2, under_fsdp1)


def test_weights_that_fsdp1_hides_are_refused() -> None:
    parts = {"tiled_mlp": "LlamaMLP", "chunked_loss": "Linear", "head_groups": "LlamaAttention"}
    for result in call_in_program("tests.adapters.test_transformers_memory:results_under_fsdp1"):
        assert result.pop("error") < 1e-6 and result.pop("error without gradients") < EXACT
        for option, message in result.items():
            says = f"{option}: FSDP1 with use_orig_params=False hides the weights of {parts[option]}, "
            assert message.startswith(says) and "pass use_orig_params=True, use FSDP2" in message


def test_hooks_of_weights_see_the_whole_gradient() -> None:
    def hooked(options: dict[str, Any]) -> Any:
        model = adapter.prepare(tiny_model("llama", "ringattn").double(), **options)
        for weight in model.parameters():
            weight.register_hook(lambda grad: (2 * grad).clamp(-0.01, 0.01))
        return model

    (_, actual), (_, true) = called(hooked(EVERY)), called(hooked({}))
    assert worst(actual, true) < 1e-6


class Switched(torch.nn.Linear):
    """A linear layer with another factor for each adapter, and the names of the active ones, like a layer of PEFT."""

    is_off = False

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__(*weight.shape[::-1], bias=False, device="meta")
        self.weight, self.active = weight, ["first"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.is_off else len(self.active))


def changed_meanwhile(model: Any, change: Any) -> str:
    """Return the message of a backward pass after a change since forward, or "" if gradients are those without it."""
    loss = model(**PLAIN, num_items_in_batch=labels_of(PLAIN)).loss
    change(model)
    try:
        actual = gradients(model, loss)
    except RuntimeError as error:
        return str(error)
    assert worst(actual, called(model)[1]) < 1e-6
    return ""


def test_what_a_module_reads_may_not_change_before_backward() -> None:
    def switched(name: str) -> Any:
        model = tiny_model("qwen3", "ringattn", num_hidden_layers=1).double()
        model = adapter.prepare(model, **{name: EVERY[name]}).train()
        feed_forward = model.model.layers[0].mlp
        feed_forward.up_proj = Switched(feed_forward.up_proj.weight)
        feed_forward.register_buffer("factor", torch.ones(1))
        return model

    def first(model: Any) -> Any:
        return model.model.layers[0].mlp

    def off_and_on(model: Any) -> None:
        first(model).up_proj.is_off = True
        first(model).up_proj.is_off = False  # now an attribute of the module, and equal to that of its class

    for name, part in {"tiled_mlp": "Qwen3MLP", "chunked_loss": "Linear", "head_groups": "Qwen3Attention"}.items():
        assert changed_meanwhile(switched(name), lambda model: model.eval()).startswith(f"{part}.training")
        assert not changed_meanwhile(switched(name), lambda model: model.eval().train())
    for message, change in {
        "up_proj.active": lambda model: first(model).up_proj.active.append("second"),
        "up_proj.is_off": lambda model: setattr(first(model).up_proj, "is_off", True),
        "factor": lambda model: setattr(first(model), "factor", torch.ones(1)),
    }.items():
        assert changed_meanwhile(switched("tiled_mlp"), change).startswith(f"Qwen3MLP.{message} changed")
    contents = changed_meanwhile(switched("tiled_mlp"), lambda model: first(model).factor.add_(1))
    assert contents.startswith("the contents of Qwen3MLP.factor changed")
    assert not changed_meanwhile(switched("tiled_mlp"), off_and_on)


def test_other_weights_for_one_call_are_refused_in_backward() -> None:
    for name, weight in {"tiled_mlp": "Qwen3MLP.gate", "chunked_loss": "Linear.w", "head_groups": "Qwen3A"}.items():
        model = adapter.prepare(tiny_model("qwen3", "ringattn"), **{name: EVERY[name]})
        fast = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
        loss = torch.func.functional_call(model, fast, (), PLAIN).loss
        with pytest.raises(RuntimeError, match=rf"^{weight}.* changed between forward and backward"):
            loss.backward()


def test_a_buffer_that_each_call_updates_is_refused() -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), tiled_mlp=5).train()
    torch.nn.utils.parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UnsupportedError, match=r"^tiled_mlp: LlamaMLP updates its buffer up_proj\..*\._u in every"):
        called(model)
    assert called(model.eval())[0].loss.isfinite()


def test_parametrized_weights_learn_the_same() -> None:
    def parametrized(options: dict[str, Any]) -> Any:
        model = adapter.prepare(tiny_model("llama", "ringattn").double(), **options)
        register_parametrization(model.lm_head, "weight", torch.nn.Tanh())
        with pytest.warns(FutureWarning, match="deprecated"):  # the weight becomes an attribute, not a parameter
            torch.nn.utils.weight_norm(model.model.layers[0].mlp.up_proj)
        return model

    (_, actual), (_, true) = called(parametrized(ALL)), called(parametrized({}))
    assert {"lm_head.parametrizations.weight.original", "model.layers.0.mlp.up_proj.weight_g"} < actual.keys()
    assert worst(actual, true) < 1e-6


def test_float32_and_bfloat16_stay_within_their_rounding() -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        true, expected = called(adapter.prepare(tiny_model("llama", "ringattn").to(dtype)))
        out, grads = called(adapter.prepare(tiny_model("llama", "ringattn").to(dtype), **ALL))
        assert abs(out.loss.item() / true.loss.item() - 1) < bound and worst(grads, expected) < bound


def test_lora_beneath_learns_the_same() -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn").double(), **ALL)
    plain = adapter.prepare(tiny_model("llama", "ringattn").double())
    for module in (model, plain):
        for name, weight in module.named_parameters():
            weight.requires_grad_("down_proj" in name)
    (_, actual), (_, true) = called(model), called(plain)
    assert worst(actual, true) < 1e-6 and all(x.abs().max() > 0 for of, x in actual.items() if "down_proj" in of)


def test_each_option_takes_less(host: list[int]) -> None:
    tokens = torch.arange(512)[None] % 64
    sizes = {"max_position_embeddings": 512, "intermediate_size": 512, "vocab_size": 1024}
    layers, width, inner, vocabulary = 2, 32, 512, 1024

    def peak(**options: Any) -> int:
        model = adapter.prepare(tiny_model("llama", "ringattn", **sizes).float(), **options).train()
        with StorageMeter() as meter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        return meter.peak_bytes

    plain = peak()
    # Saved are logits, log-probabilities and gradients of all tokens; chunks add those of 64 tokens and two gradients
    # of the head.
    assert plain - peak(chunked_loss=64) > 4 * (2.5 * 512 * vocabulary - 4 * 64 * vocabulary - 2 * vocabulary * width)
    # No layer keeps gate, up, silu(gate) and their product for backward, and the peak is at the loss.
    assert plain - peak(tiled_mlp=64) > 0.95 * layers * 4 * 4 * 512 * inner
    both = peak(chunked_loss=64, tiled_mlp=64)
    assert both < plain / 4
    assert peak(chunked_loss=64, tiled_mlp=64, offload_checkpoints=True) < both


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_experts_are_refused_and_the_model_stays_as_it_was(name: str) -> None:
    model = tiny_model(name, "ringattn")
    with pytest.raises(UnsupportedError, match=r"^tiled_mlp: .*\(experts"):
        adapter.prepare(model, **ALL)
    assert adapter.prepare(model)(input_ids=PLAIN["input_ids"], labels=PLAIN["labels"]).logits is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiled_mlp": 0}, "tiled_mlp must be a number of tokens, at least 1, or None, got 0"),
        ({"tiled_mlp": True}, "tiled_mlp must be a number of tokens.*, got True"),
        ({"chunked_loss": -1}, "chunked_loss must be a number of tokens.*, got -1"),
    ],
)
def test_numbers_of_tokens(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        adapter.prepare(tiny_model("llama", "ringattn"), **options)


def test_a_second_prepare_keeps_the_first_or_is_refused() -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), chunked_loss=7)
    adapter.prepare(adapter.prepare(model), chunked_loss=7)
    assert called(model)[0].logits is None
    with pytest.raises(InputError, match="chunked_loss=8: this model was prepared with chunked_loss=7"):
        adapter.prepare(model, chunked_loss=8)


def test_copies_of_a_model_save_memory_too() -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), **ALL)
    copied = copy.deepcopy(model)
    assert adapter.prepare(copied, **ALL) is copied
    assert list(inspect.signature(copied.forward).parameters)[:2] == ["input_ids", "attention_mask"]
    (out, grads), (again, copied_grads) = called(model), called(copied)
    assert again.logits is None and torch.equal(out.loss, again.loss)
    assert all(torch.equal(copied_grads[of], grads[of]) for of in grads)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert called(copied)[0].loss == again.loss != called(model)[0].loss


def test_no_loss_of_another_kind() -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=4, pad_token_id=0)  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"^chunked_loss: LlamaForSequenceClassification has no"):
        adapter.prepare(LlamaForSequenceClassification(config), chunked_loss=7)


def test_logits_that_are_looked_at_are_refused() -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), chunked_loss=7)
    with pytest.raises(InputError, match="return_dict=False"):
        model(input_ids=PLAIN["input_ids"], labels=PLAIN["labels"], return_dict=False)
    with pytest.raises(InputError, match=r"chunked_loss: 52 labels for 54 tokens"):
        model(input_ids=PLAIN["input_ids"], labels=PLAIN["labels"], shift_labels=PLAIN["labels"][:, 1:])
    chunks = model.loss_function.loss
    chunks.has_labels = True
    logits = model.lm_head(torch.zeros(1, 2, 32))
    for look in (lambda: logits[..., 0], lambda: logits.argmax(-1), lambda: torch.softmax(logits, -1),
                 lambda: logits * torch.ones(64)):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"^chunked_loss: .* the model uses them"):
            chunks(look(), PLAIN["labels"], 64)
    assert not hasattr(logits, "dtype")


def test_checkpoints_have_nowhere_to_go_on_a_cpu_and_stay_on() -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), offload_checkpoints=True).train()
    with pytest.raises(InputError, match=r"^offload_checkpoints=True: .* on a CPU"):
        called(model)
    model.eval()(input_ids=PLAIN["input_ids"])
    model.train().gradient_checkpointing_disable()
    with pytest.raises(InputError, match=r"^offload_checkpoints=True: gradient checkpointing was turned off"):
        called(model)


def test_a_trainer_that_sets_checkpoints_again_leaves_them_on_the_host(host: list[int]) -> None:
    model = adapter.prepare(tiny_model("llama", "ringattn"), offload_checkpoints=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    called(model)
    assert host == [PLAIN["input_ids"].numel() * 32] * 2
