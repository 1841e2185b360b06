"""The scripts of docs/embedding-diffs.md: before the change on one process, and after it on two, in float64."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.adapters.models import tiny_model
from tests.adapters.processes import ROOT, forked_ranks, worst_error
from tests.adapters.ranks import in_double

PAGE = ROOT / "docs" / "embedding-diffs.md"
_DATA = """\
from tests.adapters.trainer import padded as collate, texts

texts = texts()
"""


def diffs() -> dict[str, str]:
    """Return the diffs of the page by the name of their host."""
    blocks = re.findall(r"^```diff (\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(blocks)


def script_of(diff: str, sign: str) -> str:
    """Return the script before the change (`sign` is "-") or after it ("+")."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line or line[0] in (" ", sign))


def changed_lines(diff: str) -> int:
    """Return the number of lines of the script that are new or changed."""
    return max(sum(line.startswith(sign) for line in diff.splitlines()) for sign in "+-")


def errors(folder: str, *hosts: str) -> dict[str, float]:
    """Return the largest relative error of the weights by host, and for DeepSpeed also of the unchanged script.

    `folder`: for the model and the data.
    """
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc, assignment]  # DeepSpeed's factor of clipping
    os.chdir(folder)
    Path("data.py").write_text(_DATA, encoding="utf-8")
    sys.path.insert(0, folder)
    tiny_model("llama", "eager").save_pretrained("model")
    if "SFTTrainer" in hosts:
        from tests.adapters.sft import tokenizer

        tokenizer().save_pretrained("model")
    if "DeepSpeed" in hosts:
        from tests.adapters.deepspeed_ranks import compile_nothing

        compile_nothing()
    return {name: error for host in hosts for name, error in _errors(host)}


def _errors(host: str) -> list[tuple[str, float]]:
    scripts = {sign: Path(f"{host}{sign}.py") for sign in "-+"}
    for sign, file in scripts.items():
        file.write_text(script_of(diffs()[host], sign), encoding="utf-8")
    (true,) = forked_ranks(1, partial(trained, host, scripts["-"], False))
    initial = dict(tiny_model("llama", "eager").named_parameters())
    assert max(worst_error([(true[name], weight)]) for name, weight in initial.items()) > 1e-3
    runs: dict[str, Callable[[int], Any]] = {host: partial(trained, host, scripts["+"], False)}
    if host == "DeepSpeed":
        runs["DeepSpeed, unchanged"] = partial(trained, host, scripts["-"], True)
    return [
        (name, worst_error((weights[key], value) for key, value in true.items()))
        for name, run in runs.items()
        for weights in forked_ranks(2, run)
    ]


def trained(host: str, file: Path, is_enabled: bool, number: int) -> dict[str, Tensor]:
    """Run a script, and return the weights of its model. `is_enabled`: as `ringattn script` runs it."""
    torch.set_num_threads(1)
    if host == "DeepSpeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    if is_enabled:
        from ringattn.adapters.auto import enable

        enable()
    with in_double():
        model = runpy.run_path(str(file))["model"]
    if host == "DeepSpeed":
        from tests.adapters.deepspeed_ranks import weights_of

        return weights_of(model)
    model = getattr(model, "module", model)  # in DDP
    model = getattr(model, "model", model) if host == "Lightning" else model
    return {name: weight.detach() for name, weight in model.named_parameters()}
