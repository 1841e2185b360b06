"""`ringattn doctor`: its findings for simulated machines, networks and nodes, and for this machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.bench.hosts import RailedNodes
from ringattn.cli import main
from ringattn.engine.plain import PlainEngine
from ringattn.errors import UnsupportedError
from ringattn.launch.doctor import doctor
from ringattn.launch.doctor import probes as doctor_probes
from ringattn.launch.doctor.doctor import examine, rounds
from ringattn.launch.doctor.network import (
    BRIDGE,
    NUMA,
    SWITCH,
    SYSTEM,
    UNKNOWN,
    Interface,
    Near,
    Network,
    Port,
    acs,
    distances,
    gpudirect,
    launches,
    memlock,
    mtu,
    named,
    network,
    network_facts,
    ports,
    rails,
)
from ringattn.launch.doctor.probes import ERROR, NOTE, OK, WARNING, Finding, Gpu, Link, Nccl, Wheel
from ringattn.launch.ranks import RanksError
from ringattn.planner.cluster import LinkClass, Links
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from ringattn.transport.location import Location
from tests.launch.commands import TORCHRUN, python


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the finding of the highest level."""
    return max(findings, key=lambda finding: doctor_probes.LEVELS.index(finding.level))


def by_topic(findings: Sequence[Finding]) -> dict[str, Finding]:
    """Return the findings by their topics."""
    return {finding.topic: finding for finding in findings}


# --- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("torch", "2.13.0+cpu", OK), ("torch", "2.11.0a0+git1", OK), ("torch", "2.9.1", ERROR), ("torch", None, ERROR),
        ("numpy", "1.25.2", ERROR), ("triton", "3.5.0", WARNING), ("triton", None, NOTE), ("cupy", None, NOTE),
        ("python", "3.10.14", ERROR), ("python", "3.11.0", OK),
    ],
)  # fmt: skip
def test_versions(name: str, version: str | None, level: str) -> None:
    (finding,) = doctor_probes.versions({name: version})
    assert (finding.topic, finding.level) == (name, level)
    assert bool(finding.advice) == (level in (WARNING, ERROR))


@pytest.mark.parametrize(
    ("build", "driver", "available", "level", "text"),
    [
        (None, None, False, NOTE, "over shared memory within a machine and gloo between machines"),
        (None, "580.1", False, ERROR, "torch is a CPU build"),
        ("13.0", None, False, WARNING, "no NVIDIA driver"),
        ("13.0", "470.2", False, ERROR, "finds no device with driver 470.2"),
        ("13.0", "580.1", True, OK, "torch for CUDA 13.0, driver 580.1"),
    ],
)
def test_cuda(build: str | None, driver: str | None, available: bool, level: str, text: str) -> None:
    finding = doctor_probes.cuda(build, driver, available)
    assert finding.level == level and text in finding.text


@pytest.mark.parametrize(
    ("library", "torch_version", "level", "text"),
    [
        (Nccl("/a/libnccl.so.2", 22907), 22907, OK, "2.29.7 from /a/libnccl.so.2"),
        (Nccl("/a/libnccl.so.2", 22903), 22907, OK, "2.29.3"),  # a patch release apart
        (Nccl("/a/libnccl.so.2", 22403), 22907, WARNING, "torch was built with 2.29.7"),
        (Nccl("/a/libnccl.so.2", 22907), None, OK, "2.29.7"),
        (Nccl(error="/a/libnccl.so.2 is NCCL 2.18.3; ringattn needs 2.23"), 22907, ERROR, "NCCL 2.18.3"),
        (Nccl(error="no libnccl in this process"), None, NOTE, "no libnccl"),
    ],
)
def test_nccl(library: Nccl, torch_version: int | None, level: str, text: str) -> None:
    (finding,) = doctor_probes.nccl(library, torch_version)
    assert finding.level == level and text in finding.text


def test_an_old_nccl_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedError("/old/libnccl.so.2 is NCCL 2.18.3; ringattn needs 2.23.0 or newer")

    monkeypatch.setattr(doctor, "load_library", refuse)
    assert doctor.nccl_library() == Nccl(error="/old/libnccl.so.2 is NCCL 2.18.3; ringattn needs 2.23.0 or newer")


def install(site: Path, name: str, content: bytes) -> None:
    """Write the files of an NCCL wheel into `site`: its libnccl and its metadata, with the RECORD file."""
    library = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(content)
    info = site / f"{name.replace('-', '_')}-2.29.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.29.7\n")
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"nvidia/nccl/lib/libnccl.so.2,sha256={digest},{len(content)}\n")


def test_one_wheel_overwrites_another(tmp_path: Path) -> None:
    def check_wheels(build: str | None) -> Finding:
        wheels = doctor.nccl_wheels(metadata.distributions(path=[str(tmp_path)]))
        return worst(doctor_probes.wheels(wheels, build))

    assert check_wheels(None).level == NOTE and check_wheels("13.0").level == WARNING
    assert "ringattn[cu12]" in check_wheels("12.8").advice
    install(tmp_path, "nvidia-nccl-cu13", b"thirteen")
    assert check_wheels("13.0") == Finding("NCCL wheels", OK, "nvidia-nccl-cu13 2.29.7")
    install(tmp_path, "nvidia-nccl-cu12", b"twelve")
    clash = check_wheels("13.0")
    assert clash.level == ERROR and "whose current version is from nvidia-nccl-cu12" in clash.text
    assert "pip uninstall nvidia-nccl-cu12," in clash.advice
    # A third package overwrote the file of both wheels.
    (tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_bytes(b"another")
    assert "neither of them" in check_wheels("13.0").text


def test_a_wheel_without_its_file(tmp_path: Path) -> None:
    install(tmp_path, "nvidia-nccl-cu13", b"thirteen")
    (tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2").unlink()
    (wheel,) = doctor.nccl_wheels(metadata.distributions(path=[str(tmp_path)]))
    (finding,) = doctor_probes.wheels([wheel], "13.0")
    assert wheel.intact is False and finding.level == ERROR
    assert finding.advice == "pip install --force-reinstall --no-deps nvidia-nccl-cu13==2.29.7"
    unknown = Wheel("nvidia-nccl-cu13", "2.29.7", "x", None)
    assert doctor_probes.wheels([unknown], "13.0")[0].level == OK


@pytest.mark.parametrize(
    ("installed", "origin", "level"),
    [(None, None, OK), (None, "/site/kernels/__init__.py", OK), ("0.17.2", "/site/kernels/__init__.py", OK),
     ("0.17.2", None, ERROR)],
)  # fmt: skip
def test_kernels_name(installed: str | None, origin: str | None, level: str) -> None:
    assert doctor_probes.kernels_name(installed, origin).level == level


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "level", "text"),
    [
        ((7, 5), WARNING, "no bf16, and the Triton kernels need sm_80"), ((8, 0), OK, "sm_80: bf16"),
        ((8, 9), OK, "bf16 and fp8"), ((9, 0), OK, "80 GiB, sm_90: bf16 and fp8"),
    ],
)  # fmt: skip
def test_dtypes_by_generation(capability: tuple[int, int], level: str, text: str) -> None:
    (finding,) = doctor_probes.devices([Gpu("a GPU", capability, 80 * 2**30)], usable=True)
    assert finding.level == level and text in finding.text
    assert ("fp8" in finding.text) == (capability >= (8, 9))


def test_the_kernel_forms_of_each_gpu_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    forms = doctor.kernel_forms([Gpu("H100", (9, 0)), Gpu("A100", (8, 0)), Gpu("H100", (9, 0))])
    assert len(forms) == 2 and "on sm_80: pointers" in forms[0] and "on sm_90: " in forms[1]
    assert doctor.kernel_forms([]) == ["engine='triton' does not run here: no GPU"]
    monkeypatch.setitem(sys.modules, "ringattn.engine.forms", None)
    assert "does not run here: ringattn.engine.forms is not installed" in doctor.kernel_forms([])[0]


def test_a_missing_c_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor names what Triton's launcher lacks: a compiler, or Python's headers. The engine refuses for it."""
    pytest.importorskip("triton", reason="the compiler is for Triton's launcher")
    from ringattn.engine import triton as engine

    assert [(finding.level, finding.text) for finding in doctor.compiler()] == [(OK, "Triton can build its launcher")]
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    (headers,) = doctor.compiler()
    assert (
        headers.level == WARNING and headers.text == f"no {tmp_path}/Python.h, which Triton needs to build its launcher"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (finding,) = doctor.compiler()
    assert finding.text.startswith("no C compiler (gcc or clang)") and finding.advice == "install gcc, or set CC"
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(engine, "_driver_starts", lambda: False)
    assert "engine='triton': no C compiler (gcc or clang), " in str(engine.missing(gpu))
    monkeypatch.setattr(engine, "_driver_starts", lambda: True)
    assert engine.missing(gpu) is None
    monkeypatch.setenv("CC", "mycc")
    assert "Python.h" in doctor.compiler()[0].text


def test_devices_of_different_generations() -> None:
    finding = worst(doctor_probes.devices([Gpu("A100", (8, 0)), Gpu("H100", (9, 0))], usable=True))
    assert finding.level == WARNING and "slowest" in finding.text


class NvmlError(Exception):
    """A stand-in for `pynvml.NVMLError`."""


def test_a_gpu_that_nvml_does_not_report() -> None:
    (finding,) = doctor_probes.devices([], usable=True)
    assert finding.level == WARNING and "nvidia-ml-py" in finding.advice
    assert doctor_probes.devices([], usable=False) == []


def fake_nvml(nvlink: bool, peer: bool) -> SimpleNamespace:
    """Return a fake NVML with three devices. A query of the link between the first and the last device fails."""

    def status(first: int, second: int, index: str) -> int:
        if (first, second) == (0, 2):
            raise NvmlError("not supported")
        return 0 if {"read": peer, "nvlink": nvlink}[index] else 1

    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3, nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}", nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCudaComputeCapability=lambda handle: [9, 0],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=2**36),
        nvmlDeviceGetTopologyCommonAncestor=lambda first, second: 40,
        nvmlDeviceGetP2PStatus=status, NVMLError=NvmlError,
        NVML_P2P_CAPS_INDEX_READ="read", NVML_P2P_CAPS_INDEX_NVLINK="nvlink", NVML_P2P_STATUS_OK=0,
    )  # fmt: skip


def test_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvlink=True, peer=True))
    driver, gpus, links = doctor.nvml()
    assert (driver, gpus[2]) == ("580.1", Gpu("GPU 2", (9, 0), 2**36))
    (finding,) = doctor_probes.topology(links)
    assert finding.level == OK and "2 over NVLink, 1 over an unknown way (not supported)" in finding.text
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvlink=False, peer=False))
    (finding,) = doctor_probes.topology(doctor.nvml()[2])
    assert finding.level == WARNING
    assert "2 over the NUMA node" in finding.text and "other's memory: 0 and 1, 1 and 2" in finding.text
    assert doctor_probes.topology([]) == []
    assert doctor_probes.topology([Link(0, 1, "NVLink", True)])[0].level == OK


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    assert doctor.nvml() == (None, [], [])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor.nvml() == (None, [], [])


def test_processors() -> None:
    assert doctor_probes.processors(8, 4, 1, "4")[0] == Finding("processors", OK, "4 of 8 cores, 1 NUMA node")
    assert doctor_probes.processors(8, 4, 1, "5")[0].level == WARNING
    assert "numa-binding" in doctor_probes.processors(64, 64, 2, None)[0].advice


@pytest.mark.parametrize(
    ("environment", "level", "text"),
    [
        ({"HOME": "/"}, OK, "no NCCL_"),
        ({"NCCL_DEBUG": "INFO", "TORCH_LOGS": "x"}, NOTE, "NCCL_DEBUG=INFO, TORCH_LOGS=x"),
        ({"NCCL_COMM_ID": "a:1"}, ERROR, "NCCL_COMM_ID is set"),
        ({"NCCL_P2P_DISABLE": "1"}, WARNING, "through the host"),
    ],
)
def test_variables(environment: dict[str, str], level: str, text: str) -> None:
    finding = worst(doctor_probes.variables(environment))
    assert finding.level == level and text in finding.text


# --- ranks -----------------------------------------------------------------------------------------------------------


def answer(rank: int, **changed: Any) -> dict[str, Any]:
    """Return the measurements that a healthy rank reports, with the entries in `changed` replaced."""
    healthy = {"rank": rank, "host": "a", "device": f"cuda:{rank}", "transport": "nccl", "torch": "2.13.0",
               "python": "3.11.7", "ringattn": "0.1.0", "message_bytes": 2**24, "bandwidth": 2e9, "latency_us": 40.0,
               "error": 2e-6}  # fmt: skip
    return {**healthy, **changed}


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, OK, ""),
        ({"error": 2e-5}, ERROR, "differs from float64 by 2.0e-05, more than 1e-05"),
        ({"error": float("nan")}, ERROR, "differs from float64 by nan"),
        ({"device": "cuda:0"}, ERROR, "two ranks share a GPU"),
        ({"device": "cuda:0", "host": "b"}, OK, ""),
        ({"torch": "2.12.0"}, ERROR, "different versions of torch: 2.12.0, 2.13.0"),
    ],
)
def test_findings_from_the_answers_of_ranks(changed: dict[str, Any], level: str, text: str) -> None:
    for answers in ([answer(0), answer(1, **changed)], [answer(1, **changed), answer(0)]):
        finding = worst(doctor.judged(answers))
        assert finding.level == level and text in finding.text


def test_the_slowest_rank_counts() -> None:
    findings = by_topic(doctor.judged([answer(0, latency_us=90.0), answer(1, bandwidth=1e9)]))
    assert findings["exchange"].text == "over nccl: 1.00 GB/s each way in messages of 16 MiB, 90 µs for a small message"
    single = doctor.judged([answer(0, bandwidth=None, latency_us=None)])
    assert [finding.topic for finding in single] == ["ranks", "parity"]


def test_examine_measures_error_bandwidth_and_latency() -> None:
    answers = run_ranks(3, examine)
    assert [rank["rank"] for rank in answers] == [0, 1, 2]
    assert worst(doctor.judged(answers)).level == OK
    assert all(0 < rank["error"] < 1e-5 and rank["bandwidth"] > 0 and rank["latency_us"] > 0 for rank in answers)
    assert run_ranks(1, examine)[0]["bandwidth"] is None


def test_a_wrong_engine_is_a_parity_error() -> None:
    class Wrong(PlainEngine):
        def attend(self, q: torch.Tensor, *others: Any) -> None:
            super().attend(q * 1.001, *others)

    finding = worst(doctor.judged(run_ranks(2, examine, engine=Wrong())))
    assert (finding.topic, finding.level) == ("parity", ERROR)


# --- the command -----------------------------------------------------------------------------------------------------


def test_help_and_bad_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0 and "usage: ringattn doctor" in capsys.readouterr().out
    assert main(["doctor", "--jsn"]) == 2 and "--jsn: write options as key=value" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the processes that the doctor starts by the answers of two healthy ranks."""
    monkeypatch.setattr(doctor, "system", lambda: {"os": "some Linux"})
    monkeypatch.setattr(doctor, "run_ranks_in_processes", lambda *_, **__: [answer(0), answer(1)])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run_doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run the command and return the exit code and the JSON document."""
    code = main(["doctor", "json=-"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("quick")
def test_ranks_that_do_not_connect_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor(capsys)[0] == 0

    def fail(*_: Any, **__: Any) -> None:
        raise RanksError("2 ranks did not end within 60 s and were terminated")

    monkeypatch.setattr(doctor, "run_ranks_in_processes", fail)
    code, document = run_doctor(capsys)
    assert code == 1 and document["passed"] is False and document["counts"]["error"] == 1
    (error,) = (finding for finding in document["findings"] if finding["level"] == ERROR)
    assert "did not end within 60 s" in error["text"] and "firewall" in error["advice"]


@pytest.mark.usefixtures("quick")
def test_a_failing_check_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(doctor, "cores", fail)
    code, document = run_doctor(capsys)
    findings = {finding["topic"]: finding for finding in document["findings"]}
    assert code == 0 and findings["processors"]["level"] == WARNING
    assert findings["processors"]["text"] == "could not be checked: OSError: no such file"
    assert "kernels" in findings and document["system"] == {"os": "some Linux"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("options", "gpus", "transport"),
    [
        ([], 0, "auto"),
        ([], 1, "shm"),
        ([], 2, "auto"),
        (["transport=gloo"], 0, "gloo"),
        (["transport=nccl"], 1, "nccl"),
    ],
)
def test_two_processes_use_the_transport_of_a_ring(
    options: list[str], gpus: int, transport: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    specs: list[dict[str, Any]] = []

    def start(entry: str, spec: dict[str, Any], *_: Any, **__: Any) -> list[dict[str, Any]]:
        specs.append(spec)
        return [answer(0), answer(1)]

    monkeypatch.setattr(doctor, "run_ranks_in_processes", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(doctor, "_checked", lambda say: ([], {}))
    assert main(["doctor", *options]) == 0
    assert [spec["transport"] for spec in specs] == [transport]
    shown = "the transport that a ring takes here" if transport == "auto" else transport
    assert f"two processes connect over {shown}, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_this_machine(ranks: int, tmp_path: Path) -> None:
    # As a single process and under torchrun, the doctor writes one document to standard output, and its progress to
    # standard error.
    torchrun = (*TORCHRUN, f"--nproc-per-node={ranks}") if ranks else ()
    done = python(*torchrun, "-m", "ringattn", "doctor", "json=-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    findings = {finding["topic"]: finding for finding in document["findings"]}
    assert findings["torch"]["text"] == torch.__version__ and findings["parity"]["level"] == OK
    assert "2 ranks connected over shm: " in findings["ranks"]["text"]
    assert findings["exchange"]["text"].startswith("over shm: ")
    assert findings["parity"]["text"].startswith("attention on 2 ranks over shm differs from float64 by ")
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["passed"] and document["system"]["torch_version"] == torch.__version__
    assert "doctor: " in done.stderr


# --- networks: facts from simulated /sys and /proc trees -------------------------------------------------------------

BRIDGE_CLASS, GPU_CLASS, NIC_CLASS = "0x060400", "0x030200", "0x020700"


def registers(control: int | None) -> bytes:
    """Return the PCI configuration space of a bridge.

    It has one other extended capability, then ACS with this control register, or no ACS for None.
    """
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    if control is not None:
        space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


def device(root: Path, path: str, kind: str, numa: int = 0, config: bytes | None = None, **files: str) -> Path:
    """Write the folder of a PCI device at `path`, and a link to it in the folder of all devices. Return its folder."""
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"class": kind, "numa_node": str(numa), **files}.items():
        (folder / name).write_text(text + "\n")
    if config is not None:
        (folder / "config").write_bytes(config)
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / folder.name).symlink_to(Path(os.path.relpath(folder, links)))
    return folder


def port(root: Path, name: str, nic: Path, state: str = "4: ACTIVE", layer: str = "InfiniBand", **files: str) -> None:
    """Write an RDMA device with one port, whose PCI function is in the folder `nic`."""
    folder = root / "sys/class/infiniband" / name
    (folder / "ports/1").mkdir(parents=True)
    (folder / "device").symlink_to(Path(os.path.relpath(nic, folder)))
    for file, text in {"state": state, "link_layer": layer, "rate": "400 Gb/sec (4X NDR)", **files}.items():
        (folder / "ports/1" / file).write_text(text + "\n")


def plant(root: Path, acs: int | None = 0, readable: bool = True) -> Path:
    """Write the /sys and /proc trees of a machine with two GPUs.

    One GPU shares a PCI switch with an InfiniBand port. The other is on the second socket, as is an Ethernet port.
    """
    config = registers(acs) if readable else registers(acs)[:64]
    left, right = "pci0000:00/0000:00:01.0", "pci0000:80/0000:80:01.0"
    for bridge in (left, f"{left}/0000:01:00.0", right):
        device(root, bridge, BRIDGE_CLASS, config=config)
    device(root, f"{left}/0000:01:00.0/0000:02:00.0", GPU_CLASS, vendor="0x10de")
    device(root, f"{right}/0000:81:00.0", GPU_CLASS, 1, vendor="0x10de")
    device(root, f"{right}/0000:83:00.0", "0x010802", 1, vendor="0x144d")  # neither a GPU nor NVIDIA's
    near = device(root, f"{left}/0000:01:00.0/0000:03:00.0", NIC_CLASS, vendor="0x15b3")
    far = device(root, "pci0000:80/0000:80:02.0", NIC_CLASS, 1, vendor="0x15b3")
    (far / "net/eth1").mkdir(parents=True)
    (far / "net/eth1/mtu").write_text("1500\n")
    port(root, "mlx5_0", near)
    port(root, "mlx5_1", far, layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    port(root, "mlx5_2", far, state="1: DOWN")
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("eth1", "down"), ("docker0", "up")):
        (root / "sys/class/net" / name).mkdir(parents=True)
        (root / "sys/class/net" / name / "operstate").write_text(state + "\n")
        (root / "sys/class/net" / name / "mtu").write_text("1500\n")
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/modules").write_text("nvidia_peermem 16384 0 - Live 0x0\nib_core 1 2 - Live 0x0\n")
    (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1\n")
    (root / "proc/sys/kernel/osrelease").write_text("5.15.0-91-generic\n")
    (root / "proc/self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         65536                unlimited            bytes     \n"
    )
    return root


def test_facts_of_a_simulated_machine(tmp_path: Path) -> None:
    facts = network_facts(plant(tmp_path))
    assert facts.ports == (
        Port("mlx5_0", "1", "ACTIVE", "InfiniBand", 400.0),
        Port("mlx5_1", "1", "ACTIVE", "Ethernet", 100.0, 1500),
        Port("mlx5_2", "1", "DOWN", "InfiniBand", 400.0),
    )
    assert facts.interfaces == (
        Interface("docker0", True, 1500), Interface("eth0", True, 1500), Interface("eth1", False, 1500)
    )  # fmt: skip
    assert facts.gpus == ("0000:02:00.0", "0000:81:00.0")
    assert facts.nearest == (
        Near("0000:02:00.0", "mlx5_0", SWITCH),
        Near("0000:81:00.0", "mlx5_1", BRIDGE),
    )
    assert (facts.peermem, facts.dmabuf, facts.redirecting, facts.memlock) == (True, True, (), 65536)


@pytest.mark.parametrize(
    ("control", "redirects"), [(None, False), (0, False), (0x11, False), (0x04, True), (0x08, True)]
)
def test_acs_is_read_from_the_bridges(control: int | None, redirects: bool, tmp_path: Path) -> None:
    redirecting = network_facts(plant(tmp_path, acs=control)).redirecting
    assert redirecting == (("0000:00:01.0", "0000:01:00.0", "0000:80:01.0") if redirects else ())


def test_facts_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    assert network_facts(plant(tmp_path / "a", readable=False)).redirecting is None
    assert network_facts(tmp_path / "nothing") == Network()
    root = plant(tmp_path / "b")
    (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\n")
    (root / "proc/modules").write_text("nvidia 1 0 - Live 0x0\n")
    (root / "proc/self/limits").write_text(
        "Max locked memory         unlimited            unlimited            bytes\n"
    )
    facts = network_facts(root)
    assert (facts.dmabuf, facts.peermem, facts.memlock) == (False, False, None)
    (root / "proc/driver/nvidia/version").write_text("NVIDIA UNIX Open Kernel Module\n")
    (root / "proc/sys/kernel/osrelease").write_text("5.4.0\n")
    assert network_facts(root).dmabuf is False
    (root / "proc/driver/nvidia/version").unlink()
    assert network_facts(root).dmabuf is None


def test_distances_by_numa_node(tmp_path: Path) -> None:
    gpu = device(tmp_path, "pci0000:00/0000:00:01.0/0000:01:00.0", GPU_CLASS, 0, vendor="0x10de")
    nic = device(tmp_path, "pci0000:40/0000:40:01.0/0000:41:00.0", NIC_CLASS, 0)
    port(tmp_path, "mlx5_0", nic)
    assert network_facts(tmp_path).nearest == (Near("0000:01:00.0", "mlx5_0", NUMA),)
    (nic / "numa_node").write_text("1\n")
    assert network_facts(tmp_path).nearest[0].distance == SYSTEM
    (gpu / "numa_node").unlink()
    assert network_facts(tmp_path).nearest[0].distance == UNKNOWN


# --- findings --------------------------------------------------------------------------------------------------------

FAST, SLOW = Port("mlx5_0", "1", "ACTIVE", "InfiniBand", 400.0), Port("mlx5_9", "1", "ACTIVE", "Ethernet", 25.0, 9000)
DOWN = Port("mlx5_1", "1", "DOWN", "InfiniBand", 400.0)


def test_findings_of_a_simulated_machine(tmp_path: Path) -> None:
    environment = {"NCCL_CGA_CLUSTER_SIZE": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    findings = network(network_facts(plant(tmp_path, acs=0x0C)), environment, 22809)
    assert {(finding.topic, finding.level) for finding in findings} == {
        ("RDMA ports", WARNING), ("MTU", WARNING), ("NCCL_SOCKET_IFNAME", NOTE), ("memlock", ERROR),
        ("NIC to GPU", NOTE), ("GPUDirect", OK), ("ACS", WARNING), ("CTAs and CGA", WARNING), ("launch order", NOTE),
    }  # fmt: skip
    assert all(finding.why for finding in findings if finding.level in (WARNING, ERROR))


@pytest.mark.parametrize(
    ("findings", "level", "text"),
    [
        (ports(Network()), NOTE, "messages between machines use TCP"),
        (ports(Network((FAST,))), OK, "active: mlx5_0:1 400 Gb/s InfiniBand"),
        (ports(Network((FAST, DOWN))), WARNING, "mlx5_1:1 is DOWN"),
        (ports(Network((FAST, SLOW))), WARNING, "of different rates: mlx5_0:1 400 Gb/s"),
        (mtu(Network((SLOW,))), OK, "mlx5_9:1 9000"),
        (mtu(Network((replace(SLOW, mtu=1500),))), WARNING, "mlx5_9:1 1500"),
        ([memlock(Network())], OK, "no limit"),
        ([memlock(Network(memlock=2**26))], OK, "64 MiB"),
        ([memlock(Network(memlock=65536))], ERROR, "may lock 64 KiB"),
        (distances(Network(nearest=(Near("g", "mlx5_0", SWITCH),))), OK, "GPU g to mlx5_0 over one PCIe switch"),
        (distances(Network(nearest=(Near("g", "mlx5_0", BRIDGE),))), NOTE, "one host bridge"),
        (distances(Network(nearest=(Near("g", "mlx5_0", SYSTEM),))), WARNING, "another NUMA node"),
        ([gpudirect(Network(peermem=True), {})], OK, "by nvidia-peermem"),
        ([gpudirect(Network(dmabuf=True), {})], OK, "by DMABUF"),
        ([gpudirect(Network(dmabuf=True), {"NCCL_DMABUF_ENABLE": "0"})], WARNING, "no DMABUF"),
        ([gpudirect(Network(), {})], WARNING, "whether DMABUF works is unknown"),
        ([gpudirect(Network(peermem=True), {"NCCL_NET_GDR_LEVEL": "LOC"})], WARNING, "turned off"),
        ([acs(Network())], OK, "no bridge"),
        ([acs(Network(redirecting=None))], NOTE, "only root can read"),
        ([acs(Network(redirecting=("0000:00:01.0",)))], WARNING, "redirects at 0000:00:01.0"),
        (rails(Network((FAST, SLOW), gpus=("a", "b")), {"NCCL_PXN_DISABLE": "1"}), WARNING, "NCCL_PXN_DISABLE=1"),
        (rails(Network((FAST,), gpus=("a",)), {"NCCL_PXN_DISABLE": "1"}), NOTE, "NCCL_PXN_DISABLE=1"),
        (launches({}, 22809), NOTE, "NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        (launches({"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "NCCL_COMM_ID": "a:1"}, 22809), OK, "the same order"),
        (launches({"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 22809), NOTE, "to 8"),
    ],
)  # fmt: skip
def test_findings(findings: list[Finding], level: str, text: str) -> None:
    finding = worst(findings)
    assert finding.level == level and text in finding.text
    if level in (WARNING, ERROR):
        assert finding.advice and finding.why


@pytest.mark.parametrize(
    ("variable", "value", "level", "text"),
    [
        ("NCCL_IB_HCA", "mlx5", OK, "selects mlx5_0:1, mlx5_9:1"),
        ("NCCL_IB_HCA", "mlx5_0", OK, "selects mlx5_0:1"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_7", WARNING, "there is no RDMA port mlx5_7"),
        ("NCCL_IB_HCA", "=mlx5", ERROR, "leaves no RDMA port that works"),
        ("NCCL_IB_HCA", "mlx5_1", ERROR, "there are: mlx5_0:1, mlx5_9:1"),  # it is down
        ("NCCL_IB_HCA", "^mlx5_0", OK, "selects mlx5_9:1"),
        ("NCCL_IB_HCA", "^mlx5", ERROR, "leaves no RDMA port"),
        ("NCCL_SOCKET_IFNAME", "eth", OK, "selects eth0"),
        ("NCCL_SOCKET_IFNAME", "ib0", ERROR, "leaves no interface that works; there are: eth0, docker0"),
        ("NCCL_SOCKET_IFNAME", "lo", NOTE, "only ranks of this machine"),
        ("GLOO_SOCKET_IFNAME", "eth0", OK, "selects eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", ERROR, "leaves no interface"),  # whole names only
        ("NCCL_IB_DISABLE", "1", WARNING, "there are active RDMA ports"),
    ],
)  # fmt: skip
def test_variables_that_select_ports_and_interfaces(variable: str, value: str, level: str, text: str) -> None:
    interfaces = Interface("eth0", True), Interface("eth1", False), Interface("docker0", True)
    findings = named(Network((FAST, DOWN, SLOW), interfaces), {variable: value})
    (finding,) = (finding for finding in findings if finding.topic == variable)
    assert finding.level == level and text in finding.text


def test_virtual_interfaces_are_reported_if_no_variable_selects_one() -> None:
    facts = Network(interfaces=(Interface("docker0", True), Interface("ens3", True)), gpus=("g",))
    (finding,) = named(facts, {})
    assert finding.level == NOTE and finding.advice.endswith("NCCL_SOCKET_IFNAME=ens3") and "docker0" in finding.text
    assert named(replace(facts, gpus=()), {}) == []


# --- ranks of several nodes ------------------------------------------------------------------------------------------


def test_the_measured_pairs_of_a_round_share_no_rank() -> None:
    pcie = LinkClass.PCIE
    links = Links((0, 0, 0, 1, 2, 2), LinkClass.NVLINK, ((0, 2, pcie), (1, 2, pcie)))
    assert rounds(links) == [[(0, 1), (4, 5)], [(0, 2)], [(0, 3)], [(3, 4)]]
    assert rounds(Links((0, 0))) == [[(0, 1)]]
    assert rounds(Links((0, 1, 0))) == [[(0, 2)], [(0, 1)]]
    for pairs in rounds(Links((0, 0, 1, 1, 2, 2, 3, 3))):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_ranks_of_two_nodes_measure_within_and_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPEATS", "PAIR_REPEATS"):
        monkeypatch.setattr(doctor, name, dict.fromkeys(getattr(doctor, name), 1))
    locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate("aba"))

    def body(ring: Ring) -> dict[str, Any]:
        ring.transport.locations = locations
        ring.links = Links((0, 1, 0), LinkClass.MEMORY)
        return examine(ring)

    answers = run_ranks(3, body)
    assert [[(pair["peer"], pair["link"], pair["across"]) for pair in rank["pairs"]] for rank in answers] == [
        [(2, "host memory", False), (1, "network", True)], [], [],
    ]  # fmt: skip
    findings = by_topic(doctor.judged(answers))
    links = findings["links"].text
    assert links.startswith("inside a node ") and "over host memory (ranks 0 and 2)" in links
    assert "between nodes" in links and "a factor of " in links
    # A ring of three ranks on two nodes crosses between the nodes twice in any order of ranks.
    assert "rank order" not in findings
    assert answers[1]["network"] and not answers[0]["network"] + answers[2]["network"]


def test_measured_speed_is_compared_with_the_rate_of_the_port() -> None:
    inside = {"peer": 1, "link": "NVLink", "bandwidth": 300e9, "latency_us": 10.0, "across": False}
    between = {"peer": 2, "link": "network", "bandwidth": 20e9, "latency_us": 30.0, "across": True}
    slow = {**between, "bandwidth": 10e9}
    nics = [["mlx5_0:1", 400.0]]

    def links(*pairs: dict[str, Any]) -> Finding:
        return by_topic(doctor.judged([answer(0, pairs=pairs, nics=nics), answer(1, host="h1"), answer(2)]))["links"]

    assert links(inside, between).text == (
        "inside a node 300.00 GB/s and 10 µs over NVLink (ranks 0 and 1); "
        "between nodes 20.00 GB/s and 30 µs over network (ranks 0 and 2); a factor of 15"
    )
    assert links(inside, between).level == NOTE and "a port of rank 0 reports 50 GB/s" in links(inside, between).advice
    assert links(inside, {**between, "bandwidth": 30e9}).level == OK
    assert "10.00 GB/s" in links(between, slow).text  # the slowest pair of a class of links counts
    assert doctor.judged([answer(0), answer(1)])[-1].topic == "exchange"


def test_rank_order_and_findings_of_other_nodes_are_reported() -> None:
    trouble = Finding("memlock", ERROR, "a process may lock 64 KiB", "ulimit -l unlimited", "why")._asdict()
    fine = Finding("ACS", OK, "no bridge")._asdict()
    order = "ranks 0,2 on node 0; 1,3 on node 1: too often (node 0 is a). Number the ranks of a node"
    findings = by_topic(doctor.judged([answer(0, order=order), answer(1, host="h1", network=[trouble, fine])]))
    assert findings["memlock, h1"].level == ERROR and "ACS, h1" not in findings
    assert findings["rank order"].level == WARNING
    assert findings["rank order"].advice == "Number the ranks of a node"


# --- two hosts -------------------------------------------------------------------------------------------------------

BYTES_S = 25e6


@pytest.mark.slow
def test_two_hosts_with_a_slow_link_between() -> None:
    try:
        hosts = RailedNodes(2, BYTES_S)
    except UnsupportedError as error:
        pytest.skip(str(error))
    with hosts:
        answers = hosts.run("ringattn.launch.doctor.doctor:examine", {}, print, "auto", limit_s=240.0)
    pairs = {(rank["rank"], pair["peer"]): pair for rank in answers for pair in rank["pairs"]}
    inside, between = pairs[0, 1], pairs[0, 2]
    assert (inside["link"], inside["across"]) == ("host memory", False)
    assert (between["link"], between["across"]) == ("network", True)
    assert BYTES_S / 10 < between["bandwidth"] < 1.5 * BYTES_S  # the burst of the token bucket is not throttled
    assert inside["bandwidth"] > 4 * between["bandwidth"]
    links = by_topic(doctor.judged(answers))["links"].text
    assert "between nodes 0.0" in links and "a factor of" in links
