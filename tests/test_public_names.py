"""The names of the package: complete, loaded at first use, and without torch for `--help`."""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import ringattn
from ringattn import dilated, errors
from ringattn.adapters import loss
from ringattn.core import dilation, layout, problem
from ringattn.engine import select
from ringattn.layers import projection, rotary
from ringattn.observe import memory
from ringattn.transport import rendezvous
from ringattn.transport.nccl import options

INIT = Path(ringattn.__file__)


def test_every_public_name_loads() -> None:
    assert dir(ringattn) == sorted(ringattn.__all__)
    for name in ringattn.__all__:
        assert name == "__version__" or getattr(ringattn, name).__name__ == name
    assert ringattn.__version__[0].isdigit()
    with pytest.raises(AttributeError, match=r"module 'ringattn' has no attribute 'Rings'"):
        _ = ringattn.Rings  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(INIT.read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed_names = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed_names | {"__version__"} == set(ringattn.__all__)


def test_methods_that_the_documentation_calls_are_defined_in_ring_itself() -> None:
    pages = [INIT.parent.parent / "README.md", *(INIT.parent.parent / "docs").glob("*.md")]
    called = {name for page in pages for name in re.findall(r"\bring\.(\w+)\(", page.read_text(encoding="utf-8"))}
    assert len(called) > 10
    assert called - set(vars(ringattn.Ring)) == set()


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_needs_no_torch(word: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from ringattn.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, word], cwd=INIT.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[0] in ("usage:", "ringattn") and not done.stderr


def test_the_logger_is_silent_by_default() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("ringattn").handlers)


# --- docstrings ------------------------------------------------------------------------------------------------------

DOCS = (INIT.parent.parent / "README.md", *sorted((INIT.parent.parent / "docs").glob("*.md")))
ADAPTERS = sorted(
    {
        module
        for page in DOCS
        for module in re.findall(r"from (ringattn\.adapters\.[\w.]+) import", page.read_text(encoding="utf-8"))
    }
)
"""The modules of adapters that the documentation imports from."""
MODULES = ("ringattn", "ringattn.testing", *ADAPTERS)
PARTS = "Args", "Shape", "Returns", "Raises", "Example"


@cache
def public_callables() -> dict[str, Any]:
    """Return the public functions, classes and methods of `MODULES`, by module and name."""
    callables: dict[str, Any] = {}
    for module, name in [(value, name) for value in importable() for name in names_of(value)]:
        value = getattr(module, name)
        key = f"{module.__name__}.{getattr(value, '__qualname__', name)}"
        if inspect.isfunction(value):
            callables[key] = value
        elif inspect.isclass(value) and not issubclass(value, Exception):
            callables[key] = value
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_") and function.__module__.startswith("ringattn"):
                    callables[f"{key}.{method}"] = function
    return callables


def importable() -> Iterator[ModuleType]:
    """Yield `MODULES` except those of hosts that are not installed."""
    for path in MODULES:
        try:
            yield import_module(path)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("ringattn"):
                raise


def names_of(module: ModuleType) -> list[str]:
    """Return `__all__`, or the public names that the module itself defines."""
    defined_names = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return getattr(module, "__all__", [name for name in defined_names if not name.startswith("_")])


def sections(value: Any) -> dict[str, str]:
    """Return the sections of a docstring by title; for a class, also those of its `__init__`."""
    by_title: dict[str, str] = {}
    for documented in (value, value.__init__) if inspect.isclass(value) else (value,):
        title = ""
        for line in (inspect.getdoc(documented) or "").splitlines():
            head = line.removesuffix(":")
            title = head if line.endswith(":") and head in PARTS else title if line[:1] in ("", " ") else ""
            if title:
                by_title[title] = by_title.get(title, "") + line + "\n"
    return by_title


def entries(section: str) -> set[str]:
    """Return the names that a section documents: `a: ...`, `b: ...`."""
    return set(re.findall(r"^ {4}(\w+): \S", section, re.MULTILINE))


def parameters(function: Any) -> Iterator[str]:
    """Yield the names of the parameters that a caller may pass."""
    all_parameters = list(inspect.signature(function).parameters.values())
    for parameter in (
        all_parameters if inspect.isclass(function) or "." not in function.__qualname__ else all_parameters[1:]
    ):
        yield parameter.name


@pytest.mark.parametrize("name", public_callables())
def test_every_public_callable_documents_arguments_results_and_errors(name: str) -> None:
    function = public_callables()[name]
    documented, names = sections(function), set(parameters(function))
    assert entries(documented.get("Args", "")) == names, "Args names each parameter, and nothing else"
    returned = str(inspect.signature(function).return_annotation)
    assert ("Returns" in documented) == (not inspect.isclass(function) and returned != "None")
    if names:
        assert "Raises" in documented
    raised = entries(documented.get("Raises", ""))
    assert raised or documented.get("Raises", "Raises:\n    Nothing.\n").strip().endswith("Nothing.")
    for error in raised:
        assert issubclass(getattr(errors, error, None) or getattr(builtins, error), BaseException)


@pytest.mark.parametrize(
    ("literal", "names"),
    [
        (layout.LayoutName, ("auto", *layout.LAYOUTS, "mask")),
        (layout.Purpose, layout.PURPOSES),
        (dilation.Offset, dilation.OFFSETS),
        (problem.FloatName, problem.FLOATS),
        (problem.EightBitName, problem.EIGHT_BIT),
        (rendezvous.TransportName, rendezvous.TRANSPORTS),
        (select.EngineName, select.ENGINES),
        (dilated.BranchGradient, dilated.GRADIENTS),
        (dilated.Tail, dilated.TAILS),
        (rotary.RopeStyle, rotary.STYLES),
        (projection.Backend, projection.BACKENDS),
        (memory.ProfileName, memory.PROFILES),
        (options.BindingName, options.BINDINGS),
        (loss.GradientReduction, loss.GRADIENTS),
    ],
)
def test_type_checkers_see_the_names_that_are_accepted(literal: Any, names: tuple[str, ...]) -> None:
    assert sorted(get_args(literal)) == sorted(names)
