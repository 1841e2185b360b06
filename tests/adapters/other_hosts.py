"""Hosts other than transformers: their versions, and the tests that show each feature, run in an environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.adapters.environments import FIRST, environment, python_of_tests
from tests.adapters.processes import ROOT

FAILED, REFUSED, IMPOSSIBLE = "failed: ", "refused: ", "not possible: "
"""What a verdict that is no error begins with."""
Verdict = float | str
"""The largest error, or one of the words above and a sentence."""
_RAISED = re.compile(r"(?:UnsupportedError|InputError|ringattn script): (?!loading )(.*?)(?:\\n|$)", re.MULTILINE)
"""A refusal in a traceback, or on the error output of `ringattn script`, which a failed comparison may show escaped."""

_NO_GPU = "0 active drivers ([])"
"""What Triton raises when a kernel is launched on a machine without a GPU."""


class OtherHost(NamedTuple):
    """A package with an adapter.

    `file`: the tests of most features. `versions`: by version, requirements that pip installs next to it. `features`:
    by feature, a test or a case of `file`, or another file, or a test in it. `refused`: features whose tests show a
    refusal. `adapter`: the module in which `HOST` checks the version. `python`: the oldest Python of versions that need
    a newer one than ringattn does. `quick`: leave out slow tests.
    """

    package: str
    file: str
    versions: Mapping[str, tuple[str, ...]]
    features: Mapping[str, str]
    refused: tuple[str, ...] = ()
    adapter: str = ""
    python: Mapping[str, tuple[int, int]] = {}
    quick: bool = False

    def tests(self) -> dict[str, str]:
        """Return by feature the file of its tests, its test or case."""
        return {name: test if ".py" in test else f"{self.file}::{test}" for name, test in self.features.items()}


_CUDA = (
    "nvidia-cublas==13.1.1.3", "nvidia-cuda-cupti==13.0.85", "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96", "nvidia-cudnn-cu13==9.24.0.43", "nvidia-cufft==12.0.0.61",
    "nvidia-cufile==1.15.1.6", "nvidia-curand==10.4.0.35", "nvidia-cusolver==12.0.4.66", "nvidia-cusparse==12.6.3.3",
    "nvidia-cusparselt-cu13==0.8.1", "nvidia-nccl-cu13==2.30.7", "nvidia-nvjitlink==13.4.92",
    "nvidia-nvshmem-cu13==3.4.5", "nvidia-nvtx==13.0.85",
)  # fmt: skip
"""Libraries that torch's build of the package index loads, also on a machine without a GPU."""
OTHERS = {
    "accelerate": OtherHost(
        "accelerate",
        "adapters/test_script.py",
        dict.fromkeys(("1.12.0", "1.13.0", "1.14.0", "1.15.0"), ()),
        {
            "a loop, `ringattn script`": "test_a_script_over_one_ring_equals_one_process[loop]",
            "a loop, masked labels": "test_a_script_over_one_ring_equals_one_process[loop, masked]",
            "a loop over two rings": "test_a_script_over_two_rings_equals_two_processes[loop]",
            "Trainer over two ranks": "adapters/test_transformers_trainer.py::test_checkpointed_layers_of_both_routes",
            "`RingParallelismConfig`": "adapters/test_transformers_trainer.py::test_a_trainer_gets_the_ring",
            "batches split among ranks": "test_loops_that_cannot_be_exact_are_refused",
        },
        ("batches split among ranks",),
        "accelerate",
    ),
    "TRL": OtherHost(
        "trl",
        "adapters/test_trl.py",
        dict.fromkeys(("1.14.2", "1.15.0", "1.16.0"), ()),
        {
            "SFTTrainer": "adapters/test_script.py::test_sfttrainer_with_the_name_of_the_attention",
            **{
                f"{name}Trainer": f"test_losses_of_whole_texts_over_two_processes[{name}]"
                for name in ("DPO", "KTO", "Reward", "GRPO", "RLOO")
            },
        },
    ),
    "PEFT": OtherHost(
        "peft",
        "adapters/test_trl.py",
        dict.fromkeys(("0.19.1", "0.20.0", "0.21.2"), ()),
        {"18 kinds of adapters, SFTTrainer": "test_sft_and_adapters_over_two_processes"},
    ),
    "Lightning": OtherHost(
        "lightning",
        "adapters/test_lightning.py",
        dict.fromkeys(("2.5.6", "2.6.1", "2.6.6"), ()),
        {
            "two rings, packed, compiled, FSDP2": "test_training_goes_the_way_of_one_process_or_is_refused",
            "a mean over targets of all ranks": "test_a_mean_over_ranks_of_which_some_have_no_target",
            "the script of five changed lines": "adapters/test_host_diffs.py::"
            "test_a_changed_script_equals_the_script_on_one_process[('Lightning',)]",
            "a ring that does not fit": "test_rings_that_do_not_fit_are_refused",
        },
        ("a ring that does not fit",),
        "lightning",
    ),
    "diffusers": OtherHost(
        "diffusers",
        "adapters/test_diffusers.py",
        dict.fromkeys(("0.39.0", "0.40.0", "0.41.0", "0.42.1"), ()),
        {
            "Flux": "test_a_flux_transformer_equals_one_process[2-plain]",
            "Flux, gradient checkpointing": "test_a_flux_transformer_equals_one_process[2-checkpointing]",
            "Flux, compiled": "test_a_flux_transformer_equals_one_process[2-compile]",
            "Flux, FSDP2 and LoRA": "test_sharded_weights_and_adapters_over_two_processes",
            "cross attention": "test_a_block_with_cross_attention_equals_one_process",
            "IP adapters": "test_an_ip_adapter_is_refused",
        },
        ("IP adapters",),
        "diffusers",
    ),
    "DeepSpeed": OtherHost(
        "deepspeed",
        "adapters/test_deepspeed.py",
        # A plain process imports it too, because accelerate looks for it.
        dict.fromkeys(
            ("0.19.6", "0.19.8"),
            ("hjson==3.1.0", "ninja==1.13.2", "py-cpuinfo==9.0.0", "msgpack==1.2.4", "einops==0.8.2"),
        ),
        {
            "engine, ZeRO 0 to 2, offloaded": "test_the_engine_over_one_ring_equals_one_process"
            "[('0', '1', '2', '1, offloaded', '2, offloaded')]",
            "engine, ZeRO 3, offloaded": "test_the_engine_over_one_ring_equals_one_process[('3', '3, offloaded')]",
            "engine over two rings, ZeRO 3": "test_the_engine_over_two_rings_equals_one_process[('3',)]",
            "a loop of accelerate, ZeRO 2": "test_a_loop_of_accelerate_equals_as_many_processes_as_rings[loop-1-2]",
            "`ringattn script`, a Trainer": "test_a_script_equals_one_process",
        },
        (),
        "deepspeed",
    ),
    "Megatron Core": OtherHost(
        "megatron-core",
        "adapters/test_megatron.py",
        dict.fromkeys(("0.15.3", "0.16.0", "0.16.1", "0.19.2"), ()),
        {
            "GPT: packed, FSDP2, compiled, 13 cases": "test_a_model_over_two_processes_equals_one",
            "windows": "test_windows_of_the_layers_that_have_one",
            "sinks": "test_sinks",
            "latent attention, float32": "test_latent_attention",
            "a group for each batch": "test_a_batch_may_bring_its_own_group",
            "what its core attention lacks": "test_what_is_refused",
        },
        ("what its core attention lacks",),
        "megatron",
        {"0.19.2": (3, 12)},
    ),
    "torchtitan": OtherHost(
        "torchtitan",
        "adapters/test_torchtitan.py",
        dict.fromkeys(("0.2.2", "0.3.0"), ()),
        {
            "Llama 3, load balancers, LoRA": "test_a_model_over_two_processes_equals_one",
            "its Trainer, 10 steps, float32": "test_ten_steps_over_a_ring_equal_one_process[2-cases0]",
            "activation checkpointing": "test_recomputation_has_its_sequence_as_an_argument",
            "windows": "test_windows_and_what_is_made_of_lse",
            "tensor parallelism": "test_heads_over_ranks_of_tensor_parallelism",
            "options of its Trainer": "test_what_the_trainer_may_not_ask_for",
        },
        ("options of its Trainer",),
        "torchtitan",
    ),
    "torch": OtherHost(
        "torch",
        "",
        {"2.11.0": _CUDA, "2.12.1": _CUDA, "2.13.0": (), "2.14.1": _CUDA},
        {
            "masks, layouts, schedules, float64": "test_exact.py::test_float64",
            "sequences": "test_sequence.py",
            "changes in place": "test_in_place.py",
            "SDPA, `context_parallel`": "adapters/test_sdpa.py",
            "flex attention": "adapters/test_flex.py",
            "`torch.compile`": "adapters/test_compile.py",
            "forward of transformers models": "adapters/test_transformers_forward.py",
        },
        quick=True,
    ),
}
"""By name. The versions of torch run the quick tests; `make test` runs all of them with the installed version."""


def folders(host: OtherHost, version: str, python: str) -> list[Path]:
    """Return the folders to put first on PYTHONPATH. Skips the test if no package index can be reached."""
    packages = (f"{host.package}=={version}",), host.versions[version]
    return [environment(*requirements, python=python) for requirements in packages if requirements]


def run_features(host: OtherHost, version: str) -> tuple[dict[str, Verdict], int]:
    """Run the tests of all features with a version. Return the verdicts, and the number of tests that passed.

    Raises `RuntimeError` if the version cannot be installed, or if its tests crash.
    """
    python = python_of_tests(host.python.get(version, (3, 11)))
    before = folders(host, version, python)
    first = os.pathsep.join(map(str, before))
    variables = {
        **os.environ, FIRST: first, "PYTHONPATH": os.pathsep.join([first, str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "",  # pip has not compiled these packages
        "LD_LIBRARY_PATH": os.pathsep.join(str(lib) for folder in before for lib in folder.glob("nvidia/*/lib")),
    }  # fmt: skip
    by_file: dict[str, list[str]] = {}
    tests = host.tests()
    for test in tests.values():
        by_file.setdefault(test.split("::")[0], []).append(test)
    cases = [case for of_file in by_file.values() for case in run_cases(python, of_file, host.quick, variables)]
    verdicts = {name: verdict_of(test, name in host.refused, cases) for name, test in tests.items()}
    passed = sum(case.outcome == "passed" for case in cases)
    if any(str(verdict).startswith(IMPOSSIBLE) for verdict in verdicts.values()) and host.adapter:
        refusal = _refusal(python, host.adapter, variables)
        if refusal:
            verdicts = {
                name: REFUSED + refusal if str(verdict).startswith(IMPOSSIBLE) else verdict
                for name, verdict in verdicts.items()
            }
    return verdicts, passed


class Case(NamedTuple):
    """A test case in a JUnit file. `outcome`: passed, skipped, failure or error."""

    test: str
    outcome: str
    message: str
    text: str
    properties: dict[str, str]


def run_cases(python: str, tests: list[str], is_quick: bool, variables: Mapping[str, str]) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        command = [
            python, "-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "no:cacheprovider",
            "-p", "tests.adapters.worst_errors",
            "-o", "enable_assertion_pass_hook=true", "--timeout=280", f"--junitxml={file}",
            "-m", "not slow" if is_quick else "slow or not slow", *(str(ROOT / "tests" / test) for test in tests),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode < 0:  # a crash of torch, for example
            raise RuntimeError(f"tests of {tests[0].split('::')[0]} end by {signal.Signals(-done.returncode).name}")
        assert file.exists(), (done.stdout + done.stderr)[-2000:]
        return [_case(element) for element in ElementTree.parse(file).iter("testcase")]


def _case(element: ElementTree.Element) -> Case:
    module, name = element.get("classname", "").removeprefix("tests.").replace(".", "/"), element.get("name", "")
    properties = {entry.get("name", ""): entry.get("value", "") for entry in element.iter("property")}
    for outcome in ("failure", "error", "skipped"):
        if (found := element.find(outcome)) is not None:
            return Case(f"{module}.py::{name}", outcome, found.get("message", ""), found.text or "", properties)
    return Case(f"{module}.py::{name}", "passed", "", "", properties)


def verdict_of(test: str, is_refused: bool, cases: Iterable[Case]) -> Verdict:
    """Return the verdict of the cases of a feature: the first that did not pass, or the largest error of all."""
    matching = [case for case in cases if case.test == test or case.test.startswith((f"{test}[", f"{test}::"))]
    ran = [case for case in matching if case.outcome != "skipped"]
    for case in ran:
        if case.outcome != "passed":
            text = f"{case.message}\n{case.text}"
            if _NO_GPU in text:
                return IMPOSSIBLE + "a Triton kernel needs a GPU"
            refusals = _RAISED.findall(text)
            return REFUSED + refusals[-1] if refusals else FAILED + sentence(case)
    if not ran:
        reasons = [case for case in (*matching, *cases) if case.outcome in ("error", "skipped")]
        return IMPOSSIBLE + (sentence(reasons[0]) if reasons else "no test ran")
    if is_refused:
        return REFUSED + next(
            (case.properties["refusal"] for case in ran if "refusal" in case.properties), "by its tests"
        )
    return max((float(case.properties["error"]) for case in ran if "error" in case.properties), default=0.0)


def sentence(case: Case) -> str:
    """Return the last line of a case's message or traceback that names an error, at most 200 characters."""
    for text in (case.message, case.text):
        lines = [line.removeprefix("E ").strip() for line in text.splitlines()]
        if named := [line for line in lines if re.match(r"[\w.]*(?:Error|Exception)\b", line)]:
            return named[-1][:200]
    return case.message.partition("\n")[0][:200]


def _refusal(python: str, adapter: str, variables: Mapping[str, str]) -> str:
    """Return the error of the adapter's check of the version, or nothing."""
    program = f"from ringattn.adapters.{adapter} import HOST; HOST.require()"
    done = subprocess.run([python, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True)
    return (_RAISED.findall(done.stderr) or [""])[-1]
