"""`ringattn script`: run an unchanged script with its Trainers, Accelerators and DeepSpeed engines over rings.

Guarantees: what they cannot compute exactly over a ring is refused when they are created. A script that creates none
ends with an error, because nothing would have been trained over a ring.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from ringattn.core.layout import LAYOUTS
from ringattn.errors import InputError, RingError
from ringattn.launch.options import WORD, help_text, load_plain, option

T = TypeVar("T")
SCRIPT_USAGE = "[key=value ...]", "[key=value ...] SCRIPT [...]"
"""What to replace in the usage line of a command that takes a script after its options."""

PURPOSE = """\
Runs a Python script, or a module after -m, in this process. Every Trainer of transformers, SFTTrainer of TRL,
Accelerator of accelerate and engine of deepspeed.initialize that it creates shards its batches over rings of ranks. The
words after the script are the script's arguments. Start one process for each GPU, with torchrun or accelerate launch.
Example: torchrun --nproc-per-node 8 -m ringattn script train.py --attn_implementation ringattn
Example: torchrun --nproc-per-node 8 -m ringattn script ranks=4 -m trl.scripts.sft --model_name_or_path DIR"""


@dataclass
class ScriptConfig:
    """How the ranks of torchrun form rings."""

    ranks: int | None = option(None, "ranks of a ring, consecutive processes; null: all", least=1)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))


class Program(NamedTuple):
    """A Python file or a module, and its arguments: what `python FILE ...` or `python -m MODULE ...` would run."""

    words: list[str]
    """The file or the module, then its arguments."""
    is_module: bool

    def run(self) -> None:
        """Run the program as `__main__` in this process, with its arguments in `sys.argv`."""
        sys.argv = list(self.words)
        sys.path.insert(0, os.getcwd() if self.is_module else str(Path(self.words[0]).resolve().parent))
        if self.is_module:
            runpy.run_module(self.words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.words[0], run_name="__main__")


def parse(argv: Sequence[str], schema: type[T]) -> tuple[T, Program]:
    """Return the options before a script, and the script with its arguments. Raises `InputError` for wrong words."""
    count = next((index for index, word in enumerate(argv) if not WORD.fullmatch(word)), len(argv))
    config, script = load_plain(argv[:count], schema), list(argv[count:])
    is_module = script[:1] == ["-m"]
    if is_module:
        del script[0]
    if not script or script[0].startswith("-"):
        raise InputError("no script: write the path of a Python file, or -m and a module, after the options")
    if not is_module and not Path(script[0]).is_file():
        raise InputError(f"{script[0]}: no such file; write the path of a Python file, or -m before a module")
    return config, Program(script, is_module)


def main(argv: Sequence[str]) -> int:
    """Run the script `argv`. Returns 0, or 1 if the script created nothing that trains over a ring."""
    if argv and argv[0] in ("-h", "--help"):
        print(help_text("script", PURPOSE, ScriptConfig).replace(*SCRIPT_USAGE))
        return 0
    config, program = parse(argv, ScriptConfig)

    from ringattn.adapters import auto

    auto.enable(config.ranks, config.layout)
    try:
        program.run()
    except RingError as error:
        _print_line(error)
        raise
    if auto.created:
        return 0
    if os.environ.get("RANK", "0") == "0":
        print(
            f"ringattn script: {program.words[0]} created no Trainer, Accelerator or DeepSpeed engine, so nothing "
            "was trained over a ring; in a loop without them, call shard_batch and ring.activate, see "
            "docs/embedding-transformers.md",
            file=sys.stderr,
        )
    return 1


def _print_line(error: RingError) -> None:
    """Print, on the first rank, the line of the script where an error was raised."""
    if os.environ.get("RANK", "0") != "0":
        return
    libraries = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    for frame in lines[-1:]:
        print(f"{frame.filename}, line {frame.lineno}: {frame.line}", file=sys.stderr)
