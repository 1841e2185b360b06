"""Which extra of ringattn brings a package that a command needs and that is not installed."""

from __future__ import annotations

EXTRAS = {
    **dict.fromkeys(("hydra", "omegaconf", "rich", "matplotlib", "jinja2"), "launch"),
    **dict.fromkeys(("submitit", "hydra_plugins"), "slurm"),
    **dict.fromkeys(("transformers", "accelerate"), "hf"),
}
"""By package that is imported."""


def advice(error: ModuleNotFoundError) -> str | None:
    """What to install for the package that `error` names; None if no extra brings it."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    return extra and f"needs {package}, which is not installed: pip install 'ringattn[{extra}]'"
