"""One rank's part of a case of attention calls, which uses only the public API.

Guarantees: every result consists of float64 tensors and strings, so that it can be sent between processes. A refusal of
a call is a result too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn
from ringattn import masks
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.adapters.torch_ops import ring_attention
from ringattn.core.layout import PLACED, causal_documents, make_layout
from ringattn.core.mask import make_mask
from ringattn.planner.cluster import REFERENCE
from ringattn.planner.layouts import suits_at_once
from tests.fuzz import inputs, reference
from tests.fuzz.draw import Case

CallResult = dict[str, Any]


def on_rank(ring: ringattn.Ring, case: Case) -> list[CallResult]:
    """Make all calls and run their backward passes. Return this rank's result or refusal of each call."""
    rows = [_Call(ring, case, index) for index in range(len(case["calls"]))]
    for index, call in enumerate(rows):
        call.attend(rows[: index + 1])
    index = case.get("active_in_backward")
    active = None if index is None or rows[index].refused else rows[index].seq
    with nullcontext() if active is None else ring.activate(active):
        for backward in _backwards(ring, case, rows):
            backward()
    return [call.result() for call in rows]


def sequence(ring: ringattn.Ring, seq: Case, cut_later: bool) -> ringattn.Sequence:
    """Create the sequence that `seq` describes. With `cut_later`, `with_documents` adds the documents afterwards.

    A sequence that is placed for a mask carries this mask.
    """
    if cut_later:
        whole = ring.sequence(seq["length"], layout=seq["layout"], for_=seq["for_"])
        return whole.with_documents(seq["documents"])
    length = None if seq["documents"] is not None and seq["length"] % 2 else seq["length"]
    named = placed_for(seq) if seq["layout"] in PLACED else "auto"
    mask = masks.from_text(seq["mask"]) if seq["layout"] == "mask" and seq["mask"] is not None else None
    return ring.sequence(
        length, cu_seqlens=seq["documents"], layout=seq["layout"], for_=seq["for_"], schedule=named, mask=mask
    )  # fmt: skip


def placed_for(seq: Case) -> str:
    """Return the schedule for which the layout of `seq` places tokens; "auto" in older cases, which name none."""
    name = seq.get("schedule", "auto")
    assert isinstance(name, str)
    return name


def owned(seq: Case, case: Case) -> list[Tensor]:
    """Return the positions of each rank of the case, as the reference defines them.

    The reference has no layouts `documents` and `mask`, so for these the positions are those of the library.
    """
    ranks, per_node = case["ranks"], (case.get("nodes") or {}).get("ranks", 0)
    cuts, length = None if seq["documents"] is None else tuple(seq["documents"]), seq["length"]
    if seq["layout"] == "mask" or (seq["layout"] == "documents" and cuts is not None):
        mask = masks.from_text(seq["mask"]) if seq["layout"] == "mask" else None
        placed = None if mask is None else make_mask(
            length, length, causal=seq["for_"] == "causal" and mask.takes_causal, mask=mask, documents=cuts,
            kv_documents=cuts, q_heads=mask.q_heads or 1,
        )  # fmt: skip
        placed_mask = causal_documents(cuts) if placed is None else placed
        at_once = suits_at_once(placed_mask, length, ranks, placed_for(seq), REFERENCE)
        layout = make_layout(
            seq["layout"], length, ranks, cuts, at_once=at_once, mask=placed,
            ranks_per_node=per_node if 1 < per_node < ranks and ranks % per_node == 0 else 0,
        )  # fmt: skip
        return [torch.from_numpy(layout.positions(rank)) for rank in range(ranks)]
    name = reference.layout_of(seq["layout"], seq["for_"], seq["documents"])
    return reference.shards(name, seq["length"], ranks, seq["documents"])


@contextmanager
def modes(case: Case, mode: str) -> Iterator[None]:
    """Enter the autocast of the case, and inference mode or `no_grad` if `mode` says so."""
    with ExitStack() as stack:
        if case["autocast"]:
            stack.enter_context(torch.autocast("cpu", getattr(torch, case["autocast"])))
        if mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "no_grad":
            stack.enter_context(torch.no_grad())
        yield


class _Call:
    """One call on one rank, with its leaves and results."""

    def __init__(self, ring: ringattn.Ring, case: Case, index: int) -> None:
        self.ring, self.case, self.index, self.call = ring, case, index, case["calls"][index]
        odd = case.get("odd", {})
        self.change: Case = odd.get("change", {}) if index == 0 and odd.get("rank") == ring.rank else {}
        self.grads: str = self.call["grads_of"][ring.rank] if "grads_of" in self.call else self.call["grads"]
        self.refused: str | None = None
        self.out: Tensor | None = None
        self.lse: Tensor | None = None
        self.loss: Tensor | None = None

    def attend(self, calls: list[_Call]) -> None:
        """Create the leaves and make the call. Record a refusal (InputError); let other errors propagate."""
        call, ring = self.call, self.ring
        values = inputs.values(self.case, self.index)
        try:
            described = self.change.get("seq", call["seq"])
            self.seq = sequence(ring, described, call["cut_later"])
            carried = call["options"]["mask"] if self._carries_mask else None
            if carried != (described["mask"] if described["layout"] == "mask" else None):
                self.seq = self.seq.with_mask(None if carried is None else masks.from_text(carried))
            self.kv_seq = sequence(ring, call["kv_seq"], False).with_mask(None) if call["kv_seq"] else None
        except ringattn.InputError as error:
            self.refused = f"{type(error).__name__}: {error}"
            return
        if "seq" not in self.change:
            for seq, sequence_ in ((call["seq"], self.seq), (call["kv_seq"], self.kv_seq)):
                if sequence_ is not None:
                    assert torch.equal(sequence_.positions(), owned(seq, self.case)[ring.rank]), "positions"
        rows = self.seq.positions()
        k_rows = rows if self.kv_seq is None else self.kv_seq.positions()
        before = calls[call["like"]] if call["like"] is not None else self
        if call.get("share"):
            self.leaves, self.views, self.sinks = before.leaves, before.views, before.sinks
        else:
            self._make_leaves(values, rows, k_rows)
        if call["chained"]:
            if before.out is None:
                self.refused = before.refused
                return
            self.views = [before.out, *self.views[1:]]
        try:
            with modes(self.case, call["mode"]):
                self.out, self.lse = self._result()
            if call["via"] == "sdpa":
                self.out = self.out.transpose(1, 2)
        except ringattn.InputError as error:
            self.refused = f"{type(error).__name__}: {error}"
            return
        self._check_dtypes(values.q.dtype)
        self.kept = self.out.detach().clone(), None if self.lse is None else self.lse.detach().clone()
        if call["mode"] == "no_grad" and call["in_place"]:
            self.out.mul_(2)
        if call["mode"] not in ("inference", "no_grad"):
            loss = inputs.loss_of(call, self.out, self.lse, values.dout[:, rows], values.dlse[:, :, rows])
            self.loss = loss if loss.requires_grad else None

    @property
    def _carries_mask(self) -> bool:
        """Whether the sequence carries the mask of the call, which then does not name it."""
        return "mask" in self.call["options"] and self.case["seed"] % 2 == 1

    def _make_leaves(self, values: inputs.Values, rows: Tensor, k_rows: Tensor) -> None:
        """Create this rank's shards as leaves, in the memory layouts of the case."""
        call, odd_dtype = self.call, self.change.get("dtype")
        self.leaves, self.views = [], []
        for name, x, kind, positions in zip("qkv", values[:3], call["strides"], (rows, k_rows, k_rows), strict=True):
            positions = positions[positions < x.shape[1]]
            shard = x[:, positions] if odd_dtype is None else x[:, positions].to(getattr(torch, odd_dtype))
            if "tokens" in self.change or len(positions) != len(rows if name == "q" else k_rows):
                shard = torch.zeros(x.shape[0], len(positions) + 1, *x.shape[2:], dtype=shard.dtype)
            leaf = inputs.leaf_of(kind, shard).requires_grad_(name in self.grads)
            self.leaves.append(leaf)
            self.views.append(inputs.as_input(inputs.inside(kind, leaf, x.shape[3]), call, name))
        self.sinks = None if values.sinks is None else values.sinks.clone().requires_grad_("s" in self.grads)

    def _result(self) -> tuple[Tensor, Tensor | None]:
        mode, tensors = self.call["mode"], (*self.views, self.sinks)
        with self.ring.activate(self.seq) if self.call.get("active") == "around" else nullcontext():
            if mode == "reentrant" and any(x is not None and x.requires_grad for x in tensors):
                return checkpoint(self._run_call, *tensors, use_reentrant=True)
            if mode in ("checkpoint", "reentrant"):
                return checkpoint(self._run_call, *tensors, use_reentrant=False)
            return self._run_call(*tensors)

    def _run_call(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Make the call through the API that the case names in `via`."""
        call, ring = self.call, self.ring
        options = call["options"] | (call["bad"] or {})
        options |= {
            key: value for key, value in self.change.items() if key in ("scale", "softcap", "causal", "schedule")
        }
        if self.change.get("causal") == "a tensor":
            options["causal"] = torch.ones(2, dtype=torch.bool)
        seq = self.seq
        if self._carries_mask:
            del options["mask"]
        elif "mask" in options:
            options["mask"] = masks.from_text(options["mask"])
        if call["via"] == "sdpa":
            with ring.activate(self.seq) if call.get("active") != "around" else nullcontext():
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                out = ring_sdpa(*heads_first, is_causal=options["causal"], scale=options.get("scale"), enable_gqa=True)
            return out, None
        if call["via"] == "operator":
            if "alibi_slopes" in options:  # the operator's schema has no lists of numbers per head
                options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], dtype=torch.float64)
            return ring_attention(q, k, v, seq, **options), None
        if call["via"] in ("module", "alone"):
            layers: Any = {"attention": ringattn.RingAttention, "dilated": ringattn.RingDilatedAttention}
            if call["via"] == "alone":
                return ringattn.DilatedAttention(**options)(q, k, v), None
            return layers[call["op"]](**options)(q, k, v, seq), None
        if call["op"] == "attention":
            if self.kv_seq is not None:
                options["kv_seq"] = self.kv_seq
            ask: Any = ring.attention
        else:
            ask = ring.dilated_attention
        if call["uses"]["lse"] or self.index % 2 == 0:
            return ask(q, k, v, seq, sinks=sinks, return_lse=True, **options)
        return ask(q, k, v, seq, sinks=sinks, **options), None

    def _check_dtypes(self, dtype: torch.dtype) -> None:
        assert self.out is not None and self.out.dtype == dtype, f"out is {self.out.dtype}"
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert self.lse is None or self.lse.dtype == wide, f"lse is {self.lse.dtype}"

    def result(self) -> CallResult:
        """Return the values to compare, in float64."""
        if self.refused is not None:
            return {"refused": self.refused}
        out, lse = self.kept
        result: CallResult = {"out": out.double(), "lse": None if lse is None else lse.double()}
        if not self.call.get("share"):
            d_k, d_v = self.call["dims"]
            for name, leaf, kind, dim in zip("qkv", self.leaves, self.call["strides"], (d_k, d_k, d_v), strict=True):
                assert leaf.grad is None or leaf.grad.dtype == leaf.dtype, f"d{name} is {leaf.grad.dtype}"
                grad = None if leaf.grad is None else inputs.inside(kind, leaf.grad, dim)
                result[f"d{name}"] = None if grad is None else grad.double().contiguous()
            grad = None if self.sinks is None else self.sinks.grad
            result["dsinks"] = None if grad is None else grad.double()
        return result


def _backwards(ring: ringattn.Ring, case: Case, calls: list[_Call]) -> list[Any]:
    """Return the backward passes in this rank's order, ready to be called."""
    odd, order = case.get("odd", {}), case["order"]
    if "order" in odd and odd["rank"] == ring.rank:
        order = odd["order"]
    again = any(call.call["backward_twice"] for call in calls)
    keep = again or any(call.call["chained"] for call in calls)
    losses = [call.loss for call in calls]
    if order is None:
        live = [loss for loss in losses if loss is not None]
        passes = [lambda: sum(live[1:], live[0]).backward(retain_graph=keep)] if live else []
    else:
        passes = [
            lambda loss=losses[index]: loss.backward(retain_graph=keep) for index in order if losses[index] is not None
        ]
    return passes * (2 if again else 1)
