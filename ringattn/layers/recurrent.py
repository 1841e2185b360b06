"""Layers that read each document in token order: short convolutions, gated delta rules and selective states.

Each rank computes its fragments (`Sequence.fragments`) from empty states. `Ring.halo` gives a fragment the rows before
it, `Ring.scan_states` its initial state. The states at the ends of the fragments are computed first. While they are
exchanged, the rank computes its outputs for empty initial states; afterwards it adds the part of the initial states.

Guarantees: results and gradients equal those of one process for every layout with contiguous tokens and all documents.
States are float32, or float64 for float64 inputs, also under torch.autocast. torch.compile leaves the layers out of
compiled regions. Gradients of weights are this rank's part, to be summed over ranks (`ring.all_reduce`).
Under tensor parallelism, each rank passes its heads or channels as local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.core.fragments import Fragment
from ringattn.errors import InputError
from ringattn.gradients import with_shared_node
from ringattn.integers import whole_number
from ringattn.layers.base import Layer, check_sequence
from ringattn.runtime.consistency import check_kinds
from ringattn.runtime.states import reach, started_scan
from ringattn.sequence import Sequence

CHUNK = 64
"""Tokens of a chunk: within it, tokens are computed by products of matrices; states pass from chunk to chunk."""
CHANNEL_CHUNK = 16
"""The same with a gate per channel, which needs a number for each pair of tokens and each channel."""
KERNEL_CHUNK = 256
"""The chunk size that mamba_ssm's kernel gets, which is Mamba-2's default."""
Activation = Literal["silu", "swish"]


class ShortConvolution(Layer):
    """A causal convolution of each channel over the tokens of its document.

    The parameters `weight` and `bias` have the names and shapes of a depthwise `torch.nn.Conv1d`, so its state
    dictionaries and those of fla's `ShortConvolution` load.

    Example:
        conv = ringattn.ShortConvolution(4096, 4, activation="silu")
        y = conv(seq.shard(x), seq)
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        bias: bool = False,
        activation: Activation | None = None,
        fn: Callable[..., Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weights.

        Args:
            channels: Channels of a token.
            kernel_size: Taps: a token depends on itself and the kernel_size - 1 tokens before it.
            bias: Add a learned number per channel.
            activation: silu (also called swish), or None for no activation.
            fn: A kernel with the signature of causal_conv1d's `causal_conv1d_fn(x, weight, bias, activation=)`, x of
                shape (batch, channels, tokens). None: torch's convolution.
            device: Device of the weights. None: torch's default.
            dtype: Dtype of the weights. None: torch's default.

        Raises:
            InputError: `kernel_size` is not a positive integer, or the activation is unknown.
        """
        super().__init__()
        kernel_size = whole_number(kernel_size, "kernel_size must be a positive number of tokens", 1)
        if activation not in (None, "silu", "swish"):
            raise InputError(f"activation must be 'silu', 'swish' or None, got {activation!r}")
        self.channels, self.kernel_size, self.activation, self.fn = channels, kernel_size, activation, fn
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights like `torch.nn.Conv1d`."""
        bound = self.kernel_size**-0.5
        for values in self.parameters():
            nn.init.uniform_(values, -bound, bound)

    def own_memory(self) -> dict[str, int]:
        """Return the bytes of the layer's weights.

        Returns:
            `parameter_bytes`.
        """
        return {"parameter_bytes": sum(values.numel() * values.element_size() for values in self.parameters())}

    @torch.compiler.disable
    def forward(self, x: Tensor, seq: Sequence) -> Tensor:
        """Convolve this rank's tokens. A collective call.

        Args:
            x: This rank's shard of `seq`. If `weight` is a DTensor (tensor parallelism), x has this rank's channels.
            seq: The sequence, with its ring, in any layout but striped.

        Shape:
            x: (batch, tokens, channels)

        Returns:
            (batch, tokens, channels).

        Raises:
            InputError: `x` is not this rank's shard, on any rank; every rank raises.
            UnsupportedError: The layout is striped.
            DisagreementError: The ranks make different calls.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
        """
        check_sequence(seq)
        weight, bias = _local(self.weight), _local(self.bias)
        with seq.ring.refused_by_all():
            _check_shapes(seq, x=(x, ("batch", "tokens", weight.shape[0])))
        padded, rows = seq.ring.halo(x, seq, self.kernel_size - 1)
        if self.fn is not None and len(rows):
            y = self.fn(padded.mT, weight[:, 0], bias, activation=self.activation)
            return y.mT[:, rows]
        if not len(rows):  # torch refuses a convolution of fewer tokens than taps
            padded = F.pad(padded, (0, 0, self.kernel_size, 0))
        y = F.conv1d(padded.mT, weight, bias, groups=len(weight)).mT[:, rows - self.kernel_size + 1]
        return y if self.activation is None else F.silu(y)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model.

        Returns:
            The sizes and options.
        """
        bias = self.bias is not None
        return f"{self.channels}, kernel_size={self.kernel_size}, bias={bias}, activation={self.activation!r}"


class GatedDeltaRule(Layer):
    """The gated delta rule, with a gate per head (Gated DeltaNet) or per key channel (Kimi Delta Attention).

    For each head, a matrix S of shape (d_k, d_v) changes from token to token, and out = scale S^T q. Within a document

        S[t] = exp(g[t]) S[t - 1] + beta[t] k[t] (v[t] - k[t]^T exp(g[t]) S[t - 1])

    as in flash-linear-attention (fla), whose names, shapes and default scale this layer has. The layer has no weights.

    Example:
        rule = ringattn.GatedDeltaRule()
        out = rule(q, F.normalize(k, dim=-1), v, g, beta, seq)
    """

    def __init__(
        self, *, scale: float | None = None, fn: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    ) -> None:
        """Store the options.

        Args:
            scale: Factor of the outputs. None: 1 / sqrt(d_k).
            fn: A kernel with the signature of fla's `chunk_gated_delta_rule` or `chunk_kda`: fn(q, k, v, g=, beta=,
                scale=, initial_state=, output_final_state=, cu_seqlens=) returns the outputs and the final states, and
                is differentiable in both. It is called once for all documents that are whole on this rank, as documents
                of one batch row, and once for each other fragment. For a fragment that continues a document, it gets
                d_k more columns of values, by which it computes how the outputs and the final state depend on the
                initial state. None: a chunked form in torch.

        Raises:
            Nothing.
        """
        super().__init__()
        self.scale, self.fn = scale, fn

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, seq: Sequence) -> Tensor:
        """Compute the rule for this rank's tokens. A collective call.

        Args:
            q: Queries, this rank's shard of `seq`.
            k: Keys, this rank's shard. They are usually normalized.
            v: Values, this rank's shard; v_heads is a multiple of heads.
            g: Logarithms of the decay, this rank's shard: one per head, or one per channel of a key.
            beta: Factors of the update, this rank's shard.
            seq: The sequence, with its ring, in any layout but striped.

        Shape:
            q: (batch, tokens, heads, d_k)
            k: (batch, tokens, heads, d_k)
            v: (batch, tokens, v_heads, d_v)
            g: (batch, tokens, v_heads) or (batch, tokens, v_heads, d_k)
            beta: (batch, tokens, v_heads)

        Returns:
            (batch, tokens, v_heads, d_v) in the dtype of v.

        Raises:
            InputError: A tensor is not this rank's shard or does not fit the others, on any rank; every rank raises.
            UnsupportedError: The layout is striped.
            DisagreementError: The ranks make different calls.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
        """
        check_sequence(seq)
        with seq.ring.refused_by_all():
            key, per_token = ("batch", "tokens", "heads", "d_k"), ("batch", "tokens", "v_heads")
            gate = (*per_token, "d_k") if g.dim() == 4 else per_token
            sizes = _check_shapes(
                seq, q=(q, key), k=(k, key), v=(v, (*per_token, "d_v")), g=(g, gate), beta=(beta, per_token)
            )
            _check_groups("v_heads", sizes["v_heads"], "heads", sizes["heads"])
            fragments = seq.fragments()
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        with torch.autocast(v.device.type, enabled=False):
            reached, q, k, v, g, beta = with_shared_node(q, k, v, g, beta)
            if self.fn is None or not v.numel():
                return _chunked(q, k, v, g, beta, scale, reached, fragments, seq)
            return _by_kernel(_DeltaRule(self.fn, (q, k, v, g, beta), scale), reached, fragments, seq)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model.

        Returns:
            The scale, if it is not the default.
        """
        return "" if self.scale is None else f"scale={self.scale!r}"


class SelectiveState(Layer):
    """The selective state-space model of Mamba-2 (SSD), with one decay per head.

    For each head, a matrix S of shape (d_state, head_dim) changes from token to token. Within a document

        S[t] = exp(dt[t] A) S[t - 1] + dt[t] B[t] x[t]^T
        out[t] = S[t]^T C[t] + D x[t]

    with the names and shapes of mamba_ssm's `mamba_chunk_scan_combined`. The layer has no weights: A, D and dt_bias are
    arguments, and their gradients are this rank's part.

    Example:
        ssm = ringattn.SelectiveState(dt_softplus=True)
        y = ssm(x, dt, -torch.exp(A_log), B, C, seq, D=D, dt_bias=dt_bias)
    """

    def __init__(
        self,
        *,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        fn: Callable[..., Any] | None = None,
    ) -> None:
        """Store the options.

        Args:
            dt_softplus: Apply softplus to dt + dt_bias.
            dt_limit: The smallest and the largest step, to which steps are clamped after that.
            fn: A kernel with the signature of `mamba_chunk_scan_combined`: fn(x, dt, A, B, C, chunk_size, seq_idx=,
                return_final_states=) returns the outputs, and the final states (batch, heads, head_dim, d_state) if
                `return_final_states`. It is called once for all documents that are whole on this rank, with `seq_idx`,
                and once for each other fragment. None: a chunked form in torch.

        Raises:
            Nothing.
        """
        super().__init__()
        self.dt_softplus, self.dt_limit, self.fn = dt_softplus, dt_limit, fn

    @torch.compiler.disable
    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        seq: Sequence,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of this rank's tokens. A collective call.

        Args:
            x: Inputs, this rank's shard of `seq`.
            dt: Steps, this rank's shard.
            A: Decay rates, usually negative.
            B: Input matrices, this rank's shard; heads is a multiple of groups.
            C: Output matrices, this rank's shard.
            seq: The sequence, with its ring, in any layout but striped.
            D: Factors of x that are added to the outputs. None: x is not added.
            dt_bias: Added to dt. None: nothing is added.

        Shape:
            x: (batch, tokens, heads, head_dim)
            dt: (batch, tokens, heads)
            A: (heads,)
            B: (batch, tokens, groups, d_state)
            C: (batch, tokens, groups, d_state)
            D: (heads,) or (heads, head_dim)
            dt_bias: (heads,)

        Returns:
            (batch, tokens, heads, head_dim) in the dtype of x.

        Raises:
            InputError: A tensor is not this rank's shard or does not fit the others, on any rank; every rank raises.
            UnsupportedError: The layout is striped.
            DisagreementError: The ranks make different calls.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
        """
        check_sequence(seq)
        with seq.ring.refused_by_all():
            per_token, group = ("batch", "tokens", "heads"), ("batch", "tokens", "groups", "d_state")
            expected: dict[str, tuple[Tensor, tuple[str, ...]]] = {
                "x": (x, (*per_token, "head_dim")), "dt": (dt, per_token), "A": (A, ("heads",)), "B": (B, group),
                "C": (C, group),
            }  # fmt: skip
            if D is not None:
                expected["D"] = D, ("heads", "head_dim")[: D.dim()]
            if dt_bias is not None:
                expected["dt_bias"] = dt_bias, ("heads",)
            sizes = _check_shapes(seq, **expected)
            _check_groups("heads", sizes["heads"], "groups", sizes["groups"])
            fragments = seq.fragments()
        with torch.autocast(x.device.type, enabled=False):
            wide = _wide(x, dt, A, B, C)
            dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
            dt = (F.softplus(dt) if self.dt_softplus else dt).clamp(*self.dt_limit)
            reached, x, dt, A, B, C = with_shared_node(x, dt, A, B, C)
            if self.fn is None or not x.numel():
                out = _chunked(C, B, x.to(wide) * dt[..., None], dt * A.to(wide), None, 1.0, reached, fragments, seq)
            else:
                out = _by_kernel(_SelectiveState(self.fn, (C, B, x, dt), A), reached, fragments, seq)
            if D is not None:
                out = out + D.to(wide).view(D.shape[0], -1) * x
            return out.to(x.dtype)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model.

        Returns:
            The options.
        """
        return f"dt_softplus={self.dt_softplus}, dt_limit={self.dt_limit}"


# --- the chunked form in torch ---------------------------------------------------------------------------------------


class _Chunks(NamedTuple):
    """The chunks of a rank's fragments, each padded to `size` tokens. A fragment's first chunk is of step 0.

    Attributes:
        rows: (chunks, size) the local row of each token; padding has the row behind the last one.
        padded: (tokens,) the index of each local row in the flattened `rows`.
        order: The fragments by decreasing number of chunks, so that those with a chunk of a step come first.
        active: For each step, how many fragments have a chunk. Chunks are ordered by step, then like `order`.
    """

    rows: Tensor
    padded: Tensor
    order: Tensor
    active: list[int]


def _chunks_of(fragments: tuple[Fragment, ...], size: int, tokens: int, device: torch.device) -> _Chunks:
    lengths = [fragment.stop - fragment.start for fragment in fragments]
    counts = [-(-length // size) for length in lengths]
    order = sorted(range(len(fragments)), key=lambda index: -counts[index])
    active = [sum(count > step for count in counts) for step in range(max(counts, default=0))]
    first = torch.tensor(
        [fragments[index].start + step * size for step, number in enumerate(active) for index in order[:number]],
        dtype=torch.int64,
    )
    stop = torch.tensor([fragments[index].stop for number in active for index in order[:number]], dtype=torch.int64)
    rows = first[:, None] + torch.arange(size)
    inside = rows < stop[:, None]
    padded = torch.empty(tokens, dtype=torch.int64)
    padded[rows[inside]] = inside.flatten().nonzero()[:, 0]
    rows = rows.where(inside, tokens)
    return _Chunks(rows.to(device), padded.to(device), torch.tensor(order, dtype=torch.int64).to(device), active)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    reached: Tensor,
    fragments: tuple[Fragment, ...],
    seq: Sequence,
) -> Tensor:
    """Return the outputs of S[t] = exp(g[t]) S[t - 1] + k[t] v[t]^T, or with `beta` of the delta rule.

    `reached`: the empty tensor of `with_shared_node` for all tensors of the call. The backward pass of the scan is
    collective, and the states of a rank may depend on some tensors only, or on none if the rank has no tokens.

    Within a chunk, let S be its initial state and D[i, j] the decay from token j to token i. By the UT transform, the
    delta rule adds k[i] (u[i] - w[i] S)^T, where (u, w) = (I + strict lower part of beta k k^T D)^-1 beta (v, decayed
    k). So the final state of a chunk is affine in S. See Yang et al., Gated Delta Networks, 2024, section 3.3.
    """
    batch, tokens, heads, d_v = v.shape
    size = min(CHANNEL_CHUNK if g.dim() == 4 else CHUNK, max((each.stop - each.start for each in fragments), default=1))
    chunks = _chunks_of(fragments, size, tokens, v.device)
    wide, values = _wide(q, k, v, g, *(() if beta is None else (beta,))), v

    def cut(x: Tensor) -> Tensor:
        """Return (chunks, batch, heads, size, ...) in the dtype of states, with zeros for padding."""
        x = torch.cat([x, torch.zeros_like(x[:, :1])], 1)[:, chunks.rows].to(wide)
        x = x.movedim(0, 1).movedim(3, 2)
        return x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] != heads else x

    q, k, v = cut(q) * scale, cut(k), cut(v)
    gate = cut(g) if g.dim() == 4 else cut(g)[..., None]  # (..., size, d_k or 1)
    # Sums of gates over token ranges, not differences of two sums, which lose digits behind a strong decay.
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).tril(-1)
    sums = gate[..., :, None, :].where(later[..., None], 0).cumsum(-3)  # (..., to, from, channel)
    decay = sums.masked_fill(later.mT[..., None], -torch.inf).exp()
    from_start = gate.cumsum(-2).exp()
    to_end, through = decay[..., -1, :, :], from_start[..., -1, :, None]

    def pairs(x: Tensor) -> Tensor:
        """Return x k^T with the decay between the two tokens."""
        if decay.shape[-1] == 1:
            return x @ k.mT * decay[..., 0]
        return ((decay * k[..., None, :, :]) @ x[..., None]).squeeze(-1)

    scores, q_start, k_end = pairs(q), q * from_start, k * to_end
    if beta is None:
        u, w = v, None
    else:
        factors = cut(beta)[..., None]
        right = torch.cat([v, k * from_start], -1) * factors
        u, w = torch.linalg.solve_triangular(pairs(k) * factors * later, right, upper=False, unitriangular=True).split(
            [d_v, k.shape[-1]], -1
        )

    # The states of all fragments, from chunk to chunk. More columns pass on the identity (for a factor: ones): they are
    # the transition from the start of the fragment.
    matrix, d_k = w is not None, k.shape[-1]
    continued = any(not each.begins_document for each in fragments)
    unit = torch.eye(d_k, dtype=wide, device=v.device) if matrix else k.new_ones(d_k, 1)
    if not continued:
        unit = unit[:, :0]  # transitions are not used
    empty = torch.cat([k.new_zeros(d_k, d_v), unit], -1)
    state = empty.expand(len(fragments), batch, heads, *empty.shape)
    starts, ends = [state[:0]], []
    added = k_end.mT @ F.pad(u, (0, unit.shape[-1]))
    changes = [added, through] if w is None else [added, through, k_end.mT, w]
    for each in zip(*(x.split(chunks.active) for x in changes), strict=True):
        ends.append(state[len(each[0]) :])
        state = state[: len(each[0])]
        starts.append(state)
        state = each[1] * state + each[0] - (each[2] @ (each[3] @ state) if matrix else 0)
    parts = torch.tensor([index for index, each in enumerate(fragments) if each.is_part], dtype=torch.int64)
    parts = parts.to(v.device)
    final = torch.cat([state, *ends[::-1]])[chunks.order.argsort()[parts]]
    transitions = final[..., d_v:] if continued else final.new_zeros(*final.shape[:-1], d_k if matrix else 1)
    if not matrix and gate.shape[-1] == 1:
        transitions = transitions[..., :1, :]
    with started_scan(seq.ring, transitions, reach(final[..., :d_v], reached), seq, matrix) as scan:
        # The outputs for empty initial states, while states are exchanged.
        start, passed = torch.cat(starts).split([d_v, unit.shape[-1]], -1)
        read = q_start if w is None else q_start - scores @ w
        out = scores @ u + read @ start
        initial = scan.wait()
    if continued:
        before = initial.new_zeros(len(fragments), *initial.shape[1:]).index_copy(0, parts, initial)
        initial = torch.cat([before[:0], *(before[chunks.order[:number]] for number in chunks.active)])
        out = out + read @ (passed @ initial if matrix else passed * initial)
    else:
        out = reach(out, initial)
    return out.movedim(2, 3).movedim(1, 0).flatten(1, 2)[:, chunks.padded].to(values.dtype)


# --- kernels ---------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A fragment for an empty initial state: outputs, transition and final state; `read` applies to an initial state.

    `out`: (batch, tokens, heads, d_v). `read`: (batch, tokens, heads, d_k), or None if the fragment begins its
    document. `transition`, `state`: without the dimension of fragments.
    """

    out: Tensor
    read: Tensor | None
    transition: Tensor
    state: Tensor


@dataclass(frozen=True)
class _DeltaRule:
    """fla's kernel, and the tensors of a call: q, k, v, g and beta."""

    matrix: ClassVar[bool] = True

    fn: Callable[..., tuple[Tensor, Any]]
    tensors: tuple[Tensor, ...]
    scale: float

    def part(self, fragment: Fragment) -> _Part:
        """Compute one fragment."""
        q, k, v, g, beta = (x[:, fragment.start : fragment.stop] for x in self.tensors)
        d_k, d_v, initial = k.shape[-1], v.shape[-1], None
        if not fragment.begins_document:
            v = F.pad(v, (0, d_k))
            unit = F.pad(torch.eye(d_k, dtype=_wide(*self.tensors), device=v.device), (d_v, 0))
            initial = unit.expand(v.shape[0], v.shape[2], *unit.shape).contiguous()
        out, final = self.fn(
            q, k, v, g=g, beta=beta, scale=self.scale, initial_state=initial, output_final_state=True, cu_seqlens=None
        )
        final = final.to(_wide(*self.tensors))
        if fragment.begins_document:
            return _Part(out, None, final.new_zeros(*final.shape[:-1], d_k), final)
        return _Part(out[..., :d_v], out[..., d_v:], final[..., d_v:], final[..., :d_v])

    def documents(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Compute whole documents: the outputs of `rows`."""
        batch = self.tensors[0].shape[0]
        bounds = torch.tensor([0, *accumulate(lengths * batch)], dtype=torch.int64, device=rows.device)
        q, k, v, g, beta = (x[:, rows].flatten(0, 1)[None] for x in self.tensors)
        out, _ = self.fn(
            q, k, v, g=g, beta=beta, scale=self.scale, initial_state=None, output_final_state=False, cu_seqlens=bounds
        )
        return out[0].unflatten(0, (batch, len(rows)))


@dataclass(frozen=True)
class _SelectiveState:
    """mamba_ssm's kernel, and the tensors of a call: C, B, x and dt."""

    matrix: ClassVar[bool] = False

    fn: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    A: Tensor

    def part(self, fragment: Fragment) -> _Part:
        """Compute one fragment."""
        C, B, x, dt = (tensor[:, fragment.start : fragment.stop] for tensor in self.tensors)
        out, final = self.fn(x, dt, self.A, B, C, KERNEL_CHUNK, seq_idx=None, return_final_states=True)
        decay = (dt * self.A.to(dt.dtype)).cumsum(1).exp()
        read = C.to(dt.dtype).repeat_interleave(x.shape[2] // C.shape[2], 2) * decay[..., None]
        return _Part(
            out, None if fragment.begins_document else read, decay[:, -1, :, None, None], final.mT.to(dt.dtype)
        )

    def documents(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Compute whole documents: the outputs of `rows`."""
        C, B, x, dt = (tensor[:, rows] for tensor in self.tensors)
        index = torch.arange(len(lengths), dtype=torch.int32, device=rows.device)
        index = index.repeat_interleave(torch.tensor(lengths, device=rows.device)).expand(len(x), -1)
        out: Tensor = self.fn(x, dt, self.A, B, C, KERNEL_CHUNK, seq_idx=index.contiguous(), return_final_states=False)
        return out


def _by_kernel(
    kernel: _DeltaRule | _SelectiveState, reached: Tensor, fragments: tuple[Fragment, ...], seq: Sequence
) -> Tensor:
    """Return the outputs: fragment by fragment, and all documents that are whole on this rank in one call.

    `reached`: as in `_chunked`.
    """
    whole = [each for each in fragments if not each.is_part]
    cut = [each for each in fragments if each.is_part]
    parts = {each: kernel.part(each) for each in cut if not each.ends_document}
    keys, values = kernel.tensors[1:3]
    wide = _wide(*kernel.tensors)
    zeros = values.new_zeros(values.shape[0], values.shape[2], keys.shape[-1], values.shape[-1], dtype=wide)
    unused = zeros.new_zeros(*zeros.shape[:2], *((keys.shape[-1],) * 2 if kernel.matrix else (1, 1)))
    transitions = torch.stack([unused, *(parts[each].transition if each in parts else unused for each in cut)])[1:]
    states = torch.stack([zeros, *(parts[each].state if each in parts else zeros for each in cut)])[1:]
    outs: dict[Fragment, Tensor] = {}
    with started_scan(seq.ring, transitions, reach(states, reached), seq, kernel.matrix) as scan:
        parts |= {each: kernel.part(each) for each in cut if each.ends_document}
        if whole:
            rows = torch.cat([torch.arange(each.start, each.stop, device=values.device) for each in whole])
            lengths = [each.stop - each.start for each in whole]
            outs = dict(zip(whole, kernel.documents(rows, lengths).split(lengths, 1), strict=True))
        initial = scan.wait()
    for each, state in zip(cut, initial, strict=True):
        out, read = parts[each].out, parts[each].read
        if read is not None:
            out = out.to(wide) + torch.einsum("bnhk,bhkv->bnhv", read.to(wide), state)
        outs[each] = out.to(values.dtype)
    return reach(torch.cat([outs[each] for each in fragments], 1), initial)


# --- checks ----------------------------------------------------------------------------------------------------------


def _wide(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of states: float64 if any tensor has it, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _check_shapes(seq: Sequence, **tensors: tuple[Tensor, tuple[str | int, ...]]) -> dict[str, int]:
    """Return the sizes by name. Raise `InputError` unless sizes of the same name are equal, and all have the tokens."""
    check_kinds({name: x for name, (x, _) in tensors.items()})
    sizes = {"tokens": seq.counts[seq.ring.rank]}
    for name, (x, dims) in tensors.items():
        expected = tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in dims)
        if x.dim() != len(dims) or any(
            size != actual for size, actual in zip(expected, x.shape, strict=True) if isinstance(size, int)
        ):
            text = ", ".join(str(size) for size in expected)
            shard = f", this rank's shard; pass seq.shard({name})" if "tokens" in dims else ""
            raise InputError(f"{name} must be ({text}), got {tuple(x.shape)}{shard}")
        if not x.is_floating_point():
            raise InputError(f"{name} must have a float dtype, got {x.dtype}")
        sizes.update({dim: actual for dim, actual in zip(dims, x.shape, strict=True) if isinstance(dim, str)})
    return sizes


def _local(x: Any) -> Any:
    """Return this rank's part of a parameter that tensor parallelism has sharded; other parameters as they are."""
    return x.to_local() if hasattr(x, "to_local") else x


def _check_groups(name: str, count: int, group: str, groups: int) -> None:
    """Raise `InputError` unless the number of heads is a multiple of the number of groups."""
    if not groups or count % groups:
        raise InputError(f"{name} must be a multiple of {group}; got {count} and {groups}")
