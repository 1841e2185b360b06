"""Training with other projects' parallelism of sequences, on CPUs: `public_faults.py PROJECT`.

diffusers 0.39's ring attention has wrong gradients, accelerate 1.14 shards the tokens of linear attention, and
axolotl's batch ring attends across packed documents (`axolotl`, but not `axolotl-single`). FlashAttention's kernels are
replaced by those of torch for CPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

RANKS = int(os.environ["WORLD_SIZE"])


# --- diffusers' ring attention ---------------------------------------------------------------------------------------


def flash_forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, *others: Any) -> Any:
    """Compute what FlashAttention's forward kernel does, on CPUs. Tensors are (batch, tokens, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse, None, None


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout: float, scale: float, causal: bool, *others: Any,
) -> None:  # fmt: skip
    """Compute what FlashAttention's backward kernel does, on CPUs."""
    batch, tokens, heads, _ = q.shape
    lse = lse.as_strided((batch, heads, tokens), (heads * tokens, tokens, 1))  # the kernel ignores its strides
    inputs = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, causal, scale=scale)
    for result, value in zip((dq, dk, dv), grads, strict=True):
        result.copy_(value.transpose(1, 2))


def flash(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
    """Attend on one process."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def diffusers() -> None:
    """Train a Flux with diffusers' ring attention and its backend `flash`, whose kernels are replaced."""
    from diffusers import ContextParallelConfig, FluxTransformer2DModel
    from diffusers.models import attention_dispatch

    attention_dispatch._CAN_USE_FLASH_ATTN = True
    attention_dispatch.flash_attn_func = flash
    attention_dispatch._wrapped_flash_attn_forward = flash_forward
    attention_dispatch._wrapped_flash_attn_backward = flash_backward
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    model.set_attention_backend("flash")
    if RANKS > 1:
        dist.init_process_group("gloo")
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=RANKS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        shapes = (12, 4), (12, 4), (6, 16), (8,)
        target, image, text, pooled = (torch.randn(1, *shape, generator=generator) for shape in shapes)
        (out,) = model(
            hidden_states=image, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.tensor([0.5]),
            img_ids=torch.arange(36.0).view(12, 3), txt_ids=torch.zeros(6, 3), return_dict=False,
        )  # fmt: skip
        F.mse_loss(out, target).backward()
        sum_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients over ranks, because gathered outputs give each rank the gradient of its tokens."""
    for parameter in parameters:
        if RANKS > 1:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)


# --- axolotl's batch ring --------------------------------------------------------------------------------------------


def flash_forward_grouped(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: None = None, return_softmax: bool = False,
) -> Any:  # fmt: skip
    """Compute what FlashAttention's forward kernel does, with fewer heads of keys than of queries."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    return flash_forward(q, k, v, dropout_p, softmax_scale, causal)


def flash_backward_grouped(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: None = None, deterministic: bool = False,
) -> None:  # fmt: skip
    """Compute what FlashAttention's backward kernel does, with fewer heads of keys than of queries."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    wide = torch.empty_like(k), torch.empty_like(v)
    lse = softmax_lse.float().contiguous()
    flash_backward(dout, q, k, v, out, lse, dq, *wide, dropout_p, softmax_scale, causal)
    for result, grad in zip((dk, dv), wide, strict=True):
        result.copy_(grad.unflatten(2, (-1, groups)).sum(3))


def axolotl(lengths: list[int]) -> None:
    """Train a Llama in bf16 on packed documents of these lengths with axolotl's `batch_ring`."""
    import transformers.modeling_flash_attention_utils as flash_utils
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    if RANKS > 1:
        interface = ModuleType("flash_attn.flash_attn_interface")
        interface.__dict__.update(
            _flash_attn_forward=flash_forward_grouped, _flash_attn_backward=flash_backward_grouped,
            _flash_attn_varlen_forward=None, _flash_attn_varlen_backward=None,
        )  # fmt: skip
        sys.modules |= {"flash_attn": ModuleType("flash_attn"), "flash_attn.flash_attn_interface": interface}
        # Names that ring-flash-attn 0.1.8 and axolotl 0.19 import, and transformers 5.16.1 no longer has.
        flash_utils.is_flash_attn_greater_or_equal_2_10 = lambda: True
        flash_utils.is_flash_attn_greater_or_equal = lambda version: True
        torch.cuda.current_device = lambda: "cpu"
        torch.compile = lambda function, **options: function
        from axolotl.utils.ctx_managers.sequence_parallel import SequenceParallelContextManager
        from axolotl.utils.schemas.enums import RingAttnFunc

        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        context = SequenceParallelContextManager([model], RANKS, 1, RingAttnFunc.BATCH_RING, None, True, mesh)
        model.config._attn_implementation = "flash_attention_2"
        context.__enter__()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    for _ in range(3):
        tokens = torch.randint(3, 64, positions.shape, generator=generator)
        labels = tokens.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
        logits = model(input_ids=tokens, position_ids=positions).logits
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
        sum_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()


# --- accelerate's context parallelism --------------------------------------------------------------------------------


def accelerate() -> None:
    """Train a Qwen3-Next, whose layers are linear attention, with accelerate's context parallelism."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    options: dict[str, Any] = {}
    if RANKS > 1:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # accelerate shards on these only
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        options = {"fsdp_plugin": plugin, "parallelism_config": ParallelismConfig(cp_size=RANKS)}
    accelerator = Accelerator(cpu=True, **options)
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, layer_types=["linear_attention"] * 2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, use_cache=False,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        text = torch.randint(3, 64, (1, 65), generator=generator)
        tokens, labels, positions = text[:, :-1].clone(), text[:, 1:].clone(), torch.arange(64)[None]
        sharded: AbstractContextManager[None] = nullcontext()
        if RANKS > 1:
            buffers = [tokens, labels, positions]
            sharded = accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            )
        with sharded:
            logits = model(input_ids=tokens, position_ids=positions).logits
            accelerator.backward(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    {
        "diffusers": diffusers, "accelerate": accelerate, "axolotl": partial(axolotl, [13, 12, 11, 14, 10]),
        "axolotl-single": partial(axolotl, [60]),
    }[sys.argv[1]]()  # fmt: skip
