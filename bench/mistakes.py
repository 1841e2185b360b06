"""Known ways to spend memory that context parallelism was meant to save; small, honest, exact and not for use.

`FullQueryRing` lets K/V travel around a ring and keeps the queries of the whole sequence, and so the output too, on
every rank: what travels is small, what stays grows with the sequence. `GatheredScores` gathers all K/V and
materializes its queries' scores against them; `PartitionedScores` materializes those against one chunk at a time. All
are forward only, in the plain softmax form in which they are mostly written; `FullQueryRing` also with a fused block,
so that its mistake can be told from that of materialized scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.bench.baselines import ALL, flash
from ringattn.bench.gate import Inputs
from ringattn.engine.softmax_state import merge_
from ringattn.ring import Ring
from ringattn.transport.base import Message


class _Mistake:
    """What they have in common: contiguous shards of even length, the ring's own transport, no backward."""

    name: str
    heads = kv_heads = ALL

    def __init__(self, ring: Ring) -> None:
        """`ring` gives the ranks and carries the messages."""
        self.ring = ring

    def load(self, inputs: Inputs) -> None:
        """Keep all queries, and this rank's shard of K and V as one (2, 1, tokens, kv_heads, dim) tensor."""
        ranks, tokens = self.ring.world_size, inputs.q.shape[1]
        assert tokens % ranks == 0, "the mistakes know even shards only"
        self._count = tokens // ranks
        own = slice(self.ring.rank * self._count, (self.ring.rank + 1) * self._count)
        self._keep_queries(inputs.q, own)
        self._kv = torch.stack((inputs.k[:, own], inputs.v[:, own]))

    def backward(self) -> None:
        """None: forward only."""

    def _keep_queries(self, q: Tensor, own: slice) -> None:
        raise NotImplementedError


class FullQueryRing(_Mistake):
    """Every rank attends with all queries to the K/V that pass by: P times the work, and full-length tensors."""

    def __init__(self, ring: Ring, fused: bool) -> None:
        """`fused`: torch's flash block for each chunk of keys; else the chunk's scores as a matrix."""
        super().__init__(ring)
        self._fused = fused
        self.name = "full-Q fused" if fused else "full-Q scores"

    def _keep_queries(self, q: Tensor, own: slice) -> None:
        self.positions = torch.arange(q.shape[1])
        self._q = q.clone()

    def forward(self) -> Tensor:
        """The output of the queries that are kept: of the whole sequence, on every rank."""
        _, tokens, heads, _ = self._q.shape
        out, lse = torch.zeros_like(self._q), torch.full((1, heads, tokens), float("-inf"))
        held, arriving = self._kv, torch.empty_like(self._kv)
        rank, ranks = self.ring.rank, self.ring.world_size
        for turn in range(ranks):
            ticket = None
            if turn < ranks - 1:
                ticket = self.ring.transport.exchange(
                    [Message((rank + 1) % ranks, held.view(-1), "K/V")],
                    [Message((rank - 1) % ranks, arriving.view(-1), "K/V")],
                )
            self._fold(held, (rank - turn) % ranks, out, lse)
            if ticket is not None:
                ticket.wait()
                held, arriving = arriving, torch.empty_like(arriving)
        return out

    def _fold(self, kv: Tensor, owner: int, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of all queries that see a key of the owner's chunk."""
        first = owner * self._count
        part_out, part_lse = self._attend(self._q[:, first:], kv)
        merge_(out[:, first:].transpose(0, 1), lse[:, :, first:], part_out.transpose(0, 1), part_lse)

    def _attend(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries from the position of the first key on."""
        k, v = kv
        if not self._fused:
            return dense(q, k, v)
        below = q.shape[1] - self._count
        square, square_lse = flash(*(x.transpose(1, 2) for x in (q[:, : self._count], k, v)), 0.0, True)
        if not below:
            return square.transpose(1, 2), square_lse
        full, full_lse = flash(*(x.transpose(1, 2) for x in (q[:, self._count :], k, v)), 0.0, False)
        return torch.cat((square, full), 2).transpose(1, 2), torch.cat((square_lse, full_lse), 2)


class PartitionedScores(FullQueryRing):
    """Own queries alone, as it should be, and their scores against each chunk as a matrix."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring, fused=False)
        self.name = "own-Q scores"

    def _keep_queries(self, q: Tensor, own: slice) -> None:
        self.positions = torch.arange(q.shape[1])[own]
        self._q = q[:, own].clone()

    def _fold(self, kv: Tensor, owner: int, out: Tensor, lse: Tensor) -> None:
        if owner <= self.ring.rank:
            k, v = kv
            part_out, part_lse = dense(self._q, k, v, first_query=(self.ring.rank - owner) * self._count)
            merge_(out.transpose(0, 1), lse, part_out.transpose(0, 1), part_lse)


class GatheredScores(_Mistake):
    """All K/V on every rank, and the scores of the rank's own queries against all of them as one matrix."""

    name = "gathered scores"

    def _keep_queries(self, q: Tensor, own: slice) -> None:
        self.positions = torch.arange(own.start, own.stop)
        self._q = q[:, own].clone()

    def forward(self) -> Tensor:
        """The output of this rank's queries."""
        rank, ranks = self.ring.rank, self.ring.world_size
        parts = [self._kv if peer == rank else torch.empty_like(self._kv) for peer in range(ranks)]
        others = [peer for peer in range(ranks) if peer != rank]
        self.ring.transport.exchange(
            [Message(peer, self._kv.view(-1), "K/V") for peer in others],
            [Message(peer, parts[peer].view(-1), "K/V") for peer in others],
        ).wait()
        k, v = torch.cat(parts, 2)
        return dense(self._q, k, v, first_query=rank * self._count)[0]


def dense(q: Tensor, k: Tensor, v: Tensor, first_query: int = 0) -> tuple[Tensor, Tensor]:
    """Causal attention by a matrix of scores; query i is `first_query` + i keys after the first key.

    Returns out (1, queries, heads, dim) and lse (1, heads, queries). Every query sees a key.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) * q.shape[3] ** -0.5
    unseen = torch.ones(scores.shape[2:], dtype=torch.bool).triu_(1 + first_query)
    lse = scores.masked_fill_(unseen, float("-inf")).logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return (weights @ v).transpose(1, 2), lse
