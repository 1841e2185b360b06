"""`ringattn verify-trainer`: a user's training script on one process and on several, and which parameters differ first.

The script runs three times: on one process, on one process with other rounding, and on all ranks.
"""

from __future__ import annotations

import io
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringattn.launch.folders import json_output
from ringattn.launch.options import help_text, json_option, option
from ringattn.launch.ranks import run_ranks_in_processes, threads_for
from ringattn.launch.script import SCRIPT_USAGE, Program, parse

if TYPE_CHECKING:
    from ringattn.launch.verify.comparison import Verdict

SHOWN = 8
"""Parameters in the table."""
PURPOSE = """\
Runs a training script, not changed, on one process and on several, for a few optimizer steps, and compares the gradient
and weight of every parameter. Says which differ first, by how much, whether that is more than rounding, and what it
looks like. It works with any implementation of context, data or tensor parallelism. The words after the script are its
arguments; {ranks} in them is the number of processes. Exit code 1 if the runs differ.
Example: ringattn verify-trainer ranks=2 steps=3 train.py --cp_size {ranks}
Example: ringattn verify-trainer ranks=4 ring=true dtype=float64 train.py"""


@dataclass
class VerifyConfig:
    """How a script is run and compared."""

    ranks: int = option(2, "processes that are compared with one", least=2)
    steps: int = option(3, "optimizer steps, after which the script is stopped", least=1)
    seed: int = option(0, "seed of torch, random and numpy when the script starts", least=0, most=2**32 - 1)
    dtype: str = option("script", "dtype to compute in: that of the script, or float64", choices=("script", "float64"))
    ring: bool = option(False, "run the ranks as `ringattn script` does: Trainer or Accelerator over a ring")
    one: str = option("", "arguments that only the runs on one process get, after the others")
    limit_s: float = option(600.0, "seconds that each run may take", above=0.0)
    verbose: bool = option(False, "print what the first rank of the script prints")
    json: str = json_option()


def main(argv: Sequence[str]) -> int:
    """Run and compare. Returns 0 if the runs are equal up to rounding, else 1."""
    if argv and argv[0] in ("-h", "--help"):
        print(help_text("verify-trainer", PURPOSE, VerifyConfig).replace(*SCRIPT_USAGE))
        return 0
    config, program = parse(argv, VerifyConfig)
    with json_output(config.json) as write:
        verdict = verify(config, program)
        show(verdict, config)
        write({**asdict(verdict), "ranks": config.ranks, "dtype": config.dtype})
    return 0 if verdict.equal else 1


def verify(config: VerifyConfig, program: Program) -> Verdict:
    """Run the program three times and return the comparison. Raises what the script raises, as `RanksError`."""
    import torch

    from ringattn.launch.verify.comparison import compare

    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        records = {}
        for name, ranks in (("one", 1), ("otherwise", 1), ("ranks", config.ranks)):
            print(f"running {program.words[0]} on {ranks} process{'es' if ranks > 1 else ''}", file=sys.stderr)
            words = [word.replace("{ranks}", str(ranks)) for word in program.words]
            spec = {
                "name": name,
                "folder": folder,
                "words": [*words, *(shlex.split(config.one) if ranks == 1 else ())],
                "is_module": program.is_module,
                "steps": config.steps,
                "seed": config.seed,
                "double": config.dtype == "float64",
                "rounds_otherwise": name == "otherwise",
                "ring": config.ring and name == "ranks",
            }
            with nullcontext() if config.verbose else redirect_stderr(io.StringIO()):
                run_ranks_in_processes(
                    "ringattn.launch.verify.observer:run", spec, ranks, config.limit_s, threads_for(config.ranks)
                )
            files = [Path(folder) / f"{name}-{rank}.pt" for rank in range(ranks)]
            records[name] = [torch.load(file) for file in files]
        return compare(records["one"][0], records["otherwise"][0], records["ranks"], config.dtype == "float64")


def show(verdict: Verdict, config: VerifyConfig) -> None:
    """Print the table of the first step that differs, or of the last step, and the diagnosis."""
    from rich.console import Console

    from ringattn.launch.report.tables import Table
    from ringattn.launch.verify.comparison import TIMES

    what = {"before": "weight", "steps": "gradient"}.get(verdict.what, verdict.what)
    rows = []
    for difference in verdict.differences[:SHOWN]:
        ratio = "–" if difference.ratio is None else f"{difference.ratio:.2f}"
        cells = f"{difference.error:.1e}", f"{difference.own_error:.1e}", ratio, f"{difference.times_rounding:.3g}"
        rows.append((difference.name, *cells, "yes" if difference.differs else "no"))
    columns = (what, "error", "of its own", "ratio", "/ rounding", f"over {TIMES:g}")
    title = f"step {verdict.step}: {config.ranks} processes against one"
    losses = ["unknown" if loss is None else f"{loss:.7g}" for loss in verdict.losses]
    different = sum(difference.differs for difference in verdict.differences)
    console = Console() if sys.stdout.isatty() else Console(width=100)
    console.print(Table(title, columns, rows).for_terminal())
    for line in (
        f"{different} of {len(verdict.differences)} parameters differ by more than rounding",
        f"loss: {losses[0]} on one process, {losses[1]} over the ranks (their mean)",
        f"equal up to rounding in {verdict.step} steps" if verdict.equal else f"DIFFERENT: {verdict.diagnosis}",
    ):
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
