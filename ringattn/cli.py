"""The command `ringattn`: a word, then options as `key=value`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper

import ringattn
from ringattn.errors import RingError
from ringattn.launch.extras import advice

COMMANDS = {  # word: module of ringattn.launch, what it does
    "check": ("measure.check", "compare every schedule, layout and mask with a dense float64 reference"),
    "explain": ("pictures.show", "print who sends what to whom, when, and what it costs"),
    "plan": ("capacity.plan", "say how many bytes a rank needs to train a model, what fits, and what to do"),
    "run": ("measure.run", "measure one attention call on several ranks, behind its exactness gate"),
    "sweep": ("measure.sweep", "measure many: world sizes, lengths, schedules, ...; resumes where it stopped"),
    "demo": ("train.demo", "train with four processes and with one, compare, check, and draw"),
    "train": ("train.train", "train a byte-level language model with its sequences split over ranks"),
    "calibrate": ("measure.calibrate", "measure this machine, so that times can be predicted for it"),
    "report": ("report.report", "show what a sweep found: tables here, Markdown, and a page with charts"),
    "compare": ("report.compare", "compare two sweeps point by point; fails if the second is worse"),
    "doctor": ("doctor.doctor", "look at this machine and its packages, and say what to do about them"),
    "timeline": ("pictures.timeline", "record what every rank does in a pass, and when: a trace and a picture"),
    "flight": ("doctor.flight", "merge the records of a failed run, and say which rank parted from the rest"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 good, 1 a check failed, 2 bad options or a failed run."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode shows escapes
    if not words or words[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    if words[0] in ("--version", "version"):
        print(f"ringattn {ringattn.__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"ringattn: {words[0]!r} is not a command\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        run: Callable[[Sequence[str]], int] = import_module(f"ringattn.launch.{COMMANDS[words[0]][0]}").main
        return run(words[1:])
    except RingError as error:
        print(f"ringattn {words[0]}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (told := advice(error)) is None:
            raise
        print(f"ringattn {words[0]}: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _help() -> str:
    lines = [f"  {name:<11}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["usage: ringattn <command> [key=value ...]", "", *lines, "", "`ringattn <command> --help` lists its keys."]
    )
