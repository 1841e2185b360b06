"""`Ring`: the entry point of the package. All of its public methods are defined here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from numbers import Real
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import torch
from torch import Tensor

from ringattn import dilated
from ringattn.attention import attend, plan_passes
from ringattn.batch import MicroBatch, make_batch
from ringattn.core.dilation import Dilated, Offset, check
from ringattn.core.layout import PLACED, PURPOSES, LayoutName, Purpose, make_layout
from ringattn.core.mask import AttentionMask
from ringattn.core.problem import EIGHT_BIT, FLOATS, EightBitName, FloatName, wire_name
from ringattn.dilated import BranchGradient, Tail
from ringattn.engine.base import Engine
from ringattn.engine.select import ENGINES, EngineName
from ringattn.errors import DisagreementError, InputError
from ringattn.explain import Explanation, StatesExplanation, explain_call, explain_scan
from ringattn.integers import whole_number
from ringattn.latent import Wire, attend_latents
from ringattn.masks import Tree, check_mask
from ringattn.observe.memory import Action, Level, MemoryMonitor, Profile, ProfileName
from ringattn.observe.spans import Recording, new_recording
from ringattn.options import AttentionKeywords, AttentionOptions, check_dropout_seed, takes_options
from ringattn.planner.cluster import Cluster, cluster_of
from ringattn.planner.layouts import placed_layout
from ringattn.planner.memory import MemoryPlan
from ringattn.planner.plan import placements
from ringattn.planner.states import StateSizes
from ringattn.runtime.activation import activate
from ringattn.runtime.executor import Counters
from ringattn.runtime.runtime import Runtime
from ringattn.runtime.states import halo, started_scan
from ringattn.sequence import Sequence, check_documents
from ringattn.transport import collectives
from ringattn.transport.base import Transport
from ringattn.transport.local import LocalWorld
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.rendezvous import TransportName, open_transport, refusals_published
from ringattn.transport.untraced import untraced

Planned = TypeVar("Planned", bound=Sequence[Any] | tuple[Sequence[Any] | MicroBatch, ...])
"""What `Ring.plan_ahead` plans."""


class _PlannedAhead(Future[Planned]):
    """The future of `Ring.plan_ahead`. After the ring was closed or has failed, `result` raises `ClosedError`."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self._ring = ring

    def result(self, timeout: float | None = None) -> Planned:
        """Wait for the plan and return the sequence or the batch."""
        try:
            return super().result(timeout)
        finally:
            self._ring.check_open()


class Ring(Runtime):
    """A group of ranks that compute attention together, as one of these ranks sees it.

    A ring owns its rank's transport, memory pool and cached plans, and closes them. It is a context
    manager; a ring that is garbage collected is closed soon afterwards. After a failure, every later call on every rank
    raises `ClosedError`.

    One thread at a time uses a ring, and all ranks make the same calls in the same order, for the same batches. A lock
    between threads does not ensure this order. Calls of the same shapes are paired without an error in another order,
    or for different batches, and the results are then wrong.

    Attributes:
        rank: This rank, 0 .. world_size - 1.
        world_size: The number of ranks.
        device: The device of this rank's tensors.
        is_open: Whether the ring can still be used: neither closed nor failed.

    Example:
        with ringattn.Ring() as ring:  # under torchrun, or alone
            seq = ring.sequence(1_048_576)
            q, k, v = (seq.shard(x) for x in (q, k, v))
            out = ring.attention(q, k, v, seq, causal=True)
    """

    def __init__(
        self,
        group: Any = None,
        *,
        transport: TransportName | str | Transport = "auto",
        engine: EngineName | str | Engine = "auto",
        timeout_s: float = 600.0,
        dkv_wire_dtype: torch.dtype | FloatName | None = None,
        kv_wire_dtype: torch.dtype | EightBitName | None = None,
        out_wire_dtype: torch.dtype | FloatName | None = None,
        keep_received: bool = False,
        poison: bool = False,
        nccl: NcclOptions | None = None,
        cluster: Cluster | str | None = "auto",
    ) -> None:
        """Open the ring on this rank. Return when all ranks have opened it.

        Args:
            group: A ProcessGroup, or a DeviceMesh (its dimension `cp`). None: the default process group if there is
                one, else torchrun's environment variables, else this process alone.
            transport: The transport of the messages: nccl, peer (copy engines within a node, NCCL between nodes), shm
                (shared memory within a machine, gloo between machines), gloo, local (a single process), or a
                `Transport`. auto: nccl if there is a CUDA device; otherwise shm if all ranks run on one machine as the
                same user, and gloo if not; local for a ring of one rank.
            engine: The engine that computes attention: aten, plain, triton, fa3, fa4, or an `Engine`. auto: chosen by
                device, dtype and head sizes.
            timeout_s: The deadline of every wait, in seconds.
            dkv_wire_dtype: The floating dtype, or its name, in which dK and dV are sent. None: the accumulator dtype
                (float32; float64 for float64 inputs).
            kv_wire_dtype: The eight-bit dtype, int8 or float8_e4m3fn, in which K and V are sent. It halves the bytes of
                bf16 K and V, and rounds the K and V that come from other ranks, never those of the rank itself.
                Gradients are those of the rounded values. None: the dtype of K and V. Relative errors of out, dq, dk,
                dv, for unit normal inputs of head_dim 64, causal, 4 ranks: 0.5, 0.7, 0.6, 0.3 % in int8 and 2.1, 3.1,
                2.4, 1.6 % in float8_e4m3fn; docs/internals/decisions/0006 has bounds.
            out_wire_dtype: The floating dtype, or its name, in which a rank returns outputs that it computed for the
                queries of another rank, as the schedules ulysses, ulysses_ring, pass_q and balanced do. A narrower
                dtype rounds those outputs. None: the accumulator dtype.
            keep_received: Keep everything that a forward pass receives until its backward pass, which then need not
                receive it again. Only all_gather, node_gather and ulysses can, because they hold all received rows at
                the same time. Each call needs the memory of these rows until its backward pass, so with checkpointed
                layers only one layer needs it. False: keep them if they are at most an eighth of the own K and V.
            poison: Fill unused memory with NaN, so that reading it becomes visible.
            nccl: Options of NCCL, for the transports nccl and peer (between nodes). None: the defaults of
                `NcclOptions`.
            cluster: The machines for which schedule="auto" chooses, the same on all ranks: the name of a preset, a file
                written by `ringattn calibrate`, or a `Cluster`. Nodes and links are those that the ring detects, unless
                the cluster has `links`. auto: the file that `ringattn calibrate` wrote on this machine, or the preset
                of its GPUs; `explain` says which. None: unknown, so schedule="auto" decides by mask and bytes.

        Raises:
            InputError: An argument is unknown or does not fit the group.
            UnsupportedError: The transport does not work with this machine or build.
            InputError: RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing or wrong, or the port is in use.
            DeadlineError: A rank did not open the ring in time.
            PeerLostError: Another rank's arguments were refused, or rank 0 ended while it hosted the store.
            DisagreementError: The ranks have different NCCL options or libraries, or belong to two jobs.
        """
        # If the arguments of one rank are refused, all ranks report the reason.
        with refusals_published(group) if isinstance(transport, str) else nullcontext():
            if isinstance(engine, str) and engine not in ENGINES:
                raise InputError(f"engine={engine!r} is not known; choose one of {', '.join(ENGINES)}")
            if cluster == "auto":
                machines: Cluster | Literal["auto"] | None = "auto"
            else:
                machines = None if cluster is None else cluster_of(cluster)
            if not isinstance(timeout_s, Real) or not 0 < timeout_s < math.inf:
                raise InputError(f"timeout_s must be a positive, finite number, got {timeout_s!r}")
            if not isinstance(keep_received, bool):
                raise InputError(f"keep_received must be True or False, got {keep_received!r}")
            facts: dict[str, Any] = {
                "keep_received": keep_received,
                "dkv_wire_dtype": wire_name("dkv_wire_dtype", dkv_wire_dtype, FLOATS),
                "kv_wire_dtype": wire_name("kv_wire_dtype", kv_wire_dtype, EIGHT_BIT),
                "out_wire_dtype": wire_name("out_wire_dtype", out_wire_dtype, FLOATS),
            }
        if not isinstance(transport, str):
            super().__init__(transport, engine=engine, poison=poison, cluster=machines, **facts)
            return
        opened = open_transport(group, transport, timeout_s, nccl, calibrated=machines == "auto")
        try:
            super().__init__(opened, engine=engine, poison=poison, cluster=machines, **facts)
        except BaseException as error:
            opened.abort(error)  # the other ranks have opened the ring already
            raise

    def close(self) -> None:
        """Close the ring on this rank without disturbing other ranks. Idempotent; later calls raise `ClosedError`."""
        if self.forked or self._end is not None:
            return
        # Release the arena before the transport closes, because the close frees its memory.
        self._release_memory()
        self._end = "it was closed"
        self._if_dropped.detach()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # An error inside `with` may have left peers waiting: abort, because close would wait for them.
        if error is not None and self._end is None:
            self.end(error)
        self.close()

    def sequence(
        self,
        length: int | None = None,
        *,
        cu_seqlens: Many[int] | Tensor | None = None,
        layout: LayoutName | str = "auto",
        for_: Purpose | str = "causal",
        schedule: str = "auto",
        mask: AttentionMask | None = None,
    ) -> Sequence[Ring]:
        """Shard `length` tokens, or packed documents, over the ranks. Local: no rank waits for another.

        Uneven counts are normal: the first ranks or chunks take the extra tokens.

        Args:
            length: The number of tokens of the whole sequence. None: the last entry of `cu_seqlens`, or
                the tokens of a tree.
            cu_seqlens: Cumulative document lengths [0, ..., length], integers. Every row of a batch has these
                documents. None: one sequence without documents.
            layout: contiguous, zigzag, striped, per_document (zigzag within each document) or documents (a short
                document stays on one rank, a long one is cut, and causal pairs are balanced) or mask (the same for the
                pairs of `mask`: few rows are sent, and pairs are balanced). auto: chosen by `for_`.
            for_: The mask whose work the layout balances: causal, full, window or dilated. Only for layout="auto"; with
                layout="mask", full if calls have causal=False and the mask combines with `causal`.
            schedule: The schedule that calls will name. Used with layout="documents" and "mask" only. all_gather and
                node_gather: place tokens so that few rows are sent, by node first. Other schedules: place them
                so that no rank waits for another in any step. auto: place them as for all_gather if the cluster is
                known, and there are several equal nodes or no rank then receives more than 1.5 times its shard;
                otherwise as for other schedules. Calls with another schedule are exact but slower.
            mask: The mask of every attention over the sequence, as in `Sequence.with_mask`. layout="mask" needs it.

        Returns:
            The sequence. It shards tensors, and attention takes it.

        Raises:
            InputError: No length is given, it is not a number of tokens or exceeds 2^50; `cu_seqlens` does not ascend
                from 0 to the length; a name is unknown; a layout of documents is used without documents, or
                layout="mask" without a mask or with one that does not fit the sequence; the mask is a tree of another
                number of tokens; or a schedule is named for a layout other than documents and mask.

        Example:
            seq = ring.sequence(cu_seqlens=[0, 700, 1000])
            seq = ring.sequence(mask=masks.tree([-1, 0, 0], [1024, 512, 256]), layout="mask")
        """
        documents = None if cu_seqlens is None else check_documents(cu_seqlens, length)
        check_mask(mask)
        if length is None:
            if documents is not None:
                length = documents[-1]
            elif isinstance(mask, Tree):
                length = mask.tokens
            else:
                raise InputError("sequence needs a length in tokens, or cu_seqlens=[0, ..., length]")
        length = whole_number(length, "length must be a number of tokens", 0)
        if schedule != "auto" and layout not in PLACED:
            raise InputError(
                f"schedule={schedule!r} decides where layout='documents' or 'mask' places tokens; layout={layout!r} "
                "does not depend on it: name the schedule in the call only"
            )
        if layout in PLACED and for_ in PURPOSES:
            token_layout = placed_layout(
                layout, length, self.world_size, documents, for_, mask, str(schedule), self.machines
            )
        else:
            token_layout = make_layout(layout, length, self.world_size, documents, for_)
        return Sequence(self, token_layout, documents, mask)

    def batch(
        self,
        samples: Iterable[int | Tree] | Tensor,
        *,
        max_tokens_per_rank: int | None = None,
        micro_batches: int | None = None,
        token_pairs: float | None = None,
        schedule: str = "auto",
    ) -> tuple[MicroBatch, ...]:
        """Divide the samples of an optimizer step among micro-batches of nearly equal predicted time. Local.

        Each micro-batch is a packed sequence over all ranks, placed as by layout="documents": short samples are whole
        on a rank, long ones are cut, and tokens and pairs are even on all ranks. If any sample is a tree, each
        micro-batch is a tree with a root for each sample, placed as by layout="mask". Use it with one ring of all
        ranks, instead of groups for data and context parallelism. Samples are never truncated.

        Args:
            samples: The number of tokens of each sample, or its `masks.tree`, the same on all ranks.
            max_tokens_per_rank: The most tokens of a micro-batch on a rank. None: no limit.
            micro_batches: The number of micro-batches. None: as few as are found to fit the limit, where samples are
                packed from the longest to the shortest; without a limit, one.
            token_pairs: The time of a token outside of attention, in the time of one causal (query, key) pair, see
                `ringattn.batch.token_pairs`. None: that of a dense model of 8 billion weights (Llama 3). It has no
                effect on results.
            schedule: As in `sequence`.

        Returns:
            The micro-batches. Each sample is in one of them.

        Raises:
            InputError: A sample exceeds the limit, or the samples are not found to fit into `micro_batches`; there are
                fewer samples than micro-batches; a sample is empty, or is neither a length nor a tree; the samples have
                more than 2^50 tokens together; or a number or name is not valid.

        Example:
            batch = ring.batch(list(map(len, texts)), max_tokens_per_rank=8192)
            labels = [micro.shard_labels(texts) for micro in batch]
            scale = loss_scale(labels, ring, gradients="mean")
            for micro, micro_labels in zip(batch, labels):
                with ring.activate(micro.seq):
                    logits = model(micro.shard(texts), micro.seq.positions(per_document=True))
                    (scale * cross_entropy(logits[0], micro_labels[0], reduction="sum")).backward()
        """
        return make_batch(self, samples, max_tokens_per_rank, micro_batches, token_pairs, schedule)

    def plan_ahead(self, make: Callable[[], Planned]) -> Future[Planned]:
        """Make and plan the next sequence or batch in a thread, while this step computes. Returns at once; local.

        Use it if masks, documents or lengths change from step to step: placing tokens and planning take milliseconds,
        which a step otherwise waits for. The thread plans the passes that this ring has run since the last `plan_ahead`
        (if there are none, since the one before) over the new sequence. These are the calls of the last step: a call
        that was not among them, one with `kv_seq` and `latent_attention` are planned when they are made. Plans and
        results are the same as without.

        Args:
            make: Returns a sequence of this ring, a tuple of them, or the micro-batches of `batch`. It is called in the
                thread, so it must not make calls of the ring that other ranks take part in.

        Returns:
            The future of what `make` returns. Its `result()` waits until that is planned.

        Raises:
            InputError: `make` is not a function. From `result()`: `make` did not return a sequence of this ring, or its
                micro-batches. A call that is refused for the new sequence is refused when it is made, on all ranks.
            ClosedError: The ring was closed or has failed. From `result()` too.
            BaseException: From `result()`, what `make` or planning raised.

        Example:
            ahead = ring.plan_ahead(lambda: ring.sequence(mask=trees[0], layout="mask"))
            for step in range(steps):
                seq = ahead.result()
                loss = forward(seq)
                ahead = ring.plan_ahead(lambda: ring.sequence(mask=trees[step + 1], layout="mask"))
                loss.backward()
        """
        if not callable(make):
            raise InputError(f"rank {self.rank}: plan_ahead takes a function that returns a sequence, got {make!r}")
        passes = self.recent_passes()
        future = _PlannedAhead[Planned](self)

        def plan() -> None:
            try:
                made = make()
                parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
                seqs = [part.seq if isinstance(part, MicroBatch) else part for part in parts]
                if not seqs or not all(isinstance(seq, Sequence) and seq.ring is self for seq in seqs):
                    raise InputError(
                        f"rank {self.rank}: plan_ahead takes a function that returns a sequence or a batch of this "
                        f"ring, got {made!r}"
                    )
                for seq in seqs:
                    plan_passes(self, seq, passes)
                future.set_result(made)
            except BaseException as error:  # raised by `result`
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        Thread(target=plan, name="ringattn-plan").start()
        return future

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, kv_seq: Sequence | None = ...,
        return_lse: Literal[False] = ..., **options: Unpack[AttentionKeywords],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, kv_seq: Sequence | None = ...,
        return_lse: Literal[True], **options: Unpack[AttentionKeywords],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, kv_seq: Sequence | None = ...,
        return_lse: bool, **options: Unpack[AttentionKeywords],
    ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip

    @untraced
    @takes_options()
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: Sequence,
        *,
        kv_seq: Sequence | None = None,
        return_lse: bool = False,
        **options: Unpack[AttentionKeywords],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute exact attention of this rank's queries to the keys of all ranks. Differentiable. A collective call.

        torch.autocast has no effect: out has the dtype of q, and engines ignore it. As with torch's
        scaled_dot_product_attention, the backward pass uses the outputs and raises if they were changed in place. If an
        input of any rank needs a gradient, the outputs of all ranks carry a graph, and every rank calls backward.
        Second derivatives are not supported: a backward pass with create_graph=True raises UnsupportedError.

        Args:
            q: Queries, this rank's shard of `seq`: float64, float32, float16 or bfloat16.
            k: Keys in the dtype of q, this rank's shard of `kv_seq` if it is given, otherwise of `seq`. q_heads is a
                multiple of kv_heads.
            v: Values, like k.
            seq: The sequence of the queries, made by this ring.
            kv_seq: The sequence of the keys for cross attention, made by this ring. Positions count from 0 in both.
                None: `seq`.
            return_lse: Also return lse.
            options: See `ringattn.options.AttentionOptions`.

        Shape:
            q: (batch, tokens, q_heads, d_k)
            k: (batch, kv_tokens, kv_heads, d_k)
            v: (batch, kv_tokens, kv_heads, d_v)
            sinks: (q_heads,)
            alibi_slopes: (q_heads,)
            out: (batch, tokens, q_heads, d_v)
            lse: (batch, q_heads, tokens)

        Returns:
            out in the dtype of q; with `return_lse` (out, lse). lse is the natural logarithm of the softmax's
            denominator including sinks, in the accumulator dtype, and differentiable. For a query that attends to no
            key, or whose scores are all -inf, out is 0 and lse is -inf, or the sink if there are sinks. A NaN in a
            query makes its row NaN.

        Raises:
            InputError: A tensor, a sequence or an option is wrong, on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call, or a tensor is a DTensor.
            DisagreementError: The ranks do not make the same call, or some need gradients and another uses
                torch.no_grad.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had no memory for the pass.

        Example:
            out, lse = ring.attention(q, k, v, seq, causal=True, window=(4095, 0), return_lse=True)
        """
        with self.refused_by_all():
            checked = AttentionOptions.of(options)
        out, lse = attend(self, q, k, v, seq, kv_seq, checked)
        return (out, lse) if return_lse else out

    @untraced
    @takes_options()
    def latent_attention(
        self,
        q: Tensor,
        rotary: Tensor,
        latents: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        seq: Sequence,
        *,
        wire: Wire | str = "auto",
        return_lse: bool = False,
        **options: Unpack[AttentionKeywords],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute multi-head latent attention (MLA) exactly. Differentiable. A collective call.

        A key of head h is `w_k[h] @ latent` followed by the rotary key, which all heads share; a value is
        `w_v[h] @ latent`. Latents and rotary keys can be sent between ranks in place of the keys and values of all
        heads: d_latent + d_rope numbers per token instead of heads * (d_k + d_v). Each rank then expands the blocks
        that it receives, in backward again.

        Args:
            q: Queries, this rank's shard of `seq`: float64, float32, float16 or bfloat16. The last d_rope numbers of a
                head meet the rotary key.
            rotary: Rotary keys, after the rotary embedding.
            latents: Latents, after their norm.
            w_k: Weights of keys. Its gradient is this rank's part, to be summed over ranks like that of any weight.
            w_v: Weights of values, like `w_k`.
            seq: The sequence, made by this ring.
            wire: What is sent: latents, or keys (and values). auto: latents if they are smaller and, on known machines,
                the predicted time is shorter.
            return_lse: Also return lse.
            options: See `ringattn.options.AttentionOptions`. The schedule must send keys, not queries, to send latents.

        Shape:
            q: (batch, tokens, heads, d_k)
            rotary: (batch, tokens, d_rope)
            latents: (batch, tokens, d_latent)
            w_k: (heads, d_k - d_rope, d_latent)
            w_v: (heads, d_v, d_latent)
            out: (batch, tokens, heads, d_v)
            lse: (batch, heads, tokens)

        Returns:
            out in the dtype of q; with `return_lse` (out, lse), as `attention` returns them.

        Raises:
            InputError: A tensor, a sequence or an option is wrong, on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call.
            DisagreementError: The ranks do not make the same call.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had no memory for the pass.

        Example:
            w_k, w_v = kv_b_proj.weight.view(heads, d_nope + d_v, d_latent).split([d_nope, d_v], 1)
            out = ring.latent_attention(q, rotary, latents, w_k, w_v, seq, causal=True)
        """
        with self.refused_by_all():
            checked = AttentionOptions.of(options)
        out, lse = attend_latents(self, q, rotary, latents, w_k, w_v, seq, wire, checked)
        return (out, lse) if return_lse else out

    @untraced
    @takes_options(dilated.REFUSED)
    def dilated_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: Sequence,
        *,
        segment_lengths: Many[int],
        dilation_rates: Many[int],
        offset: Offset | str = "mod",
        grad: BranchGradient = "exact",
        tail: Tail = "ragged",
        layer: int | None = None,
        return_lse: bool = False,
        **options: Unpack[AttentionKeywords],
    ) -> Any:
        """Compute LongNet's dilated attention (arXiv 2307.02486) exactly: one softmax over the keys of all branches.

        Branch i cuts the sequence, or each document, into segments of `segment_lengths[i]` tokens. In each segment, the
        queries and keys of a head are those at its `offset` modulo `dilation_rates[i]`. A pair in several branches
        counts once for each. Differentiable. A collective call.

        Args:
            q: Queries, this rank's shard of `seq`: float64, float32, float16 or bfloat16.
            k: Keys, this rank's shard of `seq`, in the dtype of q. q_heads is a multiple of kv_heads.
            v: Values, like k.
            seq: The sequence, made by this ring.
            segment_lengths: The number of tokens of a segment, one per branch; positive.
            dilation_rates: The dilation rate r, one per branch; positive. A head keeps one of r tokens.
            offset: Which token of each r a head keeps. mod: head % r (LongNet). block: groups of ceil(heads / r) heads
                share an offset (torchscale). kv_head: K/V head % r. layer_rotated: (head + layer * heads) % r.
            grad: exact; or detached, which treats the weights of the branches as constants, as torchscale does. Then
                lse has no gradient.
            tail: ragged; or zero_pad, where queries also attend to the zero keys with which torchscale fills short
                segments.
            layer: The index of the layer, from 0, with offset="layer_rotated"; None otherwise.
            return_lse: Also return lse.
            options: See `ringattn.options.AttentionOptions`. sinks need grad="exact", and alibi_slopes tail="ragged".

        Shape:
            q: (batch, tokens, q_heads, d_k)
            k: (batch, tokens, kv_heads, d_k)
            v: (batch, tokens, kv_heads, d_v)
            sinks: (q_heads,)
            alibi_slopes: (q_heads,)
            out: (batch, tokens, q_heads, d_v)
            lse: (batch, q_heads, tokens)

        Returns:
            out in the dtype of q; with `return_lse` (out, lse), as `attention` returns them.

        Raises:
            InputError: A tensor, a branch or an option is wrong, on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call, or a tensor is a DTensor.
            DisagreementError: The ranks do not make the same call, or some need gradients and another uses
                torch.no_grad.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had no memory for the pass.

        Example:
            out = ring.dilated_attention(q, k, v, seq, segment_lengths=[2048, 8192], dilation_rates=[1, 4], causal=True)
        """
        with self.refused_by_all():
            checked = AttentionOptions.of(options, dilated.REFUSED)
            branches = Dilated(*check(segment_lengths, dilation_rates), checked.causal, offset, layer)
        out, lse = dilated.attend_dilated(self, q, k, v, seq, branches, checked, grad, tail)
        return (out, lse) if return_lse else out

    @takes_options()
    def explain(
        self,
        seq: Sequence,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        batch: int = 1,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dtype: torch.dtype | str | None = None,
        backward: bool = True,
        segment_lengths: Many[int] | None = None,
        dilation_rates: Many[int] | None = None,
        offset: Offset | str = "mod",
        layer: int | None = None,
        kv_seq: Sequence | None = None,
        cluster: Cluster | str | None = None,
        sm_margin: int | None = None,
        **options: Unpack[AttentionKeywords],
    ) -> Explanation:
        """Explain what `attention` would do with these arguments; with `segment_lengths`, `dilated_attention`.

        Everything is read from the plans that would run. Nothing is sent, and the other ranks need not call it. The
        memory and time of this call grow with the number of token ranges in the layout and of pairs of ranks, not with
        the number of tokens.

        Args:
            seq: The sequence of the queries.
            q: Queries (batch, tokens, q_heads, d_k): batch, heads, head_dim, dtype and device are taken from them.
                None: give `q_heads` and `head_dim`.
            k: Keys: the number of K/V heads is taken from them. None: `kv_heads`.
            v: Values: d_v is taken from them. None: d_k.
            batch: The size of the batch, if `q` is None.
            q_heads: The number of query heads, if `q` is None.
            kv_heads: The number of K/V heads, if `k` is None. None: the number of query heads.
            head_dim: d_k, if `q` is None.
            dtype: The dtype of q, k and v, or its name, if `q` is None. None: bfloat16.
            backward: Also explain the backward pass.
            segment_lengths: As for `dilated_attention`. None, with `dilation_rates` None: explain `attention`.
            dilation_rates: As for `dilated_attention`.
            offset: As for `dilated_attention`.
            layer: As for `dilated_attention`.
            kv_seq: As for `attention`.
            cluster: The machines for which times are predicted: a `Cluster`, the name of a preset, or a file written by
                `ringattn calibrate`. If it does not say which ranks share a node, the nodes of the ring are used. None:
                the machines of the ring.
            sm_margin: The number of multiprocessors that attention leaves free for exchanges, as in `NcclOptions`.
                None: the number that the engine of this ring leaves free on its device.
            options: See `ringattn.options.AttentionOptions`; dropout needs no seed here.

        Returns:
            The explanation: plans, bytes, messages, pairs, memory, predicted time. `print` shows it as text.

        Raises:
            InputError: Sizes are missing or are not whole numbers, a tensor does not have four dimensions, a name is
                unknown, options contradict each other, there are too many pieces to plan, or the GPUs of the cluster
                have fewer multiprocessors than `sm_margin`.
            UnsupportedError: The engine does not compute this call.

        Example:
            print(ring.explain(seq, q_heads=32, kv_heads=8, head_dim=128, causal=True))
        """
        is_dilated = segment_lengths is not None or dilation_rates is not None
        checked = AttentionOptions.of(options, dilated.REFUSED if is_dilated else {})
        branches = None
        if is_dilated:
            branches = Dilated(*check(segment_lengths or (), dilation_rates or ()), checked.causal, offset, layer)
        elif offset != "mod" or layer is not None:
            raise InputError("offset= and layer= need dilated attention; also give segment_lengths=")
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x is not None and (not isinstance(x, Tensor) or x.dim() != 4):
                got = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
                raise InputError(f"explain: {name} must be a (batch, tokens, heads, head_dim) tensor, got {got}")
        if q is not None:
            if batch != 1 or (q_heads, head_dim, dtype) != (None, None, None):
                raise InputError("explain takes batch, heads, head_dim and dtype from q; give either q= or these")
            batch, _, q_heads, head_dim = q.shape
            dtype = q.dtype
        if q_heads is None or head_dim is None:
            raise InputError("explain needs q=, or q_heads= and head_dim=")
        if k is not None:
            kv_heads = k.shape[2]
        elif kv_heads is None:
            kv_heads = q_heads
        sizes = batch, q_heads, kv_heads, head_dim, v.shape[3] if v is not None else head_dim
        name = str(dtype or torch.bfloat16).removeprefix("torch.")
        return explain_call(
            self, seq, kv_seq, sizes, name, self.device if q is None else q.device, checked, branches,
            backward=backward, cluster=cluster, sm_margin=sm_margin,
        )  # fmt: skip

    def memory_plan(self, seq: Sequence, **call: Any) -> MemoryPlan:
        """Plan all memory of one `attention` call on every rank, without running it. Local, like `explain`.

        Counted are the arena, accumulators, the workspace of the engine, cached remote K/V, the outputs that are saved
        for backward, and the gradients. On a CPU, the peaks of random calls were within 3 % of the measured ones; see
        docs/memory-planning.md.

        Args:
            seq: The sequence of the queries.
            call: The arguments of `explain` that describe the call, such as `q_heads`, `dtype`, `backward=False` for a
                call without gradients, `schedule` and `causal`.

        Returns:
            The memory of each rank by part, at the peak of each pass and between the passes. `print` shows a table.

        Raises:
            InputError: As for `explain`.
            UnsupportedError: The engine does not compute this call.

        Example:
            print(ring.memory_plan(seq, q_heads=32, kv_heads=8, head_dim=128, causal=True))
        """
        return self.explain(seq, **call).memory

    def activate(self, seq: Sequence | None, *, dropout_seed: int | None = None) -> AbstractContextManager[None]:
        """Make `seq` the active sequence inside the `with`: `ringattn.active_sequence()` returns it. Calls may nest.

        If the sequence has several ranks, an operator that would attend to the local shard only is refused where it is
        called. Operators are observed during the first activation of a ring (once with gradients and once without), and
        during later ones until the first attention over a ring.

        Args:
            seq: A sequence of this ring. None: attention inside is local.
            dropout_seed: A number from 0 to 2**64 - 1, the same on all ranks, for example the number of the step. Each
                attention with dropout inside the `with` draws its own seed from this number. If a later `with` has the
                same number, the draws continue. None: attention with dropout is refused.

        Returns:
            A context manager.

        Raises:
            InputError: `seq` belongs to another ring, `dropout_seed` is not a seed, or it is given for local attention;
                or, at the end of the `with`, a model ran inside and no attention was computed over a ring.
            UnsupportedError: Inside, an operator would attend to this rank's tokens only.

        Example:
            with ring.activate(seq):
                loss = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None]).loss
        """
        if seq is not None and (not isinstance(seq, Sequence) or seq.ring is not self):
            raise InputError(f"rank {self.rank}: activate takes a sequence of this ring, got {seq!r}")
        check_dropout_seed(dropout_seed)
        if seq is None and dropout_seed is not None:
            raise InputError(
                "dropout of local attention uses torch's generator; leave dropout_seed out of activate(None)"
            )
        return activate(seq, dropout_seed=dropout_seed)

    def memory_monitor(
        self,
        profile: ProfileName | Profile = "balanced",
        *,
        actions: Mapping[Level, Iterable[Action]] | None = None,
        capacity_bytes: int | None = None,
    ) -> MemoryMonitor:
        """Return a monitor of the memory of all ranks, with actions at named levels.

        Args:
            profile: The shares of the memory at which levels begin: aggressive, balanced or conservative, or a
                `Profile`.
            actions: For each `Level`, the functions of (level, readings) to call from that level on. None: no actions.
            capacity_bytes: The memory of this rank. None: the memory of the device; on a CPU, the memory of the machine
                or the limit of the control group.

        Returns:
            The monitor. All ranks call its `report` and `check` together.

        Raises:
            InputError: The profile is unknown or its shares do not ascend within 0 to 1; the capacity is not a positive
                whole number of bytes; the actions are not lists of functions by `Level`.
        """
        gather = self.all_gather_text
        return MemoryMonitor(self.pool, self.device, self.rank, gather, profile, actions, capacity_bytes)

    def barrier(self) -> None:
        """Wait until every rank has called this method. A collective call.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: A peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        self.check_consistency("barrier", always=True)

    def synchronize(self) -> None:
        """Wait until all exchanges of this rank have arrived. Local, not a barrier.

        On a GPU the host runs ahead, so it notices a lost peer at a later call: synchronize before you save results.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: An exchange failed.
        """
        with self.guarded():
            self.transport.drain()

    def all_reduce(self, tensors: Iterable[Tensor | None]) -> None:
        """Sum tensors over the ranks, in place, with the same bits on every rank. A collective call.

        Args:
            tensors: Tensors of any shape and stride, with the same shapes and dtypes on all ranks; not expanded, sparse
                or DTensors. Any dtype except bool and unsigned integers of 16 bits and more. Floats of 8 and 16 bits
                are summed in float32 and rounded once, all others in their own dtype. An entry that is None on all
                ranks, like the gradient of a frozen parameter, is skipped.

        Raises:
            InputError: An entry is not such a tensor and not None, on any rank; every rank raises.
            DisagreementError: Shapes, dtypes, or which entries are None differ between ranks.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or the deadline passed (DeadlineError).

        Example:
            ring.all_reduce([weight.grad for weight in model.parameters()])
        """
        entries: list[Tensor | None] = []

        def described() -> str:
            entries.extend(collectives.listed(tensors))
            listed = collectives.summary(entries)
            collectives.check_sums(entries)
            return f"all_reduce of {listed}"

        try:
            self.check_same_call(described)
        except DisagreementError as error:
            if collectives.ARE_NONE not in str(error):
                raise
            raise DisagreementError(
                f"{error}\nall_reduce skips an entry only where it is None on all ranks; on a rank without a gradient "
                "pass torch.zeros_like(parameter)"
            ) from None
        with self.guarded():
            collectives.all_reduce(self.transport, [entry for entry in entries if entry is not None])

    def broadcast(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Copy the tensors of one rank to every rank, in place. A collective call.

        Args:
            tensors: Tensors of any shape, stride and dtype, with the same shapes and dtypes on all ranks; not expanded,
                sparse or DTensors.
            src: The rank whose tensors are copied.

        Raises:
            InputError: There is no rank `src`, or an entry is not such a tensor, on any rank; every rank raises.
            DisagreementError: `src`, shapes or dtypes differ between ranks.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        entries: list[Tensor] = []
        root: list[int] = []

        def described() -> str:
            needed = f"broadcast: src must be a rank below {self.world_size}"
            root.append(whole_number(src, needed, 0, self.world_size - 1))
            entries.extend(collectives.listed(tensors))
            if missing := [index for index, entry in enumerate(entries) if entry is None]:
                raise InputError(f"broadcast: tensors[{missing[0]}] is None; leave it out on all ranks")
            return f"broadcast from {root[0]} of {collectives.summary(entries)}"

        self.check_same_call(described)
        with self.guarded():
            collectives.broadcast(self.transport, entries, root[0])

    @untraced
    def halo(self, x: Tensor, seq: Sequence, width: int, dim: int = 1) -> tuple[Tensor, Tensor]:
        """Return each fragment of this rank's tokens behind its `width` rows of history. A collective call.

        Use it for layers in which a token depends on the `width` tokens before it, such as a short convolution or a
        shift of tokens. History ends at the start of the document: rows before it are zeros. Differentiable.

        Args:
            x: This rank's tokens of `seq`.
            seq: The sequence, made by this ring, in any layout but striped.
            width: The number of rows of history.
            dim: The dimension of the tokens.

        Returns:
            (padded, rows): a tensor like x with, in `dim`, the history and the tokens of each fragment of
            `seq.fragments()` in turn; and the int64 indices of this rank's tokens in it.

        Raises:
            InputError: `x` does not have this rank's tokens in `dim`, or `width` is not a number of rows, on any rank.
            UnsupportedError: The layout is striped.
            DisagreementError: The ranks differ in the width, the dtype, the other dimensions or the sequence.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).

        Example:
            padded, rows = ring.halo(x, seq, width=3)  # (batch, tokens, channels)
            y = conv1d(padded.mT, weight, groups=channels).mT[:, rows - 3]  # a causal convolution of 4 taps
        """
        return halo(self, x, seq, width, dim)

    @untraced
    def scan_states(self, transitions: Tensor, states: Tensor, seq: Sequence, *, matrix: bool = False) -> Tensor:
        """Return the states before this rank's parts of documents, for recurrences that are affine in their state.

        Within a fragment, such a recurrence turns a state S into M S + B. This rank computes M and B of its fragments
        that are not whole documents (B is the state at the end of the fragment if S = 0). The result for a fragment is
        the state that all earlier fragments of its document lead to, zeros at the start of the document.
        Differentiable. A collective call, and so is its backward pass: on each rank, the loss must depend on the
        result.

        Args:
            transitions: M of each fragment of `seq.fragments()` with `is_part`: a factor of the state, or with `matrix`
                a matrix that is multiplied from the left. That of the first fragment of a document is not used.
            states: B of each of these fragments: float32 or float64.
            seq: The sequence, made by this ring, in any layout but striped.
            matrix: Whether transitions are matrices.

        Shape:
            states: (parts, ...), with `matrix` (parts, ..., d, e).
            transitions: broadcasts to `states`, with `matrix` (parts, ..., d, d).

        Returns:
            The states before the fragments, a tensor like `states`.

        Raises:
            InputError: Shapes or dtypes do not fit, on any rank.
            UnsupportedError: The layout is striped.
            DisagreementError: The ranks differ in shapes, dtypes or the sequence.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).

        Example:
            # S[t] = decay[t] * S[t - 1] + x[t], from the local sums of each part
            before = ring.scan_states(torch.stack(products), torch.stack(sums), seq)
        """
        with started_scan(self, transitions, states, seq, matrix) as scan:
            return scan.wait()

    def explain_states(
        self,
        seq: Sequence,
        *,
        state_bytes: int = 0,
        transition_bytes: int = 0,
        halo_rows: int = 0,
        row_bytes: int = 0,
        backward: bool = True,
        cluster: Cluster | str | None = None,
    ) -> StatesExplanation:
        """Explain what a layer with a state exchanges: `scan_states` of states of these sizes, and `halo` of rows.

        Bytes do not depend on the number of tokens. Nothing is sent, and the other ranks need not call it.

        Args:
            seq: The sequence, in any layout but striped.
            state_bytes: The bytes of the state of a fragment, all heads and batch rows. 0: no scan.
            transition_bytes: The bytes of the transition of a fragment.
            halo_rows: The rows of history, `width` of `halo`. 0: no halo.
            row_bytes: The bytes of a row of history, all batch rows.
            backward: Also explain the backward pass.
            cluster: As for `explain`.

        Returns:
            The explanation: bytes, messages, exchanges and predicted time of the messages. `print` shows it as text.

        Raises:
            InputError: A size is not a number, or the cluster is unknown.
            UnsupportedError: The layout is striped.

        Example:
            heads, d_k, d_v = 32, 128, 128  # a gated delta rule in float32, behind a convolution of 4 taps in bfloat16
            sizes = {"state_bytes": heads * d_k * d_v * 4, "transition_bytes": heads * d_k * d_k * 4}
            print(ring.explain_states(seq, **sizes, halo_rows=3, row_bytes=8192 * 2))
        """
        sizes = StateSizes(transition_bytes, state_bytes, halo_rows, row_bytes)
        return explain_scan(self, seq, sizes, backward=backward, cluster=cluster)

    def replay(self, graph: Any) -> None:
        """Replay a captured CUDA graph of calls of this ring on the current stream, under a single deadline.

        All ranks capture and replay the same calls. Run a call once before you capture it, capture with
        `capture_error_mode="thread_local"`, and delete the graph before you close the ring. Until then, the ring keeps
        the staging buffers of the captured calls. A later call that needs more memory allocates other buffers.

        Args:
            graph: A `torch.cuda.CUDAGraph`.

        Raises:
            InputError: `graph` is something else, on any rank.
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: An exchange failed, or the deadline passed (DeadlineError).
        """

        def described() -> str:
            if not callable(getattr(graph, "replay", None)):
                raise InputError(f"replay: graph must be a torch.cuda.CUDAGraph, got {type(graph).__name__}")
            return "replay of a captured graph"

        self.check_same_call(described)
        with self.guarded():
            self.transport.replay(graph.replay)

    def counters(self) -> dict[str, int]:
        """Return the numbers of bytes, messages and passes of this rank since the last reset.

        Returns:
            `bytes_sent` (payload), `messages`, `passes` and `pool_high_water_bytes`.
        """
        return {**asdict(self._counters), "pool_high_water_bytes": self.pool.high_water_bytes}

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self._counters = Counters()
        self.pool.reset_high_water()

    @contextmanager
    def recording(self, *, nvtx: bool = False) -> Iterator[Recording]:
        """Record the phases of the passes that this rank runs inside the `with`, backward passes included. Local.

        On a GPU the recording waits for the device once, before the first pass. A pass that is captured into a CUDA
        graph is refused.

        Args:
            nvtx: Also mark the passes as NVTX ranges for NVIDIA's tools.

        Returns:
            A context manager that gives the `Recording`, see `ringattn.observe.spans`.

        Raises:
            InputError: The ring is being recorded already.
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        if self._recording is not None:
            raise InputError("this ring is being recorded already; recordings cannot be nested")
        self._recording = new_recording(
            self.rank, self.world_size, self.device, self.transport.stream, nvtx, self.transport.name
        )
        try:
            yield self._recording
        finally:
            self._recording = None

    def memory_info(self) -> dict[str, int]:
        """Return the memory of the ring, which all layers share. Local.

        Returns:
            `world_size`; `plans`, the number of cached plans; `slots` (buffers) and `pool_gap_bytes` of the largest
            plan; `kept_bytes`, the most that one forward pass keeps for its backward pass; `pool_bytes`, the current
            size of the pool; `pool_high_water_bytes`, the bytes of the largest pass; and `pool_reuses`, the number of
            passes that needed no new memory.
        """
        plans = [executor.plan for executor in self._executors.values()]
        return {"world_size": self.world_size, **placements(plans), **self.pool.report()}


def ring_of_one(ring: Ring | None) -> Ring:
    """Return `ring` if it is open, else a new ring of one rank, whatever other processes exist.

    For a ring that users do not see, so they cannot open another one after a failure or in a forked process.

    Args:
        ring: The ring of an earlier call, or None.

    Returns:
        An open ring.

    Raises:
        Nothing.
    """
    return ring if ring is not None and ring.is_open else Ring(transport=LocalWorld(1).transport(0))
