"""The link of each pair of ranks, and how often a ring leaves a node."""

from __future__ import annotations

import pytest

from ringattn.errors import InputError
from ringattn.planner.cluster import LinkClass, Links, numbered


def test_the_class_of_a_pair() -> None:
    links = Links((0, 0, 0, 1), LinkClass.NVLINK, ((0, 2, LinkClass.PCIE),))
    assert links.of(0, 1) is links.of(1, 0) is links.of(2, 1) is LinkClass.NVLINK
    assert links.of(0, 2) is links.of(2, 0) is LinkClass.PCIE
    assert links.of(3, 2) is links.of(1, 3) is LinkClass.NETWORK
    assert links.hops() == (LinkClass.NVLINK, LinkClass.NVLINK, LinkClass.NETWORK, LinkClass.NETWORK)
    assert Links((0,)).hops() == ()
    assert hash(links) == hash(Links((0, 0, 0, 1), LinkClass.NVLINK, ((0, 2, LinkClass.PCIE),)))


@pytest.mark.parametrize(
    ("nodes", "crossings", "least"),
    [
        ((0,), 0, 0),
        ((0, 0, 0), 0, 0),
        ((0, 0, 1, 1), 2, 2),
        ((0, 1, 0, 1), 4, 2),
        ((0, 1, 1, 0), 2, 2),  # it enters either node once, whatever rank it begins at
        ((0, 0, 0, 1), 2, 2),
        ((0, 0, 1, 2, 2, 2), 3, 3),
        ((0, 1, 2, 0, 1, 2, 0), 6, 3),
        ((0, 0, 1, 2, 0), 3, 3),
    ],
)
def test_crossings(nodes: tuple[int, ...], crossings: int, least: int) -> None:
    assert (Links(nodes).crossings, Links(nodes).least_crossings) == (crossings, least)


def test_nodes_are_counted_as_they_appear() -> None:
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)
    for wrong in ((1, 0), (0, 2), (0, 1, 3)):
        with pytest.raises(InputError, match="count the nodes from 0"):
            Links(wrong)


def test_the_classes_inside_of_nodes() -> None:
    nvlink, pcie = LinkClass.NVLINK, LinkClass.PCIE
    assert Links((0, 1, 2), nvlink).classes_inside() == set()
    assert Links((0, 0, 1), nvlink).classes_inside() == {nvlink}
    assert Links((0, 0, 1), nvlink, ((0, 1, pcie),)).classes_inside() == {pcie}
    assert Links((0, 0, 0, 1), nvlink, ((0, 2, pcie), (0, 3, nvlink))).classes_inside() == {nvlink, pcie}
