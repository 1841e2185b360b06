"""Sequence functions against plain indexing: shard, gather, positions, labels."""

from __future__ import annotations

import torch
from torch import Tensor

import ringattn
from tests.fuzz import reference
from tests.fuzz.calls import owned, sequence
from tests.fuzz.choices import OF_DOCUMENTS
from tests.fuzz.draw import Case


def on_rank(ring: ringattn.Ring, case: Case) -> None:
    """Raises AssertionError where a function differs from the indexing that it means."""
    given, ranks = case["seq"], ring.world_size
    if given["layout"] in OF_DOCUMENTS and given["documents"] is None:
        _refused(lambda: sequence(ring, given, False), f"{given['layout']} without documents")
        return
    later = case["cut_later"] and given["documents"] is not None and given["layout"] not in ("auto", *OF_DOCUMENTS)
    seq, rows = sequence(ring, given, later), owned(given, ranks)
    mine, at = rows[ring.rank], reference.places(given["length"], given["documents"])
    assert sorted(torch.cat(rows).tolist()) == list(range(given["length"])), "the reference's layout"
    assert seq.length == given["length"] and seq.counts == tuple(len(one) for one in rows), "counts"
    assert torch.equal(seq.positions(), mine), "positions"
    assert torch.equal(seq.positions(per_document=True), at.within[mine]), "positions per document"
    assert seq.positions().dtype == torch.int64
    for number, tensor in enumerate(case["tensors"]):
        _one(ring, seq, case, tensor, rows, at, number)


def gathers_on_rank(ring: ringattn.Ring, case: Case) -> None:
    """Gathers that are alike, and their backward passes in this rank's order."""
    seq, odd = sequence(ring, case["seq"], False), case["odd"]
    leaves = [torch.ones(seq.counts[ring.rank], 2, requires_grad=True) for _ in case["order"]]
    losses = [(seq.gather(leaf, 0) * (number + 1)).sum() for number, leaf in enumerate(leaves)]
    for number in odd["order"] if odd["rank"] == ring.rank else case["order"]:
        losses[number].backward()


def _one(
    ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, tensor: Case, rows: list[Tensor], at: reference.Places,
    number: int,
) -> None:  # fmt: skip
    dim, dtype, length = tensor["dim"], getattr(torch, tensor["dtype"]), case["seq"]["length"]
    shape, mine = list(tensor["shape"]), rows[ring.rank]
    shape[dim] = length + tensor["wrong"]
    if shape[dim] < 0:
        return
    random = torch.Generator().manual_seed(case["seed"] * 16 + number)
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    else:
        low, high = (0, 2) if dtype == torch.bool else (0, 256) if dtype == torch.uint8 else (-128, 128)
        x = torch.randint(low, high, shape, generator=random).to(dtype)
    ignore = {} if tensor["ignore_index"] is None else {"ignore_index": tensor["ignore_index"]}
    if tensor["wrong"]:
        _refused(lambda: seq.shard(x, dim), "shard of a wrong length")
        if not dtype.is_floating_point:
            _refused(lambda: seq.shard_labels(x, dim, **ignore), "labels of a wrong length")
        return
    leaf = x.requires_grad_() if dtype.is_floating_point else x
    shard = seq.shard(leaf, dim)
    assert torch.equal(shard, x.index_select(dim, mine)) and shard.dtype == dtype, "shard"
    if not dtype.is_floating_point:
        labels = seq.shard_labels(x, dim, **ignore)
        wanted = torch.full(shape, ignore.get("ignore_index", -100)).movedim(dim, 0)
        follows = (at.stop - 1 > torch.arange(length)).nonzero()[:, 0]
        wanted[follows] = x.long().movedim(dim, 0)[follows + 1]
        assert torch.equal(labels.long(), wanted.movedim(0, dim).index_select(dim, mine)), "labels"
    full = seq.gather(shard, dim)
    assert torch.equal(full, x) and full.dtype == dtype, "gather"
    if dtype.is_floating_point and dtype != torch.bfloat16:
        weights = torch.randn(shape, generator=random.manual_seed(case["seed"]), dtype=torch.float64).to(dtype)
        (full * weights * (ring.rank + 1)).sum().backward()
        total = ring.world_size * (ring.world_size + 1) / 2
        wanted = torch.zeros_like(weights).index_copy(dim, mine, weights.index_select(dim, mine) * total)
        assert leaf.grad is not None and torch.allclose(leaf.grad, wanted, rtol=1e-5), "gradient of gather"
    total = torch.full((3,), float(ring.rank))
    ring.all_reduce([total])
    assert total.tolist() == [ring.world_size * (ring.world_size - 1) / 2] * 3, "all_reduce"


def _refused(what: object, why: str) -> None:
    try:
        what()  # type: ignore[operator]
    except ringattn.InputError:
        return
    raise AssertionError(f"{why} is not refused")
