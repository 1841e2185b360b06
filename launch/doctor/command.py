"""The words of `ringattn doctor`, without what looks at the machine: that loads torch."""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.launch.options import wrapped

HELP = """usage: ringattn doctor [transport=auto] [json=FILE] [timeout_s=30]

Look at this machine: versions, CUDA, NCCL, devices and how they are connected, network ports and what NCCL needs of
them, environment variables; then let two processes (under torchrun: all ranks, of all nodes) meet, exchange inside
nodes and between them, and attend beside a float64 reference. Findings say why they matter and what to do.

  transport=T  what carries the messages: auto (what Ring takes here), shm, gloo, nccl or peer
  json=FILE    file to write the figures into; - for the standard output, with nothing else
  timeout_s=N  deadline of every wait for another rank, in seconds (30)

Returns 0, or 1 if a finding is an error."""


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options."""
    if {"--help", "-h"} & set(argv):
        print("\n".join(wrapped(HELP)))
        return 0
    from ringattn.launch.doctor.doctor import main as look

    return look(argv)
