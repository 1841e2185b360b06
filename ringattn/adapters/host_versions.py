"""The versions of hosts: tested, expected to work, or refused.

Each adapter describes its host as a `Host`: the tested minor versions, and what the adapter relies on in the host's
code. An installed version is

- tested: its minor version is in the list, and all checks pass;
- expected to work: all checks pass. The adapter runs, after one warning. `RINGATTN_UNTESTED_HOSTS=error` refuses it;
- refused: a check failed. The error names the function of the host that differs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import version
from threading import RLock
from typing import Any

from ringattn.errors import InputError, UnsupportedError

VARIABLE = "RINGATTN_UNTESTED_HOSTS"
ABSENT = "absent"
"""Stands for the digest of a function that some reviewed versions do not have."""


class UntestedHostWarning(UserWarning):
    """An adapter runs with a version of its host that was not tested, but whose relevant code is unchanged."""


@dataclass(frozen=True, eq=False)
class Host:
    """A package that an adapter is written for, and what the adapter relies on in it.

    `package`: its name on the package index. `tested`: minor versions ("5.23"). `feature`: the part of the adapter that
    needs the functions, for errors; empty for all of it.
    `parameters`: for functions ("module:Class.name") that the adapter calls, overrides or registers with: parameters
    that it passes or expects. All must exist, and no other parameter may be required.
    `sources`: for functions whose behaviour the adapter repeats or corrects: the digests of the reviewed sources.
    """

    package: str
    tested: tuple[str, ...]
    feature: str = ""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def require(self) -> None:
        """Check the installed version, once per process.

        Warns with `UntestedHostWarning` for an untested version that passes the checks. Raises `UnsupportedError` if a
        check fails, or for an untested version if `RINGATTN_UNTESTED_HOSTS` is "error".
        """
        _require(self, os.environ.get(VARIABLE, ""))

    def differences(self) -> list[str]:
        """Return a phrase for each check that the installed version fails."""
        found = [_parameter_difference(path, names) for path, names in self.parameters.items()]
        found += [_source_difference(path, digests) for path, digests in self.sources.items()]
        return [difference for difference in found if difference]


@cache
def _require(host: Host, policy: str) -> None:
    if policy not in ("", "warn", "error"):
        raise InputError(f"{VARIABLE}={policy}: must be warn (the default) or error")
    installed = version(host.package)
    name, tested = f"{host.package} {installed}", f"tested with {host.package} {_ranges(host.tested)}"
    part = f"the adapter's {host.feature}" if host.feature else "this adapter"
    if differences := host.differences():
        raise UnsupportedError(
            f"{part} was {tested}, and relies on code that differs in {name}: {'; '.join(differences)}. Install a "
            "tested version"
        )
    if ".".join(installed.split(".")[:2]) in host.tested:
        return
    checks = f"all {len(host.parameters) + len(host.sources)} functions of the host that it relies on"
    if policy == "error":
        raise UnsupportedError(
            f"{part} was {tested}, and {name} is installed: {checks} are as expected, but {VARIABLE}=error allows "
            f"tested versions only; install one, or set {VARIABLE}=warn"
        )
    warnings.warn(
        f"{part} was {tested}, not with {name}; {checks} are as expected, so it runs. {VARIABLE}=error refuses "
        "untested versions",
        UntestedHostWarning,
        stacklevel=4,
    )


def _ranges(versions: tuple[str, ...]) -> str:
    """Return minor versions with successive numbers as one range: "4.57, 5.0 to 5.24"."""
    runs: list[list[tuple[int, int]]] = []
    for major, minor in (map(int, text.split(".")) for text in versions):
        if runs and runs[-1][-1] == (major, minor - 1):
            runs[-1].append((major, minor))
        else:
            runs.append([(major, minor)])
    ends = [[f"{major}.{minor}" for major, minor in (run[0], run[-1])] for run in runs]
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in ends)


# --- Checks -----------------------------------------------------------------------------------------------------------

_parsing = RLock()
"""Held while Python parses: in Python 3.11, parsing in two threads can raise SystemError."""


def source_digest(function: Callable[..., Any]) -> str:
    """Return eight hexadecimal digits of a function's source, without docstrings, comment lines and white space.

    Raises `OSError` or `TypeError` if there is no source.
    """
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    with _parsing:
        nodes = list(ast.walk(ast.parse("\n".join(lines))))
    for node in nodes:
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None and body:
            lines[body[0].lineno - 1 : body[0].end_lineno] = [""] * (body[0].end_lineno - body[0].lineno + 1)
    code = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    return hashlib.sha256(" ".join(" ".join(code).split()).encode()).hexdigest()[:8]


def digest_of(path: str) -> str:
    """Return the digest of the function at "module:Class.name", or `ABSENT`. Raises like `source_digest`."""
    function = _find(path)
    return ABSENT if function is None else source_digest(function)


def _find(path: str) -> Any:
    """Return the object at "module:Class.name", or None if there is none."""
    module, _, names = path.partition(":")
    try:
        value: Any = import_module(module)
    except ModuleNotFoundError as error:
        # A missing dependency of the module is another error, which the user must see.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None
    for name in names.split("."):
        value = getattr(value, name, None)
    return value


def _parameter_difference(path: str, names: tuple[str, ...]) -> str:
    function = _find(path)
    if function is None:
        return f"{path} does not exist"
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return f"the parameters of {path} cannot be read"
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [] if takes_any else [name for name in names if name not in parameters]
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in (*names, "self", "cls")
    ]
    if missing:
        return f"{path} has no parameter {', '.join(missing)}"
    return f"{path} requires the parameter {', '.join(required)}" if required else ""


def _source_difference(path: str, digests: tuple[str, ...]) -> str:
    try:
        digest = digest_of(path)
    except (OSError, TypeError):
        return f"the source of {path} cannot be read"
    if digest in digests:
        return ""
    return f"{path} does not exist" if digest == ABSENT else f"{path} has changed (digest {digest})"
