"""Shapes of decoder-only transformers: presets by name, their numbers of parameters, and a rank's share of a model.

Guarantees: the parameters of a shape are those of its matrices and vectors, each listed once. Without tensor and
pipeline parallelism the share is the whole model, to the last parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ringattn.errors import InputError, one_of

BLOCKS = ("swiglu", "gelu")
"""swiglu: RMSNorm, rotary positions, a gated feed-forward of three matrices, no biases, no dropout: the block of
`ringattn train` and Llama. gelu: LayerNorm, biases, dropout after attention and feed-forward, two matrices: GPT."""


class Matrix(NamedTuple):
    """`copies` weight matrices of `rows` by `columns`."""

    rows: int
    columns: int
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Return the elements of all copies."""
        return self.rows * self.columns * self.copies


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model: `width` of the residual stream, `ffn` of the feed-forward, `vocabulary` in tokens.

    `head_size` is the number of elements of one head; 0 stands for width / heads. With `experts`, a router sends each
    token to `experts_per_token` feed-forwards of width `ffn`, and each token also passes through the `shared_experts`.
    With 0 experts there is one feed-forward. `head_norms`: queries and keys are normalized per head, which only the
    memory of other stacks counts. Positions are rotary and have no parameters, because a learned table
    would limit the length of a sequence. Raises `InputError` if sizes contradict each other.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool
    block: str = "swiglu"
    head_size: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    head_norms: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` if sizes contradict each other."""
        for name in ("layers", "width", "heads", "kv_heads", "ffn", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.head_size and self.width % self.heads:
            raise InputError(f"heads={self.heads}: must divide width={self.width}; otherwise set head_dim")
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        one_of(self.block, BLOCKS, "block")
        if self.experts and self.block != "swiglu":
            raise InputError(f"experts={self.experts}: needs block=swiglu; block={self.block} has one feed-forward")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise InputError(
                f"experts_per_token={self.experts_per_token}: must be from 1 to experts={self.experts}, the experts "
                "that process a token"
            )
        if not self.experts:
            for name in ("experts_per_token", "shared_experts"):
                if getattr(self, name):
                    raise InputError(f"{name}={getattr(self, name)}: has no effect without experts; set experts")

    @property
    def head_dim(self) -> int:
        """Return the number of elements of one head."""
        return self.head_size or self.width // self.heads

    @property
    def query_width(self) -> int:
        """Return the number of elements of one token's queries. The outputs of attention have the same number."""
        return self.heads * self.head_dim

    @property
    def feeds(self) -> int:
        """Return the number of feed-forwards that process a token in a layer."""
        return self.experts_per_token + self.shared_experts if self.experts else 1

    @property
    def kv_width(self) -> int:
        """Return the number of elements of one token's keys. Its values have the same number."""
        return self.kv_heads * self.head_dim

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices of one layer's attention: the projection to Q, K and V, and the output projection."""
        return Matrix(self.query_width + 2 * self.kv_width, self.width), Matrix(self.width, self.query_width)

    @property
    def feed_copies(self) -> int:
        """Return the number of feed-forwards in a layer."""
        return self.experts + self.shared_experts if self.experts else 1

    def feed_matrices(self, copies: int) -> tuple[Matrix, ...]:
        """Return the matrices of `copies` feed-forwards: gate and up as one matrix, then down."""
        inner = 2 * self.ffn if self.block == "swiglu" else self.ffn
        return Matrix(inner, self.width, copies), Matrix(self.width, self.ffn, copies)

    @property
    def layer_matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices of one layer: attention, all feed-forwards, and their router."""
        router = (Matrix(self.experts, self.width),) if self.experts else ()
        return (*self.attention_matrices, *self.feed_matrices(self.feed_copies), *router)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters of one layer's matrices that one token is multiplied with."""
        idle = self.feed_matrices(self.experts - self.experts_per_token) if self.experts else ()
        return sum(matrix.parameters for matrix in self.layer_matrices) - sum(matrix.parameters for matrix in idle)

    @property
    def layer_vectors(self) -> int:
        """Return the number of parameters of the norms and biases of one layer."""
        if self.block == "swiglu":
            return 2 * self.width
        return 4 * self.width + (self.query_width + 2 * self.kv_width) + self.width + self.ffn + self.width

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer."""
        return sum(matrix.parameters for matrix in self.layer_matrices) + self.layer_vectors

    @property
    def table_parameters(self) -> int:
        """Return the number of parameters of the embedding, and of the output matrix unless the two are tied."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def head_parameters(self) -> int:
        """Return the number of parameters outside the layers: the embedding, the output matrix and the last norm."""
        return self.table_parameters + self.width * (1 if self.block == "swiglu" else 2)

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.layers * self.layer_parameters + self.head_parameters

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the weight matrices of the whole model."""
        tables = Matrix(self.vocabulary, self.width, 1 if self.tied else 2)
        return (tables, *(matrix._replace(copies=matrix.copies * self.layers) for matrix in self.layer_matrices))


def _gpt(layers: int, width: int, heads: int) -> ModelShape:
    """Return a GPT-3 shape (Brown et al. 2020, arXiv:2005.14165, table 2.1) with GPT-2's 50257 tokens, tied."""
    return ModelShape(layers, width, heads, heads, 4 * width, 50257, True, "gelu")


PRESETS: dict[str, ModelShape] = {
    "125M": _gpt(12, 768, 12),
    "350M": _gpt(24, 1024, 16),
    "760M": _gpt(24, 1536, 16),
    "1.3B": _gpt(24, 2048, 16),
    "7B": ModelShape(32, 4096, 32, 32, 11008, 32000, False),
    "13B": ModelShape(40, 5120, 40, 40, 13824, 32000, False),
    "70B": ModelShape(80, 8192, 64, 8, 28672, 32000, False),
    "405B": ModelShape(126, 16384, 128, 8, 53248, 128256, False),
    "llama3-8b": ModelShape(32, 4096, 32, 8, 14336, 128256, False),
    "llama3-70b": ModelShape(80, 8192, 64, 8, 28672, 128256, False),
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 3072, 151936, True, head_size=128, head_norms=True),
    "qwen3-4b": ModelShape(36, 2560, 32, 8, 9728, 151936, True, head_size=128, head_norms=True),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 12288, 151936, False, head_size=128, head_norms=True),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 25600, 151936, False, head_size=128, head_norms=True),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 14336, 32000, False, experts=8, experts_per_token=2),
    "qwen3-30b-a3b": ModelShape(
        48, 2048, 32, 4, 768, 151936, False, head_size=128, experts=128, experts_per_token=8, head_norms=True
    ),
}
"""125M to 1.3B: GPT-3's table 2.1. Its 1.3B lists 24 heads of 128, which is not 2048 wide; 16 heads are meant.
7B, 13B: LLaMA (arXiv:2302.13971, table 2, and its released configurations for the feed-forward); 70B: Llama 2
(arXiv:2307.09288, table 1: 8 K/V heads); 405B and llama3-*: Llama 3 (arXiv:2407.21783, table 3). qwen3-*, mixtral-*:
their released configurations; the weights of norms of queries and keys (Qwen3: 2 of
128 a layer) are left out."""


def model_shape(name: str) -> ModelShape:
    """Return the preset `name`. Raises `InputError` with the nearest name if it is unknown."""
    return PRESETS[one_of(name, PRESETS, "preset")]


# --- the share of one rank --------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The part of a model on one rank.

    `layers` is the number of layers of the rank's pipeline stage, `layer` the number of parameters of each, and `head`
    the number of parameters of the embedding, the last norm and the output matrix.
    """

    layers: int
    layer: float
    head: float

    @property
    def parameters(self) -> float:
        """Return the number of parameters of the rank."""
        return self.layers * self.layer + self.head


def share_of(shape: ModelShape, tensor_ranks: int = 1, pipeline_ranks: int = 1) -> Share:
    """Return the share of the rank that has the most parameters.

    Each matrix is sharded over `tensor_ranks`, and each tensor rank has all vectors. If there are several pipeline
    stages, the first has the embedding and the last has the output matrix.
    """
    vectors = shape.layer_vectors
    layer = (shape.layer_parameters - vectors) / tensor_ranks + vectors
    tables = shape.table_parameters
    norm = shape.head_parameters - tables
    if pipeline_ranks > 1:
        tables = shape.vocabulary * shape.width
    return Share(-(-shape.layers // pipeline_ranks), layer, tables / tensor_ranks + norm)


class InFlight(NamedTuple):
    """The number of micro batches whose activations the first and the last pipeline rank keep for backward.

    A micro batch counts as 1 if all stages of the rank keep its activations, and as a fraction if some of them do.
    """

    first: float
    last: float


def in_flight(pipeline_ranks: int, chunks: int, micro_batches: int) -> InFlight:
    """Return the micro batches in flight under 1F1B, interleaved if `chunks` > 1 (arXiv:2104.04473, section 2.2).

    Before its first backward, rank r runs the forward of ranks - 1 - r micro batches and then of one more. If the
    schedule is interleaved, it runs 2 (ranks - 1 - r) + (chunks - 1) ranks forwards of one stage and then one more.
    """
    if pipeline_ranks == 1:
        return InFlight(1, 1)
    first = 2 * (pipeline_ranks - 1) + (chunks - 1) * pipeline_ranks + 1 if chunks > 1 else pipeline_ranks
    last = (chunks - 1) * pipeline_ranks + 1
    return InFlight(*(min(waiting, micro_batches * chunks) / chunks for waiting in (first, last)))


def bubble(pipeline_ranks: int, chunks: int, micro_batches: int) -> float:
    """Return the idle time of a pipeline as a share of its work (arXiv:2104.04473, section 2.2)."""
    return (pipeline_ranks - 1) / (chunks * micro_batches)
