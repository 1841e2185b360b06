"""The command line `ringattn`: the name of a command, then its options as `key=value`."""

from __future__ import annotations

import difflib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

import ringattn
from ringattn.errors import RingError
from ringattn.launch.options import advice, wrapped
from ringattn.observe.files import full_disk

COMMANDS = {  # name: module of ringattn.launch, summary
    "check": ("measure.check", "compare every schedule, layout and mask with a dense float64 reference"),
    "explain": ("pictures.show", "print which rank sends what to which rank, when, and at what cost"),
    "plan": ("capacity.plan", "estimate training memory per rank and suggest savings"),
    "run": ("measure.run", "measure one attention call on several ranks, after an exactness check"),
    "sweep": ("measure.sweep", "measure many calls: ranks, lengths, schedules, ...; resumes where it stopped"),
    "demo": ("train.demo", "train with four processes and with one, and compare both runs"),
    "train": ("train.train", "train a byte-level language model with sequences split over ranks"),
    "script": ("script", "run a training script of transformers, TRL or accelerate over rings, unchanged"),
    "verify-trainer": ("verify.command", "run your training script on one process and on several, and compare them"),
    "simulate": ("pictures.simulate", "predict the time of one attention call on 1 to 16,384 ranks, and idle ranks"),
    "calibrate": ("measure.calibrate", "measure this machine, so that times can be predicted"),
    "report": ("report.report", "show the results of a sweep as tables, Markdown and a page with charts"),
    "compare": ("report.compare", "compare two sweeps point by point; fails if the second is worse"),
    "doctor": ("doctor.command", "check this machine and its packages, and suggest fixes"),
    "timeline": ("pictures.timeline", "record a pass on every rank as a trace and a picture"),
    "flight": ("doctor.flight", "merge the records of a failed run, and name the rank that diverged"),
}

STARTS = {
    "check": "comparing with a dense reference",
    "run": "measuring one attention call",
    "sweep": "measuring a sweep",
    "train": "training",
    "timeline": "recording one attention call",
    "calibrate": "measuring this machine",
    "script": "loading transformers",
    "verify-trainer": "comparing one process with several",
}
"""Commands that take long and would otherwise be silent meanwhile."""
RESUME = {
    "script": "the script's own checkpoints are as it left them",
    "sweep": "finished points are saved; run the same command again to continue",
    "train": "run the same command again to continue from the last checkpoint in out (see checkpoint_every_steps)",
}
"""How to resume after Ctrl-C; other commands save nothing."""

UNREAD = 128 + signal.SIGPIPE
"""The exit code of a program that was ended by a pipe without a reader, as in shells."""
SHOWS = ("-h", "--help", "--dry-run", "--cfg", "-c", "--info", "-i", "--hydra-help")
"""With one of these arguments a command only prints, and starts nothing."""
REFUSED_S = 10.0
"""How long a refusing rank waits for torchrun to end it, because the first rank refuses too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 success, 1 a check failed, 2 bad options or a failed run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escape characters that the terminal lacks
    if not arguments or arguments[0] in ("--help", "-h") or arguments == ["help"]:
        print(_help())
        return 0
    if arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if arguments[0] in ("--version", "version"):
        print(f"ringattn {ringattn.__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0].lower(), COMMANDS, n=1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        if arguments[0].startswith("-") or "=" in arguments[0]:
            suggestion = f"; a command comes first, as ringattn run {arguments[0]}"
        print(f"ringattn: {arguments[0]!r} is not a command{suggestion}\n\n{_help()}", file=sys.stderr)
        return 2
    with _interruptible(arguments[0]):
        try:
            _print_start(arguments)
            run: Callable[[Sequence[str]], int] = import_module(f"ringattn.launch.{COMMANDS[arguments[0]][0]}").main
            code = run(arguments[1:])
            sys.stdout.flush()
            return _end_under_torchrun(arguments[0], code)
        except RingError as error:
            print(f"ringattn {arguments[0]}: {error}", file=sys.stderr)
            return _end_under_torchrun(arguments[0], 2)
        except ModuleNotFoundError as error:
            if (help_text := advice(error)) is None:
                raise
            print(f"ringattn {arguments[0]}: {help_text}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            if not _has_no_reader():
                raise
            return UNREAD
        except OSError as error:
            if (shortage := full_disk(error)) is None:
                raise
            try:
                sys.stdout.flush()
            except OSError:
                _drop_output()
            print(f"ringattn {arguments[0]}: {shortage}", file=sys.stderr)
            return 2


def _has_no_reader() -> bool:
    """Return whether the reader of standard output has closed it, as `head` does. If so, drop the remaining output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    _drop_output()
    return True


def _drop_output() -> None:
    """Drop the remaining standard output; otherwise Python would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_start(arguments: Sequence[str]) -> None:
    """Print to standard error which command starts, before torch loads for seconds, and the notes on its options."""
    if os.environ.get("RANK", "0") != "0" or any(word.partition("=")[0] in SHOWS for word in arguments):
        return
    from ringattn.launch.options import notes_on

    lines = [STARTS[arguments[0]]] if arguments[0] in STARTS else []
    # The arguments of a script are not options of this command.
    words = [] if arguments[0] in ("script", "verify-trainer") else arguments[1:]
    for line in (*lines, *notes_on(words)):
        print(f"ringattn {arguments[0]}: {line}", file=sys.stderr, flush=True)


def _end_under_torchrun(command: str, code: int) -> int:
    """Return the exit code; under torchrun, print the refusal of all ranks as one block.

    The first rank of each machine ends, and the others wait for the signal that torchrun then sends them.
    """
    if code != 2 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return code
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            error_record = {
                "message": f"ringattn {command} refused its arguments, see above",
                "timestamp": int(time.time()),
            }
            with suppress(OSError):  # it only repeats what was printed
                Path(path).write_text(json.dumps(error_record), encoding="utf-8")
        return code
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    time.sleep(REFUSED_S)
    return code  # only this rank refused


@contextmanager
def _interruptible(command: str) -> Iterator[None]:
    """Answer Ctrl-C immediately, even while modules load; clean-up of the interrupted work follows."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        again = RESUME.get(command, "nothing is saved; run the same command again")
        print(f"\nringattn {command}: interrupted; {again}", file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _help() -> str:
    lines = [f"  {name:<15}{about}" for name, (_, about) in COMMANDS.items()]
    usage = ["usage: ringattn <command> [key=value ...]", "", *lines, "", "`ringattn <command> --help` lists its keys."]
    return "\n".join(wrapped("\n".join(usage)))
