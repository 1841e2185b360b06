"""The product's engine on kernels in the PTX interpreter, compared with a float64 reference.

`python -m tests.kernels.ptx.cases FILE [case ...]` runs cases in forked children, two at a time, and writes what they
found to FILE. `python -m tests.kernels.ptx.cases seeds N [case ...]` runs cases with N other seeds and prints faults.
A case is a scenario, a head dimension and variants, such as `zigzag/64/float16/packed` for the Gluon kernels, or
`zigzag/64/pointers/sm_80`. With dimension 192, values have 128. The case's seed decides on the inputs, on the turns of
the warps and on when copies land.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange
from ringattn.engine import triton as engine_module
from ringattn.engine.base import KV, Accumulating
from ringattn.engine.triton import TritonEngine
from tests.contract import engine_trial
from tests.contract.engine_scenarios import DOCUMENTS, SCENARIOS, Scenario, simple, strip, whole
from tests.contract.engine_trial import NEITHER, ONLY, Trial
from tests.kernels.compile_gate.cases import value_dim_of
from tests.kernels.compile_gate.compiling import Gate, all_compiled
from tests.kernels.ptx.driver import InterpreterDriver
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.rules import OF_TENSOR_MEMORY, OF_TRITON, STRICT
from tests.oracle import attention

LONG = {
    "window-long": simple(((strip(0, 420), strip(0, 420), Band(0, 290)),), StridedRange(0, 1), 1),
    "documents": simple(DOCUMENTS, StridedRange(0, 4), 2, group=2),
    "ring-of-three": whole(
        tuple(((strip(400, 200), strip(start, 200), CAUSAL),) for start in (400, 200, 0)), 200, 2, 2
    ),
    "ring-of-two": whole((((strip(150, 150), strip(150, 150), CAUSAL),), ((strip(150, 150), strip(0, 150), FULL),)),
                         150, 1, 1, batch=2),
    "alibi-both-sides": simple(
        ((strip(70, 150), strip(0, 300), FULL), (strip(70, 150), strip(300, 90, row=3), FULL)), StridedRange(0, 2), 1,
        group=2, alibi=True, first_head=1, starts=((0, 5),),
    ),
    "alibi-softcap-causal": simple(
        ((strip(0, 200), strip(0, 200), CAUSAL),), StridedRange(0, 2), 2, alibi=True, softcap=1.5
    ),
}  # fmt: skip
"""Scenarios with several blocks of 128 rows, next to those of the engine contract, whose steps mostly have one."""

CASES = (
    "causal-long/64", "window-long/64/packed", "ring-of-three/64", "zigzag/64/packed", "full/64", "striped/64",
    "dilated/64/float16", "blind/64", "part-of-the-heads/64", "whole-zigzag-pass/64/sinks", "documents/64",
    "both-sides/64", "ring-of-two/64/only/float16", "causal/64/far",
    "softcap/64", "alibi/64/only", "alibi-documents/128/float16", "alibi-both-sides/128",
    "ring-of-two/256/only", "softcap/256/float16", "causal-long/192", "ring-of-two/192/only/float16/packed",
    "causal-long/64/fused", "zigzag/64/packed/fused", "ring-of-three/64/float16/low/fused",
    "whole-zigzag-pass/128/only/fused",
    "causal-long/128/packed", "ring-of-two/128", "dilated/128/float16", "whole-zigzag-pass/128/only/sinks",
)  # fmt: skip

TENSOR_MEMORY_CASES = (
    "causal-long/64/sm_100", "window-long/64/sm_100/packed", "ring-of-three/64/sm_100/float16", "blind/64/sm_100",
    "whole-zigzag-pass/64/sm_100/sinks", "part-of-the-heads/64/sm_100", "documents/128/sm_100",
    "ring-of-two/128/sm_100/only", "dilated/128/sm_100/float16",
)  # fmt: skip
"""Cases of the Gluon kernels for sm_100."""

TRITON_CASES = (
    "causal-long/64/pointers/sm_80", "zigzag/64/pointers/sm_80/fused", "dilated/64/pointers/sm_80/float16",
    "alibi-documents/64/pointers", "causal/64/pointers/far", "full/64/pointers/float16/records",
    "causal-long/64/descriptors", "dropout/64/descriptors", "full/64/descriptors/fused", "whole-call/64/descriptors",
    "whole-zigzag-pass/64/descriptors/only/sinks", "both-sides/128/descriptors/float16/packed",
    "full/64/descriptors/sm_100", "full/64/descriptors/sm_100/fused", "causal-long/64/pointers/sm_100/fused",
    "both-sides/128/descriptors/sm_100/float16/packed", "ring-of-two/128/descriptors/sm_100/fused",
)  # fmt: skip
"""Cases of the kernels that do not use Gluon, with the kernel of delta."""

STRICT_CASES = {
    "full/64/pointers/strict": "a product of shared memory that may still be written, or without a proxy fence",
    "full/64/descriptors/sm_100/waited": "a register is read before its load of tensor memory has been waited for",
}
"""Faults of the same kernels by the rules of PTX that `rules.OF_TRITON` relaxes."""

RULES_OF = dict.fromkeys(
    ("tcgen05_forward_kernel", "tcgen05_grad_q_kernel", "tcgen05_grad_kv_kernel"), OF_TENSOR_MEMORY
)
"""The rules of kernels other than those of a case."""

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Bounds on the relative Frobenius error, those of the interpreted kernels (tests/kernels/interpreter)."""
LSE_TOLERANCE = 2e-7
LOW = 16
"""What is added to a column of q and subtracted from that of k. With the trial's scale, logits are lower by 77."""

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: pages exist only once they are written."""


class Outcome(NamedTuple):
    """What a case found: the relative error of each result, and the kernels that ran, with the number of launches."""

    errors: dict[str, float]
    launches: dict[str, int]


class GluonEngine(TritonEngine):
    """The Triton engine on Gluon kernels, with delta computed by torch."""

    delta = Accumulating.delta


def is_gluon(variants: Sequence[str]) -> bool:
    """Return whether a case runs the Gluon kernels."""
    return not {"pointers", "descriptors"} & {*variants}


def engine_for(variants: Sequence[str], sm_margin: int) -> TritonEngine:
    """Return the engine that runs the kernels of a case."""
    if is_gluon(variants):
        return GluonEngine(form="gluon", sm_margin=sm_margin, deterministic="fused" not in variants)
    form = "pointers" if "pointers" in variants else "descriptors"
    return TritonEngine(form=form, sm_margin=sm_margin, deterministic="fused" not in variants)


def architecture_of(variants: Sequence[str]) -> int:
    """Return the architecture of a case, 90 by default."""
    return next((int(x.removeprefix("sm_")) for x in variants if x.startswith("sm_")), 90)


class PtxTrial(Trial):
    """A trial of the engine contract whose keys and values may be parts of the same rows in memory."""

    def __init__(self, name: str, seed: int) -> None:
        scenario, dim, *variants = name.split("/")
        facts: Scenario = (SCENARIOS | LONG)[scenario]
        # Descriptors need strides that are multiples of 16 bytes, which the contract's records do not have.
        memory = "heads" if facts.memory == "heads" else "records" if "records" in variants else "tokens"
        self.far = "far" in variants
        facts = facts._replace(d_k=int(dim), d_v=value_dim_of(int(dim)), memory=memory)
        super().__init__(facts, torch.float16 if "float16" in variants else torch.bfloat16, "documents" in name, seed)
        self.visit = ONLY if "only" in variants else NEITHER
        if "packed" in variants:
            self.kvs = [_packed(kv) for kv in self.kvs]
        if "low" in variants:
            # All logits are so low that the weight of a key of zeros exceeds float16: keys past the end must be masked.
            self.q[..., 0] += LOW
            for kv in self.kvs:
                kv.k[..., 0] -= LOW
        if "sinks" in variants:
            self.sinks = torch.randn(facts.heads, generator=self.generator)

    def _input(self, *how: Any) -> Tensor:
        return far(super()._input(*how)) if self.far else super()._input(*how)

    def _output(self, values: Tensor) -> Tensor:
        return far(values) if self.far else super()._output(values)

    def reference(self) -> dict[str, Tensor]:
        """Return the results of the oracle, with the sinks of this trial."""
        with patch.object(engine_trial, "attention", lambda *how: attention(*how[:6], self.sinks, *how[7:])):
            return super().reference()

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        """Check which rows the engine wrote, and return the relative Frobenius error of each result."""
        self.check(results, inf)
        reference = self.reference()
        errors = {name: relative_error(results[name], reference[name]) for name in reference}
        self.check_margins()
        return errors


def far(values: Tensor) -> Tensor:
    """Return a copy whose rows are so far apart that offsets exceed 32 bits, in memory of which few pages exist."""
    distance = 1 << 25
    size = len(values) * distance * values.element_size()
    memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS | NO_RESERVE)
    _, _, heads, dim = values.shape
    view = torch.frombuffer(memory, dtype=values.dtype).as_strided(values.shape, (distance, heads * dim, dim, 1))
    return view.copy_(values)


def _packed(kv: KV) -> KV:
    both = torch.cat((kv.k, kv.v), 3)
    return KV(both[..., : kv.k.shape[3]], both[..., kv.k.shape[3] :], kv.first_head)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return the relative Frobenius error of a result, outside NaN and infinity."""
    inside = ~result.isnan() & ~reference.isinf()
    # A reference of zeros has no relative error.
    return float((result.double() - reference)[inside].norm() / (reference[inside].norm() or 1.0))


@cache
def _driver() -> InterpreterDriver:
    return InterpreterDriver().activated()


def interpreter(architecture: int = 90) -> InterpreterDriver:
    """Let Triton and the engine see a GPU of an architecture that is the interpreter, from now on in this process."""
    patch.object(engine_module, "architecture", lambda device: architecture).start()
    device = _driver()
    # Triton keeps what it compiles by the number of the device.
    device.target, device.device = GPUTarget("cuda", architecture, 32), architecture
    return device


def run(name: str, seed: int | None = None) -> Outcome:
    """Run forward and backward of a case. Raises Fault if a kernel has an error, whatever its results are."""
    rng = Random(name if seed is None else f"{name}/{seed}")
    variants = name.split("/")[2:]
    device = interpreter(architecture_of(variants))
    device.rng, device.late, device.ran = rng, rng.random() < 0.5, []
    strict = (is_gluon(variants) and device.device == 90) or "strict" in variants
    device.rules = STRICT if strict else OF_TRITON._replace(waited_loads="waited" in variants)
    device.rules_of = RULES_OF
    device.properties["multiprocessor_count"] = rng.choice((1, 2, 3))
    trial = PtxTrial(name, rng.randrange(1 << 20))
    results = trial.run(engine_for(variants, rng.choice((0, 0, 1))), trial.visit)
    return Outcome(trial.errors(results), Counter(function.name for function in device.ran))


def main(arguments: Sequence[str], cases: Sequence[str], run: Callable[..., Outcome]) -> None:
    """Run cases and write what they found, or run them with other seeds."""
    if arguments[0] == "seeds":
        for seed in range(int(arguments[1])):
            for name in arguments[2:] or cases:
                try:
                    print(name, seed, run(name, seed), flush=True)
                except Fault as fault:
                    print(name, seed, "FAULT", fault, flush=True)
        return
    gate = Gate("ptx", Path(), cases, (), run)
    outcomes = dict(all_compiled(arguments[1:] or cases, gate))
    Path(arguments[0]).write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:], (*CASES, *TENSOR_MEMORY_CASES, *TRITON_CASES, *STRICT_CASES), run)
