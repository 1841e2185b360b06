"""Runs a case, compares its results with the reference, and reports what is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import InputError, RingError
from tests.fuzz import calls, functions, layers, sequences, states
from tests.fuzz.draw import Case
from tests.fuzz.expected import Expected, Results, expected
from tests.fuzz.legal import calls_differ, must_refuse
from tests.fuzz.ranks import SharedProcesses, on_threads

Outcomes = list[Any]
_processes = SharedProcesses()


class Wrong(AssertionError):
    """The error that describes what is wrong with a case."""


def check(case: Case) -> None:
    """Run the case. Raises `Wrong` if a result or a refusal is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case["kind"] == "sequences":
            _all_returned(on_threads(sequences.on_rank, case | {"engine": "plain", "ring": {}}))
        elif case["kind"] == "order" and "calls" not in case:
            _order(case, on_threads(sequences.gathers_on_rank, case))
        elif case["kind"] == "layers":
            _layer(case)
        elif case["kind"] == "states":
            _states(case)
        elif case["kind"] == "functions":
            _function(case)
        else:
            _calls(case)


def error_of(case: Case) -> str | None:
    """Return what is wrong with a case, or None."""
    try:
        check(case)
    except Wrong as wrong:
        return str(wrong)
    return None


def _all_returned(outcomes: Outcomes) -> Outcomes:
    """Return `outcomes`. Raises `Wrong` if any is an error, preferably one that no other rank's error caused."""
    errors = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    if not errors:
        return outcomes
    rank, error = next((outcome for outcome in errors if not isinstance(outcome[1], RingError)), errors[0])
    raise Wrong(f"rank {rank} raised {type(error).__name__}: {error}") from error


def _calls(case: Case) -> None:
    apart = case["kind"] == "processes" or case.get("transport") in ("shm", "gloo")
    apart |= case["kind"] == "triton" and case["ranks"] > 1  # Triton's interpreter has no threads
    run: Callable[..., Outcomes] = _processes.run if apart else on_threads
    try:
        outcomes = run(calls.on_rank, case)
    except AssertionError as error:
        raise Wrong(str(error)) from error
    if case["kind"] == "order" and not any(must_refuse(case, call) for call in case["calls"]):
        _order(case, outcomes)
        return
    if any(call["in_place"] for call in case["calls"]) and _changed_in_place(outcomes):
        return
    if case.get("transport") == "nccl" and _needs_changed(case, outcomes):
        return
    by_rank = _all_returned(outcomes)
    refused = []
    for index, call in enumerate(case["calls"]):
        refusals = [result[index].get("refused") for result in by_rank]
        if any(refusals) and not all(refusals):
            raise Wrong(f"call {index}: refused on some ranks only: {refusals}")
        reason = must_refuse(case, call)
        if index == 0 and calls_differ(case):
            reason = reason or f"rank {case['odd']['rank']} asks for something else: {case['odd']['change']}"
        if reason and not refusals[0]:
            raise Wrong(f"call {index} is answered, and {reason}")
        if refusals[0] and not reason:
            raise Wrong(f"call {index} is refused: {refusals[0]}")
        refused.append(bool(refusals[0]))
    for index, expected_results in enumerate(expected(case, refused)):
        if expected_results is not None:
            call, shards = case["calls"][index], [result[index] for result in by_rank]
            whole = joined(
                case, call, _with_frozen(case, call, shards, expected_results) if "grads_of" in call else shards
            )
            compare(f"call {index}", whole, expected_results, nan=bool(case.get("nan")))


def _needs_changed(case: Case, outcomes: Outcomes) -> bool:
    """Return whether heartbeats ended the ring because two equal calls differ in which ranks need gradients.

    This happens only after a call without gradient mode, on a transport that compares equal calls only once.
    """
    modes = {call["mode"] for call in case["calls"] if "grads_of" in call}
    causes = [isinstance(outcome, RingError) and "on one of the two ranks only" in str(outcome) for outcome in outcomes]
    return bool(modes & {"no_grad", "inference", "reentrant"}) and len(case["calls"]) > 1 and all(causes)


def _with_frozen(
    case: Case, call: Case, shards: Sequence[calls.CallResult], expected_results: Results
) -> list[calls.CallResult]:
    """Return the shards with the expected gradients in place of those that a rank does not need.

    If a rank does not need the gradient of the sinks, remove it from the results and from the expected results.
    """
    filled = [dict(shard) for shard in shards]
    rows = {"dq": calls.owned(call["seq"], case)}
    rows["dk"] = rows["dv"] = calls.owned(call["kv_seq"] or call["seq"], case)
    for rank, (grads, result) in enumerate(zip(call["grads_of"], filled, strict=True)):
        for name in rows.keys() & result.keys():
            if name[1] not in grads:
                if result[name] is not None:
                    raise Wrong(f"rank {rank} got {name}, which needs no gradient there")
                if name in expected_results:
                    result[name] = expected_results[name].value[:, rows[name][rank]]
            elif result[name] is None and name in expected_results:
                raise Wrong(f"rank {rank} got no {name}, which needs a gradient there")
    if not all("s" in grads for grads in call["grads_of"]):
        filled = [result | {"dsinks": None} if "dsinks" in result else result for result in filled]
        expected_results.pop("dsinks", None)
    return filled


def _changed_in_place(outcomes: Outcomes) -> bool:
    """Return whether autograd reported on every rank that a result needed by backward was changed in place."""
    autograd_errors = [isinstance(outcome, RuntimeError) for outcome in outcomes]
    return all(autograd_errors) and any("modified by an inplace operation" in str(outcome) for outcome in outcomes)


def _layer(case: Case) -> None:
    by_rank = _all_returned(on_threads(layers.on_rank, case))
    call = {"op": "", "bad": None, "kv_seq": None, "sinks": None} | case
    refusals = [result.get("refused") for result in by_rank]
    if any(refusals) and not all(refusals):
        raise Wrong(f"refused on some ranks only: {refusals}")
    reason = must_refuse(case, call)
    if bool(reason) != bool(refusals[0]):
        raise Wrong(f"the layer is refused: {refusals[0]}" if refusals[0] else f"the layer answers, and {reason}")
    if refusals[0]:
        return
    _compare_shards(by_rank, layers.expected(case))


def _function(case: Case) -> None:
    by_rank = _all_returned(on_threads(functions.on_rank, case))
    refusals, reason = [result.get("refused") for result in by_rank], functions.must_refuse(case)
    if any(bool(reason) != bool(refusal) for refusal in refusals):
        raise Wrong(f"refused: {refusals}; it should be refused because {reason}")
    if not reason:
        _compare_shards(by_rank, functions.expected(case))


def _compare_shards(by_rank: Outcomes, expected_results: Results) -> None:
    """Compare the shards of all ranks, with tokens in dimension 1, and the sums of results named "weight ..."."""
    rows = torch.cat([result["rows"] for result in by_rank])
    for name, expected_result in expected_results.items():
        value, shards = expected_result.value, [result[name] for result in by_rank]
        if name.startswith("weight "):
            whole = sum((result for result in shards if result is not None), torch.zeros_like(value))
        else:
            every = torch.cat([torch.zeros_like(value) if result is None else result for result in shards], 1)
            whole = torch.empty_like(every).index_copy_(1, rows, every)
        _compare_one(name, whole, expected_result)


def _states(case: Case) -> None:
    run: Callable[..., Outcomes] = _processes.run if case["transport"] in ("shm", "gloo") else on_threads
    try:
        by_rank = _all_returned(run(states.on_rank, case))
    except AssertionError as error:
        raise Wrong(str(error)) from error
    refusals = [result.get("refused") for result in by_rank]
    reason = states.must_refuse(case)
    if any(bool(reason) != bool(refusal) for refusal in refusals):
        raise Wrong(f"refused: {refusals}; it should be refused because {reason}")
    if reason:
        return
    rows = torch.cat([result["rows"] for result in by_rank])
    for name, expected_result in states.expected(case).items():
        every = torch.cat([result[name] for result in by_rank]).double()
        _compare_one(name, torch.empty_like(every).index_copy_(0, rows, every), expected_result)


def _order(case: Case, outcomes: Outcomes) -> None:
    """Check that every rank raises an error of the ring if one rank runs its backward passes in another order."""
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, BaseException):
            raise Wrong(f"rank {case['odd']['rank']} went backward in another order, and rank {rank} raised nothing")
        if not isinstance(outcome, RingError):
            raise Wrong(f"rank {rank} raised {type(outcome).__name__}: {outcome}") from outcome
    if not any(isinstance(outcome, InputError) for outcome in outcomes):
        errors = [f"{type(outcome).__name__}: {outcome}" for outcome in outcomes]
        raise Wrong(f"no rank says that the ranks disagree: {errors}")


def joined(case: Case, call: Case, parts: Sequence[calls.CallResult]) -> dict[str, Tensor | None]:
    """Join the shards of all ranks to whole tensors; sum the gradient of the sinks.

    `parts`: the results of each rank.
    """
    whole: dict[str, Tensor | None] = {}
    q_rows = torch.cat(calls.owned(call["seq"], case))
    k_rows = torch.cat(calls.owned(call["kv_seq"] or call["seq"], case))
    for name in parts[0]:
        shards = [part[name] for part in parts]
        if name == "dsinks":
            shards = [shard for shard in shards if shard is not None]
            whole[name] = torch.stack(shards).sum(0) if shards else None
        elif any(shard is None for shard in shards):
            whole[name] = None
        else:
            dim = 2 if name == "lse" else 1
            rows, every = k_rows if name in ("dk", "dv") else q_rows, torch.cat(shards, dim)
            whole[name] = torch.empty_like(every).index_copy_(dim, rows, every)
    return whole


def compare(call_name: str, results: dict[str, Tensor | None], expected_results: Results, nan: bool = False) -> None:
    """Raise `Wrong` if a result differs by more than its tolerance, or is not finite where it should be.

    `nan`: the inputs contain NaN, so any result may contain NaN.
    """
    for name, value in results.items():
        expected_result = expected_results.get(name)
        if value is None and (expected_result is None or name == "lse"):
            continue
        if expected_result is None:
            assert value is not None
            zeros = torch.zeros_like(value)
            expected_result = Expected(zeros, zeros, zeros.bool() if nan else None)
        _compare_one(
            f"{call_name}: {name}", torch.zeros_like(expected_result.value) if value is None else value, expected_result
        )


def _compare_one(name: str, actual: Tensor, expected_result: Expected) -> None:
    value, tolerance, nan = expected_result
    if actual.shape != value.shape:
        raise Wrong(f"{name} is {tuple(actual.shape)}, not {tuple(value.shape)}")
    if not actual.numel():
        return
    exempt = torch.zeros_like(value, dtype=torch.bool)
    if nan is not None:
        lost = nan & actual.isfinite()
        if lost.any():
            raise Wrong(f"{name}: a NaN came back as {float(actual[lost][0])} at {lost.nonzero()[0].tolist()}")
        exempt = actual.isnan()
    same_ends = value.isinf() & (actual == value)
    off = torch.where(same_ends | exempt, 0.0, (actual - value).abs())
    bad = ~(off <= tolerance)
    if bad.any():
        worst = torch.where(bad, off.nan_to_num(nan=torch.inf) - tolerance, -torch.inf).argmax()
        where = [int(i) for i in torch.unravel_index(worst, value.shape)]
        raise Wrong(
            f"{name} is {float(actual[tuple(where)]):.9g} at {where}, not {float(value[tuple(where)]):.9g} "
            f"({int(bad.sum())} of {bad.numel()} elements off by more than {float(tolerance.max()):.2g}, "
            f"the worst by {float(off[bad].nan_to_num(nan=torch.inf).max()):.3g})"
        )
