"""Images and videos among the tokens of a text: exact over a ring, or refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ringattn import DisagreementError, InputError, Ring, UnsupportedError, masks
from ringattn.adapters.transformers import positions, prepare, shard_batch
from ringattn.testing import run_ranks
from tests.adapters.models import filled
from tests.adapters.processes import call_in_program
from tests.adapters.ranks import far_from_one, far_off, far_off_sharded, in_double

IMAGE, VIDEO = 60, 61
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "use_cache": False,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
}  # fmt: skip
TOWER = {"depth": 2, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {}, {"embed_dim": 16, "hidden_size": 32}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, {
        "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 8,
        "fullatt_block_indexes": [1],
    }),
    "qwen3_vl": ("Qwen3VL", {}, {
        "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }),
    "qwen3_vl_moe": ("Qwen3VLMoe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, {
        "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }),
}  # fmt: skip
"""By name: the prefix of its classes, and the options that differ from `TEXT` and from `TOWER`."""


def model(name: str, of: str = "ForConditionalGeneration") -> Any:
    classes, text, tower = MODELS[name]
    config = getattr(transformers, f"{classes}Config")(
        text_config={**TEXT, **text}, vision_config={**TOWER, **tower}, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    instance = getattr(transformers, f"{classes}{of}")._from_config(config, experts_implementation="eager")
    return filled(instance)


def batch(name: str, videos: bool = True) -> dict[str, Tensor]:
    """Return a batch of two rows: one with images of 4 and 3 tokens, one with an image of 2 and a video of 4 tokens.

    The ranks share the tokens of an image.
    """
    ids = torch.randint(3, 59, (2, 27), generator=torch.Generator().manual_seed(1))
    ids[0, 5:9] = ids[0, 12:15] = ids[1, 3:5] = IMAGE
    grids = [[1, 4, 4], [1, 2, 6], [1, 2, 4]]
    inputs = {"input_ids": ids, "image_grid_thw": torch.tensor(grids), "pixel_values": pixels(grids)}
    if videos:
        for start in (10, 13) if "qwen3" in name else (10, 12):  # Qwen3 has text between the frames
            ids[1, start : start + 2] = VIDEO
        inputs |= {"video_grid_thw": torch.tensor([[2, 2, 4]]), "pixel_values_videos": pixels([[2, 2, 4]])}
    inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return inputs


def pixels(grids: list[list[int]]) -> Tensor:
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, 3 * 2 * 2 * 2, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def logits(out: Any) -> Tensor:
    local: Tensor = out.logits
    return local


LLAMA = {**TEXT, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 6,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 8,
         "rope_parameters": None}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "image_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PIXTRAL = {**CLIP, "model_type": "pixtral", "image_size": 16, "head_dim": 8}
INTERNVL = {**CLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
SAM = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
       "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 24}  # fmt: skip
TILES = {"image_grid_pinpoints": [[8, 16], [16, 8]]}
SIZES = {"image_sizes": torch.tensor([[8, 16], [16, 16], [16, 8]])}
MERGED: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], dict[str, Tensor]]] = {
    "aya_vision": ("AyaVision", {"text_config": LLAMA | {"model_type": "cohere2"}, "downsample_factor": 2,
                   "vision_config": SIGLIP | {"image_size": 16}}, (4, 4, 4), (3, 3, 16, 16), {}),
    "cohere2_vision": ("Cohere2Vision", {"text_config": LLAMA | {"model_type": "cohere2"}, "downsample_factor": 2,
                       "vision_config": SIGLIP | {"image_size": 16}, "alignment_intermediate_size": 24},
                       (4, 4, 4), (3, 3, 16, 16), {}),
    "gemma3": ("Gemma3", {"text_config": GEMMA, "vision_config": SIGLIP | {"image_size": 16}, "mm_tokens_per_image": 4},
               (4, 4, 4), (3, 3, 16, 16), {}),
    "got_ocr2": ("GotOcr2", {"text_config": LLAMA | {"model_type": "qwen2"}, "vision_config": SAM},
                 (1, 1, 1), (3, 3, 64, 64), {}),
    "internvl": ("InternVL", {"vision_config": INTERNVL}, (4, 4, 4), (3, 3, 16, 16), {}),
    "lighton_ocr": ("LightOnOcr", {"text_config": LLAMA | {"model_type": "qwen3"}, "vision_config": PIXTRAL},
                    (2, 4, 2), (3, 3, 16, 16), SIZES),
    "llava": ("Llava", {}, (4, 4, 4), (3, 3, 8, 8), {}),
    "llava_next": ("LlavaNext", TILES, (14, 0, 16), (2, 3, 3, 8, 8), {"image_sizes": torch.tensor([[8, 16], [16, 8]])}),
    "llava_onevision": ("LlavaOnevision", {
        **TILES, "text_config": LLAMA | {"model_type": "qwen2"}, "vision_config": SIGLIP, "video_token_id": VIDEO,
        "vision_feature_select_strategy": "full",
    }, (14, 0, 0), (1, 3, 3, 8, 8), {"image_sizes": torch.tensor([[8, 16]])}),
    "mistral3": ("Mistral3", {"text_config": LLAMA | {"model_type": "mistral"}, "vision_config": PIXTRAL},
                 (2, 4, 2), (3, 3, 16, 16), SIZES),
    "vipllava": ("VipLlava", {"vision_feature_layers": [-1, -2]}, (4, 4, 4), (3, 3, 8, 8), {}),
}  # fmt: skip
"""By name: prefix of the classes, options of the configuration, tokens of three images, shape of pixels, other inputs.
"""


def merged_model(name: str) -> Any:
    """Return a model that counts the tokens of images like those of text."""
    classes, options, *_ = MERGED[name]
    config = getattr(transformers, f"{classes}Config")(
        **{"text_config": LLAMA, "vision_config": CLIP, "image_token_id": IMAGE, **options}
    )
    return filled(getattr(transformers, f"{classes}ForConditionalGeneration")(config))


def merged_batch(name: str) -> dict[str, Tensor]:
    """Return a batch of two rows, the first with two images and the second with one. Ranks share their tokens."""
    _, _, counts, shape, others = MERGED[name]
    ids = torch.randint(3, 59, (2, 27), generator=torch.Generator().manual_seed(1))
    for (row, start), count in zip(((0, 5), (0, 15), (1, 3)), counts, strict=True):
        ids[row, start : start + count] = IMAGE
    generator = torch.Generator().manual_seed(2)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(shape, dtype=torch.float64, generator=generator), **others}
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    if name == "llava_onevision":
        ids[1, 5:8] = VIDEO
        inputs["pixel_values_videos"] = torch.randn(1, 2, 3, 8, 8, dtype=torch.float64, generator=generator)
    return inputs


@pytest.mark.parametrize("name", [
    name if name in ("llava", "internvl", "mistral3") else pytest.param(name, marks=pytest.mark.slow) for name in MERGED
])  # fmt: skip
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("striped", marks=pytest.mark.slow)])
def test_every_gradient_of_models_that_count_images(name: str, layout: str) -> None:
    """All gradients are exact, including those of the tower and of the layers between tower and text."""
    assert name in positions.COUNTED
    assert far_off(lambda: merged_model(name), merged_batch(name), score=logits, layout=layout) < 1e-9


def test_every_supported_model_is_compared() -> None:
    assert {*MODELS, *MERGED} == {*positions.KNOWN}


@pytest.mark.parametrize(("name", "layout"), [
    ("qwen2_vl", "zigzag"), ("qwen3_vl", "contiguous"),
    pytest.param("qwen2_5_vl", "striped", marks=pytest.mark.slow),
    pytest.param("qwen3_vl_moe", "zigzag", marks=pytest.mark.slow),
])  # fmt: skip
def test_every_gradient(name: str, layout: str) -> None:
    """All gradients are exact, including those of the vision tower.

    Qwen3 adds features of the tower's lower layers to the image tokens.
    """
    assert far_off(lambda: model(name), batch(name), score=logits, layout=layout) < 1e-9


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_padding_and_loss(name: str) -> None:
    make = partial(model if name in MODELS else merged_model, name)
    whole = batch(name, videos=False) if name in MODELS else merged_batch(name)
    mask = torch.ones_like(whole["input_ids"])
    mask[1, 20:] = 0
    assert far_off(make, {**whole, "attention_mask": mask}, score=logits) < 1e-9
    labels = torch.where(whole["input_ids"] == IMAGE, -100, whole["input_ids"])
    count = int((labels[:, 1:] != -100).sum())
    true = make()(**whole, labels=labels, num_items_in_batch=count).loss

    def body(ring: Ring) -> Tensor:
        ours = prepare(make())
        seq, shards = shard_batch(ring, {**whole, "labels": labels}, model=ours)
        with ring.activate(seq):
            loss = ours(**shards, num_items_in_batch=count).loss.detach()
        ring.all_reduce([loss])
        return loss

    for loss in run_ranks(2, body, timeout_s=20.0):
        torch.testing.assert_close(loss, true, rtol=1e-5, atol=1e-5)  # rotary positions in float32


@pytest.mark.parametrize(("name", "make"), [
    ("gemma3", create_sliding_window_causal_mask), ("llava", create_causal_mask),
])  # fmt: skip
def test_other_masks_with_blocks_are_refused(name: str, make: Any) -> None:
    """A union of a window and blocks (PaliGemma 2), and blocks of a model in which they may not be images."""
    text = prepare(merged_model(name)).model.language_model
    ids = torch.arange(8)[None]
    mask = make(text.config, text.embed_tokens(ids), None, None, ids, block_sequence_ids=ids // 4)
    with pytest.raises(UnsupportedError, match=r"is made with .*blockwise_overlay.*or_masks"):
        mask.refuse()


GRIDS = [[1, 4, 4], [1, 2, 6], [1, 2, 4], [1, 4, 8], [1, 2, 2]]
"""Of five images with 4, 3, 2, 8 and 1 tokens."""


def batch_of_images(name: str, count: int) -> dict[str, Tensor]:
    """Return a batch of two rows with this number of images, whose sizes differ if the model allows it."""
    ids = torch.randint(3, 59, (2, 27), generator=torch.Generator().manual_seed(1))
    generator, sizes = torch.Generator().manual_seed(2), torch.tensor([[8, 16], [16, 16], [16, 8], [8, 8], [16, 16]])
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if name in MODELS:
        tokens = [t * h * w // 4 for t, h, w in GRIDS]
        inputs |= {"image_grid_thw": torch.tensor(GRIDS[:count]), "pixel_values": pixels(GRIDS[:count])}
    else:
        tokens = [4] * 5
        shape = (count, *MERGED[name][3][1:])
        inputs["pixel_values"] = torch.randn(shape, dtype=torch.float64, generator=generator)
        if name == "mistral3":
            tokens = (sizes.prod(1) // 64).tolist()
            inputs["image_sizes"] = sizes[:count]
    for image, (row, start) in enumerate(((0, 3), (0, 12), (1, 2), (1, 8), (1, 20))[:count]):
        ids[row, start : start + tokens[image]] = IMAGE
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    if name in MODELS:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *MERGED])
def test_sharded_images_of_every_model(name: str) -> None:
    """All gradients are exact if every rank runs the tower on some images, videos too."""
    make, whole = (model, batch(name)) if name in MODELS else (merged_model, merged_batch(name))
    assert far_off(partial(make, name), whole, score=logits, ranks=3, shard_images=True) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [
    ("qwen2_5_vl", 2), ("qwen3_vl", 3), ("llava", 2), ("mistral3", 3), ("gemma3", 2),
])  # fmt: skip
def test_any_number_of_sharded_images(name: str, ranks: int) -> None:
    """All gradients are exact with fewer images than ranks too."""
    for count in (1, 2, 3, 5):
        make, whole = partial(model if name in MODELS else merged_model, name), batch_of_images(name, count)
        assert far_off(make, whole, score=logits, ranks=ranks, layout="contiguous", shard_images=True) < 1e-9, count


def sharded_weights_error() -> float:
    """Return the largest error of sharded images with FSDP2. Needs a process that has not started threads."""
    whole = batch_of_images("qwen2_vl", 1)
    whole["labels"] = torch.where(whole["input_ids"] == IMAGE, -100, whole["input_ids"])
    blocks = ("model.visual.blocks.0", "model.visual.blocks.1")
    return far_off_sharded(partial(model, "qwen2_vl"), whole, blocks, shard_images=True)


@pytest.mark.slow
def test_sharded_images_with_sharded_weights() -> None:
    """A rank without an image takes part in the collective calls of FSDP2 inside the tower."""
    assert call_in_program("tests.adapters.test_transformers_images:sharded_weights_error") < 1e-9


@pytest.mark.parametrize(("count", "patches"), [(5, [36, 36]), (1, [16, 16])])
def test_images_are_balanced_by_their_patches(count: int, patches: list[int]) -> None:
    """Every rank runs the tower on some images, and a rank without an image on the first one."""

    def body(ring: Ring) -> int:
        ours, patches = prepare(model("qwen2_vl"), shard_images=True), []
        ours.model.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
        seq, shards = shard_batch(ring, batch_of_images("qwen2_vl", count), model=ours)
        with ring.activate(seq), torch.no_grad():
            ours(**shards)
        (rows,) = patches
        return int(rows)

    assert run_ranks(2, body, timeout_s=20.0) == patches


def test_images_that_cannot_be_sharded() -> None:
    def body(ring: Ring) -> None:
        whole = batch_of_images("llava", 3)
        with pytest.raises(
            UnsupportedError, match="shard_images: LlamaForCausalLM takes no images, or not like qwen2_vl, "
        ):
            prepare(filled(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))), shard_images=True)
        ours = prepare(merged_model("llava"), shard_images=True)
        seq, shards = shard_batch(ring, whole, model=ours)
        ours.model.vision_tower.norm = torch.nn.BatchNorm1d(3)
        with pytest.raises(InputError, match="of LlavaModel is a batch normalization"), ring.activate(seq):
            ours(**shards)
        del ours.model.vision_tower.norm
        shards["image_sizes"] = torch.tensor([[8, 8], [8, 8]])
        with pytest.raises(InputError, match=r"cannot be divided by images; .*'image_sizes': 2"), ring.activate(seq):
            ours(**shards)
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def gemma3_batch(padded: bool = False) -> dict[str, Tensor]:
    """Return three rows with labels: two adjacent images and a third, one image at the start, and no image."""
    whole = merged_batch("gemma3")
    ids = torch.randint(3, 59, (3, 27), generator=torch.Generator().manual_seed(4))
    for row, start in ((0, 3), (0, 7), (0, 19), (1, 0)):
        ids[row, start : start + 4] = IMAGE
    generator = torch.Generator().manual_seed(5)
    whole |= {
        "input_ids": ids, "token_type_ids": (ids == IMAGE).int(), "labels": torch.where(ids == IMAGE, -100, ids),
        "pixel_values": torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator),
    }  # fmt: skip
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :2], mask[0, 21:], mask[2, 20:] = 0, 0, 0  # the padding of row 0 has the end of an image
        whole["attention_mask"] = mask
        whole["labels"] = torch.where((mask == 1) & (mask.roll(1, 1) == 1), whole["labels"], -100)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "padded", "ranks"), [
    ("contiguous", False, 2), ("contiguous", False, 3), ("contiguous", False, 4), ("zigzag", False, 3),
    ("zigzag", True, 2), ("zigzag", True, 4),
])  # fmt: skip
def test_images_that_attend_in_both_directions(layout: str, padded: bool, ranks: int) -> None:
    """Logits, loss and gradients are exact in layers with a window of 6 tokens and in layers without a window.

    Two adjacent images are one block of 8 tokens, longer than the window.
    """

    def train(model: Any) -> Any:
        if layout == "contiguous":
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.train()

    whole = gemma3_batch(padded)
    with in_double():  # also while backward recomputes layers
        error = far_from_one(partial(merged_model, "gemma3"), whole, train=train, layout=layout, ranks=ranks)
    assert error < 1e-9


def test_blocks_that_cannot_be_attended_to() -> None:
    """Packed documents and a sequence with a mask are refused on all ranks."""

    def body(ring: Ring) -> None:
        ours, whole = prepare(merged_model("gemma3")), gemma3_batch()
        row = {"input_ids": whole["input_ids"][1:2], "token_type_ids": whole["token_type_ids"][1:2]}
        seq, shards = shard_batch(ring, {**row, "position_ids": torch.arange(27)[None] % 14}, model=ours)
        with pytest.raises(InputError, match="give each document its own row"), ring.activate(seq):
            ours(**shards)
        seq, shards = shard_batch(ring, row, model=ours)
        with pytest.raises(InputError, match="seq has mask=prefix:2"), ring.activate(seq.with_mask(masks.prefix(2))):
            ours(**shards)
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def refused(match: str, error: type[Exception] = InputError, name: str = "qwen2_vl", **changes: Any) -> None:
    """Assert that all ranks refuse a batch which rank 1 changes.

    `changes`: by input, a function that returns its new value, (sequence, shards) -> value.
    """

    def body(ring: Ring) -> None:
        ours = prepare(model(name))
        seq, shards = shard_batch(ring, batch(name, videos=False), model=ours)
        shards |= {key: make(seq, shards) for key, make in changes.items()} if ring.rank == 1 else {}
        with pytest.raises(error, match=match), ring.activate(seq):
            ours(**{key: x for key, x in shards.items() if x is not None})
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def test_positions_of_a_text_with_images() -> None:
    """Positions of a text without images are refused. The model would accept them, and rotate images as if text."""
    refused(r"rank 1: position_ids \(2, 14\) are not the \(3, rows, tokens\)", position_ids=lambda seq, shards: (
        seq.positions()[None].expand(2, -1)))  # fmt: skip
    refused(r"rank 1: position_ids \(3, 2, 14\) are not", position_ids=lambda seq, shards: shards["position_ids"] + 1)


def test_positions_of_images_without_images() -> None:
    refused("first of 3 rows., not .* of a text without images", pixel_values=lambda seq, shards: None,
            image_grid_thw=lambda seq, shards: None)  # fmt: skip


def test_images_on_some_ranks_only() -> None:
    def body(ring: Ring) -> None:
        ours = prepare(merged_model("llava"))
        seq, shards = shard_batch(ring, merged_batch("llava"), model=ours)
        if ring.rank == 1:
            del shards["pixel_values"]
        with pytest.raises(DisagreementError, match="the ranks"), ring.activate(seq):
            ours(**shards)

    run_ranks(2, body, timeout_s=20.0)


def test_images_in_another_form() -> None:
    refused("takes images as pixel_values, .* without input_ids", InputError, input_ids=lambda seq, shards: None,
            inputs_embeds=lambda seq, shards: torch.zeros(2, 14, 32, dtype=torch.float64))  # fmt: skip
    refused("cannot compute positions for whole rows with 9 image", image_grid_thw=lambda seq, shards: (
        shards["image_grid_thw"][:1]))  # fmt: skip
    more = [[1, 4, 4], [1, 2, 6], [1, 2, 4], [1, 4, 4]]
    refused("13 image features for 9 tokens in the whole batch", pixel_values=lambda seq, shards: pixels(more),
            image_grid_thw=lambda seq, shards: torch.tensor(more))  # fmt: skip


def test_batches_that_cannot_be_placed() -> None:
    def body(ring: Ring) -> None:
        whole, ours = batch("qwen2_vl"), prepare(model("qwen2_vl"))
        with pytest.raises(InputError, match="a batch with images needs input_ids and model="):
            shard_batch(ring, whole)
        with pytest.raises(InputError, match="position_ids with images: leave them out"):
            shard_batch(ring, {**whole, "position_ids": torch.arange(27).expand(2, -1)}, model=ours)

    run_ranks(2, body, timeout_s=20.0)


def test_other_models_with_images_in_their_text() -> None:
    """Models with images in their text that the adapter does not know are refused.

    Their tokens are sharded but their images are not, so a rank's image features would not fit its tokens.
    """
    config = transformers.FastVlmConfig(text_config=LLAMA, vision_config=CLIP, image_token_id=IMAGE)

    def body(ring: Ring) -> None:
        ours = prepare(filled(transformers.FastVlmForConditionalGeneration(config)))
        seq, shards = shard_batch(ring, {"input_ids": batch("qwen2_vl", videos=False)["input_ids"]})
        message = r"FastVlmModel inserts images .*seq\.shard\(inputs_embeds\)"
        with pytest.raises(InputError, match=message), ring.activate(seq):
            ours(**shards, pixel_values=torch.zeros(1, 3, 8, 8, dtype=torch.float64) if ring.rank else None)
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)
