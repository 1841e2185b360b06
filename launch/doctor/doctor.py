"""`ringattn doctor`: looks at this machine, its packages and its ranks, and says what to do about what it finds.

Alone it starts two processes that meet, exchange and attend; under torchrun all of its ranks do.
Guarantees: it ends, with a finding for whatever cannot be found out; returns 1 only for a finding of level error.
Not covered: what a fact means (`doctor_probes`), how one is found (`doctor_facts`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import ringattn
from ringattn.errors import RingError
from ringattn.launch.doctor import facts, network, probes
from ringattn.launch.doctor.network import network_facts
from ringattn.launch.doctor.probes import ERROR, LEVELS, NOTE, OK, WARNING, Finding
from ringattn.launch.doctor.ranks import examine
from ringattn.launch.options import load_plain, option
from ringattn.launch.ranks import place_in_torchrun, run_ranks_in_processes
from ringattn.transport.nccl.library import mismatch

if TYPE_CHECKING:
    from rich.console import Console

LOOPBACK_RANKS = 2
STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}
WIDTH = 160
"""Columns of the table where the output has no width of its own."""

Say = Callable[[str], None]


@dataclass
class DoctorConfig:
    """How long it takes at most; --json is a word of its own."""

    timeout_s: float = option(30.0, "deadline of every wait for another rank, in seconds", above=0.0)


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options."""
    config = load_plain([word for word in argv if word != "--json"], DoctorConfig)
    place = place_in_torchrun()
    silent = place is not None and place.rank != 0
    findings: list[Finding] = []
    system: dict[str, Any] = {}
    # Looking waits for other programs most of the time; the ranks are started here, where an interrupt ends them.
    with _progress(silent) as say, ThreadPoolExecutor(1) as aside:
        looking = None if silent else aside.submit(_looked, say)
        answers, met = (_under_torchrun if place else _loopback)(say, config.timeout_s)
        if looking is not None:
            findings, system = looking.result()
    findings += met
    if not silent:
        _show(findings, system, answers, "--json" in argv)
    return int(any(finding.level == ERROR for finding in findings))


@contextmanager
def _progress(silent: bool) -> Iterator[Say]:
    """Lines on standard error, so that standard output is the document alone; one that changes on a terminal."""
    console = _console(stderr=True)
    if silent:
        yield lambda line: None
    elif console is not None and console.is_terminal:
        with console.status("doctor") as status:
            yield lambda line: status.update(f"doctor: {line}")
    else:
        yield lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True)


def _looked(say: Say) -> tuple[list[Finding], dict[str, Any]]:
    """All findings that need no other process, and torch's own account of the system."""
    build, system = torch.version.cuda, {}
    found: list[Finding] = []

    def account() -> list[Finding]:
        system.update(facts.system())
        return []

    def devices() -> list[Finding]:
        driver, gpus, links = facts.nvml()
        driver = driver or system.get("nvidia_driver_version")
        on_gpu = probes.cuda(build, driver, torch.cuda.is_available())
        forms = [Finding("kernels' forms", OK, told) for told in facts.kernel_forms(gpus)]
        return [on_gpu, *probes.devices(gpus, torch.cuda.is_available()), *forms, *probes.topology(links)]

    looks: dict[str, Callable[[], Sequence[Finding]]] = {
        "packages": lambda: probes.versions(facts.package_versions()),
        "system": account,
        "devices": devices,
        "processors": lambda: probes.processors(*facts.cores(), os.environ.get("OMP_NUM_THREADS")),
        "NCCL": lambda: probes.nccl(facts.nccl_library(), facts.torch_nccl()),
        "NCCL wheels": lambda: probes.wheels(facts.nccl_wheels(), build),
        "CUDA wheels": lambda: probes.fitting(mismatch(build)),
        "network": lambda: network.network(network_facts(), os.environ, facts.nccl_library().version),
        "environment": lambda: probes.variables(os.environ),
        "kernels": lambda: [probes.kernels_name(facts.installed("kernels"), facts.kernels_origin())],
    }
    for topic, look in looks.items():
        say(topic)
        try:
            found += look()
        except Exception as error:  # on a machine that nobody has thought of, the other findings still help
            text = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(Finding(topic, WARNING, text, "report this with the output of `ringattn doctor --json`"))
    return found, system


def _loopback(say: Say, timeout_s: float) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Two processes of this machine: over NCCL where it has two GPUs, else on CPU."""
    transport = "nccl" if torch.cuda.device_count() >= LOOPBACK_RANKS else "gloo"
    say(f"two processes meet over {transport}, exchange, and attend")
    spec = {"transport": transport, "timeout_s": timeout_s}
    try:
        answers = run_ranks_in_processes(
            "ringattn.launch.doctor.ranks:examined", spec, LOOPBACK_RANKS, 2 * timeout_s, limit_key="timeout_s"
        )
    except RingError as error:
        return [], [_apart(error)]
    return answers, judged(answers)


def _under_torchrun(say: Say, timeout_s: float) -> tuple[list[dict[str, Any]], list[Finding]]:
    """All ranks that torchrun started; every one of them has all answers."""
    say("all ranks meet, exchange, and attend")
    try:
        with ringattn.Ring(timeout_s=timeout_s) as ring:
            answers = [json.loads(told) for told in ring.all_gather_text(json.dumps(examine(ring)))]
    except Exception as error:  # whatever a device or its driver raises
        return [], [_apart(error)]
    return answers, judged(answers)


def judged(answers: Sequence[dict[str, Any]]) -> list[Finding]:
    """The findings about ranks that have met."""
    return [*probes.meeting(answers), *probes.exchange(answers), *probes.speeds(answers), *probes.other_nodes(answers)]


def _apart(error: Exception) -> Finding:
    advice = "are MASTER_ADDR and its port reachable from every machine, and does a firewall stand between them?"
    return Finding("ranks", ERROR, str(error), advice)


def _show(findings: Sequence[Finding], system: dict[str, Any], answers: Sequence[Any], as_json: bool) -> None:
    counts = Counter(finding.level for finding in findings)
    if as_json:
        document = {
            "passed": not counts[ERROR],
            "counts": {level: counts[level] for level in LEVELS},
            "findings": [finding._asdict() for finding in findings],
            "ranks": answers,
            "system": system,
        }
        print(json.dumps(document, indent=1, default=str))
        return
    console = _console()
    if console is None:
        _print_lines(findings)
    else:
        _print_table(findings, console if console.is_terminal else _console(width=WIDTH))
    print(", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level]))


def _print_table(findings: Sequence[Finding], console: Any) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table("about", "", box=box.SIMPLE_HEAD)
    for name in ("found", "why it matters", "what to do"):
        table.add_column(name, overflow="fold")
    for one in findings:
        words = escape(one.text), escape(one.why), escape(one.advice)
        table.add_row(one.topic, f"[{STYLES[one.level]}]{one.level}[/]", *words)
    console.print(table)


def _print_lines(findings: Sequence[Finding]) -> None:
    """The same where rich is not installed."""
    for one in findings:
        print(f"{one.topic:<14} {one.level:<8} {one.text}")
        for words in filter(None, (one.why, one.advice)):
            print(f"{'':<24}{words}")


def _console(**options: Any) -> Console | None:
    """A console of rich; None where that is not installed, for the doctor is run where little is."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(**options)
