"""`make demo`: run the same training in several processes and in one, and compare the losses.

The demo prints about twenty lines that compare the losses and the memory and check every schedule. It writes pictures
and a summary. It exits with 1 if the curves differ by more than rounding explains, or if the check fails.
Modules that need torch are imported after the first line is printed, because torch takes seconds to load.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ringattn.errors import InputError, RingError
from ringattn.launch.folders import write_json, writing
from ringattn.launch.options import help_text, option
from ringattn.launch.ranks import place_in_torchrun, run_ranks_in_processes

if TYPE_CHECKING:
    from ringattn.explain import Explanation
    from ringattn.launch.pictures.charts import CurveDistance
    from ringattn.launch.train.config import TrainConfig

BOUNDS = {"fp32": 1e-4, "fp64": 1e-9}
"""Largest relative difference of two losses of the same step.

The runs compute the same function and differ only in the order of their sums. In float64, the bound is far above
rounding and far below the usual mistake: a mean of the ranks' means is wrong by 1e-5 here. In float32, rounding errors
begin at 1e-7, and unstable training amplifies them. With the demo's learning rate, float32 losses differ by a few 1e-6;
with three times that rate, even float64 losses differ by 1e-8. So the bound also checks that the training is stable.
"""
NEEDED: dict[str, tuple[str | None, str]] = {
    "nonfinite": ("stop", "the demo compares the losses of all steps; use stop"),
    "checkpoint_every_steps": (None, "the demo compares whole runs, and one would resume from another's checkpoints; "
                                     "leave it out"),
    "resume": ("never", "the demo compares whole runs; leave it out"),
}  # fmt: skip
"""Keys of the training run that the demo cannot change: the only allowed value, and the reason."""
FP64_STEPS = 8
SHOWN_STEPS = 3
PURPOSE = """\
Trains the same model on the same text with several processes and with one, compares the losses, then checks every
schedule with every mask and layout against a dense reference. Writes pictures and summary.json. Defaults below are
those of `ringattn train`; the demo's own values are in launch/conf/demo.yaml.
Example: python -m ringattn.launch.train.demo steps=20 layout=striped"""


@dataclass
class DemoConfig:
    """The options of the demo itself. All other keys are those of the training run."""

    verbose: bool = option(False, "print each case of the check, not only a line for each schedule")


def main(argv: Sequence[str]) -> int:
    """Run the demo with the overrides `argv`. Return 0, 1 if losses differ or something fails, or 2 for bad options."""
    if any(word in ("-h", "--help") for word in argv):
        from ringattn.launch.train.config import TrainConfig

        print(help_text("demo", PURPOSE, DemoConfig, TrainConfig))
        return 0
    console, started = Console(), time.monotonic()
    console.print("the same model is trained by several processes and by one, in fp32 and in fp64; loading torch")
    try:
        from ringattn.launch.config import load
        from ringattn.launch.train.config import load_train

        demo_words = [word for word in argv if word.startswith("verbose=")]
        options = load(demo_words, DemoConfig)
        config = load_train([word for word in argv if word not in demo_words], "demo")
        if place_in_torchrun() is not None:
            raise InputError("the demo starts its own processes: run it without torchrun")
        for key, (needed, reason) in NEEDED.items():
            if (value := getattr(config, key)) != needed:
                raise InputError(f"{key}={value}: {reason}")
        runs = [_train(config, ranks, console) for ranks in (config.ranks or 4, 1)]
        agreements = [_agreement(*pair) for pair in zip(*runs, strict=True)]
        for line in (*_losses_told(runs[0][0], runs[1][0]), *_memory_told([run[0] for run in runs])):
            console.print(line, highlight=False, soft_wrap=True)
        verdicts = [_say_agreement(agreement, runs[0][0]["ranks"], console) for agreement in agreements]
        verdicts.append(_check(console, options.verbose))
        explanation = explain(config, runs[0][0]["ranks"])
        _write(Path(config.out), runs, agreements, explanation, all(verdicts))
    except RingError as error:
        print(f"ringattn demo: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    console.print(f"pictures and summary in {config.out}/ ({time.monotonic() - started:.0f} s)", soft_wrap=True)
    return 0 if all(verdicts) else 1


def _train(config: TrainConfig, ranks: int, console: Console) -> list[dict[str, Any]]:
    """Train in `ranks` new processes: first the configured run, then a few float64 steps. Return both results."""
    shown = replace(config, ranks=ranks)
    exact = replace(shown, dtype="fp64", steps=min(FP64_STEPS, config.steps))
    spec = {"runs": [asdict(shown), asdict(exact)], "lines": 1}
    answers = run_ranks_in_processes(
        "ringattn.launch.train.loop:train_rank", spec, ranks, config.limit_s, config.threads_per_rank
    )
    return list(answers[0]["runs"])


def _agreement(shared: dict[str, Any], alone: dict[str, Any]) -> CurveDistance:
    from ringattn.launch.pictures.charts import CurveDistance

    dtype = shared["config"]["dtype"]
    pairs = zip(shared["losses"], alone["losses"], strict=True)
    return CurveDistance(dtype, [abs(a - b) / abs(b) for a, b in pairs], BOUNDS.get(dtype, BOUNDS["fp32"]))


def _say_agreement(agreement: CurveDistance, ranks: int, console: Console) -> bool:
    largest = max(agreement.differences)
    good = largest <= agreement.bound
    console.print(
        f"{agreement.dtype}: over {len(agreement.differences)} steps the losses of {ranks} processes and of one "
        f"process differ by at most {largest:.1e} of the loss; bound {agreement.bound:.0e}: "
        f"{'equal' if good else 'DIFFERENT'}",
        soft_wrap=True,
    )
    return good


def _losses_told(shared: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    """Return a table that compares the losses of both runs at the first step, the last, and some steps between."""
    lines = [f"{'step':>6}  {'loss, ' + str(shared['ranks']) + ' processes':>19}  {'loss, 1 process':>15}  difference"]
    steps = len(shared["losses"])
    for step in sorted({round(shown * (steps - 1) / (SHOWN_STEPS - 1)) for shown in range(SHOWN_STEPS)}):
        a, b = shared["losses"][step], alone["losses"][step]
        lines.append(f"{step + 1:>6}  {a:>19.7f}  {b:>15.7f}  {a - b:>+10.1e}")
    return lines


def _memory_told(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the tokens and memory of a process, and of the speed, of each run."""
    lines = [f"{'processes':>9}  {'tokens of each':>14}  {'memory of each':>14}  {'tokens/s':>9}"]
    for run in runs:
        memory, tokens = max(run["memory_growth_bytes"]) / 2**20, max(run["tokens_of_rank"])
        lines.append(f"{run['ranks']:>9}  {tokens:>14,}  {memory:>10.1f} MiB  {run['tokens_per_s']:>9,.0f}")
    return [*lines, f"memory: {runs[0]['memory_method']}; largest value of any process"]


def _check(console: Console, verbose: bool) -> bool:
    """Run `ringattn check` on every pair of mask, layout and schedule. Return whether all results were exact."""
    from ringattn.launch.measure.check import main as check

    return check(["combinations=pairs", f"verbose={verbose}".lower()]) == 0


def explain(config: TrainConfig, ranks: int) -> Explanation:
    """Plan an attention call of the last step of the configured run, on threads, and return its explanation."""
    from ringattn.launch.pictures.show import ExplainConfig, explanation_of
    from ringattn.launch.train.config import head_dim
    from ringattn.launch.train.data import drawn, load
    from ringattn.testing import run_ranks

    text, model = load(config), config.model
    part = run_ranks(ranks, lambda ring: drawn(ring, 0, text, config.steps - 1, config)[0])[0]
    batch, tokens = part.tokens.shape
    documents = part.seq.documents
    call = ExplainConfig(
        tokens, batch, model.heads, model.kv_heads, head_dim(model), config.dtype,
        layout=part.seq.layout.name, schedule=config.schedule, ranks=ranks,
        cu_seqlens=None if documents is None else list(documents),
        segment_lengths=config.segment_lengths, dilation_rates=config.dilation_rates,
    )  # fmt: skip
    return explanation_of(call)


def _write(
    folder: Path,
    runs: Sequence[Sequence[dict[str, Any]]],
    agreements: Sequence[CurveDistance],
    explanation: Explanation,
    good: bool,
) -> None:
    from ringattn.launch.pictures.charts import Bars, draw_losses, draw_memory, draw_schedule

    shared, alone = runs[0][0], runs[1][0]
    titles = {id(run): f"{run['ranks']} process{'es' if run['ranks'] > 1 else ''}" for run in (shared, alone)}
    summary = {
        "equal": good,
        "agreements": [{**agreement._asdict(), "largest": max(agreement.differences)} for agreement in agreements],
        "runs": [result for run in runs for result in run],
        "schedule": str(explanation).splitlines(),
    }
    write_json(folder / "summary.json", summary)
    bars = [Bars(titles[id(run)], run["replicated_bytes"], run["memory_growth_bytes"]) for run in (alone, shared)]
    with writing("out", folder):
        draw_losses(folder / "loss.png", {titles[id(run)]: run["losses"] for run in (alone, shared)}, agreements)
        draw_memory(folder / "memory.png", bars, shared["memory_method"])
        draw_schedule(explanation, folder / "schedule.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
