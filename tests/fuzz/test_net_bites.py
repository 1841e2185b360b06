"""The fuzzer finds each of these faults, which the package once had and which the tests reintroduce by patches."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import attention
from ringattn.engine import latent, rectangles
from ringattn.planner.plan import Plan
from ringattn.runtime import call
from ringattn.runtime.consistency import ComparedCall
from ringattn.runtime.executor import Executor
from ringattn.runtime.runtime import Runtime
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import Route
from tests.fuzz.draw import Case, draw, kind_of
from tests.fuzz.judge import error_of
from tests.fuzz.shrink import shrink

Finds = Callable[..., None]


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Finds:
    """Return a function that checks that the fuzzer finds the patched fault.

    One of the first `most` cases of a kind must fail with `pattern`. After the patches are undone, this case must hold.
    """

    def check(
        pattern: str, kind: str, most: int, selects: Callable[[Case], bool] = lambda case: True, shrink_s: float = 0.0
    ) -> None:
        cases = (draw(seed) for seed in count() if kind_of(seed) == kind)
        errors = ((case, error_of(case)) for case in islice(filter(selects, cases), most))
        case, error = next(((case, error) for case, error in errors if error), ({}, "nothing found"))
        assert re.search(pattern, error), error
        if shrink_s:
            smaller = shrink(case, error, shrink_s)
            assert smaller is not None and re.search(pattern, str(error_of(smaller)))
        monkeypatch.undo()
        assert error_of(case) is None

    return check


def test_causal_squares_merged_across_heads(monkeypatch: pytest.MonkeyPatch, finds: Finds) -> None:
    def by_rows(items: Any, key: Any = None) -> list[Any]:
        if key is None:
            return sorted(items)
        return sorted(items, key=lambda r: (r.q_rows, r.k_rows, r.heads) if r.causal else key(r))

    def beside(first: Any, second: Any) -> bool:
        return rectangles._follows(first.q_rows, second.q_rows) and rectangles._follows(first.k_rows, second.k_rows)

    def cheap(case: Case) -> bool:
        """Return whether a case is cheap, runs on one rank and may show the fault."""
        (first, *others), default = case["calls"], case["engine"] == "auto" and case["ranks"] == 1
        return default and not others and first["options"]["causal"] and 8 < first["seq"]["length"] < 50

    monkeypatch.setattr(rectangles, "sorted", by_rows, raising=False)
    monkeypatch.setattr(rectangles, "_continues", beside)
    finds("off by more than", "dilated", 120, cheap, shrink_s=1.5)


def test_backward_passes_that_do_not_name_their_call(monkeypatch: pytest.MonkeyPatch, finds: Finds) -> None:
    check_consistency = Runtime.check_consistency

    def forgetful(
        self: Runtime, summary: str, refusal: Any = None, always: bool = False, backward_of: Any = None, **needs: Any
    ) -> ComparedCall:
        message = summary if backward_of is None else f"backward of {summary}"
        return check_consistency(self, message, refusal, always, **needs)

    monkeypatch.setattr(Runtime, "check_consistency", forgetful)
    finds("raised nothing", "order", 20)


def local(case: Case) -> bool:
    return case.get("transport") == "local" and case["ranks"] > 1


def test_outputs_without_a_graph_if_no_local_input_needs_a_gradient(
    monkeypatch: pytest.MonkeyPatch, finds: Finds
) -> None:
    def frozen(case: Case) -> bool:
        grads = case["calls"][0].get("grads_of", ())
        return local(case) and len(case["calls"]) == 1 and "" in grads and any(grads)

    monkeypatch.setattr(attention, "anchor", lambda *_: None)
    finds("PeerLostError|got no d", "attention", 20, frozen)


def test_facts_with_only_the_name_of_a_route(monkeypatch: pytest.MonkeyPatch, finds: Finds) -> None:
    facts_of = call._facts

    def forgetful(part: Any, name: str) -> tuple[str, ...]:
        return (part.name,) if isinstance(part, Route) else facts_of(part, name)

    monkeypatch.setattr(call, "_facts", forgetful)
    finds("is answered|raised", "disagree", 20, lambda case: local(case) and "schedule" in case["odd"]["change"])


def test_a_plan_without_steps_that_starts_early(monkeypatch: pytest.MonkeyPatch, finds: Finds) -> None:
    def eager(self: Executor) -> bool:
        plan: Plan = self.plan
        packs = plan.steps[0].packs if plan.steps else ()
        return all(plan.buffers[pack.into].kind is Kind.KV for pack in packs)

    monkeypatch.setattr(Executor, "begins_with_keys", property(eager))
    finds("IndexError", "layers", 60)


def test_latents_expanded_to_values_whose_last_dimension_is_not_contiguous(
    monkeypatch: pytest.MonkeyPatch, finds: Finds
) -> None:
    def by_einsum(latents: Tensor, rotary: Tensor, w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (torch.einsum("nbl,hkl->nbhk", latents, w) for w in (w_k, w_v))
        return torch.cat([keys, rotary[:, :, None].expand(-1, -1, len(w_k), -1)], 3), values

    def fused(case: Case) -> bool:
        """Return whether torch's operator gets the values as they are expanded from latents of one number."""
        if case["function"] != "latent_attention" or case["shapes"]["latents"] != [1]:
            return False
        (heads, d_k), (_, d_v, _) = case["shapes"]["q"], case["weights"]["w_v"]
        sends_latents = case["options"]["wire"] == "latents" and case["engine"] != "plain"
        return sends_latents and heads > 1 and case["batch"] == 1 and d_v >= d_k and case["seq"]["length"] > 3

    monkeypatch.setattr(latent, "expand", by_einsum)
    finds("off by more than", "functions", 20, fused, shrink_s=1.5)
