"""What carries messages and how many multiprocessors attention leaves to it: what a ring has, what it could have."""

from __future__ import annotations

from typing import NamedTuple

from ringattn.planner.cluster import Cluster

DEFAULT_SM_MARGIN = 8
"""Multiprocessors that NCCL gets, and kernels leave free, unless somebody says otherwise (decision 0018)."""


class Exchange(NamedTuple):
    """`transport`: a name as `Ring` takes it, or two joined by "+" (inside nodes, between them)."""

    transport: str
    sm_margin: int = 0

    def __str__(self) -> str:
        return f"{self.transport}, {self.sm_margin} SMs" if self.transport.endswith("nccl") else self.transport

    def on(self, cluster: Cluster) -> Cluster:
        """These machines as a call meets them: copy engines take no multiprocessor, and a margin slows arithmetic."""
        if self.transport.startswith("peer"):
            cluster = cluster.by_copy_engines()
        return cluster.leaving(self.sm_margin) if cluster.sms is not None else cluster


def exchanges(own: Exchange, cluster: Cluster, ranks: int) -> tuple[Exchange, ...]:
    """What a call could go over on a cluster as far as its constants tell them apart, `own` first.

    On GPUs NCCL with its default margin and with none, and copy engines inside of one node. On processors nothing but
    `own`: constants are those of the transport that they were measured over.
    """
    if cluster.sms is None:
        return (own,)
    nodes = {cluster.node_of(rank) for rank in range(ranks)}
    others = [Exchange("nccl", DEFAULT_SM_MARGIN), Exchange("nccl"), *([Exchange("peer")] if len(nodes) == 1 else [])]
    return own, *(one for one in others if one != own)
