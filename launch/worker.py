"""The process of one rank, started by `ringattn.launch.ranks`: `python -m ringattn.launch.worker JOB.json`.

It calls the job's entry function, and writes the answer or the error to a file in the job's folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ringattn.errors import InputError, RingError
from ringattn.launch.processes import LAUNCHER, end_with_parent
from ringattn.observe.files import full_disk, write_file


def main(job: Path) -> int:
    """Run the job described by the file `job` as the rank that the environment names. Returns the exit code."""
    end_with_parent(int(os.environ[LAUNCHER]))
    rank, folder = int(os.environ["RANK"]), job.parent
    described: dict[str, Any] = json.loads(job.read_text(encoding="utf-8"))
    module, _, function = described["entry"].partition(":")
    try:
        answer = getattr(importlib.import_module(module), function)(described["spec"])
    except BaseException as error:  # torch's checkpoint errors do not derive from Exception
        shortage = full_disk(error)
        # For an error of ringattn or a full disk, the message suffices. Other errors also need their traceback.
        is_explained = isinstance(error, RingError) or shortage is not None
        failure = {
            "rank": rank,
            "time_s": time.time(),
            "kind": type(error).__name__,
            "message": shortage or str(error),
            "refused": isinstance(error, InputError),
            "traceback": "" if is_explained else traceback.format_exc(),
        }
        write_file(folder / f"failure-{rank}.json", json.dumps(failure))
        return 1
    write_file(folder / f"answer-{rank}.json", json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
