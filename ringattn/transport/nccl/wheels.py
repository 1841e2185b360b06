"""Whether the CUDA wheels that are installed fit this torch: cupy and NCCL for its CUDA version, and one of each.

Wheels for several CUDA versions bring the same files (`cupy/`, `nvidia/nccl/lib/libnccl.so.2`): the last one installed
overwrites the others, and removing any takes the file of all.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

CUDA = ("13", "12", "11")
FORMS = ("cupy-cuda{}x", "nvidia-nccl-cu{}")
"""Names of the wheels, by CUDA version."""
CUPY_FROM_SOURCE = "cupy"
"""Built for whatever CUDA was there."""


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def mismatch(cuda_build: str | None, version_of: Callable[[str], str | None] = installed) -> str | None:
    """One line: which wheels are installed, what this torch wants, the commands that mend it; None if all is well.

    `cuda_build`: `torch.version.cuda`; for a CPU build (None) only several wheels of a kind are at fault.
    """
    major = cuda_build.partition(".")[0] if cuda_build else None
    found: dict[str, str] = {}
    remove: list[str] = []
    install: list[str] = []
    for form in FORMS:
        names = [*(form.format(cuda) for cuda in CUDA), *([CUPY_FROM_SOURCE] if "cupy" in form else [])]
        there = {name: version for name in names if (version := version_of(name))}
        fitting = [name for name in there if major is None or name in (form.format(major), CUPY_FROM_SOURCE)]
        if wrong := [name for name in there if name not in fitting[:1]]:
            remove += wrong
            install += [f"{name}=={there[name]}" for name in fitting[:1]] or [form.format(major)]
        found |= there
    if not remove:
        return None
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    wants = f"this torch has CUDA {cuda_build}" if cuda_build else "wheels of a kind bring the same files"
    return (
        f"installed: {listed}; {wants}: pip uninstall -y {' '.join(remove)}, then "
        f"pip install --force-reinstall --no-deps {' '.join(install)}"
    )
