"""Copies of models for probes: a forward pass of the copy leaves no trace in the model.

A copy shares the parameters and has its own buffers, attributes and configurations. No hook runs in it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module")
"""Where torch.compile and FSDP1 keep the module that they wrap; FSDP1 would gather its weights."""


class ProbeEndedError(Exception):
    """The forward pass of a copy has reached a layer, or whatever else ends the probe."""


@torch.no_grad()
def probe_copy(model: nn.Module) -> Any:
    """Return a copy of `model` in evaluation mode, for one probe.

    Each call of a module goes straight to the `forward` of its class. So no hook runs, not even those that torch runs
    for every module, and no `forward` that was set on an instance. A call of a member of an `nn.ModuleList` raises
    `ProbeEndedError`. Objects that are neither modules, tensors, plain containers nor configurations are shared.
    """
    return _Copies().module(model)


class _Copies:
    """Copies by the identity of the original: what two modules share, their copies share."""

    def __init__(self) -> None:
        self.by_id: dict[int, Any] = {}
        self.originals: list[Any] = []
        """Kept alive, so that no other object gets the id of one."""

    def module(self, module: nn.Module) -> Any:
        """Return the copy of a module, or of the module that it wraps."""
        for name in _WRAPPED:
            if (wrapped := module._modules.get(name)) is not None:
                return self.module(wrapped)
        if id(module) in self.by_id:
            return self.by_id[id(module)]
        copied = self._keep(module, object.__new__(type(module)))
        for name, value in list(vars(module).items()):
            if name == "_modules" and isinstance(module, nn.ModuleList):
                vars(copied)[name] = {index: _Layer(self, layer) for index, layer in value.items()}
            elif name != "forward":
                vars(copied)[name] = self.value(value)
        # torch calls this in place of the hooks and `forward`.
        vars(copied).update(training=False, _compiled_call_impl=MethodType(type(module).forward, copied))
        return copied

    def value(self, value: Any) -> Any:
        """Return the copy of an attribute or of a member of a container."""
        from transformers.configuration_utils import PretrainedConfig  # the name that 4.57 has, too

        if id(value) in self.by_id:
            return self.by_id[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, PretrainedConfig):
            return copy.deepcopy(value, self.by_id)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        if type(value) is partial:
            return partial(self.value(value.func), *map(self.value, value.args), **self._members(value.keywords))
        if type(value) in (list, tuple, set):
            return self._keep(value, type(value)(map(self.value, value)))
        if type(value) in (dict, OrderedDict, defaultdict):
            copied = self._keep(value, copy.copy(value))
            copied.update(self._members(value))
            return copied
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return self._keep(value, value.detach().clone())
        return value

    def _members(self, members: dict[Any, Any]) -> dict[Any, Any]:
        return {key: self.value(member) for key, member in list(members.items())}

    def _keep(self, original: Any, copied: Any) -> Any:
        self.by_id[id(original)] = copied
        self.originals.append(original)
        return copied


class _Layer(nn.Module):
    """A member of an `nn.ModuleList`: its attributes are those of its copy, and its call ends the probe."""

    def __init__(self, copies: _Copies, layer: nn.Module) -> None:
        super().__init__()
        self.eval()
        vars(self).update(copies=copies, layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copies.module(self.layer), name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ProbeEndedError
