"""Recipes: command-line trainers under `ringattn script`, unchanged, with the versions that they require."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file

from tests.adapters.environments import environment
from tests.adapters.processes import ROOT, call_in_program, run_program, worst_error
from tests.adapters.versions import WITH_TRL, packages
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
VERL = (
    "verl==0.9.1", "ray==2.60.0", "tensordict==0.10.0", "codetiming==1.4.0", "uvicorn==0.54.0", "orjson==3.13.0",
    "pyvers==0.2.3", "protobuf==7.36.2", "msgpack==1.2.4", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1",
    "referencing==0.37.0", "rpds-py==2026.9.1",
)  # fmt: skip
"""verl, and the requirements of its actor that are not in `WITH_TRL` or in the tests' environment."""


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


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 60 s on an idle machine, and 90 MB of packages in the first run
def test_actors_and_critics_of_verl_over_rings_equal_one_process(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("FastAPI = None\n")  # only servers of rollouts need it
    folders = environment(*VERL), packages("5.9.0"), environment(*WITH_TRL), tmp_path
    path = os.pathsep.join([str(ROOT), *map(str, folders)])  # first ROOT, because verl has a package `tests` too
    variables = {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_MODULES": "tests.adapters.verl_platform",
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",
    }  # fmt: skip
    entry = "tests.adapters.verl_actor:errors_and_refusals"
    errors, refusals = call_in_program(entry, str(tmp_path), timeout_s=540, **variables)
    assert set(errors) == {"actor, 3 ranks", "actor, LoRA, 3 ranks", "critic, 3 ranks", "actor, 4 ranks"}
    for case, results in errors.items():
        assert max(results.values()) <= 1e-9, (case, results)
    assert "InputError: rank 0: shard got 64 tokens" in refusals["padding"]
    assert "ValueError: use_fused_kernels replaces the forward" in refusals["fused"]
