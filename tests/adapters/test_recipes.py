"""Recipes: command-line trainers under `ringattn script`, unchanged, with the versions that they require."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file

from tests.adapters.environments import environment
from tests.adapters.processes import ROOT, run_program, worst_error
from tests.doc_code import run_under_torchrun

PROGRAM = str(ROOT / "tests" / "adapters" / "recipes.py")
LLAMA_FACTORY = (
    "llamafactory==0.9.5", "transformers==5.6.0", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "httpx==0.28.1",
    "httpcore==1.0.9", "accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1", "trl==0.24.0", "pyarrow==26.0.1",
    "pandas==3.1.1", "dill==0.3.9", "multiprocess==0.70.16", "xxhash==4.1.0", "six==1.17.0", "pytz==2026.6",
    "tzdata==2026.6", "fsspec==2025.3.0", "av==16.0.0", "fire==0.7.1", "termcolor==3.3.0", "sse-starlette==3.7.0",
    "modelscope==1.40.2", "tiktoken==0.14.0", "torchdata==0.11.0", "python-dateutil==4.0.0", "protobuf==7.36.2",
    "sentencepiece==0.2.3", "scipy==1.17.1",
)  # fmt: skip
"""LLaMA-Factory, and the requirements of it that the tests' environment does not satisfy."""


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 60 s on an idle machine, and 200 MB of packages in the first run
def test_llama_factory_over_two_processes_equals_one(tmp_path: Path) -> None:
    # LLaMA-Factory imports torchaudio, whose wheels need CUDA, and uses it for sound only.
    (tmp_path / "torchaudio.py").touch()
    path = os.pathsep.join([str(environment(*LLAMA_FACTORY)), str(tmp_path), str(ROOT)])
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run_program(PROGRAM, str(tmp_path), **variables)
    run_under_torchrun(["-m", "ringattn", "script", PROGRAM, str(tmp_path)], tmp_path, 2, **variables)
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("1", "2"))
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert one.keys() == two.keys() and worst_error((one[name], before[name]) for name in one if name in before) > 1e-3
    assert worst_error((two[name], one[name]) for name in one) <= 1e-9
    losses = [json.loads((tmp_path / folder / "all_results.json").read_text())["eval_loss"] for folder in ("1", "2")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
