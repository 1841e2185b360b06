"""The program of the ranks in the GPU checks. torchrun starts it as `python -m tests.gpu.processes JOB.json`.

Several ranks may share a GPU. Each then acts as a separate host, and NCCL uses sockets of the loopback interface. The
same functions run over gloo on the CPU, as a rehearsal.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ringattn import Ring
from ringattn.errors import UnsupportedError
from ringattn.testing import dense_attention
from ringattn.transport import rendezvous

ALONE_ON_A_HOST = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "GLOO_SOCKET_IFNAME": "lo",
}
TOKENS = 101
OPENING_S = 60.0
"""The deadline of rings, except in tests of faults. When 24 processes started at once, 20 s were not enough."""
STALL_CYCLES = 1 << 36  # a kernel that sleeps for this number of cycles takes over half a minute
SIZES = (4 << 10, 64 << 10, 8 << 20, 80 << 20)  # for both of NCCL's protocols; the largest exceeds its buffers
TRIES = 6
LOG_LINE = re.compile(r"(Send|Recv): opCount \S+ sendbuff \S+ recvbuff \S+ count (\d+) datatype \d+ op \d+ root (\d+)")


def prepare(spec: dict[str, Any]) -> None:
    """Set the environment before anything uses CUDA or NCCL. `spec["nodes"]`: the node that each rank must report."""
    rank = os.environ["RANK"]
    os.environ["RINGATTN_FLIGHT_DIR"] = spec["flights"]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    if nodes := spec.get("nodes"):
        located = rendezvous.my_location
        rendezvous.my_location = lambda gpu: replace(located(gpu), machine=f"node {nodes[int(rank)]}")
    by_nccl = spec["transport"] == "nccl" or (nodes and spec["transport"] == "peer")
    if by_nccl and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ.update(ALONE_ON_A_HOST, NCCL_HOSTID=f"ringattn-{os.environ['MASTER_PORT']}-{rank}")
    if "log" in spec:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="COLL", NCCL_DEBUG_FILE=f"{spec['log']}-{rank}")


def open_ring(spec: dict[str, Any], timeout_s: float = OPENING_S, **options: Any) -> Ring:
    return Ring(transport=spec["transport"], engine="plain", timeout_s=timeout_s, **options)


def tensors(ring: Ring, seed: int = 0) -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    """Return a sequence, this rank's [q, k, v], and the expected output of causal attention."""
    generator = torch.Generator().manual_seed(seed)
    full = [torch.randn(1, TOKENS, 4, 32, generator=generator, dtype=torch.float64).to(ring.device) for _ in range(3)]
    seq = ring.sequence(TOKENS, layout="zigzag")
    reference = seq.shard(dense_attention(*full, causal=True)[0])
    return seq, [seq.shard(x) for x in full], reference


def exact(spec: dict[str, Any]) -> Any:
    """Compare attention with float64 for all combinations of mask, layout and schedule, or a set that has all pairs.

    Forward and backward passes are compared. Return the numbers of cases and failures.
    """
    from ringattn.launch.measure.check import worker

    return worker(spec["check"])


def sizes(spec: dict[str, Any]) -> Any:
    """Send a message of each size to the next rank. Return for each size whether the previous rank's arrived whole."""
    from ringattn.transport.base import Message

    with open_ring(spec) as ring:
        after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
        whole = []
        for nbytes in SIZES:
            sent, received = (
                torch.full((nbytes,), n, dtype=torch.uint8, device=ring.device) for n in (ring.rank + 1, 0)
            )
            ring.transport.exchange([Message(after, sent, "bytes")], [Message(before, received, "bytes")]).wait()
            whole.append(bool((received == before + 1).all()))
        return {"whole": whole}


def in_order(ring: Ring) -> list[list[Any]]:
    """Run two rounds of calls. Return the sends and receives that the plans of one round contain, in order.

    Each is a list of "Send" or "Recv", the peer, and the bytes.
    """
    seq, (q, k, v), _ = tensors(ring)
    q.requires_grad_()
    for _ in range(2):
        for schedule in ("ring", "direct"):
            ring.attention(q, k, v, seq, causal=True, schedule=schedule).sum().backward()
    ring.synchronize()
    planned: list[list[Any]] = []
    for executor in ring._executors.values():
        plan = executor.plan
        item = {index: plan.element_bytes(index) for index in range(len(plan.buffers))}
        for step in plan.steps:
            planned += [["Recv", r.peer, r.elements * item[r.buffer]] for r in step.recvs]
            planned += [["Send", s.peer, s.elements * item[s.buffer]] for s in step.sends]
    return planned


def order(spec: dict[str, Any]) -> Any:
    """Return the sends and receives that the plans contain, and those in NCCL's log."""
    with open_ring(spec) as ring:
        planned = in_order(ring)
    files = list(Path(spec["log"]).parent.glob(f"{Path(spec['log']).name}-{os.environ['RANK']}*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    called = [[m[1], int(m[3]), int(m[2])] for line in lines if (m := LOG_LINE.search(line))]
    return {"planned": planned, "called": called, "files": [str(file) for file in files], "lines": lines[:10]}


def graph(spec: dict[str, Any]) -> Any:
    """Capture a forward pass and replay it with other inputs. Return the largest error and the time of each replay."""
    from ringattn.transport.nccl.options import NcclOptions

    with open_ring(spec, nccl=NcclOptions(blocking=spec["blocking"])) as ring, torch.no_grad():
        seq, inputs, _ = tensors(ring)
        for _ in range(2):
            ring.attention(*inputs, seq, causal=True)
        ring.synchronize()
        torch.cuda.synchronize()
        ring.barrier()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            out = ring.attention(*inputs, seq, causal=True)
        errors, took_ms = [], []
        for seed in range(1, 6):
            _, fresh, reference = tensors(ring, seed)
            for into, x in zip(inputs, fresh, strict=True):
                into.copy_(x)
            torch.cuda.synchronize()
            ring.barrier()
            start = time.perf_counter()
            ring.replay(captured)
            ring.synchronize()
            took_ms.append((time.perf_counter() - start) * 1e3)
            errors.append(float((out - reference).abs().max()))
        captured.reset()
        return {"errors": errors, "replay_ms": took_ms}


def refused_capture(spec: dict[str, Any]) -> Any:
    """Try to capture an exchange of a transport that supports no graphs.

    Return the message of the refusal, and the numerical error of a pass that runs after it.
    """
    with open_ring(spec) as ring, torch.no_grad():
        seq, inputs, reference = tensors(ring)
        ring.attention(*inputs, seq, causal=True)
        ring.synchronize()
        torch.cuda.synchronize()
        captured, refused = torch.cuda.CUDAGraph(), ""
        try:
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                ring.transport.bind([], []).start()
        except UnsupportedError as error:
            refused = str(error)
        out = ring.attention(*inputs, seq, causal=True)
        ring.synchronize()
        return {"refused": refused, "error": float((out - reference).abs().max())}


def beside(spec: dict[str, Any]) -> Any:
    """Measure a hop next to an attention step. Return the result of `ringattn.bench.many_ranks.overlap`."""
    from ringattn.bench.many_ranks import overlap

    half = "bfloat16" if torch.cuda.is_available() else "float32"
    shape = {"heads": 16, "kv_heads": 4, "head_dim": 128, "rows": 4096} if torch.cuda.is_available() else spec["shape"]
    return overlap({"transport": spec["transport"], "nccl": {}, "engine": "aten", "dtype": half, "count": 10, **shape})


def fault(spec: dict[str, Any]) -> Any:
    """Lose the rank `culprit` by the fault `kind` ("kill", "stop" or "stall") while all ranks run passes.

    Return the error that this rank raises, and when.
    """
    kind, culprit, note = spec["kind"], spec["culprit"], Path(spec["note"])
    with open_ring(spec) as meeting:  # with the long deadline, because processes that load libraries are late
        meeting.barrier()
    ring = open_ring(spec, timeout_s=spec["timeout_s"])
    seq, (q, k, v), reference = tensors(ring)
    out = ring.attention(q, k, v, seq, causal=True)
    ring.synchronize()
    assert float((out - reference).abs().max()) < 1e-10  # type: ignore[operator]
    ring.barrier()
    if ring.rank == culprit:
        write(note, {"at_s": time.monotonic(), "pid": os.getpid()})
        if kind == "stall":
            torch.cuda._sleep(STALL_CYCLES)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
    seen = {"kind": "nothing", "message": "", "at_s": time.monotonic()}
    for _ in range(TRIES):
        try:
            ring.attention(q, k, v, seq, causal=True)
            ring.synchronize()
        except Exception as error:
            seen = {"kind": type(error).__name__, "message": str(error), "at_s": time.monotonic()}
            break
    return seen


def abort(spec: dict[str, Any]) -> Any:
    """Let rank 0's device wait for a message that is never sent, and then abort.

    On rank 0, return how long the abort takes and when the device is free. On the others, return the error that they
    raise.
    """
    from ringattn.transport.base import Message

    ring = open_ring(spec)
    if ring.rank != 0:
        time.sleep(4.0)
        seen = ""
        try:
            ring.barrier()
        except Exception as error:
            seen = str(error)
        return {"heard": seen}
    buffer = torch.zeros(1 << 20, dtype=torch.uint8, device=ring.device)
    ring.transport.exchange([], [Message(1, buffer, "never sent")]).wait()
    time.sleep(1.0)
    start = time.perf_counter()
    ring.transport.abort(ValueError("rank 0 gives up"))
    took_s = time.perf_counter() - start
    if ring.device.type == "cuda":
        torch.cuda.synchronize()
    return {"abort_s": took_s, "device_free_s": time.perf_counter() - start}


def write(path: Path, content: Any) -> None:
    """Write a file atomically."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.rename(path)


def main(job: Path) -> None:
    """Run a rank, and write its answer next to `job`.

    It ignores SIGTERM, because torchrun sends SIGTERM to the surviving ranks as soon as one dies.
    """
    spec = json.loads(job.read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.dump_traceback_later(150)  # before the job's time limit
    torch.set_num_threads(1)
    prepare(spec)
    try:
        answer = globals()[spec["entry"]](spec)
    except Exception:
        answer = {"traceback": traceback.format_exc()}
    write(job.parent / f"answer-{os.environ['RANK']}.json", answer)
    sys.stdout.flush()
    os._exit(0)  # a kernel that still spins must not hold the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
