"""A point in a job of submitit, by Slurm or on this machine: which of the job's nodes this is, and where they meet."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from ringattn.launch.measure.run_config import RunConfig

FIRST_PORT, PORTS = 20_000, 12_000
"""Below the ports that Linux hands out by itself (net.ipv4.ip_local_port_range starts at 32768)."""


def in_job() -> bool:
    """Whether submitit started this process."""
    if find_spec("submitit") is None:
        return False
    from submitit import JobEnvironment

    try:
        return bool(JobEnvironment().activated())
    except RuntimeError:
        return False


def meeting(config: RunConfig) -> RunConfig:
    """`config` on this node of the job; submitit starts one task a node."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    host = "127.0.0.1" if job.name() == "local" else job.hostnames[0]
    port = FIRST_PORT + int("".join(filter(str.isdecimal, job.job_id))) % PORTS
    return replace(config, node_rank=job.global_rank, rdzv_endpoint=f"{host}:{port}")
