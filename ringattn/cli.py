"""The command `ringattn`: a word, then options as `key=value`."""

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

COMMANDS = {  # word: module of ringattn.launch, what it does
    "check": ("measure.check", "compare every schedule, layout and mask with a dense float64 reference"),
    "explain": ("pictures.show", "print who sends what to whom, when, and what it costs"),
    "plan": ("capacity.plan", "say how many bytes a rank needs to train a model, what fits, and what to do"),
    "run": ("measure.run", "measure one attention call on several ranks, behind its exactness gate"),
    "sweep": ("measure.sweep", "measure many: world sizes, lengths, schedules, ...; resumes where it stopped"),
    "demo": ("train.demo", "train with four processes and with one, compare, check, and draw"),
    "train": ("train.train", "train a byte-level language model with its sequences split over ranks"),
    "simulate": ("pictures.simulate", "say how long one attention call takes on 1 to 16,384 ranks, and who waits"),
    "calibrate": ("measure.calibrate", "measure this machine, so that times can be predicted for it"),
    "report": ("report.report", "show what a sweep found: tables here, Markdown, and a page with charts"),
    "compare": ("report.compare", "compare two sweeps point by point; fails if the second is worse"),
    "doctor": ("doctor.command", "look at this machine and its packages, and say what to do about them"),
    "timeline": ("pictures.timeline", "record what every rank does in a pass, and when: a trace and a picture"),
    "flight": ("doctor.flight", "merge the records of a failed run, and say which rank parted from the rest"),
}

STARTS = {
    "check": "comparing with a dense reference",
    "run": "measuring one attention call",
    "sweep": "measuring a sweep",
    "train": "training",
    "timeline": "recording one attention call",
    "calibrate": "measuring this machine",
}
"""What takes a while, and would be silent meanwhile."""
AGAIN = {
    "sweep": "what was measured is kept, and the same command goes on",
    "train": "the same command goes on from the last checkpoint in the folder out, if checkpoint_every_steps made one",
}
"""How to go on after Ctrl-C; other commands keep nothing."""

UNREAD = 128 + signal.SIGPIPE
"""The exit code of a program that a pipe without a reader ended, as shells have it."""
SHOWS = ("-h", "--help", "--dry-run", "--cfg", "-c", "--info", "-i", "--hydra-help")
"""With one of these a command prints and starts nothing."""
REFUSED_S = 10.0
"""How long a rank that refuses waits for torchrun to end it, because the first rank refuses too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 good, 1 a check failed, 2 bad options or a failed run."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode shows escapes
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        print(_help())
        return 0
    if words[0] == "help":
        words = [words[1], "--help"]
    if words[0] in ("--version", "version"):
        print(f"ringattn {ringattn.__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0].lower(), COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        if words[0].startswith("-") or "=" in words[0]:
            meant = f"; a command comes first, as ringattn run {words[0]}"
        print(f"ringattn: {words[0]!r} is not a command{meant}\n\n{_help()}", file=sys.stderr)
        return 2
    with _interruptible(words[0]):
        try:
            _say_what_starts(words)
            run: Callable[[Sequence[str]], int] = import_module(f"ringattn.launch.{COMMANDS[words[0]][0]}").main
            code = run(words[1:])
            sys.stdout.flush()
            return _one_block(words[0], code)
        except RingError as error:
            print(f"ringattn {words[0]}: {error}", file=sys.stderr)
            return _one_block(words[0], 2)
        except ModuleNotFoundError as error:
            if (told := advice(error)) is None:
                raise
            print(f"ringattn {words[0]}: {told}", file=sys.stderr)
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
            print(f"ringattn {words[0]}: {shortage}", file=sys.stderr)
            return 2


def _has_no_reader() -> bool:
    """Whether the reader of the standard output has closed it, as `head` does; then drop what is left to write."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    _drop_output()
    return True


def _drop_output() -> None:
    """Drop what is left to write to the standard output: Python would fail on it once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_what_starts(words: Sequence[str]) -> None:
    """A line before torch is loaded, which takes seconds; what lengths with a letter come to. On standard error."""
    if os.environ.get("RANK", "0") != "0" or any(word.partition("=")[0] in SHOWS for word in words):
        return
    from ringattn.launch.options import notes_on

    told = [STARTS[words[0]]] if words[0] in STARTS else []
    for line in (*told, *notes_on(words[1:])):
        print(f"ringattn {words[0]}: {line}", file=sys.stderr, flush=True)


def _one_block(command: str, code: int) -> int:
    """The exit code. Under torchrun, words that all ranks refuse end in one block of its own, which says so: the first
    rank of a machine ends, and the others wait for the signal that torchrun sends them then."""
    if code != 2 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return code
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            told = {"message": f"ringattn {command} refused its words, see above", "timestamp": int(time.time())}
            with suppress(OSError):  # it only repeats what was printed
                Path(path).write_text(json.dumps(told), encoding="utf-8")
        return code
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    time.sleep(REFUSED_S)
    return code  # it was this rank alone that refused


@contextmanager
def _interruptible(command: str) -> Iterator[None]:
    """Ctrl-C is answered at once, also while modules are loaded; what it interrupts is cleaned up after that."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        again = AGAIN.get(command, "nothing is kept; give the same command again")
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
    lines = [f"  {name:<11}{about}" for name, (_, about) in COMMANDS.items()]
    usage = ["usage: ringattn <command> [key=value ...]", "", *lines, "", "`ringattn <command> --help` lists its keys."]
    return "\n".join(wrapped("\n".join(usage)))
