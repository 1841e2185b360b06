"""A text as documents of tokens, and sequences packed with them.

Documents are drawn in another order in each pass over the text, strung together and cut into sequences of one length.
Guarantees: no token is left out, doubled or padded; a sequence is a pure function of (text, seed, number of the
sequence), so a run can start at any; a document that reaches over the end of a sequence goes on in the next.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.launch.train.text import VOCABULARY, load_text


@dataclass(frozen=True, eq=False)
class Documents:
    """All tokens of a text, and where its documents end."""

    tokens: Tensor
    """(tokens,), uint8 for bytes, int32 for a tokenizer's."""
    cuts: tuple[int, ...]
    """0, then the end of each document; none is empty."""
    vocabulary: int
    """Every token is below it."""

    def digest(self) -> str:
        """Of all that a run draws from, in hex: the same tokens in other documents are another text."""
        facts = (torch.tensor([self.vocabulary, *self.cuts]), self.tokens.contiguous())
        return hashlib.sha256(b"".join(hashlib.sha256(fact.numpy().tobytes()).digest() for fact in facts)).hexdigest()


def load_documents(path: str = "", separator: str = "\n\n", tokenizer: str = "") -> Documents:
    """The documents of the file at `path`, each ending behind a `separator`; of Python's reference if `path` is empty.

    `tokenizer`: a tokenizer.json of Hugging Face's `tokenizers`, which must be installed then; empty: bytes are tokens.
    Documents are encoded one by one and whole, without special tokens. Raises `InputError`, with the key first.
    """
    if not separator:
        raise InputError("separator: what documents end with must not be empty")
    content = bytes(load_text(path).numpy())
    mark = separator.encode()
    *ended, rest = content.split(mark)
    parts = [part for part in (*(part + mark for part in ended), rest) if part]
    if not tokenizer:
        cuts = tuple(accumulate(map(len, parts), initial=0))
        return Documents(torch.frombuffer(bytearray(content), dtype=torch.uint8), cuts, VOCABULARY)
    encoder = _tokenizer(tokenizer)
    # The file may carry either, for batches of sentences.
    encoder.no_truncation()
    encoder.no_padding()
    try:
        ids = [one.ids for one in encoder.encode_batch([part.decode() for part in parts], add_special_tokens=False)]
    except UnicodeDecodeError as error:
        raise InputError(f"text={path}: a tokenizer needs UTF-8, {error}") from error
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer={tokenizer}: cannot encode the text, {error}") from error
    ids = [one for one in ids if one]
    tokens = torch.tensor([token for one in ids for token in one], dtype=torch.int32)
    vocabulary = 1 + max(encoder.get_vocab().values(), default=0)  # there may be fewer tokens: ids may have holes
    return Documents(tokens, tuple(accumulate(map(len, ids), initial=0)), vocabulary)


def packed(documents: Documents, index: int, tokens: int, seed: int) -> tuple[Tensor, tuple[int, ...]]:
    """Sequence number `index`: its tokens, int64 (tokens,), and its documents' cuts (0, ..., tokens)."""
    pieces: list[Tensor] = []
    cuts = [0]
    at = index * tokens  # in the endless string of passes over the text
    while cuts[-1] < tokens:
        round_, place = divmod(at, documents.cuts[-1])
        order, ends = _drawn(documents, round_, seed)
        drawn = int(torch.searchsorted(ends, place, right=True))
        left = int(ends[drawn]) - place  # of this document
        count = min(left, tokens - cuts[-1])
        start = documents.cuts[int(order[drawn]) + 1] - left
        pieces.append(documents.tokens[start : start + count])
        cuts.append(cuts[-1] + count)
        at += count
    return torch.cat(pieces).long(), tuple(cuts)


@lru_cache(maxsize=4)
def _drawn(documents: Documents, round_: int, seed: int) -> tuple[Tensor, Tensor]:
    """The order of the documents in a pass over the text, and where each ends in it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + round_)
    order = torch.randperm(len(documents.cuts) - 1, generator=generator)
    return order, torch.tensor(documents.cuts).diff()[order].cumsum(0)


def _tokenizer(path: str) -> Any:
    if not Path(path).is_file():
        raise InputError(f"tokenizer={path}: there is no such file; give a tokenizer.json")
    try:
        return importlib.import_module("tokenizers").Tokenizer.from_file(path)
    except ModuleNotFoundError as error:
        raise InputError(f"tokenizer={path}: needs Hugging Face's tokenizers; pip install tokenizers") from error
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer={path}: {error}") from error
