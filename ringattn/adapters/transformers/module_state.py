"""The state of a module that its forward reads, for options that compute the forward again in backward.

Such an option uses the module as it is in backward. So the option compares the state with that of forward, and refuses
a module that updates its state itself in every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from ringattn.errors import UnsupportedError

_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of `nn.Module`: its tensors and parts, which have separate entries, and hooks."""

_OF_DEEPSPEED = "ds_", "applied_pre_backward_ref_cnt"
"""How the names of attributes begin in which ZeRO 3 counts calls of a module."""


def module_state(module: nn.Module) -> dict[str, object]:
    """Return the tensors of a module and its parts, the version counters of buffers, modes and plain attributes.

    Plain attributes are numbers, strings, and lists and dicts of these. PEFT keeps there which adapters are active.
    """
    state: dict[str, object] = {}
    for path, part in module.named_modules():
        prefix = ".".join([type(module).__name__, *filter(None, [path]), ""])
        for name, version in _versions(part).items():
            state[f"the contents of {prefix}{name}"] = version
        # A class has the defaults of attributes. FSDP1 sets weights as attributes, which in backward are no parameters.
        kind: type = type(part)
        of_class = [(name, getattr(kind, name)) for name in _plain_names(kind)]
        for name, value in (*of_class, *part._parameters.items(), *part._buffers.items(), *vars(part).items()):
            if name in _OF_ALL_MODULES:
                continue
            if isinstance(value, Tensor):
                state[prefix + name] = value
            elif _is_plain(value) and not name.startswith(_OF_DEEPSPEED):
                state[prefix + name] = _copied(value)
    return state


@contextmanager
def refuse_updates(module: nn.Module, option: str) -> Iterator[None]:
    """Return a context that raises `UnsupportedError` at its end if it has changed a buffer of the module in place."""
    before = [(path, part, _versions(part)) for path, part in module.named_modules()]
    yield
    for path, part, versions in before:
        changed = [name for name, version in _versions(part).items() if versions.get(name) != version]
        if changed:
            raise UnsupportedError(
                f"{option}: {type(module).__name__} updates its buffer {'.'.join([path, *changed[:1]]).lstrip('.')} "
                f"in every call, and {option} calls it several times; leave {option} out"
            )


def _versions(part: nn.Module) -> dict[str, int]:
    """Return the version counters of buffers. Inference tensors have none, and no backward pass."""
    buffers = part._buffers.items()
    return {name: x._version for name, x in buffers if isinstance(x, Tensor) and not x.is_inference()}


@cache
def _plain_names(kind: type) -> tuple[str, ...]:
    """Return the names of the plain attributes of a class of modules."""
    kinds = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return tuple(
        {name: None for part in kinds for name in vars(part) if name[:2] != "__" and _is_plain(getattr(kind, name))}
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, (bool, int, float, str)):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return items is not None and all(map(_is_plain, items))


def _copied(value: Any) -> object:
    """Return a copy, because lists and dicts may change in place."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value
