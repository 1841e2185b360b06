"""diffusers over a ring: a Flux transformer and a block with cross attention, against one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ringattn import InputError, Ring
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.testing import run_ranks

pytest.importorskip("diffusers", reason="needs diffusers")

from diffusers import FluxTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock

from ringattn.adapters.diffusers import JointSequence, RingAttnProcessor, RingFluxAttnProcessor
from tests.adapters.processes import whole, worst_error
from tests.adapters.versions import packages

DIM = 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> nn.Module:
    """Fill the module with float64 weights that are equal on every rank. Return it."""
    generator = torch.Generator().manual_seed(4)
    module.double()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator) * 0.2)
    return module


def flux() -> nn.Module:
    return filled(
        FluxTransformer2DModel(
            in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=DIM, pooled_projection_dim=8, guidance_embeds=False, axes_dims_rope=(2, 2, 4),
        )
    )  # fmt: skip


def block() -> nn.Module:
    return filled(BasicTransformerBlock(DIM, 2, 8, cross_attention_dim=12))


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), weights, allow_unused=True)
    return [torch.zeros_like(weight) if grad is None else grad for weight, grad in zip(weights, grads, strict=True)]


def check(ring: Ring, model: nn.Module, out: Tensor, expected: list[Tensor]) -> float:
    """Check that the summed gradients of all ranks equal those of one process. Return the largest relative error."""
    actual = gradients(model, out)
    ring.all_reduce(actual)
    worst = worst_error(zip(actual, expected, strict=True))
    assert worst < 1e-10
    return worst


# --- text and image attend jointly -----------------------------------------------------------------------------------

TEXT, IMAGE = 5, 7


def flux_inputs(of_text: Callable[..., Tensor], of_image: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": of_image(randn(2, IMAGE, 4), 1),
        "encoder_hidden_states": of_text(randn(2, TEXT, DIM, seed=1), 1),
        "pooled_projections": randn(2, 8, seed=2),
        "timestep": torch.tensor([0.3, 0.8], dtype=torch.float64),
        "img_ids": of_image(torch.arange(3 * IMAGE, dtype=torch.float64).view(IMAGE, 3), 0),
        "txt_ids": of_text(torch.zeros(TEXT, 3, dtype=torch.float64), 0),
        "return_dict": False,
    }


def plain(model: Any) -> Any:
    return model


def checkpointed(model: Any) -> Any:
    model.enable_gradient_checkpointing()
    return model


def compiled(model: Any) -> Any:
    model.compile_repeated_blocks(backend="eager")
    return model


OF_MODES = {"plain": plain, "checkpointing": checkpointed, "compile": compiled}


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(2, "plain"), (3, "plain"), (2, "checkpointing"), pytest.param(2, "compile", marks=pytest.mark.slow)],
)
def test_a_flux_transformer_equals_one_process(ranks: int, mode: str) -> None:
    """Outputs and gradients of two steps are exact. Compiled code and checkpoints may treat the second differently."""
    torch._dynamo.reset()
    alone = flux()
    (reference,) = alone(**flux_inputs(lambda x, dim: x, lambda x, dim: x))
    expected = gradients(alone, reference)

    def body(ring: Ring) -> int:
        model = OF_MODES[mode](flux())
        model.set_attn_processor(RingFluxAttnProcessor())
        joint = JointSequence(ring, TEXT, IMAGE)
        for _ in range(2):
            with ring.activate(joint):
                (out,) = model(**flux_inputs(joint.shard_text, joint.shard_image))
            torch.testing.assert_close(joint.gather_image(out), reference, rtol=1e-10, atol=1e-10)
            check(ring, model, out, expected)
        return ring.counters()["passes"]

    assert set(run_ranks(ranks, body)) == {2 * (6 if mode == "checkpointing" else 4)}  # for two blocks


def of_processes(spec: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative error of each mode's gradients, on one of two ranks."""
    from peft import LoraConfig

    def sharded(model: Any) -> Any:
        for part in (*model.transformer_blocks, *model.single_transformer_blocks, model):
            fully_shard(part)
        return model

    def adapted(model: Any) -> Any:
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "add_v_proj", "to_out.0"]))
        return filled(model)

    dist.init_process_group("gloo")
    expected = {}
    for mode, changed in (("FSDP2", plain), ("PEFT", adapted)):
        alone = changed(flux())
        expected[mode] = gradients(alone, alone(**flux_inputs(lambda x, dim: x, lambda x, dim: x))[0])
    assert 0 < len(expected["PEFT"]) < len(expected["FSDP2"]) and all(grad.any() for grad in expected["PEFT"])
    errors = {}
    with Ring(dist.group.WORLD) as ring:
        joint = JointSequence(ring, TEXT, IMAGE)
        for mode, changed in (("FSDP2", sharded), ("PEFT", adapted)):
            model = changed(flux())
            model.set_attn_processor(RingFluxAttnProcessor())
            with ring.activate(joint):
                (out,) = model(**flux_inputs(joint.shard_text, joint.shard_image))
            if mode == "PEFT":
                errors[mode] = check(ring, model, out, expected[mode])
                continue
            (out.square().sum() * ring.world_size).backward()  # FSDP2 takes the mean over ranks
            grads = [whole(weight.grad) for weight in model.parameters()]
            errors[mode] = worst_error(zip(grads, expected[mode], strict=True))
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
def test_sharded_weights_and_adapters_over_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(packages("5.23.0")))  # for PEFT: diffusers checks at import whether it is installed
    answers = run_ranks_in_processes("tests.adapters.test_diffusers:of_processes", {}, 2, 200, 1)
    assert all(set(errors) == {"FSDP2", "PEFT"} and max(errors.values()) < 1e-10 for errors in answers), answers


def test_a_joint_sequence_deals_out_both_streams() -> None:
    def body(ring: Ring) -> tuple[list[int], list[int]]:
        joint = JointSequence(ring, 5, 6)
        text, image = torch.arange(5), torch.arange(6.0).view(1, 6).requires_grad_()
        shard = joint.shard_image(image)
        assert joint.counts[ring.rank] == len(joint.shard_text(text, 0)) + shard.shape[1]
        whole = joint.gather_image(shard)
        whole.sum().backward()
        assert torch.equal(whole, image) and image.grad is not None
        assert image.grad[0].nonzero()[:, 0].tolist() == shard[0].long().tolist()
        with pytest.raises(InputError, match=r"\(1, 6\) must have the 5 tokens of its stream in dimension 1"):
            joint.shard_text(image)
        return joint.shard_text(text, 0).tolist(), shard[0].long().tolist()

    texts, images = zip(*run_ranks(3, body), strict=True)
    assert sorted(map(len, texts)) == [1, 2, 2] and [*map(len, images)] == [2, 2, 2]
    assert [*chain(*texts)] == [0, 1, 2, 3, 4] and [*chain(*images)] == [0, 1, 2, 3, 4, 5]


# --- image attends to itself, then to text ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["sharded", "whole"])
def test_a_block_with_cross_attention_equals_one_process(text: str) -> None:
    image, prompt = randn(2, 11, DIM), randn(2, 6, 12, seed=1)
    alone = block()
    reference = alone(image, encoder_hidden_states=prompt)
    expected = gradients(alone, reference)

    def body(ring: Ring) -> None:
        model, seq, text_seq = block(), ring.sequence(11, layout="contiguous"), ring.sequence(6)
        for attention in (model.attn1, model.attn2):
            attention.set_processor(RingAttnProcessor())
        shard, kv_seq = (text_seq.shard(prompt), text_seq) if text == "sharded" else (prompt, "whole")
        with ring.activate(seq):
            out = model(seq.shard(image), encoder_hidden_states=shard, cross_attention_kwargs={"kv_seq": kv_seq})
        torch.testing.assert_close(seq.gather(out), reference, rtol=1e-10, atol=1e-10)
        check(ring, model, out, expected)

    run_ranks(2, body)


def test_without_a_ring_a_block_is_that_of_diffusers() -> None:
    image, prompt, mask = randn(2, 11, DIM), randn(2, 6, 12, seed=1), torch.zeros(2, 1, 6, dtype=torch.float64)
    mask[0, :, 4:] = -1e9
    model = block()
    reference = model(image, encoder_hidden_states=prompt, encoder_attention_mask=mask)
    assert not torch.allclose(reference, model(image, encoder_hidden_states=prompt), atol=1e-3)
    for attention in (model.attn1, model.attn2):
        attention.set_processor(RingAttnProcessor())
    assert torch.equal(model(image, encoder_hidden_states=prompt, encoder_attention_mask=mask), reference)


def test_what_is_refused() -> None:
    x, prompt = randn(1, 4, DIM), randn(1, 6, 12)
    model, image = block(), flux()
    for attention in (model.attn1, model.attn2):
        attention.set_processor(RingAttnProcessor())

    def body(ring: Ring) -> None:
        seq = ring.sequence(8)
        with pytest.raises(InputError, match="no sequence is active"):
            model(x, encoder_hidden_states=prompt)
        with ring.activate(seq), pytest.raises(InputError, match=r"kv_seq.*its Sequence or .whole."):
            model.attn2(x, encoder_hidden_states=prompt)

    run_ranks(2, body)
    with Ring() as ring, ring.activate(ring.sequence(4)):
        model.attn1.group_norm = nn.GroupNorm(2, DIM)
        model.attn2.group_norm = nn.GroupNorm(2, DIM)
        for call in (lambda: model.attn1(x), lambda: model.attn2(x, encoder_hidden_states=prompt, kv_seq="whole")):
            with pytest.raises(InputError, match="group_norm and spatial_norm normalize over all tokens"):
                call()
        image.set_attn_processor(RingFluxAttnProcessor())
        attention = image.transformer_blocks[0].attn
        attention.fused_projections = True
        with pytest.raises(InputError, match="unfuse_qkv_projections"):
            attention(x)


@pytest.mark.parametrize("name", ["ip_hidden_states", "ip_adapter_masks"])
def test_an_ip_adapter_is_refused(name: str) -> None:
    """IP adapter arguments are refused although the model's blocks drop keywords that a processor does not name."""
    added = {"joint_attention_kwargs": {name: [randn(2, 4, DIM)]}}

    def body(ring: Ring) -> None:
        model, joint = flux(), JointSequence(ring, TEXT, IMAGE)
        model.set_attn_processor(RingFluxAttnProcessor())
        inputs = flux_inputs(joint.shard_text, joint.shard_image)
        with ring.activate(joint), pytest.raises(InputError, match="IP adapters are not supported"):
            model(**inputs, **(added if ring.rank else {}))
        with ring.activate(None), pytest.raises(InputError, match="IP adapters are not supported"):
            model(**inputs, **added)

    run_ranks(2, body, timeout_s=10.0)


def test_what_one_rank_alone_gets_wrong() -> None:
    """If one rank passes wrong arguments, all ranks raise, and none waits for the deadline."""
    x, mask = randn(1, 4, DIM), torch.zeros(1, 1, 4)

    def body(ring: Ring) -> None:
        model, image, wrong = block(), flux(), mask if ring.rank else None
        model.attn1.set_processor(RingAttnProcessor())
        image.set_attn_processor(RingFluxAttnProcessor())
        joint, attention = JointSequence(ring, 4, 4), image.single_transformer_blocks[0].attn
        with ring.activate(ring.sequence(8)), pytest.raises(InputError, match="attention_mask: attention over a ring"):
            model.attn1(x, attention_mask=wrong)
        with ring.activate(joint), pytest.raises(InputError, match="attention_mask: joint attention"):
            attention(x, attention_mask=wrong)
        with pytest.raises(InputError, match="tokens"):
            joint.gather_image(torch.zeros(1, 2 + ring.rank, 4))

    run_ranks(2, body, timeout_s=10.0)
