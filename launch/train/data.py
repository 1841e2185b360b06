"""The text, its documents, and the sequences of each step.

A text is a sequence of bytes or of a tokenizer's tokens, cut into documents. A step trains on windows of the text at
random positions, or on sequences packed with whole documents. Early steps may have shorter sequences
(`curriculum_start_tokens`). Without a file, the text is Python's own language reference (`pydoc_data.topics`, about
460 kB).

Guarantees: the sequences of a step are a pure function of the configuration, the text and the step's number. They are
the same on all ranks of a replica. All replicas together draw the same sequences, whatever the number of replicas. A
resumed run therefore needs only the step's number to continue with the same data.
"""

from __future__ import annotations

import hashlib
import importlib
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import Ring, Sequence
from ringattn.batch import token_pairs
from ringattn.errors import InputError
from ringattn.launch.train.config import TrainConfig, doublings, head_dim

VOCABULARY = 256
"""Number of different tokens of a text without a tokenizer: the values of a byte."""


@dataclass(frozen=True, eq=False)
class Documents:
    """All tokens of a text, and where its documents end."""

    tokens: Tensor
    """(tokens,), uint8 if tokens are bytes, int32 if they come from a tokenizer."""
    cuts: tuple[int, ...]
    """0, then the end of each document; no document is empty."""
    vocabulary: int
    """The number of different tokens: every token is less than it."""

    def digest(self) -> str:
        """Return a digest, in hex, of everything that determines the sequences: tokens, documents and vocabulary."""
        facts = (torch.tensor([self.vocabulary, *self.cuts]), self.tokens.contiguous())
        return hashlib.sha256(b"".join(hashlib.sha256(fact.numpy().tobytes()).digest() for fact in facts)).hexdigest()


class BatchPart(NamedTuple):
    """Sequences that pass through the model at the same time."""

    seq: Sequence
    """The sequence object that shards each of the sequences over the ring."""
    tokens: Tensor
    """The tokens of the whole sequences, int64 (sequences, tokens), the same on every rank of the ring."""


# --- reading the text ------------------------------------------------------------------------------------------------


def load(config: TrainConfig) -> Documents:
    """Load the text of the configuration. Raises `InputError`, with the key first, if it is unreadable or too short."""
    text = load_documents(config.text, config.separator, config.tokenizer)
    if not len(text.tokens):
        raise InputError(
            f"tokenizer={config.tokenizer}: produces no token from the text; choose another tokenizer or another text"
        )
    if config.pack_documents and max(stop - start for start, stop in pairwise(text.cuts)) < 2:
        raise InputError(
            f"text={config.text}: no document has a second token, so there are no labels; documents end with "
            f"{config.separator!r}: choose another separator or another text"
        )
    if not config.pack_documents and len(text.tokens) < config.tokens:
        raise InputError(
            f"tokens={config.tokens}: the text has only {len(text.tokens)} tokens; choose a longer file "
            "with text=PATH, or pack_documents=true"
        )
    return text


def load_documents(path: str = "", separator: str = "\n\n", tokenizer: str = "") -> Documents:
    """Load the documents of the file at `path`, or of Python's reference if `path` is empty.

    A document ends with `separator`, which is part of it. `tokenizer` is a tokenizer.json for Hugging Face's
    `tokenizers`, which must then be installed; if it is empty, bytes are tokens. Each document is encoded separately,
    without special tokens. Raises `InputError`, with the key first.
    """
    if not separator:
        raise InputError("separator: must not be empty, because it ends each document")
    content = _read(path)
    mark = separator.encode()
    *ended, rest = content.split(mark)
    parts = [part for part in (*(part + mark for part in ended), rest) if part]
    if not tokenizer:
        cuts = tuple(accumulate(map(len, parts), initial=0))
        return Documents(torch.frombuffer(bytearray(content), dtype=torch.uint8), cuts, VOCABULARY)
    encoder = _tokenizer(tokenizer)
    # The tokenizer's file may turn on truncation and padding, which are meant for batches of sentences.
    encoder.no_truncation()
    encoder.no_padding()
    try:
        encoded = encoder.encode_batch([part.decode() for part in parts], add_special_tokens=False)
    except UnicodeDecodeError as error:
        raise InputError(f"text={path}: must be UTF-8 for a tokenizer: {error}") from error
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer={tokenizer}: cannot encode the text: {error}") from error
    documents = [document.ids for document in encoded if document.ids]
    tokens = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
    # The number of tokens would be too small, because the ids may have gaps.
    vocabulary = 1 + max(encoder.get_vocab().values(), default=0)
    return Documents(tokens, tuple(accumulate(map(len, documents), initial=0)), vocabulary)


def _read(path: str) -> bytes:
    if path:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"text={path}: {error.strerror or error}") from error
    else:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    if not content:
        raise InputError(f"text={path}: the file is empty")
    return content


def _tokenizer(path: str) -> Any:
    if not Path(path).is_file():
        raise InputError(f"tokenizer={path}: this file does not exist; give a tokenizer.json")
    try:
        return importlib.import_module("tokenizers").Tokenizer.from_file(path)
    except ModuleNotFoundError as error:
        raise InputError(f"tokenizer={path}: needs Hugging Face's tokenizers; pip install tokenizers") from error
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer={path}: {error}") from error


# --- drawing a step's sequences --------------------------------------------------------------------------------------


class Draws:
    """This replica's sequences of each step. A thread can draw and plan those of the next step meanwhile."""

    def __init__(self, ring: Ring, replica: int, text: Documents, config: TrainConfig) -> None:
        """Draw nothing yet."""
        self.config, self._ring = config, ring
        self._drawn = partial(drawn, ring, replica, text, config=config)
        self._ahead: tuple[int, Future[Any], list[BatchPart]] | None = None

    def of_step(self, step: int) -> list[BatchPart]:
        """Return the sequences of a step. Wait for the thread if it draws this step, and raise what it raised."""
        if self._ahead is None or self._ahead[0] != step:
            return self._drawn(step)
        _, planned, parts = self._ahead
        planned.result()
        return parts

    def draw_ahead(self, step: int) -> None:
        """Let a thread draw and plan a step, unless the run ends before it."""
        if step >= self.config.steps:
            return
        parts: list[BatchPart] = []

        def draw() -> tuple[Sequence, ...]:
            parts.extend(self._drawn(step))
            return tuple(part.seq for part in parts)

        self._ahead = step, self._ring.plan_ahead(draw), parts


def drawn(ring: Ring, replica: int, text: Documents, step: int, config: TrainConfig) -> list[BatchPart]:
    """Draw this replica's sequences of a step, on its device, in parts that pass through the model one by one."""
    shorter = shortened(step, config.curriculum_start_tokens, config.tokens, config.curriculum_steps)
    length, batch = config.tokens // shorter, config.batch * shorter
    # Each replica takes a share of one batch, which does not depend on the number of replicas.
    share = batch // config.replicas
    purpose = "dilated" if config.attention == "dilated" else "causal"
    if config.pack_documents:
        indices = range(step * batch + share * replica, step * batch + share * (replica + 1))
        sequences = [packed(text, index, length, config.seed) for index in indices]
        if config.max_tokens_per_rank is not None:
            documents = [tokens[start:stop] for tokens, cuts in sequences for start, stop in pairwise(cuts)]
            return divided(ring, documents, text.vocabulary, config)
        parts = []
        for tokens, cuts in sequences:
            seq = ring.sequence(cu_seqlens=cuts, layout=config.layout, for_=purpose)
            parts.append(BatchPart(seq, tokens[None].to(ring.device)))
        return parts
    seq = ring.sequence(length, layout=config.layout, for_=purpose)
    tokens = windows(text.tokens, step, batch, length, config.seed)
    tokens = tokens[share * replica : share * (replica + 1)].to(ring.device)
    return [BatchPart(seq, part) for part in tokens.split((config.micro_batch or config.batch) * shorter)]


def divided(ring: Ring, documents: list[Tensor], vocabulary: int, config: TrainConfig) -> list[BatchPart]:
    """Return the documents of a step in micro-batches of nearly equal predicted time, as `Ring.batch` forms them."""
    model, size = config.model, head_dim(config.model)
    projections = 2 * (model.heads + model.kv_heads) * size  # q, k, v and output
    weights = model.dim * (model.layers * (projections + 3 * model.hidden_dim) + vocabulary)
    pairs = token_pairs(weights, layers=model.layers, heads=model.heads, head_dim=size, cluster=ring.machines)
    lengths = [len(document) for document in documents]
    return [
        BatchPart(micro.seq, torch.cat([documents[sample] for sample in micro.samples])[None].to(ring.device))
        for micro in ring.batch(lengths, max_tokens_per_rank=config.max_tokens_per_rank, token_pairs=pairs)
    ]


def check_limit(text: Documents, config: TrainConfig, ranks: int) -> None:
    """Raise `InputError` if a document of the text, cut at the end of a sequence, exceeds `max_tokens_per_rank`."""
    longest = min(config.tokens, max(stop - start for start, stop in pairwise(text.cuts)))
    if config.max_tokens_per_rank is not None and longest > config.max_tokens_per_rank * ranks:
        raise InputError(
            f"max_tokens_per_rank={config.max_tokens_per_rank}: the text has a document of {longest} tokens, and "
            f"{ranks} ranks cannot hold it; set max_tokens_per_rank to {-(-longest // ranks)} or more, or use fewer "
            "tokens"
        )


def windows(text: Tensor, step: int, batch: int, tokens: int, seed: int) -> Tensor:
    """Draw the batch of a step: int64 (batch, tokens), windows of `text` at random positions.

    The positions depend only on `seed` and `step`, so every rank draws the same batch and a run can start at any step.
    `load` refuses a text that is shorter than one window.
    """
    # The factor exceeds the steps of any likely run, so no two seeds share the draws of a step.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - tokens + 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(tokens)].long()


def packed(documents: Documents, index: int, tokens: int, seed: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return sequence number `index`: its tokens, int64 (tokens,), and the cuts (0, ..., tokens) of its documents.

    Documents are shuffled in each pass over the text, concatenated, and cut into sequences of one length. No token is
    left out or repeated within a pass, and there is no padding. A document that crosses the end of a sequence continues
    in the next.
    """
    pieces: list[Tensor] = []
    cuts = [0]
    position = index * tokens  # in the endless concatenation of passes over the text
    while cuts[-1] < tokens:
        number, offset = divmod(position, documents.cuts[-1])
        order, ends = _shuffled(documents, number, seed)
        drawn = int(torch.searchsorted(ends, offset, right=True))
        left = int(ends[drawn]) - offset  # tokens that remain of this document
        count = min(left, tokens - cuts[-1])
        # `ends` are positions in the shuffled order, and `cuts` are positions in the text. The distance to the end of
        # the document is the same in both.
        start = documents.cuts[int(order[drawn]) + 1] - left
        pieces.append(documents.tokens[start : start + count])
        cuts.append(cuts[-1] + count)
        position += count
    return torch.cat(pieces).long(), tuple(cuts)


# A step reads one stretch of the text, which touches one or two passes unless the text is tiny.
@lru_cache(maxsize=4)
def _shuffled(documents: Documents, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the order of the documents in pass `number` over the text, and where each of them ends in it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    order = torch.randperm(len(documents.cuts) - 1, generator=generator)
    return order, torch.tensor(documents.cuts).diff()[order].cumsum(0)


def shortened(step: int, start_tokens: int | None, tokens: int, grow_steps: int) -> int:
    """Return the factor, a power of two, by which the sequences of `step` are shorter than `tokens`.

    There are more of them by the same factor, so each step has the same number of tokens. The length starts at
    `start_tokens` and doubles until it is `tokens`, which it reaches after `grow_steps`. All lengths except the last
    are used for about the same number of steps. If `start_tokens` is None, the factor is always 1.
    """
    if start_tokens is None or step >= grow_steps:
        return 1
    stages = doublings(start_tokens, tokens)
    return 1 << (stages - step * stages // grow_steps)
