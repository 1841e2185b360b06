"""Runs a case and says what is wrong with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import InputError, RingError
from tests.fuzz import calls, layers, sequences
from tests.fuzz.draw import Case
from tests.fuzz.expected import Results, Wanted, expected
from tests.fuzz.legal import asks_for_another, must_refuse
from tests.fuzz.ranks import SharedProcesses, on_threads

Outcomes = list[Any]
_processes = SharedProcesses()


class Wrong(AssertionError):
    """What a case found."""


def check(case: Case) -> None:
    """Run the case. Raises `Wrong`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case["kind"] == "sequences":
            _all_returned(on_threads(sequences.on_rank, case | {"engine": "plain", "ring": {}}))
        elif case["kind"] == "order" and "calls" not in case:
            _order(case, on_threads(sequences.gathers_on_rank, case))
        elif case["kind"] == "layers":
            _layer(case)
        else:
            _calls(case)


def error_of(case: Case) -> str | None:
    """Return what is wrong with a case, if anything."""
    try:
        check(case)
    except Wrong as wrong:
        return str(wrong)
    return None


def _all_returned(outcomes: Outcomes) -> Outcomes:
    """Raises the first error of a rank that is not another's."""
    errors = [(rank, one) for rank, one in enumerate(outcomes) if isinstance(one, BaseException)]
    if not errors:
        return outcomes
    rank, error = next((one for one in errors if not isinstance(one[1], RingError)), errors[0])
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
    found = _all_returned(outcomes)
    refused = []
    for index, call in enumerate(case["calls"]):
        refusals = [one[index].get("refused") for one in found]
        if any(refusals) and not all(refusals):
            raise Wrong(f"call {index}: refused on some ranks only: {refusals}")
        why = must_refuse(case, call)
        if index == 0 and asks_for_another(case):
            why = why or f"rank {case['odd']['rank']} asks for something else: {case['odd']['change']}"
        if why and not refusals[0]:
            raise Wrong(f"call {index} is answered, and {why}")
        if refusals[0] and not why:
            raise Wrong(f"call {index} is refused: {refusals[0]}")
        refused.append(bool(refusals[0]))
    for index, wanted in enumerate(expected(case, refused)):
        if wanted is not None:
            call, shards = case["calls"][index], [one[index] for one in found]
            whole = joined(case, call, _with_frozen(case, call, shards, wanted) if "grads_of" in call else shards)
            compare(f"call {index}", whole, wanted, nan=bool(case.get("nan")))


def _needs_changed(case: Case, outcomes: Outcomes) -> bool:
    """Whether heartbeats ended the ring: ranks once needed gradients alike, and then of an equal call did not.

    Only after a call without gradient mode, on a transport that compares a call once.
    """
    modes = {call["mode"] for call in case["calls"] if "grads_of" in call}
    causes = [isinstance(one, RingError) and "on one of the two ranks only" in str(one) for one in outcomes]
    return bool(modes & {"no_grad", "inference", "reentrant"}) and len(case["calls"]) > 1 and all(causes)


def _with_frozen(case: Case, call: Case, shards: Sequence[calls.Found], wanted: Results) -> list[calls.Found]:
    """The results with the expected gradients where a rank needs none; the sinks' only if every rank needs them."""
    given = [dict(shard) for shard in shards]
    rows = {"dq": calls.owned(call["seq"], case["ranks"])}
    rows["dk"] = rows["dv"] = calls.owned(call["kv_seq"] or call["seq"], case["ranks"])
    for rank, (grads, found) in enumerate(zip(call["grads_of"], given, strict=True)):
        for name in rows.keys() & found.keys():
            if name[1] not in grads:
                if found[name] is not None:
                    raise Wrong(f"rank {rank} got {name}, which needs no gradient there")
                if name in wanted:
                    found[name] = wanted[name].value[:, rows[name][rank]]
            elif found[name] is None and name in wanted:
                raise Wrong(f"rank {rank} got no {name}, which needs a gradient there")
    if not all("s" in grads for grads in call["grads_of"]):
        given = [found | {"dsinks": None} if "dsinks" in found else found for found in given]
        wanted.pop("dsinks", None)
    return given


def _changed_in_place(outcomes: Outcomes) -> bool:
    """Whether autograd told every rank that a result was changed which backward needs; SDPA's output is such a one."""
    told = [isinstance(one, RuntimeError) for one in outcomes]
    return all(told) and any("modified by an inplace operation" in str(one) for one in outcomes)


def _layer(case: Case) -> None:
    found = _all_returned(on_threads(layers.on_rank, case))
    call = {"op": "", "bad": None, "kv_seq": None, "sinks": None} | case
    refusals = [one.get("refused") for one in found]
    if any(refusals) and not all(refusals):
        raise Wrong(f"refused on some ranks only: {refusals}")
    why = must_refuse(case, call)
    if bool(why) != bool(refusals[0]):
        raise Wrong(f"the layer is refused: {refusals[0]}" if refusals[0] else f"the layer answers, and {why}")
    if refusals[0]:
        return
    rows = torch.cat([one["rows"] for one in found])
    for name, want in layers.expected(case).items():
        value, shards = want.value, [one[name] for one in found]
        if name.startswith("weight "):
            whole = sum((one for one in shards if one is not None), torch.zeros_like(value))
        else:
            every = torch.cat([torch.zeros_like(value) if one is None else one for one in shards], 1)
            whole = torch.empty_like(every).index_copy_(1, rows, every)
        _compare_one(name, whole, want)


def _order(case: Case, outcomes: Outcomes) -> None:
    """A backward in another order on one rank: an error of the ring on every rank."""
    for rank, one in enumerate(outcomes):
        if not isinstance(one, BaseException):
            raise Wrong(f"rank {case['odd']['rank']} went backward in another order, and rank {rank} raised nothing")
        if not isinstance(one, RingError):
            raise Wrong(f"rank {rank} raised {type(one).__name__}: {one}") from one
    if not any(isinstance(one, InputError) for one in outcomes):
        raise Wrong(f"no rank says that the ranks disagree: {[f'{type(one).__name__}: {one}' for one in outcomes]}")


def joined(case: Case, call: Case, parts: Sequence[calls.Found]) -> dict[str, Tensor | None]:
    """Whole tensors from every rank's shards; the sinks' gradient summed."""
    whole: dict[str, Tensor | None] = {}
    q_rows = torch.cat(calls.owned(call["seq"], case["ranks"]))
    k_rows = torch.cat(calls.owned(call["kv_seq"] or call["seq"], case["ranks"]))
    for name in parts[0]:
        shards = [part[name] for part in parts]
        if name == "dsinks":
            shards = [one for one in shards if one is not None]
            whole[name] = torch.stack(shards).sum(0) if shards else None
        elif any(one is None for one in shards):
            whole[name] = None
        else:
            dim = 2 if name == "lse" else 1
            rows, every = k_rows if name in ("dk", "dv") else q_rows, torch.cat(shards, dim)
            whole[name] = torch.empty_like(every).index_copy_(dim, rows, every)
    return whole


def compare(what: str, found: dict[str, Tensor | None], wanted: Results, nan: bool = False) -> None:
    """Raises `Wrong` where a result is further off than it may be, or not finite where it should be.

    `nan`: there are NaN among the inputs, so that there may be some in any result.
    """
    for name, one in found.items():
        want = wanted.get(name)
        if one is None and (want is None or name == "lse"):
            continue
        if want is None:
            assert one is not None
            zeros = torch.zeros_like(one)
            want = Wanted(zeros, zeros, zeros.bool() if nan else None)
        _compare_one(f"{what}: {name}", torch.zeros_like(want.value) if one is None else one, want)


def _compare_one(what: str, found: Tensor, want: Wanted) -> None:
    value, tolerance, nan = want
    if found.shape != value.shape:
        raise Wrong(f"{what} is {tuple(found.shape)}, not {tuple(value.shape)}")
    if not found.numel():
        return
    exempt = torch.zeros_like(value, dtype=torch.bool)
    if nan is not None:
        lost = nan & found.isfinite()
        if lost.any():
            raise Wrong(f"{what}: a NaN came back as {float(found[lost][0])} at {lost.nonzero()[0].tolist()}")
        exempt = found.isnan()
    same_ends = value.isinf() & (found == value)
    off = torch.where(same_ends | exempt, 0.0, (found - value).abs())
    bad = ~(off <= tolerance)
    if bad.any():
        worst = torch.where(bad, off.nan_to_num(nan=torch.inf) - tolerance, -torch.inf).argmax()
        where = [int(i) for i in torch.unravel_index(worst, value.shape)]
        raise Wrong(
            f"{what} is {float(found[tuple(where)]):.9g} at {where}, not {float(value[tuple(where)]):.9g} "
            f"({int(bad.sum())} of {bad.numel()} elements off by more than {float(tolerance.max()):.2g}, "
            f"the worst by {float(off[bad].nan_to_num(nan=torch.inf).max()):.3g})"
        )
