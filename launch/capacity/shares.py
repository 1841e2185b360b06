"""What one rank has of a model whose matrices are cut by tensor parallelism and whose layers lie on pipeline stages.

Guarantees: a model that is not cut is one share, to the last parameter.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.launch.capacity.model_shapes import ModelShape


class Share(NamedTuple):
    """Layers of a stage, parameters of one of them on a rank, and of the embedding, the last norm and the output."""

    layers: int
    layer: float
    head: float

    @property
    def parameters(self) -> float:
        """All that a rank has."""
        return self.layers * self.layer + self.head


def share_of(shape: ModelShape, tensor_ranks: int = 1, pipeline_ranks: int = 1) -> Share:
    """The greatest share: each matrix cut in `tensor_ranks`, vectors whole; one table on the first and last stage."""
    vectors = shape.layer_vectors
    layer = (shape.layer_parameters - vectors) / tensor_ranks + vectors
    tables = shape.table_parameters
    norm = shape.head_parameters - tables
    if pipeline_ranks > 1:
        tables = shape.vocabulary * shape.width
    return Share(-(-shape.layers // pipeline_ranks), layer, tables / tensor_ranks + norm)


class InFlight(NamedTuple):
    """Micro batches whose activations wait for their backward, counted by whole stages: on the first, on the last."""

    first: float
    last: float


def in_flight(pipeline_ranks: int, chunks: int, micro_batches: int) -> InFlight:
    """One forward, one backward, interleaved where a rank has several `chunks` of layers (arXiv:2104.04473, 2.2).

    Before its first backward a rank of number r runs ranks - 1 - r micro batches, interleaved 2 (ranks - 1 - r) +
    (chunks - 1) ranks chunks; then one more.
    """
    if pipeline_ranks == 1:
        return InFlight(1, 1)
    first = 2 * (pipeline_ranks - 1) + (chunks - 1) * pipeline_ranks + 1 if chunks > 1 else pipeline_ranks
    last = (chunks - 1) * pipeline_ranks + 1
    return InFlight(*(min(one, micro_batches * chunks) / chunks for one in (first, last)))


def bubble(pipeline_ranks: int, chunks: int, micro_batches: int) -> float:
    """Idle time of a pipeline, as a share of its work (same place)."""
    return (pipeline_ranks - 1) / (chunks * micro_batches)
