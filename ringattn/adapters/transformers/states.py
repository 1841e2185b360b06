"""Layers with a state: short convolutions and recurrences of transformers' hybrid models, over a ring.

Modeling files look up a few functions by name at every call: the convolution and the recurrence of a layer.
`watch_states` puts stand-ins in their place, which call the model's own function (transformers' torch code, or the
kernel of fla, mamba-ssm or causal-conv1d that transformers has chosen) for each fragment of this rank's tokens, and
continue its states with `Ring.halo` and `Ring.scan_states`. All these recurrences are affine in their state: an initial
state S adds Q S to the outputs of a fragment, and turns its final state B into M S + B.

Guarantees: only mixers whose code is as reviewed are computed over a ring; others stay refused by name. States are
float32, or float64 in float64 models. Without an active sequence, a stand-in calls the model's own function.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.adapters.attend import UNTRACED
from ringattn.adapters.context import sequence_of
from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers.calls import CACHES, PART, STATES, attending_call
from ringattn.adapters.transformers.checks import STATE_ENTRIES, check_documents, check_tokens
from ringattn.core.fragments import Fragment
from ringattn.errors import InputError, UnsupportedError
from ringattn.gradients import with_shared_node
from ringattn.runtime.activation import attended
from ringattn.runtime.states import reach, started_scan
from ringattn.sequence import Sequence

Function = Callable[..., Any]

_MIXERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_next:Qwen3NextGatedDeltaNet": ("aead9169", "82758d8c", "447ddff5"),
    "qwen3_5:Qwen3_5GatedDeltaNet": ("92f84f26", "69b9fe39", "2593acfc"),
    "qwen3_5_moe:Qwen3_5MoeGatedDeltaNet": ("92f84f26", "69b9fe39", "2593acfc"),
    "olmo_hybrid:OlmoHybridGatedDeltaNet": ("e0663456", "6efe6cba", "17eed0b6"),
    "lfm2:Lfm2ShortConv": ("10812e20", "72c43060"),
    "lfm2_moe:Lfm2MoeShortConv": ("10812e20", "72c43060"),
    "lfm3:Lfm3ShortConv": ("10812e20", "72c43060"),
    "bamba:BambaMixer": ("f92f56d8", "80729bb4"),
    "falcon_h1:FalconH1Mixer": ("d78f0c89", "223e9ed3"),
    "nemotron_h:NemotronHMamba2Mixer": ("f92f56d8", "80729bb4"),
    "granitemoehybrid:GraniteMoeHybridMambaLayer": ("f92f56d8", "80729bb4"),
    "zamba2:Zamba2MambaMixer": ("f92f56d8", "80729bb4"),
    "mamba2:Mamba2Mixer": ("f92f56d8", "80729bb4"),
    "kimi_linear:KimiLinearDeltaAttention": ("94a60deb", "30dde50e"),
    "bailing_hybrid:BailingHybridDeltaAttention": ("09492733", "70c0e3f8"),
    "zamba:ZambaMambaMixer": ("a48db47a", "8b7966c8"),
    "jamba:JambaMambaMixer": ("0a46855a", "d0934ca5"),
    "mamba:MambaMixer": ("982f0a26", "a2e001de"),
    "falcon_mamba:FalconMambaMixer": ("c3efd7b3", "1a4dff63"),
}
"""The reviewed mixers, by file and class, with the digests of `forward`. In it, tokens mix only in `_STAND_INS`."""


# --- Recurrences ------------------------------------------------------------------------------------------------------


class _Local(NamedTuple):
    """A fragment computed from an empty state: its final state B, its transition M, and its outputs from a state S."""

    state: Tensor
    transition: Tensor
    outputs: Callable[[Tensor], Tensor]


class _Recurrence(ABC):
    """One call of a model's recurrence on this rank's tokens.

    `dim`: the dimension of tokens of its tensors. `values`: the index of the tensor that has the shape of the outputs.
    `shape`, `dtype`: of the state. `transition`: the shape of M. `matrix`: M is a matrix that is multiplied from the
    left, not a factor. `decay`, `options`: other arguments of the model's function, which have no tokens.
    """

    dim = 1
    values = 0
    matrix = False
    decay: Tensor | None = None
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, tensors: tuple[Tensor, ...], shape: tuple[int, ...], transition: tuple[int, ...]) -> None:
        self.tensors, self.shape, self.transition = tensors, shape, transition
        self.dtype = torch.promote_types(tensors[0].dtype, torch.float32)

    @abstractmethod
    def output(self, *tensors: Tensor, initial: Tensor | None, **packed: Tensor) -> Tensor:
        """Return the outputs of a fragment from an initial state, or of packed documents."""

    @abstractmethod
    def local(self, *tensors: Tensor, begins: bool) -> _Local:
        """Compute a fragment from an empty state. `begins`: it begins its document, so S is empty and M is not used."""

    def cut(self, fragment: Fragment) -> tuple[Tensor, ...]:
        """Return the tensors of a fragment."""
        return tuple(x.narrow(self.dim, fragment.start, fragment.stop - fragment.start) for x in self.tensors)

    def over_ring(self, seq: Sequence) -> Tensor:
        """Return the outputs of this rank's tokens. A collective call, and so is its backward pass."""
        reached = self._share_node()
        fragments = seq.fragments()
        parts = [each for each in fragments if each.is_part]
        empty = torch.zeros(self.shape, dtype=self.dtype, device=self.tensors[0].device)
        unused = empty.new_zeros(self.transition)
        # First the fragments whose final states other fragments need. While states travel, the whole documents.
        open_ends = {
            each: self.local(*self.cut(each), begins=each.begins_document) for each in parts if not each.ends_document
        }
        states = [open_ends[each].state if each in open_ends else empty for each in parts]
        transitions = [open_ends[each].transition if each in open_ends else unused for each in parts]
        # A first row of zeros, because no list may be empty.
        joined = reach(torch.stack([empty, *states])[1:], reached)
        whole = [each for each in fragments if not each.is_part]
        with started_scan(seq.ring, torch.stack([unused, *transitions])[1:], joined, seq, self.matrix) as scan:
            outputs = dict(zip(whole, self.documents([self.cut(each) for each in whole]), strict=True))
            before = scan.wait()
        for each, state in zip(parts, before, strict=True):
            if each in open_ends:
                outputs[each] = open_ends[each].outputs(state)
            else:
                outputs[each] = self.output(*self.cut(each), initial=state)
        if not fragments:  # a rank without tokens
            return reach(self.tensors[self.values], before)
        return reach(torch.cat([outputs[each] for each in fragments], self.dim), before)

    def _share_node(self) -> Tensor:
        """Replace the tensors of the call by outputs of one node. Return the empty tensor that depends on all.

        The backward pass of the scan is collective. The states of a rank may depend on some tensors only, or on none if
        its fragments end their documents.
        """
        others = {name: x for name, x in self.options.items() if isinstance(x, Tensor)}
        decay = () if self.decay is None else (self.decay,)
        reached, *tensors = with_shared_node(*self.tensors, *decay, *others.values())
        count = len(self.tensors)
        self.tensors = tuple(tensors[:count])
        if decay:
            self.decay = tensors[count]
        self.options = {**self.options, **dict(zip(others, tensors[count + len(decay) :], strict=True))}
        return reached

    def documents(self, documents: list[tuple[Tensor, ...]]) -> list[Tensor]:
        """Return the outputs of whole documents: of all at once, if a kernel computes packed documents."""
        lengths = [tensors[0].shape[self.dim] for tensors in documents]
        packed = self.packed(lengths) if len(documents) > 1 else None
        if packed is None:
            return [self.output(*tensors, initial=None) for tensors in documents]
        joined = (torch.cat(tensors, self.dim) for tensors in zip(*documents, strict=True))
        return list(self.output(*joined, initial=None, **packed).split(lengths, self.dim))

    def packed(self, lengths: list[int]) -> dict[str, Tensor] | None:
        """Return the options of `output` for packed documents, or None if the function does not take them."""
        return None

    def whole(self, out: Tensor, state: Tensor) -> _Local:
        """Return a fragment that begins its document: these outputs, whatever the state."""
        return _Local(state.to(self.dtype), state.new_zeros(self.transition, dtype=self.dtype), lambda _: out)

    def added(self, out: Tensor, read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function from an initial state S to the outputs `out` + Q S, where `read` computes Q S."""

        def outputs(state: Tensor) -> Tensor:
            with torch.autocast(out.device.type, enabled=False):
                return (out.to(self.dtype) + read(state)).to(out.dtype)

        return outputs


class _DeltaRule(_Recurrence):
    """The gated delta rule, with one decay for each head (Qwen3-Next) or channel (Kimi): state d_k x d_v."""

    values = 2
    matrix = True

    def __init__(self, function: Function, tensors: tuple[Tensor, ...], options: Mapping[str, Any]) -> None:
        self.function, self.options = function, options
        _, key, value, _, _ = tensors
        batch, heads, self.d_k, self.d_v = value.shape[0], value.shape[2], key.shape[3], value.shape[3]
        super().__init__(tensors, (batch, heads, self.d_k, self.d_v), (batch, heads, self.d_k, self.d_k))

    def packed(self, lengths: list[int]) -> dict[str, Tensor] | None:
        if self.shape[0] != 1 or not _is_kernel(self.function):
            return None
        ends = torch.tensor([0, *lengths], device=self.tensors[0].device).cumsum(0)
        return {"cu_seqlens": ends}

    def _call(
        self, tensors: tuple[Tensor, ...], initial: Tensor | None, final: bool, **packed: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key, value, g, beta = tensors
        out, state = self.function(
            query, key, value, g=g, beta=beta, initial_state=initial, output_final_state=final, **self.options, **packed
        )
        return out, state

    def output(self, *tensors: Tensor, initial: Tensor | None, **packed: Tensor) -> Tensor:
        return self._call(tensors, initial, False, **packed)[0]

    def local(self, *tensors: Tensor, begins: bool) -> _Local:
        if begins:
            out, state = self._call(tensors, None, True)
            return self.whole(out, state)
        # Values of 0 from the identity as the initial state give Q as outputs and M as the final state. These are
        # d_k more columns of the state, which do not affect the others.
        query, key, value, g, beta = tensors
        identity = torch.eye(self.d_k, dtype=self.dtype, device=value.device).expand(self.transition)
        initial = torch.cat([identity.new_zeros(self.shape), identity], -1)
        out, state = self._call((query, key, F.pad(value, (0, self.d_k)), g, beta), initial, True)
        out, read = out.split([self.d_v, self.d_k], -1)
        final, transition = state.to(self.dtype).split([self.d_v, self.d_k], -1)

        query_rows = read.transpose(1, 2).to(self.dtype)
        return _Local(final, transition, self.added(out, lambda state: (query_rows @ state).transpose(1, 2)))


class _Mamba2(_Recurrence):
    """The scan of Mamba-2 with one decay for each head: state head_dim x state_size."""

    decay: Tensor

    def __init__(
        self, function: Function, tensors: tuple[Tensor, ...], decay: Tensor, options: Mapping[str, Any]
    ) -> None:
        self.function, self.decay, self.options = function, decay, options
        x, _, _, read = tensors
        batch, _, heads, head_dim = x.shape
        super().__init__(tensors, (batch, heads, head_dim, read.shape[-1]), (batch, heads, 1, 1))

    def packed(self, lengths: list[int]) -> dict[str, Tensor] | None:
        if not _is_kernel(self.function):
            return None
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=self.tensors[0].device)
        documents = numbers.repeat_interleave(torch.tensor(lengths, device=numbers.device))
        return {"seq_idx": documents.expand(self.shape[0], -1).contiguous()}

    def _call(self, tensors: tuple[Tensor, ...], initial: Tensor | None, final: bool, **packed: Tensor) -> Any:
        x, dt, write, read = tensors
        states = {"initial_states": initial, "return_final_states": final}
        return self.function(x, dt, self.decay, write, read, **states, **self.options, **packed)

    def output(self, *tensors: Tensor, initial: Tensor | None, **packed: Tensor) -> Tensor:
        out: Tensor = self._call(tensors, initial, False, **packed)
        return out

    def local(self, *tensors: Tensor, begins: bool) -> _Local:
        x, dt, _, read = tensors
        out, state = self._call(tensors, None, True)
        if begins:
            return self.whole(out, state)
        steps = _steps(dt, self.options["dt_bias"], self.options["dt_softplus"], self.dtype)
        log_decay = (steps.clamp(*self.options["dt_limit"]) * self.decay.to(self.dtype)).cumsum(1)
        by_head = read.to(self.dtype).repeat_interleave(x.shape[2] // read.shape[2], 2)

        def read_state(state: Tensor) -> Tensor:
            return torch.einsum("bthn,bhpn->bthp", by_head, state) * log_decay.exp()[..., None]

        transition = log_decay[:, -1, :, None, None].exp()
        return _Local(state.to(self.dtype), transition, self.added(out, read_state))


class _Mamba(_Recurrence):
    """The selective scan of Mamba, with a decay for each channel and state. The function takes no initial state."""

    dim = 2
    decay: Tensor

    def __init__(
        self, function: Function, tensors: tuple[Tensor, ...], decay: Tensor, options: Mapping[str, Any]
    ) -> None:
        self.function, self.decay, self.options = function, decay, options
        shape = (tensors[0].shape[0], *decay.shape)
        super().__init__(tensors, shape, shape)

    def output(self, *tensors: Tensor, initial: Tensor | None, **packed: Tensor) -> Tensor:
        if initial is None:
            return self._call(tensors, tensors[4:])
        return self._continued(tensors, self._call(tensors, ()))(initial)

    def local(self, *tensors: Tensor, begins: bool) -> _Local:
        state = self._final(*tensors[:3])
        if begins:
            return self.whole(self._call(tensors, tensors[4:]), state)
        log_decay = self._steps(tensors[1]).sum(2)[..., None] * self.decay.to(self.dtype)
        return _Local(state, log_decay.exp(), self._continued(tensors, self._call(tensors, ())))

    def _call(self, tensors: tuple[Tensor, ...], gate: tuple[Tensor, ...]) -> Tensor:
        x, dt, write, read = tensors[:4]
        z = gate[0] if gate else None
        out: Tensor = self.function(x, dt, self.decay, write, read, z=z, **self.options)
        return out

    def _final(self, x: Tensor, dt: Tensor, write: Tensor) -> Tensor:
        """Return the final state. The kernel of mamba-ssm returns one too, but ignores its gradient in backward."""
        steps, decay, write = self._steps(dt), self.decay.to(self.dtype), write.to(self.dtype)
        # Summed from the end: a difference of sums from the start would lose the small ones, whose tokens count most.
        remaining, added = steps.flip(2).cumsum(2).flip(2) - steps, steps * x.to(self.dtype)
        columns = [
            ((remaining * decay[:, index, None]).exp() * added * write[:, None, index]).sum(2)
            for index in range(decay.shape[1])
        ]
        return torch.stack(columns, -1)

    def _continued(self, tensors: tuple[Tensor, ...], ungated: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function from an initial state to the outputs. The gate multiplies all of them, so it comes last."""
        _, dt, _, read, *gate = tensors
        outputs = self.added(ungated, lambda state: self._read(dt, read, state))
        return (lambda state: outputs(state) * F.silu(gate[0])) if gate else outputs

    def _read(self, dt: Tensor, read: Tensor, state: Tensor) -> Tensor:
        """Return what an initial state adds to the outputs, (batch, channels, tokens)."""
        steps, decay, read = self._steps(dt).cumsum(2), self.decay.to(self.dtype), read.to(self.dtype)
        out = torch.zeros_like(steps)
        for index in range(decay.shape[1]):  # of the state: no tensor of channels x tokens x states
            out = out + (steps * decay[:, index, None]).exp() * state[:, :, index, None] * read[:, None, index]
        return out

    def _steps(self, dt: Tensor) -> Tensor:
        bias = self.options["delta_bias"]
        return _steps(dt, None if bias is None else bias[:, None], self.options["delta_softplus"], self.dtype)


class _Lightning(_Recurrence):
    """Linear attention with a constant decay for each head, in blocks as MiniMax computes it: state d_k x d_v."""

    values = 2

    def __init__(self, mixer: Any, tensors: tuple[Tensor, ...]) -> None:
        self.mixer = mixer
        batch, _, heads, head_dim = tensors[0].shape
        super().__init__(tensors, (batch, heads, head_dim, head_dim), (1, heads, 1, 1))

    def output(self, *tensors: Tensor, initial: Tensor | None, **packed: Tensor) -> Tensor:
        return self._blocks(tensors, initial)[0]

    def local(self, *tensors: Tensor, begins: bool) -> _Local:
        out, state = self._blocks(tensors, None)
        if begins:
            return self.whole(out, state)
        query, slope = tensors[0].to(self.dtype), self.mixer.slope_rate.to(self.dtype)
        tokens = torch.arange(1, query.shape[1] + 1, device=query.device)
        decayed = query.transpose(1, 2) * (-slope * tokens[:, None]).exp()
        outputs = self.added(out, lambda state: (decayed @ state).transpose(1, 2))
        return _Local(state, (-slope * query.shape[1]).exp()[None], outputs)

    def _blocks(self, tensors: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        mixer, outputs = self.mixer, []
        state = tensors[0].new_zeros(self.shape, dtype=self.dtype) if initial is None else initial
        for query, key, value in zip(*(x.transpose(1, 2).split(mixer.block_size, 2) for x in tensors), strict=True):
            count = query.shape[2]
            within = (query @ key.mT * mixer.diagonal_decay[..., :count, :count].to(query.dtype)) @ value
            before = (query * mixer.query_decay[:, :count]).to(self.dtype) @ state
            outputs.append(within + before.to(within.dtype))
            added = (key * mixer.key_decay[:, -count:]).to(self.dtype).mT @ value.to(self.dtype)
            state = state * (-mixer.slope_rate * count).exp().to(self.dtype) + added
        return torch.cat(outputs, 2).transpose(1, 2), state


class _GatedUnit(_Recurrence):
    """The recurrence of RecurrentGemma with a decay for each channel and token: state channels."""

    def __init__(self, function: Function, tensors: tuple[Tensor, ...]) -> None:
        self.function = function
        x = tensors[0]
        super().__init__(tensors, (x.shape[0], x.shape[2]), (x.shape[0], x.shape[2]))

    def output(self, *tensors: Tensor, initial: Tensor | None, **packed: Tensor) -> Tensor:
        return self._call(tensors, initial)[0]

    def local(self, *tensors: Tensor, begins: bool) -> _Local:
        out, state = self._call(tensors, None)
        if begins:
            return self.whole(out, state)
        decay = tensors[1].to(self.dtype)
        outputs = self.added(out, lambda state: decay.cumprod(1) * state[:, None])
        return _Local(state.to(self.dtype), decay.prod(1), outputs)

    def _call(self, tensors: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        x, decay = tensors
        kept = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)[..., None]
        out, state = self.function(
            hidden_states=x, recurrent_gate=decay, reset=kept, recurrent_states=initial, acc_dtype=self.dtype
        )
        return out, state


def _is_kernel(function: Function) -> bool:
    """Return whether transformers has chosen a kernel. Its torch functions do not keep packed documents apart."""
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation", False))


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, dtype: torch.dtype) -> Tensor:
    """Return the time steps of Mamba from their projections."""
    dt = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    return F.softplus(dt) if softplus else dt


# --- Stand-ins --------------------------------------------------------------------------------------------------------
# Each takes the sequence, the model's own function, and the arguments that mixers pass to it.


def _convolution(
    seq: Sequence, function: Function, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    _check(seq, others)
    width, tokens = weight.shape[-1], seq.counts[seq.ring.rank]
    # A cache has put zeros before a shard that is shorter than its window.
    x = x[..., -tokens:] if x.shape[-1] == width else x
    padded, rows = seq.ring.halo(x, seq, width - 1, dim=-1)
    return function(padded, weight, bias, activation=activation).index_select(-1, rows)


def _delta_rule(
    seq: Sequence, function: Function, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    _check(seq, options, value.shape[1], initial_state)
    recurrence = _DeltaRule(function, (query, key, value, g, beta), _others(options))
    return recurrence.over_ring(seq), _unknown(recurrence) if output_final_state else None


def _mamba2(
    seq: Sequence, function: Function, x: Tensor, dt: Tensor, decay: Tensor, write: Tensor, read: Tensor, *,
    initial_states: Tensor | None = None, return_final_states: bool = False, **options: Any,
) -> Any:  # fmt: skip
    _check(seq, options, x.shape[1], initial_states)
    recurrence = _Mamba2(function, (x, dt, write, read), decay, _others(options))
    out = recurrence.over_ring(seq)
    return (out, _unknown(recurrence)) if return_final_states else out


def _mamba(
    seq: Sequence, function: Function, x: Tensor, dt: Tensor, decay: Tensor, write: Tensor, read: Tensor, *,
    z: Tensor | None = None, return_last_state: bool = False, **options: Any,
) -> Any:  # fmt: skip
    _check(seq, options, x.shape[2])
    tensors = (x, dt, write, read) if z is None else (x, dt, write, read, z)
    recurrence = _Mamba(function, tensors, decay, _others(options))
    out = recurrence.over_ring(seq)
    return (out, _unknown(recurrence)) if return_last_state else out


def _lightning(
    seq: Sequence, forward: Function, mixer: Any, hidden_states: Tensor, position_embeddings: Any = None,
    attention_mask: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The forward of MiniMax's lightning attention: everything but the recurrence works on one token at a time."""
    _check(seq, options, hidden_states.shape[1])
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    qkv = qkv.unflatten(-1, (mixer.num_attention_heads, 3 * mixer.head_dim))
    recurrence = _Lightning(mixer, qkv.split(mixer.head_dim, -1))
    out = mixer.norm(recurrence.over_ring(seq).flatten(2))
    state = _unknown(recurrence)
    for name in CACHES:
        if options.get(name) is not None:
            options[name].set_linear_cache(mixer.layer_idx, state)
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * out), state


def _recurrent_block(
    seq: Sequence, forward: Function, mixer: Any, input_states: Tensor, position_ids: Tensor, attention_mask: Any,
    *args: Any, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The forward of RecurrentGemma's recurrent block, with a convolution and a unit that resets at position 0."""
    _check(seq, options, input_states.shape[1])
    padding: Tensor | None = getattr(attention_mask, "padding", None)
    with seq.ring.refused_by_all():
        if padding is not None and bool((padding[:, seq.positions().to(padding.device) == 0] == 0).any()):
            raise UnsupportedError(
                f"{type(mixer).__name__} reads the padding before the tokens of a row, whose values are undefined; pad "
                "after the tokens, or pack texts as documents"
            )
        starts = seq.positions(per_document=True).to(position_ids.device) == 0
        if not torch.equal(position_ids == 0, starts.expand_as(position_ids)):
            raise InputError(
                f"{type(mixer).__name__} begins a document at each position 0: pass position_ids="
                "seq.positions(per_document=True)[None]"
            )
    mixer.conv1d_state = mixer.rg_lru.recurrent_states = None  # they would be states of this rank's tokens
    x = mixer.linear_x(input_states).transpose(1, 2)
    padded, rows = seq.ring.halo(x, seq, mixer.conv1d_width - 1, dim=-1)
    x = mixer.rg_lru(mixer.conv_1d(padded).index_select(-1, rows).transpose(1, 2), position_ids)
    mixer.rg_lru.recurrent_states = None
    return mixer.linear_out(x * mixer.act_fn(mixer.linear_y(input_states))), None


def _gated_unit(
    seq: Sequence, function: Function, mixer: Any, hidden_states: Tensor, recurrent_gate: Tensor, *args: Any, **_: Any
) -> tuple[Tensor, None]:
    """The scan of RecurrentGemma. Its resets are the documents of the sequence."""
    return _GatedUnit(partial(function, mixer), (hidden_states, recurrent_gate)).over_ring(seq), None


def _shifted_projection(
    seq: Sequence, forward: Function, mixer: Any, hidden_states: Tensor, cache: Any = None,
    conv_mask: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The projection of Zaya, whose convolutions and delayed values need the last tokens of the previous fragment."""
    _check(seq, {}, hidden_states.shape[1])
    with seq.ring.refused_by_all():
        if mixer.q_proj.bias is not None:
            raise UnsupportedError("attention_bias of Zaya: the bias would be added to tokens before a document")
    if conv_mask is not None:
        hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
    padded, rows = seq.ring.halo(hidden_states, seq, max(mixer.conv_kernel_size, 1))
    return tuple(x.index_select(1, rows) for x in forward(mixer, padded, None))


def _fused(seq: Sequence, function: Function, *args: Any, **options: Any) -> None:
    """Answer that there is no kernel for the whole layer, so that the layer calls the functions above."""


def _step(seq: Sequence, function: Function, *args: Any, **options: Any) -> Any:
    """Refuse the step of a decoding layer."""
    with seq.ring.refused_by_all():
        raise UnsupportedError(_NO_DECODING)


_NO_DECODING = (
    "decoding from states: the states of a cache that was filled over a ring are those of this rank's tokens; for "
    "generate() pass the whole prompt inside `with ring.activate(None):`"
)

_StandIn = tuple[Callable[..., Any] | None, tuple[str, ...]]

_STAND_INS: Mapping[str, _StandIn] = {
    "causal_conv1d_fn": (_convolution, ("e2a032f5", "f276488e")),
    "causal_conv1d_update": (_step, ("ec1e13f9", "b17b4d25")),
    "torch_chunk_gated_delta_rule": (_delta_rule, ("c2f9d58a", "7bf85a9d")),
    "chunk_kimi_delta_attention": (_delta_rule, ("20787e33",)),
    "mamba2_chunk_scan": (_mamba2, ("54688fdc",)),
    "mamba2_split_conv1d_scan_combined": (_fused, ("f15627c9",)),
    "mamba_selective_scan": (_mamba, ("5b69a829", "73c05d7f")),
    "mamba_inner_fn": (_fused, ("21c7577f",)),
}
"""By the name of a function in modeling files: its stand-in, and the digests of its reviewed sources."""


_METHODS: Mapping[str, Mapping[str, _StandIn]] = {
    "minimax:MiniMaxLightningAttention": {"MiniMaxLightningAttention.forward": (_lightning, ("9305e330", "c16b0f02"))},
    "recurrent_gemma:RecurrentGemmaRecurrentBlock": {
        "RecurrentGemmaRecurrentBlock.forward": (_recurrent_block, ("352d9fa7",)),
        "RecurrentGemmaRglru.forward": (None, ("38e827fb",)),
        "RecurrentGemmaRglru._rnn_scan": (_gated_unit, ("1fc6c746",)),
    },
    "zaya:ZayaCCAProjection": {"ZayaCCAProjection.forward": (_shifted_projection, ("24d8822c", "7879a525"))},
}
"""Mixers without such functions: the methods in their file, with a stand-in or None, and the reviewed digests."""


def _check(seq: Sequence, options: Mapping[str, Any], tokens: int | None = None, state: Tensor | None = None) -> None:
    """Raise `InputError` on all ranks for a number of tokens, an initial state or documents that are refused."""
    attending_call()
    attended()
    with seq.ring.refused_by_all():
        if tokens is not None:
            check_tokens(seq, tokens, "a recurrence")
        if state is not None:
            raise UnsupportedError(_NO_DECODING)
        if options.get("seq_idx") is not None:
            raise UnsupportedError(
                "seq_idx: over a ring, documents are those of the sequence, ring.sequence(cu_seqlens=...); leave it out"
            )
        check_documents(seq, options)


def _others(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those for packed documents, which `_check` has compared with the sequence."""
    return {name: value for name, value in options.items() if name not in ("cu_seqlens", "seq_idx")}


def _unknown(recurrence: _Recurrence) -> Tensor:
    """Return the final state for a cache: NaN, because only some ranks know it. Such a cache is refused later."""
    return recurrence.tensors[0].new_full(recurrence.shape, float("nan"), dtype=recurrence.dtype)


def _stand_in(over_ring: Function, function: Function) -> Function:
    @torch.compiler.disable(reason=UNTRACED)
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        seq = sequence_of()
        return function(*args, **kwargs) if seq is None else over_ring(seq, function, *args, **kwargs)

    stand_in: Any = call
    setattr(stand_in, STATES, True)
    return call


# --- Models -----------------------------------------------------------------------------------------------------------


def watch_states(model: nn.Module) -> None:
    """Compute the layers with a state of a model over a ring in every later call.

    The functions are replaced in the files of the mixers, for all models of these files. The kinds of the computed
    layers are recorded on the parts of the model, for `refuse_layers`. Layers with other code stay refused.
    """
    kinds: set[str] = set()
    for module in model.modules():
        file: Any = sys.modules.get(type(module).__module__)
        for path, (over_ring, _) in _reviewed(file, type(module).__name__).items():
            *owner, name = path.split(".")
            place: Any = getattr(file, owner[0]) if owner else file
            function = getattr(place, name)
            if over_ring is not None and not hasattr(function, STATES):
                setattr(place, name, _stand_in(over_ring, function))
            kinds |= _kinds(model, module)
    for module in model.modules():
        if module is model or getattr(module, PART, None) == "text":
            setattr(module, STATES, frozenset(kinds))


@cache
def _reviewed(file: Any, name: str) -> Mapping[str, _StandIn]:
    """Return the functions and methods of a mixer's file, if it has such a mixer and all of them are as reviewed."""
    module = getattr(file, "__name__", "")  # None: the class was made by code that is no module
    mixer = f"{module.rpartition('.modeling_')[2]}:{name}"
    if not module.startswith("transformers.models.") or mixer not in _MIXERS.keys() | _METHODS.keys():
        return {}
    methods = _METHODS[mixer] if mixer in _METHODS else {f"{name}.forward": (None, _MIXERS[mixer])}
    functions = {name: stand_in for name, stand_in in _STAND_INS.items() if hasattr(file, name)}
    parts = {**methods, **functions}
    sources = {f"{module}:{path}": digests for path, (_, digests) in parts.items()}
    return {} if Host("transformers", (), sources=sources).differences() else parts


def _kinds(model: Any, mixer: Any) -> set[str]:
    """Return the names by which `refuse_layers` finds the layer of a mixer in a configuration."""
    config = getattr(mixer, "config", None) or model.config.get_text_config(decoder=True)
    names = {name for name in STATE_ENTRIES if hasattr(config, name)}
    layers, index = getattr(config, "layer_types", None), getattr(mixer, "layer_idx", None)
    return names | ({"linear_attention"} if layers is None or index is None else {layers[index]})
