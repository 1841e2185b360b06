"""`ringattn doctor`: what it makes of machines that are not at hand, and that it finds this one in order."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.cli import main
from ringattn.engine.plain import PlainEngine
from ringattn.errors import UnsupportedError
from ringattn.launch.doctor import doctor
from ringattn.launch.doctor import facts as doctor_facts
from ringattn.launch.doctor import probes as doctor_probes
from ringattn.launch.doctor.doctor import examine
from ringattn.launch.doctor.probes import ERROR, NOTE, OK, WARNING, Finding, Gpu, Link, Nccl, Wheel
from ringattn.launch.ranks import RanksError
from ringattn.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def worst(findings: Sequence[Finding]) -> Finding:
    """The finding of the highest level."""
    return max(findings, key=lambda finding: doctor_probes.LEVELS.index(finding.level))


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
    (found,) = doctor_probes.versions({name: version})
    assert (found.topic, found.level) == (name, level)
    assert bool(found.advice) == (level in (WARNING, ERROR))


@pytest.mark.parametrize(
    ("build", "driver", "available", "level", "words"),
    [
        (None, None, False, NOTE, "over gloo"),
        (None, "580.1", False, ERROR, "this torch is a CPU build"),
        ("13.0", None, False, WARNING, "no NVIDIA driver"),
        ("13.0", "470.2", False, ERROR, "finds no device under driver 470.2"),
        ("13.0", "580.1", True, OK, "torch for CUDA 13.0, driver 580.1"),
    ],
)
def test_cuda(build: str | None, driver: str | None, available: bool, level: str, words: str) -> None:
    found = doctor_probes.cuda(build, driver, available)
    assert found.level == level and words in found.text


@pytest.mark.parametrize(
    ("library", "torch_version", "level", "words"),
    [
        (Nccl("/a/libnccl.so.2", 22907), 22907, OK, "2.29.7 from /a/libnccl.so.2"),
        (Nccl("/a/libnccl.so.2", 22903), 22907, OK, "2.29.3"),  # a patch release apart
        (Nccl("/a/libnccl.so.2", 22403), 22907, WARNING, "torch was built with 2.29.7"),
        (Nccl("/a/libnccl.so.2", 22907), None, OK, "2.29.7"),
        (Nccl(error="/a/libnccl.so.2 is NCCL 2.18.3; ringattn needs 2.23"), 22907, ERROR, "NCCL 2.18.3"),
        (Nccl(error="no libnccl in this process"), None, NOTE, "no libnccl"),
    ],
)
def test_nccl(library: Nccl, torch_version: int | None, level: str, words: str) -> None:
    (found,) = doctor_probes.nccl(library, torch_version)
    assert found.level == level and words in found.text


def test_an_old_nccl_is_told_by_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedError("/old/libnccl.so.2 is NCCL 2.18.3; ringattn needs 2.23.0 or newer")

    monkeypatch.setattr(doctor_facts, "load_library", refuse)
    assert doctor_facts.nccl_library() == Nccl(error="/old/libnccl.so.2 is NCCL 2.18.3; ringattn needs 2.23.0 or newer")


def install(site: Path, name: str, content: bytes) -> None:
    """A wheel's traces in `site`: its libnccl, and the record of what it brought."""
    library = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(content)
    info = site / f"{name.replace('-', '_')}-2.29.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.29.7\n")
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"nvidia/nccl/lib/libnccl.so.2,sha256={digest},{len(content)}\n")


def test_one_wheel_overwrites_another(tmp_path: Path) -> None:
    def found(build: str | None) -> Finding:
        wheels = doctor_facts.nccl_wheels(metadata.distributions(path=[str(tmp_path)]))
        return worst(doctor_probes.wheels(wheels, build))

    assert found(None).level == NOTE and found("13.0").level == WARNING
    assert "ringattn[cu12]" in found("12.8").advice
    install(tmp_path, "nvidia-nccl-cu13", b"thirteen")
    assert found("13.0") == Finding("NCCL wheels", OK, "nvidia-nccl-cu13 2.29.7")
    install(tmp_path, "nvidia-nccl-cu12", b"twelve")
    clash = found("13.0")
    assert clash.level == ERROR and "which is now that of nvidia-nccl-cu12" in clash.text
    assert "pip uninstall nvidia-nccl-cu12," in clash.advice
    # pip takes the file of both with it.
    (tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_bytes(b"another")
    assert "neither of them" in found("13.0").text


def test_a_wheel_without_its_file(tmp_path: Path) -> None:
    install(tmp_path, "nvidia-nccl-cu13", b"thirteen")
    (tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2").unlink()
    (wheel,) = doctor_facts.nccl_wheels(metadata.distributions(path=[str(tmp_path)]))
    (found,) = doctor_probes.wheels([wheel], "13.0")
    assert wheel.intact is False and found.level == ERROR
    assert found.advice == "pip install --force-reinstall --no-deps nvidia-nccl-cu13==2.29.7"
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
    ("capability", "level", "words"),
    [
        ((7, 5), WARNING, "no bf16, and the Triton kernels need sm_80"), ((8, 0), OK, "sm_80: bf16"),
        ((8, 9), OK, "bf16 and fp8"), ((9, 0), OK, "80 GiB, sm_90: bf16 and fp8"),
    ],
)  # fmt: skip
def test_dtypes_by_generation(capability: tuple[int, int], level: str, words: str) -> None:
    (found,) = doctor_probes.devices([Gpu("a GPU", capability, 80 * 2**30)], usable=True)
    assert found.level == level and words in found.text
    assert ("fp8" in found.text) == (capability >= (8, 9))


def test_which_forms_of_the_kernels_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    told = doctor_facts.kernel_forms([Gpu("H100", (9, 0)), Gpu("A100", (8, 0)), Gpu("H100", (9, 0))])
    assert len(told) == 2 and "on sm_80: pointers" in told[0] and "on sm_90: " in told[1]
    assert doctor_facts.kernel_forms([]) == ["engine='triton' does not run here: no GPU"]
    monkeypatch.setitem(sys.modules, "ringattn.engine.forms", None)
    assert "does not run here: no ringattn.engine.forms" in doctor_facts.kernel_forms([])[0]


def test_devices_of_different_generations() -> None:
    found = doctor_probes.devices([Gpu("A100", (8, 0)), Gpu("H100", (9, 0))], usable=True)
    assert worst(found).level == WARNING and "slowest" in worst(found).text


class NvmlError(Exception):
    """Stands for `pynvml.NVMLError`."""


def test_a_gpu_that_nvml_does_not_tell_of() -> None:
    (found,) = doctor_probes.devices([], usable=True)
    assert found.level == WARNING and "nvidia-ml-py" in found.advice
    assert doctor_probes.devices([], usable=False) == []


def fake_nvml(nvlink: bool, peer: bool) -> SimpleNamespace:
    """NVML on a machine of three devices; between the first and the last nothing can be asked."""

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
    driver, gpus, links = doctor_facts.nvml()
    assert (driver, gpus[2]) == ("580.1", Gpu("GPU 2", (9, 0), 2**36))
    (found,) = doctor_probes.topology(links)
    assert found.level == OK and "2 over NVLink, 1 over an unknown way (not supported)" in found.text
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvlink=False, peer=False))
    (found,) = doctor_probes.topology(doctor_facts.nvml()[2])
    assert found.level == WARNING
    assert "2 over the NUMA node" in found.text and "other's memory: 0 and 1, 1 and 2" in found.text
    assert doctor_probes.topology([]) == []
    assert doctor_probes.topology([Link(0, 1, "NVLink", True)])[0].level == OK


def test_no_driver_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    assert doctor_facts.nvml() == (None, [], [])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor_facts.nvml() == (None, [], [])


def test_processors() -> None:
    assert doctor_probes.processors(8, 4, 1, "4")[0] == Finding("processors", OK, "4 of 8 cores, 1 NUMA node")
    assert doctor_probes.processors(8, 4, 1, "5")[0].level == WARNING
    assert "numa-binding" in doctor_probes.processors(64, 64, 2, None)[0].advice


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({"HOME": "/"}, OK, "no NCCL_"),
        ({"NCCL_DEBUG": "INFO", "TORCH_LOGS": "x"}, NOTE, "NCCL_DEBUG=INFO, TORCH_LOGS=x"),
        ({"NCCL_COMM_ID": "a:1"}, ERROR, "NCCL_COMM_ID is set"),
        ({"NCCL_P2P_DISABLE": "1"}, WARNING, "through the host"),
    ],
)
def test_variables(environment: dict[str, str], level: str, words: str) -> None:
    found = worst(doctor_probes.variables(environment))
    assert found.level == level and words in found.text


# --- ranks -----------------------------------------------------------------------------------------------------------


def answer(rank: int, **changed: Any) -> dict[str, Any]:
    """What a healthy rank answers."""
    healthy = {"rank": rank, "host": "a", "device": f"cuda:{rank}", "transport": "nccl", "torch": "2.13.0",
               "python": "3.11.7", "ringattn": "0.1.0", "message_bytes": 2**24, "bandwidth": 2e9, "latency_us": 40.0,
               "error": 2e-6}  # fmt: skip
    return {**healthy, **changed}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, OK, ""),
        ({"error": 2e-5}, ERROR, "differs from float64 by 2.0e-05, more than 1e-05"),
        ({"error": float("nan")}, ERROR, "differs from float64 by nan"),
        ({"device": "cuda:0"}, ERROR, "two ranks share a GPU"),
        ({"device": "cuda:0", "host": "b"}, OK, ""),
        ({"torch": "2.12.0"}, ERROR, "different versions of torch: 2.12.0, 2.13.0"),
    ],
)
def test_ranks_that_met(changed: dict[str, Any], level: str, words: str) -> None:
    for answers in ([answer(0), answer(1, **changed)], [answer(1, **changed), answer(0)]):
        found = worst(doctor.judged(answers))
        assert found.level == level and words in found.text


def test_the_slowest_rank_counts() -> None:
    found = {one.topic: one for one in doctor.judged([answer(0, latency_us=90.0), answer(1, bandwidth=1e9)])}
    assert found["exchange"].text == "1.00 GB/s each way in messages of 16 MiB, 90 µs for a small one"
    alone = doctor.judged([answer(0, bandwidth=None, latency_us=None)])
    assert [one.topic for one in alone] == ["ranks", "parity"]


def test_what_ranks_answer() -> None:
    answers = run_ranks(3, examine)
    assert [one["rank"] for one in answers] == [0, 1, 2]
    assert worst(doctor.judged(answers)).level == OK
    assert all(0 < one["error"] < 1e-5 and one["bandwidth"] > 0 and one["latency_us"] > 0 for one in answers)
    assert run_ranks(1, examine)[0]["bandwidth"] is None


def test_a_wrong_engine_is_no_parity() -> None:
    class Wrong(PlainEngine):
        def attend(self, q: torch.Tensor, *others: Any) -> None:
            super().attend(q * 1.001, *others)

    found = worst(doctor.judged(run_ranks(2, examine, engine=Wrong())))
    assert (found.topic, found.level) == ("parity", ERROR)


# --- the command -----------------------------------------------------------------------------------------------------


def test_words_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0 and "usage: ringattn doctor" in capsys.readouterr().out
    assert main(["doctor", "--jsn"]) == 2 and "--jsn: write options as key=value" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor that starts no process."""
    monkeypatch.setattr(doctor.facts, "system", lambda: {"os": "some Linux"})
    monkeypatch.setattr(doctor, "run_ranks_in_processes", lambda *_, **__: [answer(0), answer(1)])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def told(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit code and the document."""
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("quick")
def test_ranks_that_do_not_meet_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys)[0] == 0

    def fail(*_: Any, **__: Any) -> None:
        raise RanksError("2 ranks did not end within 60 s, so they were ended")

    monkeypatch.setattr(doctor, "run_ranks_in_processes", fail)
    code, document = told(capsys)
    assert code == 1 and document["passed"] is False and document["counts"]["error"] == 1
    (found,) = (one for one in document["findings"] if one["level"] == ERROR)
    assert "did not end within 60 s" in found["text"] and "firewall" in found["advice"]


@pytest.mark.usefixtures("quick")
def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(doctor.facts, "cores", fail)
    code, document = told(capsys)
    found = {one["topic"]: one for one in document["findings"]}
    assert code == 0 and found["processors"]["level"] == WARNING
    assert found["processors"]["text"] == "could not be looked at: OSError: no such file"
    assert "kernels" in found and document["system"] == {"os": "some Linux"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_this_machine(ranks: int, tmp_path: Path) -> None:
    # Alone, and as the ranks of torchrun: one document on standard output, progress beside it.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "ringattn", "doctor", "--json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = {one["topic"]: one for one in document["findings"]}
    assert found["torch"]["text"] == torch.__version__ and found["parity"]["level"] == OK
    assert [one["rank"] for one in document["ranks"]] == [0, 1]
    assert document["passed"] and document["system"]["torch_version"] == torch.__version__
    assert "doctor: " in done.stderr
