"""Compares the methods of sequences with plain indexing: shard, gather, positions and labels."""

from __future__ import annotations

import torch
from torch import Tensor

import ringattn
from tests.fuzz import reference
from tests.fuzz.calls import owned, sequence
from tests.fuzz.choices import LAYOUTS
from tests.fuzz.draw import Case
from tests.fuzz.legal import has_no_layout


def on_rank(ring: ringattn.Ring, case: Case) -> None:
    """Check the methods of the case's sequence. Raises AssertionError if one differs from the defining indexing."""
    described = case["seq"]
    if reason := has_no_layout(described):
        _assert_refused(lambda: sequence(ring, described, False), f"a sequence, and {reason}")
        return
    later = case["cut_later"] and described["documents"] is not None and described["layout"] in LAYOUTS
    seq, rows = sequence(ring, described, later), owned(described, case)
    local_rows, places = rows[ring.rank], reference.places(described["length"], described["documents"])
    assert sorted(torch.cat(rows).tolist()) == list(range(described["length"])), "the reference's layout"
    assert seq.length == described["length"] and seq.counts == tuple(len(rank_rows) for rank_rows in rows), "counts"
    seq.positions().fill_(-1)  # the caller owns what a sequence returns
    assert torch.equal(seq.positions(), local_rows), "positions"
    within, tree = places.within, _tree_of(described)
    if tree is not None:
        within = tree.sum(1) - 1
        _check_edges(seq, tree, rows)
    assert torch.equal(seq.positions(per_document=True), within[local_rows]), "positions per document"
    assert seq.positions().dtype == torch.int64
    for number, tensor in enumerate(case["tensors"]):
        _check_tensor(ring, seq, case, tensor, rows, places, number)


def _tree_of(described: Case) -> Tensor | None:
    """Return which tokens are on the path of each token, if the sequence has the mask of a tree; otherwise None."""
    kind, _, text = (described["mask"] or "" if described["layout"] == "mask" else "").partition(":")
    return reference.tree_pairs(text, None) if kind == "tree" else None


def _check_edges(seq: ringattn.Sequence, tree: Tensor, rows: list[Tensor]) -> None:
    """Check that `edges` leads from each token of this rank to the tokens that follow it."""
    parents = [max(path.nonzero()[:-1].flatten().tolist(), default=-1) for path in tree]
    local_rows, tokens = (part.tolist() for part in seq.edges())
    edges = [(int(rows[seq.ring.rank][row]), token) for row, token in zip(local_rows, tokens, strict=True)]
    expected = [(parents[token], token) for token in range(len(parents)) if parents[token] in rows[seq.ring.rank]]
    assert sorted(edges) == sorted(expected) and local_rows == sorted(local_rows), "edges"


def gathers_on_rank(ring: ringattn.Ring, case: Case) -> None:
    """Run several equal gathers, then their backward passes in the order of this rank."""
    seq, odd = sequence(ring, case["seq"], False), case["odd"]
    leaves = [torch.ones(seq.counts[ring.rank], 2, requires_grad=True) for _ in case["order"]]
    losses = [(seq.gather(leaf, 0) * (number + 1)).sum() for number, leaf in enumerate(leaves)]
    for number in odd["order"] if odd["rank"] == ring.rank else case["order"]:
        losses[number].backward()


def _check_tensor(
    ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, tensor: Case, rows: list[Tensor], places: reference.Places,
    number: int,
) -> None:  # fmt: skip
    dim, dtype, length = tensor["dim"], getattr(torch, tensor["dtype"]), case["seq"]["length"]
    shape, local_rows = list(tensor["shape"]), rows[ring.rank]
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
        _assert_refused(lambda: seq.shard(x, dim), "shard of a wrong length")
        if not dtype.is_floating_point:
            _assert_refused(lambda: seq.shard_labels(x, dim, **ignore), "labels of a wrong length")
        return
    leaf = x.requires_grad_() if dtype.is_floating_point else x
    shard = seq.shard(leaf, dim)
    assert torch.equal(shard, x.index_select(dim, local_rows)) and shard.dtype == dtype, "shard"
    if not dtype.is_floating_point and _tree_of(case["seq"]) is not None:
        _assert_refused(lambda: seq.shard_labels(x, dim, **ignore), "labels of a tree")
    elif not dtype.is_floating_point:
        shift = 1 + case["seed"] % 3
        labels = seq.shard_labels(x, dim, **ignore, shift=shift)
        expected = torch.full(shape, ignore.get("ignore_index", -100)).movedim(dim, 0)
        follows = (places.stop - shift > torch.arange(length)).nonzero()[:, 0]
        expected[follows] = x.long().movedim(dim, 0)[follows + shift]
        assert torch.equal(labels.long(), expected.movedim(0, dim).index_select(dim, local_rows)), "labels"
    full = seq.gather(shard, dim)
    assert torch.equal(full, x) and full.dtype == dtype, "gather"
    if dtype.is_floating_point and dtype != torch.bfloat16:
        weights = torch.randn(shape, generator=random.manual_seed(case["seed"]), dtype=torch.float64).to(dtype)
        (full * weights * (ring.rank + 1)).sum().backward()
        total = ring.world_size * (ring.world_size + 1) / 2
        expected = torch.zeros_like(weights).index_copy(dim, local_rows, weights.index_select(dim, local_rows) * total)
        assert leaf.grad is not None and torch.allclose(leaf.grad, expected, rtol=1e-5), "gradient of gather"
    total = torch.full((3,), float(ring.rank))
    ring.all_reduce([total])
    assert total.tolist() == [ring.world_size * (ring.world_size - 1) / 2] * 3, "all_reduce"


def _assert_refused(function: object, name: str) -> None:
    try:
        function()  # type: ignore[operator]
    except ringattn.InputError:
        return
    raise AssertionError(f"{name} is not refused")
