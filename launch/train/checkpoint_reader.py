"""Loads a checkpoint without running code that it holds.

torch's reader unpickles `.metadata`, and its planner every entry that is not a tensor, with any class: who wrote such a
checkpoint runs code in the process that loads it. Here the first is unpickled with the classes that torch's own writer
puts there, the second with `weights_only=True`.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from ringattn import Ring
from ringattn.errors import InputError, RingError

INSTANCES = (
    described.Metadata,
    described.MetadataIndex,
    described.TensorStorageMetadata,
    described.BytesStorageMetadata,
    described.ChunkStorageMetadata,
    described.TensorProperties,
    described.StorageMeta,
    _StorageInfo,
)
"""Classes whose attributes `.metadata` may set."""
ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in (*INSTANCES, described._MEM_FORMAT_ENCODING)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""What the names in `.metadata` mean. The path in it is that of the checkpoint when it was saved, and is not used."""
REMEDY = "it might run code, and `ringattn train` writes no such thing: load only checkpoints that you trust"


class MetadataUnpickler(pickle._Unpickler):
    """The unpickler in Python, whose steps can be overridden."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """The object of a name in the pickle."""
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise InputError(f".metadata names {module}.{name}; {REMEDY}") from None

    def load_build(self) -> None:
        """Set attributes of an object: never of a class or function, which would change it for the whole process."""
        if not isinstance(self.stack[-2], INSTANCES):
            raise InputError(f".metadata sets attributes of {self.stack[-2]!r}; {REMEDY}")
        build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = load_build


class Reader(FileSystemReader):
    """torch's reader, with the unpickler above. Raises `InputError` if `.metadata` names other classes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with (path / ".metadata").open("rb") as file:
            self._metadata = MetadataUnpickler(file).load()
        if not isinstance(self._metadata, described.Metadata):
            raise InputError(f".metadata holds a {type(self._metadata).__name__}; {REMEDY}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        """See `FileSystemReader.read_metadata`."""
        self._metadata.storage_meta = self._metadata.storage_meta or described.StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class Planner(DefaultLoadPlanner):
    """torch's planner; entries that are no tensors may be numbers, text, and lists, tuples and dictionaries of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `DefaultLoadPlanner.load_bytes`, which loads any class."""
        name = read_item.dest_index.fqn
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            matches = re.search(r"(?:GLOBAL|class|function) (\S+)", str(error))
            raise InputError(f"its entry {name} holds {matches[1] if matches else 'no value'}; {REMEDY}") from None
        set_element(self.original_state_dict, self.mappings[name], content)


def load_checkpoint(everyone: Ring, state: dict[str, Any], path: Path) -> None:
    """Load the checkpoint at `path` into the tensors and entries of `state`, on all ranks together.

    Raises `InputError` on all ranks if it holds other classes, `RingError` if it cannot be loaded.
    """
    reader, refusal = None, None
    try:
        reader = Reader(path)
    except InputError as error:
        refusal = error
    except Exception as error:  # what unpickling raises for bytes that are no pickle
        refusal = InputError(f".metadata cannot be read ({type(error).__name__}: {error})")
    everyone.check_consistency("which checkpoint to load", refusal, always=True)
    try:
        dcp.load(state, storage_reader=reader, planner=Planner())
    except CheckpointException as error:
        cause = first_failure(error)
        if isinstance(cause, InputError):
            raise cause from error
        raise RingError(f"{path} could not be loaded: {type(cause).__name__}: {cause}") from error


def first_failure(error: BaseException) -> BaseException:
    """The first rank's own error inside one of `torch.distributed.checkpoint`, which is no Exception."""
    if not isinstance(error, CheckpointException):
        return error
    return next((of_rank for of_rank, _ in error.failures.values()), error)
