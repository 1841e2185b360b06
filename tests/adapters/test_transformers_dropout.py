"""Models of transformers that train with attention dropout: equal to one process that drops the same pairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from ringattn import Ring
from ringattn.adapters.transformers import prepare
from ringattn.testing import run_ranks
from tests.adapters.dropout_ranks import known, made
from tests.adapters.ranks import TOKENS, InDouble, batches, gradients, one_process, over_ranks

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-10


def test_gpt2_over_three_ranks() -> None:
    """A step in training mode, and the next call in evaluation, which drops nothing."""
    batch, step = batches()["packed"], 2**64 - 1
    with InDouble():
        true_logits, true_loss, true_grads = known("gpt2", batch, step)
        calm = one_process(made("gpt2", "eager").eval(), batch)[0].detach()

    def body(ring: Ring) -> None:
        with InDouble():
            model, seq = prepare(made("gpt2", "eager")), ring.sequence(TOKENS, cu_seqlens=batch.documents)
            logits, loss = over_ranks(model, batch, seq, dropout_seed=step)
            grads, total = gradients(model, loss), loss.detach().clone()
            whole = over_ranks(model.eval(), batch, seq)[0]
        ring.all_reduce([total, *grads.values()])
        for one, other in [(logits, true_logits), (total, true_loss), (whole, calm),
                           *((grads[of], true_grads[of]) for of in true_grads)]:  # fmt: skip
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE * max(1.0, float(other.abs().max())))

    run_ranks(3, body)


@pytest.mark.slow
def test_checkpointed_layers_over_processes(tmp_path: Path) -> None:
    """Both kinds; plain, packed and padded batches over 2 and 4 ranks, logits, loss and every gradient."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.dropout_ranks", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for world_size in (2, 4):
        errors = json.loads((tmp_path / f"errors-{world_size}.json").read_text())
        assert len(errors) == 4 and not {of: error for of, error in errors.items() if not error <= TOLERANCE}
