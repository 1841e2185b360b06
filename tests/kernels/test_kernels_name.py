"""Transformers' models can be imported in the root of the repository, although it has a folder `kernels/`.

Transformers imports Hugging Face's package `kernels` if it is installed. The tests run with such a package and without
it. `tests/test_repository.py` explains why the folder has no `__init__.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers")

ROOT = Path(__file__).resolve().parents[2]

IMPORT_A_MODEL = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_kernels_available
shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 10}
LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, **shape))
found = "none"
if len(sys.argv) > 1:
    import kernels
    found = kernels.__file__
import ringattn.kernels.configs
print(is_kernels_available(), found, ringattn.kernels.configs.__file__)
"""

STAND_IN = """
class Anything:
    def __init__(self, *args, **kwargs): ...
    def __call__(self, decorated):
        return decorated


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {})
"""


def from_root(*installed: Path) -> list[str]:
    """Import a model in the root of the repository, with the folders `installed` on the path.

    Return whether transformers considers the package `kernels` usable, the file of that package, and the file of a
    module of ringattn's `kernels/`.
    """
    path = os.pathsep.join(map(str, (ROOT, *installed)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_A_MODEL, *map(str, installed)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_without_the_package() -> None:
    usable, _, ours = from_root()
    assert usable == "False" and ours == str(ROOT / "ringattn" / "kernels" / "configs.py")


@pytest.mark.slow
def test_with_a_package_of_the_version_that_transformers_needs(tmp_path: Path) -> None:
    """Transformers uses the installed package. Here it is a stand-in that has every name that is imported from it."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(STAND_IN)
    facts = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    usable, outcome, ours = from_root(tmp_path)
    assert usable == "True" and outcome == str(tmp_path / "kernels" / "__init__.py")
    assert ours == str(ROOT / "ringattn" / "kernels" / "configs.py")
