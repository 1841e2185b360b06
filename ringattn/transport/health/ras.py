"""What NCCL's RAS knows of processes that are dead or do not answer (NCCL 2.24 and later, on by default).

RAS is a thread in each process of an NCCL job. It serves a text protocol at a socket of the node:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
Guarantee: it takes at most `WITHIN_S`, and a socket that does not answer is not an error. Unproven on a GPU.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping

WITHIN_S = 0.5
ADDRESS = "localhost:28028"
SINCE = 22400
LARGEST_BYTES = 1 << 20
ERRORS = re.compile(r"^\s*Errors\s*\n\s*=+\s*\n(.*?)(?=^\s*Warnings\s*\n\s*=+|\Z)", re.DOTALL | re.MULTILINE)


def ras_address(environment: Mapping[str, str], nccl_version: int) -> str | None:
    """Where RAS of this process's NCCL answers; None if NCCL has none or the user has turned it off."""
    if nccl_version < SINCE or environment.get("NCCL_RAS_ENABLE") == "0":
        return None
    return environment.get("NCCL_RAS_ADDR", ADDRESS)


def ras_report(address: str) -> str:
    """Return what RAS lists under `Errors` as one line, or an empty string."""
    host, _, port = address.rpartition(":")
    until, status = time.monotonic() + WITHIN_S, b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), WITHIN_S) as connection:
            connection.sendall(b"verbose status\n")
            while (left_s := until - time.monotonic()) > 0 and len(status) < LARGEST_BYTES:
                connection.settimeout(left_s)
                if not (received := connection.recv(65536)):
                    break
                status += received
    except (OSError, ValueError):
        pass  # no RAS, or it is still collecting: what has arrived is used
    errors = ERRORS.search(status.decode(errors="replace"))
    lines = [" ".join(line.split()) for line in errors[1].splitlines() if line.strip()] if errors else []
    return f"NCCL RAS reports: {', '.join(lines)}" if lines else ""
