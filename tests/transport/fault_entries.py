"""The program of the ranks in `test_torchrun.py`: a job that fails, and that torchrun restarts.

torchrun starts `python -m tests.transport.fault_entries JOB`. JOB is a path; each rank writes its answer to a file in
the same folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import ringattn
from ringattn.bench.fault_ranks import open_gate
from ringattn.transport.gloo import GlooTransport

POISON = {"cause": "rank 1 failed first: poison", "closed/0": "1", "closed/1": "1", "heartbeat/1": "0 poison"}


def live(rank: int, life: int, folder: Path) -> dict[str, Any]:
    """Open a ring in the first run of the job (`life` 0) or after its restart (`life` 1).

    In the first run, write poison (a false cause, closes and a heartbeat) to the store keys of the ring, and let the
    job fail. After the restart, return what the store contains and what the new ring reads from it.
    """
    raw = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    stems = [f"ringattn/{n}/0/" for n in (0, 1)]
    with ringattn.Ring(transport="gloo", timeout_s=60.0) as ring:
        open_gate(ring)
        transport = ring.transport
        assert isinstance(transport, GlooTransport)
        control = transport.opening.control
        if life == 0:
            for key, value in POISON.items():
                raw.set(stems[0] + key, value)
            # The ring reads these keys, so it regards itself as failed from here on.
            assert control.cause() == POISON["cause"]
            (folder / f"poisoned-{rank}").touch()
            while len(list(folder.glob("poisoned-*"))) < 2:
                time.sleep(0.01)
            if rank == 1:
                os._exit(1)
            ring.barrier()
        observed = {
            "life": life,
            "former": [raw.get(stems[0] + key).decode() for key in POISON],
            "own": raw.check([f"{stems[1]}arrived/{rank}"]),
            "cause": control.cause(),
            "closed": [control.holds(f"closed/{peer}") for peer in range(2)],
        }
        open_gate(ring)
        ring.barrier()
        return observed


def main(job: Path) -> None:
    """Run one rank, and write what `live` returns to a file next to `job`."""
    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (job.parent / f"answer-{rank}.json").write_text(json.dumps(live(rank, life, job.parent)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
