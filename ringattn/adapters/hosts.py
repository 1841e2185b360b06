"""Which version of a host is installed, and whether an adapter was checked with it."""

from __future__ import annotations

from importlib.metadata import version

from ringattn.errors import UnsupportedError


def require_checked(package: str, *checked: str) -> None:
    """Raise `UnsupportedError` unless the installed `package` is of a minor version ("0.3") among `checked`."""
    installed = version(package)
    if ".".join(installed.split(".")[:2]) not in checked:
        raise UnsupportedError(
            f"this adapter was checked with {package} {', '.join(checked)} and {installed} is installed, whose tensors "
            "may lie otherwise: install one of those, or run the adapter's tests with yours and add it to them"
        )
