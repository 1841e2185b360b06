"""Every Trainer, Accelerator and DeepSpeed engine of a process over rings, for unchanged scripts: `ringattn script`.

Guarantees: each transformers Trainer, TRL SFTTrainer, accelerate Accelerator and engine of `deepspeed.initialize` that
is created after `enable` has the guarantees of `RingTrainerMixin`, `RingSFTTrainer`, `RingAccelerator` and
`ringattn.adapters.deepspeed.initialize`, and refuses what they refuse when it is made.
"""

from __future__ import annotations

import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import accelerate

from ringattn.adapters import deepspeed
from ringattn.adapters.accelerate import RingAccelerator
from ringattn.adapters.transformers import register
from ringattn.adapters.transformers.trainer import RingTrainerMixin, ring_of_arguments
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError

__all__ = ["created", "enable"]

created: list[str] = []
"""The names of the classes that were created over a ring since `enable`."""

_enabled: list[tuple[int | None, str]] = []


def enable(cp_size: int | None = None, layout: LayoutName | str = "auto") -> None:
    """Let every Trainer, Accelerator and DeepSpeed engine that this process creates later train over rings.

    It also makes `attn_implementation="ringattn"` known to transformers. A Trainer prepares its model whatever its
    `attn_implementation` is. Names that were imported from accelerate or DeepSpeed before keep their meaning.

    Args:
        cp_size: The ranks of a ring, which are consecutive processes. None: all ranks.
        layout: As in `Ring.sequence`.

    Raises:
        InputError: It was called before with other arguments.
        UnsupportedError: As `register`.

    Example:
        enable(cp_size=4)
        runpy.run_path("train.py", run_name="__main__")
    """
    if _enabled and _enabled != [(cp_size, layout)]:
        raise InputError(
            f"enable was called before, with {_enabled[0]}; all rings of a process have one size and layout"
        )
    register()
    if _enabled:
        return
    _enabled.append((cp_size, layout))
    _replace_init(cp_size, layout)
    accelerate.Accelerator = _accelerator_class(cp_size, layout)
    if "deepspeed" in sys.modules:
        _replace_initialize(sys.modules["deepspeed"], cp_size, layout)
    else:
        sys.meta_path.insert(0, _DeepSpeedFinder(cp_size, layout))


def _replace_init(cp_size: int | None, layout: LayoutName | str) -> None:
    """Let the `__init__` of Trainer make every Trainer a ring trainer, by changing its class."""
    # Imported here: transformers probes for packages by names that also exist in a checkout of this project.
    from transformers import Trainer

    original = Trainer.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, RingTrainerMixin):  # the script passes its own ring
            original(self, *args, **kwargs)
            return
        kind = type(self)
        self.__class__ = type(kind.__name__, (_mixin_for(kind), kind), {"__module__": kind.__module__})
        arguments = (*args, *kwargs.values())
        with self.created_over(ring_of_arguments(arguments, cp_size), layout, arguments):
            original(self, *args, **kwargs)
        created.append(kind.__name__)

    Trainer.__init__ = init


def _mixin_for(kind: type[Any]) -> type[RingTrainerMixin]:
    """Return the mixin that goes before a Trainer class."""
    names = {base.__name__ for base in kind.__mro__ if base.__module__.split(".")[0] == "trl"}
    if names.isdisjoint(("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")):
        return RingTrainerMixin
    # Imported only if the script uses TRL, which takes seconds to import.
    from ringattn.adapters.trl import RingGenerationMixin, RingPreferenceMixin, RingSFTMixin

    if "SFTTrainer" in names:
        return RingSFTMixin
    return RingPreferenceMixin if names.isdisjoint(RingGenerationMixin.supported_trl) else RingGenerationMixin


def _accelerator_class(cp_size: int | None, layout: LayoutName | str) -> type[RingAccelerator]:
    """Return a class named Accelerator whose objects have these settings."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        RingAccelerator.__init__(self, *args, cp_size=cp_size, layout=layout, **kwargs)
        created.append("Accelerator")

    return type("Accelerator", (RingAccelerator,), {"__init__": init, "__module__": "accelerate"})


class _DeepSpeedFinder(MetaPathFinder):
    """Replaces `initialize` when DeepSpeed is imported, because importing it takes seconds and may need a compiler."""

    def __init__(self, cp_size: int | None, layout: LayoutName | str) -> None:
        self.cp_size, self.layout = cp_size, layout

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "deepspeed" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _replace_initialize(module, self.cp_size, self.layout)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_initialize(module: Any, cp_size: int | None, layout: LayoutName | str) -> None:
    """Let `deepspeed.initialize` return engines over rings, unless another adapter calls it for its own models."""
    original = module.initialize

    @wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller in ("accelerate", "ringattn"):
            return original(*args, **kwargs)
        engine = deepspeed.initialize(*args, cp_size=cp_size, layout=layout, **kwargs)
        created.append("DeepSpeedEngine")
        return engine

    module.initialize = initialize
