"""`ringattn script`: scripts of Trainer, SFTTrainer and accelerate's loops, unchanged, equal to plain processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import accelerate
import torch
import transformers
from torch.utils.data import DataLoader

from ringattn import DisagreementError, InputError, Ring, UnsupportedError
from ringattn.adapters import auto
from ringattn.adapters.accelerate import RingAccelerator, RingParallelismConfig
from ringattn.adapters.host_versions import source_digest
from ringattn.adapters.transformers.trainer_checks import FORWARDING, has_custom_loss
from ringattn.cli import main
from tests.adapters.environments import search_path
from tests.adapters.models import tiny_model
from tests.adapters.processes import ROOT, call_in_program, worst_error
from tests.adapters.test_trl import with_trl
from tests.adapters.trainer import Forwards, Stream, padded, texts
from tests.doc_code import run_under_torchrun

SCRIPT = str(ROOT / "tests" / "adapters" / "user_scripts.py")
KINDS = ("loop", "loop, scheduled by processes", "loop, masked", "trainer", "z-loss", "mean of means")
STARTED = "loop", "trainer", "deepspeed"
"""The scripts that are started under the command as a user does, by Python and torchrun. The other runs are forked."""
TOLERANCE = 1e-9


def run(kind: str, folder: Path, processes: int, ranks: int | None, **env: str) -> dict[str, Any]:
    """Return what a script saves: in plain processes, or if `ranks` is given, under the command with such rings."""
    folder.mkdir()
    arguments = [SCRIPT, kind, str(folder / "saved.pt")]
    command = [] if ranks is None else ["-m", "ringattn", "script", f"ranks={ranks}"]
    if ranks is None or kind not in STARTED:
        call_in_program("tests.adapters.script_ranks:run", [*command, *arguments], processes, **env)
    else:
        run_under_torchrun([*command, *arguments], folder, processes, **{"PYTHONPATH": search_path(), **env})
    saved: dict[str, Any] = torch.load(folder / "saved.pt")
    return saved


def check_equal(actual: dict[str, Any], true: dict[str, Any]) -> None:
    error = worst_error((actual["weights"][name], weight) for name, weight in true["weights"].items())
    assert error <= TOLERANCE
    assert actual["values"].keys() == true["values"].keys()
    for name, values in true["values"].items():
        assert len(values) >= 1 and len(actual["values"][name]) == len(values), name
        for value, expected in zip(actual["values"][name], values, strict=True):
            assert value == pytest.approx(expected, rel=1e-6 if name == "losses" else TOLERANCE), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "loop, translations", "trainer, translations"])
def test_a_script_over_one_ring_equals_one_process(kind: str, tmp_path: Path) -> None:
    check_equal(run(kind, tmp_path / "ring", 2, ranks=2), run(kind, tmp_path / "plain", 1, ranks=None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "further losses"])
def test_a_script_over_two_rings_equals_two_processes(kind: str, tmp_path: Path) -> None:
    check_equal(run(kind, tmp_path / "rings", 4, ranks=2), run(kind, tmp_path / "plain", 2, ranks=None))


@pytest.mark.slow
def test_sfttrainer_with_the_name_of_the_attention(tmp_path: Path) -> None:
    rings, plain = (run("sft", tmp_path / str(ranks), ranks or 1, ranks, **with_trl()) for ranks in (2, None))
    check_equal(rings, plain)


@pytest.mark.slow
def test_verify_trainer_compares_one_process_with_a_ring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["verify-trainer", "ring=true", "steps=1", "json=-", SCRIPT, "trainer", str(tmp_path / "saved.pt")]
    assert main(words) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["equal"] and len(figures["differences"]) == 27
    assert max(difference["error"] for difference in figures["differences"]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_losses_of_whole_texts_with_models_by_name(kind: str, tmp_path: Path) -> None:
    rings, plain = (run(kind, tmp_path / str(ranks), ranks or 1, ranks, **with_trl()) for ranks in (2, None))
    check_equal(rings, plain)


@pytest.mark.slow
def test_dpotrainer_over_two_rings_equals_two_processes(tmp_path: Path) -> None:
    rings, plain = run("dpo", tmp_path / "rings", 4, 2, **with_trl()), run("dpo", tmp_path / "2", 2, None, **with_trl())
    check_equal(rings, plain)


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_that_creates_nothing_fails(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import sys; print(sys.argv[1:], __name__)")
    command = [sys.executable, "-m", "ringattn", "script", str(script), "ranks=9", "--flag"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout == "['ranks=9', '--flag'] __main__\n"
    assert (
        "nothing.py created no Trainer, Accelerator or DeepSpeed engine, so nothing was trained over a ring"
        in ended.stderr
    )


SPLIT = "Accelerator(cpu=True, dataloader_config=Loaders(split_batches=True))"


@pytest.mark.slow
def test_an_error_names_the_line_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "split.py"
    script.write_text("from accelerate import Accelerator, DataLoaderConfiguration as Loaders\n\n" + SPLIT)
    command = [sys.executable, "-m", "ringattn", "script", str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"{script}, line 3: {SPLIT}\n" in ended.stderr
    assert "ringattn script: split_batches would split batches among the ranks of a ring" in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script: write the path of a Python file, or -m and a module"),
        (["ranks=2", "-m"], "no script: write"),
        (["absent.py"], "absent.py: no such file"),
        (["ranks=0", "absent.py"], "ranks=0: must be at least 1"),
        (["rank=2", "absent.py"], "rank: no such key; did you mean ranks?"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `enable`, and undo it after the test."""
    monkeypatch.setattr(transformers.Trainer, "__init__", transformers.Trainer.__init__)
    monkeypatch.setattr(accelerate, "Accelerator", accelerate.Accelerator)
    monkeypatch.setattr(auto, "_enabled", [])
    monkeypatch.setattr(auto, "created", [])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    auto.enable()


def trainer_of(folder: Path, kind: type[Any] = transformers.Trainer, **given: Any) -> Any:
    parallel = {name: given.pop(name) for name in ("parallelism_config",) if name in given}
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, save_strategy="no",
        **parallel,
    )  # fmt: skip
    arguments = {"model": tiny_model("llama", "ringattn"), "train_dataset": texts(), "data_collator": padded} | given
    return kind(args=args, **arguments)


def test_every_trainer_is_one_over_a_ring(enabled: None, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    assert type(trainer).__name__ == "Trainer" and trainer.ring.world_size == 1 and auto.created == ["Trainer"]
    trainer.train()
    with Ring() as ring:
        explicit = type("Ours", (auto.RingTrainerMixin, transformers.Trainer), {})
        assert trainer_of(tmp_path, explicit, ring=ring).ring is ring
    auto.enable()  # again, with the same arguments
    with pytest.raises(InputError, match="enable was called before, with"):
        auto.enable(cp_size=2)


def test_deepspeed_is_replaced_when_it_is_imported(
    enabled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deepspeed.py").write_text("def initialize(model): return 'plain', model")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # so that the module of this test does not stay afterwards
    monkeypatch.delitem(sys.modules, "deepspeed")
    monkeypatch.setattr(auto.deepspeed, "initialize", lambda model, **options: (options, model))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("from deepspeed import initialize; result = initialize(5)", names)
    assert names["result"] == ({"cp_size": None, "layout": "auto"}, 5) and auto.created == ["DeepSpeedEngine"]
    names["__name__"] = "accelerate.accelerator"  # whose models are prepared already
    exec("result = initialize(5)", names)
    assert names["result"] == ("plain", 5) and auto.created == ["DeepSpeedEngine"]


def test_trainers_that_cannot_be_exact_are_refused(enabled: None, tmp_path: Path) -> None:
    distillation = type("DistillationTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.distillation"})
    with pytest.raises(UnsupportedError, match="TRL's DistillationTrainer has a custom loss, which was not compared"):
        trainer_of(tmp_path, distillation)
    with pytest.raises(UnsupportedError, match="cp_size=2 of accelerate's ParallelismConfig"):
        trainer_of(tmp_path, parallelism_config=RingParallelismConfig(cp_size=2))
    assert auto.created == []


def test_a_loss_is_of_shards_only_if_its_class_was_reviewed(
    enabled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, Forwards)
    assert has_custom_loss(trainer)
    path, digest = f"{Forwards.__module__}:Forwards", source_digest(Forwards.compute_loss)
    monkeypatch.setitem(FORWARDING, path, ((digest,), "args.label_names"))
    assert not has_custom_loss(trainer)
    trainer.args.label_names = ["labels"]  # the option that selects another loss
    assert has_custom_loss(trainer)
    monkeypatch.setitem(FORWARDING, path, (("another",), ""))
    assert has_custom_loss(trainer)
    monkeypatch.setitem(FORWARDING, path, ((digest,), ""))
    assert not has_custom_loss(trainer)
    trainer.compute_loss = Forwards.compute_loss
    assert has_custom_loss(trainer)


def test_a_loss_that_counts_processes_is_refused(enabled: None, tmp_path: Path) -> None:
    def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
        return transformers.Trainer.compute_loss(self, *args, **options) * self.accelerator.num_processes

    scaled = type("Scaled", (transformers.Trainer,), {"compute_loss": compute_loss})
    with pytest.raises(UnsupportedError, match="compute_loss of Scaled reads num_processes"):
        trainer_of(tmp_path, scaled)
    trainer_of(tmp_path, type("Corrected", (scaled,), {"compute_loss": lambda self, *args, **options: None}))


@pytest.mark.slow
@pytest.mark.parametrize("created", ["Accelerator()", "Trainer(model, TrainingArguments(report_to=[]))"])
def test_processes_that_accelerate_does_not_count_are_refused(created: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("on GPUs, accelerate counts the processes without a setting")
    script = tmp_path / "uncounted.py"
    script.write_text(
        "from accelerate import Accelerator\nfrom transformers import Trainer, TrainingArguments\n"
        f"from tests.adapters.models import tiny_model\nmodel = tiny_model('llama', 'eager')\n{created}\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "ringattn", "script", str(script)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "the ring has 2 ranks, but accelerate counts 1 processes" in ended.stderr


def test_loops_that_cannot_be_exact_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="split_batches would split batches among the ranks"):
        RingAccelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True))
    with pytest.raises(InputError, match="1 ranks cannot form rings of 2"):
        RingAccelerator(cp_size=2, cpu=True)
    accelerator = RingAccelerator(cpu=True)
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"Stream is an IterableDataset.*DataLoaderConfiguration\(dispatch_b"):
        accelerator.prepare(DataLoader(Stream(texts()), batch_size=2, collate_fn=padded))
    with pytest.raises(UnsupportedError, match="gather_for_metrics of objects"):
        accelerator.gather_for_metrics(["text"])
    model = accelerator.prepare(tiny_model("llama", "eager"))
    assert accelerator.prepare(model) is model and len(model._forward_hooks) == 1
    with pytest.raises(InputError, match="positional inputs: call the model with keywords"):
        model(torch.ones(1, 4, dtype=torch.int64))


def test_a_trigger_of_one_rank_counts_and_sums_of_unequal_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = RingAccelerator(cpu=True)
    accelerator._ring_size = 2
    # The other rank has zeros.
    monkeypatch.setattr(accelerate.Accelerator, "reduce", lambda self, tensor, *_: tensor)
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    with pytest.raises(DisagreementError, match=r"^reduce: a sum over all processes is not a multiple of 2, so"):
        accelerator.reduce(torch.tensor([2, 3]))
    assert accelerator.reduce({"a": torch.tensor([2, 4]), "b": torch.tensor(3.0)})["a"].tolist() == [1, 2]


def test_a_scheduler_that_counts_no_steps_advances_once_for_each_ring() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler = RingAccelerator(cpu=True).prepare_scheduler(plateau)
    scheduler.rings = 2
    for _ in range(2):
        scheduler.step(3.0)
    assert optimizer.param_groups[0]["lr"] == 1.0 * 0.5**3  # the first of four equal losses is the best
