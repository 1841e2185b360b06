"""The help of `ringattn doctor`, without the checks, which load torch."""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.launch.options import wrapped

HELP = """usage: ringattn doctor [transport=auto] [json=FILE] [timeout_s=30]

Check this machine: versions, CUDA, NCCL, devices and their connections, network ports, environment variables. Then two
processes (under torchrun all ranks of all nodes) connect, exchange messages within and between nodes, and compare one
attention call with a float64 reference. Each finding says why it matters and what to do.

  transport=T  transport of the messages: auto (that of Ring), shm, gloo, nccl or peer
  json=FILE    file to write the figures into; - for the standard output, with nothing else
  timeout_s=N  deadline of every wait for another rank, in seconds (30)

Returns 0, or 1 if a finding is an error."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options."""
    if {"--help", "-h"} & set(argv):
        print("\n".join(wrapped(HELP)))
        return 0
    from ringattn.launch.doctor.doctor import main as run_checks

    return run_checks(argv)
