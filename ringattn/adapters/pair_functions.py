"""Record and evaluate a user's mask_mod or score_mod, a function of pairs of query and key.

`PairFunction` evaluates such a function on tiles of pairs. `record` runs it once and writes down each operator of torch
with its arguments.

mask_mod and score_mod may read closures, globals, attributes and memory shared with numpy. Few of these have a version
counter, so the code of a function alone proves nothing. A recording holds the numbers and the contents of the tensors
that the function uses. Under vmap, Python cannot branch on a position, so two functions with equal recordings return
equal values at all positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ringattn.errors import UnsupportedError

MOST_PAIRS = 1 << 30
"""Limit of the pairs at which a function is evaluated, summed over the heads and rows that it reads: all pairs of
32,768 tokens."""
SAMPLED_PAIRS = 1 << 24
"""The number of pairs in the random sample of tiles that replaces more than `MOST_PAIRS` with `trust=True`."""
TILE_TOKENS = 256
"""Side of the largest tile."""
PIECE_PAIRS = 1 << 20
"""The number of pairs that are evaluated at a time."""

Function = Callable[..., Tensor]


class ReadError(BaseException):
    """A function has used an `Unread` argument. It is no Exception, so `except Exception` in the function misses it."""


class Unread(Tensor):
    """An integer that must not be used: every operation of torch on it raises."""

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        """Raise `ReadError` for any operation with this tensor among its arguments."""
        raise ReadError


class PairFunction:
    """A mask_mod or score_mod to evaluate. `refusal` returns the error for a function that cannot be evaluated."""

    def __init__(self, function: Function, device: torch.device, refusal: Callable[[str], UnsupportedError]) -> None:
        self.function, self.device, self.refusal = function, device, refusal

    def on_pairs(self, *arguments: Tensor) -> Tensor:
        """Return the function's values at single pairs, (pairs,). Each argument has one entry per pair."""
        return self._evaluate(torch.vmap(self.function), arguments)

    def on_tiles(self, row: Tensor, heads: Tensor, q: Tensor, k: Tensor, *scores: Tensor) -> Tensor:
        """Return the function's values on tiles.

        Args:
            row: The row of the batch.
            heads: Query heads.
            q: Query positions of each tile.
            k: Key positions of each tile.
            scores: For a score_mod, the scores, which are the same in every tile and head.

        Shape:
            row: ()
            heads: (heads,)
            q: (tiles, queries)
            k: (tiles, keys)
            scores: (queries, keys)

        Returns:
            (tiles, heads, queries, keys)
        """
        function, mapped = self.function, (0,) * len(scores)
        fixed: tuple[int | None, ...] = (None,) * len(scores)
        # Like in torch, the function gets a single pair, and vmap broadcasts over keys, queries, heads and tiles.
        for in_dims in ((*mapped, None, None, None, 0), (*mapped, None, None, 0, None)):
            function = torch.vmap(function, in_dims=in_dims)
        for in_dims in ((*fixed, None, 0, None, None), (*fixed, None, None, 0, 0)):
            function = torch.vmap(function, in_dims=in_dims)
        return self._evaluate(function, (*scores, row, heads, q, k))

    def reads(self, argument: int, *scores: Tensor) -> bool:
        """Return whether the function uses its row (argument 0) or head (argument 1). True if this is not certain."""
        positions = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(3)]
        unread = torch.zeros((), dtype=torch.int64, device=self.device).as_subclass(Unread)

        def call_with_unread(*arguments: Tensor) -> Tensor:
            score_arguments, indices = arguments[: len(scores)], list(arguments[len(scores) :])
            indices.insert(argument, unread)
            return self.function(*score_arguments, *indices)

        try:
            with torch.no_grad(), TransformGetItemToIndex():
                torch.vmap(call_with_unread)(*scores, *positions)
        except (Exception, ReadError):
            return True
        return False

    def _evaluate(self, function: Function, arguments: tuple[Tensor, ...]) -> Tensor:
        try:
            with torch.no_grad(), TransformGetItemToIndex():
                return function(*arguments)
        except Exception as error:
            raise self.refusal(f"could not be evaluated ({type(error).__name__}: {error})") from error


# --- Tiles -----------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Tiles of one size: the first query and key of each, (tiles, 2), and the last valid query and key of each."""

    starts: Tensor
    last: Tensor
    size: tuple[int, int]

    @property
    def pairs(self) -> int:
        """The number of pairs in all tiles."""
        return len(self.starts) * self.size[0] * self.size[1]

    def sample(self, pairs: int) -> Tiles:
        """Draw random tiles with about `pairs` pairs, the same ones on every rank."""
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(0))
        chosen = order[: max(1, pairs // (self.size[0] * self.size[1]))].to(self.starts.device)
        return Tiles(self.starts[chosen], self.last[chosen], self.size)

    def pieces(self, heads: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the tiles in pieces of at most `PIECE_PAIRS` pairs, or of one tile and one head.

        A piece is its heads, (heads,), queries, (tiles, queries), and keys, (tiles, keys).
        """
        area = self.size[0] * self.size[1]
        within = [torch.arange(side, device=self.starts.device) for side in self.size]
        for head_group in heads.split(max(1, PIECE_PAIRS // area)):
            count = max(1, PIECE_PAIRS // (area * len(head_group)))
            for starts, last in zip(self.starts.split(count), self.last.split(count), strict=True):
                # All tiles have one size. A tile at the end repeats its last query or key.
                q, k = (torch.minimum(starts[:, i, None] + within[i], last[:, i, None]) for i in range(2))
                yield head_group, q, k


def tiles_of(blocks: Tensor, size: tuple[int, int], length: int) -> Tiles:
    """Cut the True blocks, (rows, columns) of `size` queries and keys, into tiles with sides of up to `TILE_TOKENS`."""
    block = torch.tensor(size, device=blocks.device)
    starts = blocks.nonzero() * block
    last = torch.minimum(starts + block, torch.tensor(length, device=blocks.device)) - 1
    # First along queries, then along keys. A block at the end of the sequence is short, so some cuts are outside of it.
    for side in range(2):
        steps = torch.arange(0, min(size[side], length), TILE_TOKENS, device=blocks.device)
        moved = starts[:, None].repeat(1, len(steps), 1)
        moved[..., side] += steps
        last = last[:, None].expand_as(moved).flatten(0, 1)
        starts = moved.flatten(0, 1)
        inside = starts[:, side] <= last[:, side]
        starts, last = starts[inside], last[inside]
    return Tiles(starts, last, (min(size[0], length, TILE_TOKENS), min(size[1], length, TILE_TOKENS)))


def checked_tiles(tiles: dict[Any, Tiles], heads: int, trust: bool, subject: str) -> dict[Any, Tiles]:
    """Return `tiles`, or a sample if there are too many pairs. Raises UnsupportedError then if `trust` is False.

    Args:
        tiles: The tiles to evaluate, for each row or mask.
        heads: The number of heads for which each tile is evaluated.
        trust: The caller vouches for the pairs that are not evaluated.
        subject: The name of the function, for the message.
    """
    pairs = sum(part.pairs for part in tiles.values()) * heads
    if pairs <= MOST_PAIRS:
        return tiles
    if not trust:
        raise UnsupportedError(
            f"{subject} would have to be evaluated at {pairs:,} pairs of query and key, the limit is {MOST_PAIRS:,}: "
            "make block_mask with create_block_mask, which lists full blocks separately, or pass trust=True if you are "
            "sure that no single pairs differ from the rest"
        )
    return {key: part.sample(SAMPLED_PAIRS // (heads * len(tiles))) for key, part in tiles.items()}


# --- Recordings ------------------------------------------------------------------------------------------------------


class Recording(NamedTuple):
    """The operators of torch that a function calls, their arguments, and the contents of the tensors that it captures.

    Computed tensors are encoded as "#" and a number, in the order of their creation. The arguments come first: a
    score_mod's score, row, head, query and key are #0 to #4.
    """

    operations: list[Any]
    tensors: list[Tensor]

    def copied(self) -> Recording:
        """Return a recording with copies of the tensors, which later in-place changes do not affect."""
        return Recording(self.operations, [x.clone() for x in self.tensors])

    def is_same(self, other: Recording) -> bool:
        """Return whether both recordings have the same operations on tensors with the same contents."""
        return self.operations == other.operations and all(
            torch.equal(_bits(x), _bits(y)) for x, y in zip(self.tensors, other.tensors, strict=True)
        )

    def is_of_distance(self) -> bool:
        """Return whether a score_mod uses query and key only in differences and comparisons of the two."""
        query, key = "#3", "#4"
        *operations, result = self.operations
        for name, inputs, _ in operations:
            of_both = name.split(".")[1] in _OF_DISTANCE and inputs in (((query, key), {}), ((key, query), {}))
            if not of_both and {query, key} & set(tree_leaves(inputs)):
                return False
        return result not in (query, key)


_OF_DISTANCE = ("sub", "rsub", "eq", "ne", "ge", "gt", "le", "lt")


def record(function: Function, device: torch.device, is_score: bool, *more: object) -> Recording | None:
    """Run a mask_mod or score_mod and return its recording, or None if a recording does not determine the function.

    `more`: numbers and tensors to record together with the function.
    """
    arguments = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    if is_score:
        arguments.insert(0, torch.zeros(1, dtype=torch.float64, device=device))
    recorder = _Recorder()
    for argument in arguments:
        recorder.number(argument)
    try:
        with torch.no_grad(), TransformGetItemToIndex(), recorder:
            result = torch.vmap(function)(*arguments)
        recorder.operations.append(recorder.encode(result))
        if more:
            recorder.operations.append(tree_map(recorder.encode, more))
    except Exception:  # including errors of the function itself, which its evaluation reports later
        return None
    return None if recorder.is_opaque else Recording(recorder.operations, recorder.tensors)


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records each operator of torch. Below vmap it sees the batched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}
        self.tensors_made: list[Tensor] = []  # kept alive, so that no other tensor reuses an id
        self.is_opaque = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch's process-wide flag unset, which overlapping modes of two threads would leave set: see `loss`.

        No operator is missed: under vmap, compiled functions run eagerly or with the backend "eager".
        """
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record and run an operator."""
        if not str(func).startswith("aten."):
            self.is_opaque = True  # a custom operator, whose code is not recorded
        inputs = tree_map(self.encode, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        # Record the dtypes of results: they may depend on torch's default dtype, which is not an argument.
        self.operations.append((str(func), inputs, [self.number(x) for x in tree_leaves(result)]))
        return result

    def number(self, x: Any) -> str:
        """Assign the next number to a tensor of a result, and return its dtype as text. Other values become text."""
        if not isinstance(x, Tensor):
            return repr(x)
        self.numbers[id(x)] = len(self.tensors_made)
        self.tensors_made.append(x)
        return str(x.dtype)

    def encode(self, x: Any) -> str:
        """Return a text that is equal for equal arguments. Tensors from outside are recorded with their contents."""
        if not isinstance(x, Tensor):
            return f"{type(x).__name__} {x!r}"
        if id(x) in self.numbers:
            return f"#{self.numbers[id(x)]}"
        # Subclasses and sparse tensors may hide state that a comparison of contents would miss.
        self.is_opaque |= type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided
        self.number(x)
        self.tensors.append(x.detach())
        return f"{x.dtype} {x.device} {tuple(x.shape)} {x.requires_grad}"


def _bits(x: Tensor) -> Tensor:
    # Bytes, so that NaN equals NaN, and -0.0 differs from 0.0.
    return x.contiguous().flatten().view(torch.uint8)
