"""A sequence that is sharded over the ranks of a ring: shard, gather, positions, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import accumulate, count, pairwise
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ringattn.core.fragments import Fragment, fragments_of
from ringattn.core.layout import Layout
from ringattn.core.mask import AttentionMask
from ringattn.errors import InputError
from ringattn.gradients import once_differentiable
from ringattn.integers import whole_number
from ringattn.masks import Tree, check_mask
from ringattn.transport.base import Message
from ringattn.transport.untraced import disable_methods, untraced


class _Ranks(Protocol):
    """The attributes of a ring that a sequence uses."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def check_same_call(self, describe: Callable[[], str], inputs: Any = None) -> Any: ...


RingType = TypeVar("RingType", bound=_Ranks)
"""The class of the ring, which is defined in a higher module: `Ring.sequence` returns a `Sequence[Ring]`."""

_handles = count(1)
_living: WeakValueDictionary[int, Sequence[Any]] = WeakValueDictionary()


class Sequence(Generic[RingType]):
    """The assignment of the tokens of one sequence to the ranks of a ring. Made by `Ring.sequence`; immutable.

    `length`: the number of tokens of the whole sequence. `counts`: the number of tokens of each rank. `documents`:
    cumulative document lengths, or None. `encoder`: the sequence of an encoder's tokens, see `with_encoder`, or None.
    """

    def __init__(
        self,
        ring: RingType,
        layout: Layout,
        documents: tuple[int, ...] | None,
        mask: AttentionMask | None = None,
        encoder: Sequence | None = None,
    ) -> None:
        """Create a sequence. For adapters; users call `Ring.sequence`.

        Args:
            ring: The ring.
            layout: The assignment of positions to ranks.
            documents: Cumulative lengths (0, ..., length). None: a single sequence.
            mask: The mask of every attention over this sequence. None: each call may have its own mask.
            encoder: The sequence of the tokens of an encoder. None: there is none, or it is not sharded.

        Raises:
            InputError: The mask is a tree of another number of tokens: positions and labels would be wrong.
        """
        if isinstance(mask, Tree):
            mask.check_length(layout.length)
        self.ring, self.layout, self.documents, self.mask, self.encoder = ring, layout, documents, mask, encoder
        self.length = layout.length
        self._positions: np.ndarray | None = None
        self.counts = layout.counts
        """The number of tokens of each rank."""
        self.handle = next(_handles)
        """A number that identifies this sequence, see `sequence_with`; never 0."""
        _living[self.handle] = self
        disable_methods()

    def positions(self, per_document: bool = False) -> Tensor:
        """Return the global position of each local token, for example for rotary embeddings.

        Args:
            per_document: Count positions from the start of the token's document; if the sequence has the mask of a
                tree, along the path from the root.

        Returns:
            int64, (counts[rank],), on the ring's device.

        Raises:
            Nothing.
        """
        array = self._positions
        if array is None:  # made at first use: the positions of a sequence that is only planned may not fit in memory
            array = self.layout.positions(self.ring.rank)
            if not torch.compiler.is_compiling():  # while torch compiles, `array` is a traced stand-in
                self._positions = array
        with torch.inference_mode(False):  # a later call may need gradients
            positions = torch.from_numpy(array).clone()  # the caller may change it in place
        if per_document and isinstance(self.mask, Tree):
            nodes = self.mask.starts, self.mask.depths, self.mask.lengths
            starts, depths, lengths = (torch.tensor(numbers, device="cpu") for numbers in nodes)
            positions = positions - (starts - depths).repeat_interleave(lengths)[positions]
        elif per_document and self.documents is not None:
            starts = torch.tensor(self.documents, device="cpu")
            positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
        return positions.to(self.ring.device)

    def fragments(self) -> tuple[Fragment, ...]:
        """Return the contiguous ranges of one document that this rank holds, in the order of its rows. Local.

        Layers that read a document in token order compute fragment by fragment, see `Ring.halo` and `Ring.scan_states`.

        Returns:
            A `Fragment` (start, stop, begins_document, ends_document) for each; start and stop are local rows.

        Raises:
            UnsupportedError: The layout is striped, so a rank has no contiguous tokens.
        """
        every = fragments_of(self.layout, self.bounds)
        return tuple(
            Fragment(row, row + stop - start, index == first, index == last)
            for index in every.of(self.ring.rank).tolist()
            for row, start, stop, first, last in [
                [int(values[index]) for values in (every.row, every.start, every.stop, every.first, every.last)]
            ]
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """The cumulative document lengths; (0, length) without documents."""
        return self.documents or (0, self.length)

    def with_documents(self, cu_seqlens: Many[int] | Tensor | None) -> Sequence:
        """Return a sequence of the same tokens on the same ranks with other documents.

        Use it for rows of a batch whose documents differ. The padding of a row is a separate document.

        Args:
            cu_seqlens: Cumulative document lengths [0, ..., length]. None: no documents.

        Returns:
            A new sequence of the same ring.

        Raises:
            InputError: `cu_seqlens` are not integers that ascend from 0 to the length.
        """
        documents = None if cu_seqlens is None else check_documents(cu_seqlens, self.length)
        return Sequence(self.ring, self.layout, documents, self.mask, self.encoder)

    def with_mask(self, mask: AttentionMask | None) -> Sequence:
        """Return a sequence of the same tokens on the same ranks with a mask that every attention over it applies.

        Use it for masks that change from step to step, such as trees or a prefix per document: compiled code is not
        compiled again for another mask. It also reaches hosts whose attention calls have no argument for a mask.

        Args:
            mask: A mask of `ringattn.masks`. None: no mask.

        Returns:
            A new sequence of the same ring.

        Raises:
            InputError: `mask` is not a mask, or a tree of another number of tokens. An attention call refuses every
                other mask that does not fit the sequence.

        Example:
            with ring.activate(seq.with_mask(masks.prefix(prompt_lengths))):
                model(ids)
        """
        return Sequence(self.ring, self.layout, self.documents, check_mask(mask), self.encoder)

    def with_encoder(self, encoder: Sequence | None) -> Sequence:
        """Return a sequence of the same tokens on the same ranks, for the decoder of a model with a sharded encoder.

        Adapters run the encoder of such a model over `encoder`, and attend from this sequence to it. `Ring.attention`
        ignores it; it takes `kv_seq`.

        Args:
            encoder: The sequence of the encoder's tokens, made by the same ring. None: the encoder is not sharded.

        Returns:
            A new sequence of the same ring.

        Raises:
            InputError: `encoder` is not a sequence of this ring.

        Example:
            seq = ring.sequence(target.shape[1]).with_encoder(ring.sequence(source.shape[1], for_="full"))
            with ring.activate(seq):
                model(input_ids=seq.encoder.shard(source), decoder_input_ids=seq.shard(target))
        """
        if encoder is not None and (not isinstance(encoder, Sequence) or encoder.ring is not self.ring):
            raise InputError(f"rank {self.ring.rank}: with_encoder takes a sequence of this ring, got {encoder!r}")
        return Sequence(self.ring, self.layout, self.documents, self.mask, encoder)

    def __eq__(self, other: object) -> bool:
        """Return whether both sequences have the same ring, layout, documents, mask and encoder."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return self.ring is other.ring and self._facts == other._facts

    def __hash__(self) -> int:
        return hash((id(self.ring), *self._facts))

    @property
    def _facts(self) -> tuple[Layout, tuple[int, ...] | None, AttentionMask | None, Sequence | None]:
        return self.layout, self.documents, self.mask, self.encoder

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a full tensor. Local.

        Differentiable; the gradient is zero at the tokens of other ranks.

        Args:
            x: The full tensor, of any dtype.
            dim: The dimension of the tokens.

        Returns:
            A tensor like x with counts[rank] tokens in `dim`.

        Raises:
            InputError: `x` is not a tensor or has no such dimension, or its size there is not the length of the
                sequence.
        """
        dim = self._whole(x, dim, "shard")
        runs = self.layout.shards[self.ring.rank]
        if len(runs) == 1 or any(run.stride > 1 for run in runs):
            along: tuple[slice, ...] = (slice(None),) * dim
            pieces = [x[(*along, slice(run.start, run.stop, run.stride))] for run in runs]
        else:
            # All parts of a split have one gradient together, but each slice would have one of the size of x.
            cuts = sorted({0, self.length, *(cut for run in runs for cut in (run.start, run.stop))})
            parts = dict(zip(cuts, x.split([stop - start for start, stop in pairwise(cuts)], dim), strict=False))
            pieces = [parts[run.start] for run in runs]
        return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)

    @untraced
    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the full tensor, in order, on every rank. Differentiable. A collective call.

        The gradient of a rank's tokens is the *sum* over ranks, so divide a loss that every rank computes in full by
        world_size. As for attention, a backward pass with create_graph=True raises `UnsupportedError`.

        Args:
            x: This rank's tokens.
            dim: The dimension of the tokens.

        Returns:
            A tensor like x with all of the sequence's tokens in `dim`.

        Raises:
            InputError: `x` is not a dense tensor on the ring's device, has no such dimension or the wrong length, on
                any rank; every rank raises.
            DisagreementError: The shards of the ranks differ in dtype, in `dim` or in their other dimensions; or one
                rank needs the gradient and another rank calls under torch.no_grad.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
        """

        axis = 0

        def described() -> str:
            nonlocal axis
            axis = dimension_of(x, dim, f"rank {self.ring.rank}: gather")
            check_device(self.ring, "x", x)
            if x.shape[axis] != self.counts[self.ring.rank]:
                raise InputError(
                    f"rank {self.ring.rank}: gather got {x.shape[axis]} tokens in dimension {axis} of "
                    f"{tuple(x.shape)}, this rank has {self.counts[self.ring.rank]}"
                )
            rest = (*x.shape[:axis], *x.shape[axis + 1 :])
            return f"gather of dim {axis}, other dimensions {rest}, {x.dtype}, {self.layout}"

        call = self.ring.check_same_call(described, {"x": x})
        return _Gather.apply(x, call.anchor(x), self, axis, call.number)

    def shard_labels(self, tokens: Tensor, dim: int = 1, ignore_index: int = -100, *, shift: int = 1) -> Tensor:
        """Return the next-token labels of this rank's tokens: shifted over the whole sequence, then sharded. Local.

        Args:
            tokens: The full tensor, of any integer type except uint64.
            dim: The dimension of the tokens.
            ignore_index: The label of the last `shift` tokens of the sequence and of each document.
            shift: How many tokens ahead a label is: 2 and more for the heads of multi-token prediction.

        Returns:
            int64, a tensor like `tokens` with counts[rank] labels in `dim`.

        Raises:
            InputError: The tokens are not of a supported type, or their number is not the length of the sequence;
                `ignore_index` is not an integer of 64 bits, or `shift` not a positive integer; or the sequence has the
                mask of a tree, in which a token may have several next tokens (see `edges`).
        """
        where = f"rank {self.ring.rank}: shard_labels"
        if isinstance(self.mask, Tree):
            raise InputError(
                f"{where}: in a tree the last token of a node has a label per child; use seq.edges(), or "
                "ringattn.adapters.trees.edge_log_probs"
            )
        dim = self._whole(tokens, dim, "shard_labels")
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.uint64:
            raise InputError(f"{where} makes int64 labels of integer tokens, got {tokens.dtype}; give it tokens.long()")
        needed = f"{where}: ignore_index must be an integer of 64 bits"
        ignore_index = whole_number(ignore_index, needed, -(2**63), 2**63 - 1)
        shift = whole_number(shift, f"{where}: shift must be a positive integer", 1)
        labels = tokens.to(torch.int64).roll(-shift, dim)
        documents = pairwise(self.bounds)
        ends = [token for start, stop in documents for token in range(max(start, stop - shift), stop)]
        labels.index_fill_(dim, torch.tensor(ends, dtype=torch.int64, device=tokens.device), ignore_index)
        return self.shard(labels, dim)

    def edges(self) -> tuple[Tensor, Tensor]:
        """Return the labels of this rank's tokens in a tree: an edge leads from a token to each token that follows it.

        The last token of a node has an edge to the first token of each child; the first tokens of roots have no edge.

        Returns:
            (rows, tokens), int64 of equal length, on the ring's device, ordered by row: `rows` are local rows, whose
            logits predict the token, and `tokens` the positions of the tokens in the whole sequence.

        Raises:
            InputError: The sequence does not have the mask of a tree.

        Example:
            rows, tokens = seq.edges()
            loss = F.cross_entropy(logits[0, rows], ids[0, tokens], reduction="sum")
        """
        if not isinstance(self.mask, Tree):
            raise InputError(f"rank {self.ring.rank}: edges needs the mask of a tree: seq.with_mask(masks.tree(...))")
        local_rows = np.full(self.length, -1)
        local_rows[self.layout.positions(self.ring.rank)] = np.arange(self.counts[self.ring.rank])
        parents = self.mask.parent_tokens()
        rows = np.where(parents >= 0, local_rows[parents], -1)
        tokens = np.flatnonzero(rows >= 0)
        tokens = tokens[np.argsort(rows[tokens], kind="stable")]
        return (torch.from_numpy(rows[tokens]).to(self.ring.device), torch.from_numpy(tokens).to(self.ring.device))

    def _whole(self, x: Tensor, dim: int, what: str) -> int:
        """Return `dim` as a number >= 0. Raises `InputError` unless `x` has all tokens of the sequence in `dim`."""
        dim = dimension_of(x, dim, f"rank {self.ring.rank}: {what}")
        if x.shape[dim] != self.length:
            raise InputError(
                f"rank {self.ring.rank}: {what} got {x.shape[dim]} tokens in dimension {dim} of {tuple(x.shape)}, "
                f"the sequence has {self.length}"
            )
        return dim

    def __repr__(self) -> str:
        documents = f", {len(self.documents) - 1} documents" if self.documents else ""
        return f"Sequence({self.length} tokens{documents}, {self.layout.name}, counts {self.counts})"


def sequence_with(handle: int) -> Sequence:
    """Return the sequence with this `handle`. Raises `InputError` if it was deleted: a handle keeps nothing alive."""
    try:
        return _living[handle]
    except KeyError:
        raise InputError(f"the sequence with handle {handle} was deleted; keep it until its calls are made") from None


def check_sequences(ring: _Ranks, seq: Sequence, kv_seq: Sequence | None) -> None:
    """Raise `InputError` unless this ring made both sequences. `kv_seq` None: there is only `seq`."""
    for name, value in (("seq", seq), ("kv_seq", seq if kv_seq is None else kv_seq)):
        if not isinstance(value, Sequence) or value.ring is not ring:
            got = "a sequence of another ring" if isinstance(value, Sequence) else type(value).__name__
            raise InputError(f"rank {ring.rank}: {name} must come from this ring's own ring.sequence(...), got {got}")


def check_documents(cu_seqlens: Many[int] | Tensor, length: int | None) -> tuple[int, ...]:
    """Return cumulative document lengths as a tuple.

    Raises `InputError` unless they are integers that ascend from 0, and end at `length` if it is given.
    """
    # A tensor is read as a whole, because each read of a single element would wait for the GPU.
    numbers: Any = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if not isinstance(numbers, Iterable):
        raise InputError(f"cu_seqlens must be integers, got {cu_seqlens!r}")
    bounds = tuple(whole_number(number, "cu_seqlens must be integers") for number in numbers)
    if len(bounds) < 2 or bounds[0] != 0:
        raise InputError(f"cu_seqlens must start with 0 and have one number more than documents, got {bounds}")
    for index, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise InputError(f"cu_seqlens is out of order: document {index} would run from {start} to {stop}")
    if length is not None and bounds[-1] != length:
        raise InputError(f"cu_seqlens ends at {bounds[-1]}, the sequence has {length} tokens")
    return bounds


def dimension_of(x: Tensor, dim: int, where: str) -> int:
    """Return `dim` of `x` as a number >= 0. Raises `InputError` if `x` is not a tensor or has no such dimension."""
    if not isinstance(x, Tensor):
        raise InputError(f"{where} takes a tensor, got {type(x).__name__}")
    dim = whole_number(dim, f"{where}: dim must be the number of a dimension")
    if not -x.dim() <= dim < x.dim():
        raise InputError(f"{where}: dim={dim} does not exist in a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def check_device(ring: _Ranks, name: str, x: Tensor) -> None:
    """Raise `InputError` if `x` is not a tensor, or on another kind of device than the messages of the ring."""
    if not isinstance(x, Tensor):
        raise InputError(f"rank {ring.rank}: {name} must be a tensor, got {type(x).__name__}")
    if ring.world_size > 1 and x.device.type != ring.device.type:
        raise InputError(f"rank {ring.rank}: {name} is on {x.device}, this ring uses {ring.device}")


RANGE_BYTES = 1 << 16
"""If the ranges of a shard have this mean size or more, `gather` sends each as a message; else all of them in one."""

Piece = tuple[slice, slice | Tensor]
"""Rows of a shard and their positions in the whole sequence."""


def _pieces(seq: Sequence, rank: int, full: Tensor) -> list[Piece]:
    """Return the ranges of a rank's shard of `full`, whose first dimension has the tokens, or one piece if small."""
    runs = seq.layout.shards[rank]
    row_bytes = full[:1].numel() * full.element_size()
    if len(runs) > 1 and len(runs) * RANGE_BYTES > seq.counts[rank] * row_bytes:
        return [(slice(0, seq.counts[rank]), torch.from_numpy(seq.layout.positions(rank)))]
    ends = accumulate(run.count for run in runs)
    return [
        (slice(end - run.count, end), slice(run.start, run.stop, run.stride))
        for run, end in zip(runs, ends, strict=True)
    ]


class _Gather(torch.autograd.Function):
    """The gather of all shards, in order. Backward sums the gradients of a shard at its owner, in rank order.

    Each piece of a shard is a message. A contiguous piece of the whole tensor is received and sent where it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor | None, seq: Sequence, dim: int, number: int) -> Tensor:
        ctx.seq, ctx.ring, ctx.dim, ctx.number = seq, seq.ring, dim, number
        ring = seq.ring
        local = x.detach().movedim(dim, 0).contiguous()
        full = local.new_empty(seq.length, *local.shape[1:])
        pieces = [_pieces(seq, rank, full) for rank in range(ring.world_size)]
        sent = [local[rows] for rows, _ in pieces[ring.rank]]
        copies = [(positions, part) for (_, positions), part in zip(pieces[ring.rank], sent, strict=True)]
        received = list[list[Tensor]]()
        for rank in range(ring.world_size):
            received.append([])
            for rows, positions in pieces[rank] if rank != ring.rank else ():
                if isinstance(positions, slice) and positions.step == 1:
                    part = full[positions]
                else:
                    part = local.new_empty(rows.stop - rows.start, *local.shape[1:])
                    copies.append((positions, part))
                received[rank].append(part)
        _exchange(ring, [sent] * ring.world_size, received, "gather")
        for positions, part in copies:
            full[positions] = part
        # Detach, so that the result is not a view: autograd forbids in-place changes of a function's view outputs.
        return full.movedim(0, dim).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        seq, ring = ctx.seq, ctx.ring
        full = grad.movedim(ctx.dim, 0)
        own = _pieces(seq, ring.rank, full)
        sent, received, parts = list[list[Tensor]](), list[list[Tensor]](), list[Tensor]()
        for rank in range(ring.world_size):
            pieces = _pieces(seq, rank, full) if rank != ring.rank else []
            sent.append([full[positions].contiguous() for _, positions in pieces])
            parts.append(full.new_empty(seq.counts[ring.rank], *full.shape[1:]))
            received.append([parts[rank][rows] for rows, _ in own])
        ring.check_consistency("gather", backward_of=ctx.number)
        _exchange(ring, sent, received, "gradient of gather")
        total = parts[0]
        if ring.rank == 0:
            for rows, positions in own:
                total[rows] = full[positions]
        for rank, part in enumerate(parts[1:], 1):
            if rank != ring.rank:
                total += part
                continue
            for rows, positions in own:
                total[rows] += full[positions]
        return total.movedim(0, ctx.dim), None, None, None, None


def _exchange(ring: Any, sends: Many[Many[Tensor]], recvs: Many[Many[Tensor]], label: str) -> None:
    """Send sends[r] to every other rank r, and receive recvs[r] from it, in order. Skip empty tensors."""
    peers = [rank for rank in range(ring.world_size) if rank != ring.rank]
    with ring.guarded():
        ring.transport.exchange(
            *([Message(peer, part, label) for peer in peers for part in parts[peer] if part.numel()]
              for parts in (sends, recvs))
        ).wait()  # fmt: skip
