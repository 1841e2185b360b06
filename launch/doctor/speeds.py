"""What the doctor makes of the ranks of several nodes: their order, what they measured, and what other nodes found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringattn.launch.doctor.probes import ERROR, NOTE, OK, WARNING, Finding

WHY = "each step of a ring waits for its slowest pair"


def other_nodes(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is wrong with the network of the other nodes, of each as its first rank told."""
    told = [(one["host"], Finding(**each)) for one in answers for each in one.get("network", ())]
    return [each._replace(topic=f"{each.topic}, {host}") for host, each in told if each.level in (WARNING, ERROR)]


def speeds(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What was measured between ranks of a node and of two, and whether the ranks' order suits a ring."""
    findings = []
    if order := next((one["order"] for one in answers if one.get("order")), None):
        text, advice = str(order).split(". ", 1)
        findings.append(Finding("rank order", WARNING, text, advice, WHY))
    pairs = [
        {**pair, "rank": one["rank"], "nics": one.get("nics", ())} for one in answers for pair in one.get("pairs", ())
    ]
    if not pairs:
        return findings
    slowest: dict[tuple[bool, str], dict[str, Any]] = {}
    for pair in pairs:
        key = pair["across"], pair["link"]
        if key not in slowest or pair["bandwidth"] < slowest[key]["bandwidth"]:
            slowest[key] = pair
    told = [
        f"{'between nodes' if across else 'inside a node'} {pair['bandwidth'] / 1e9:.2f} GB/s and "
        f"{pair['latency_us']:,.0f} µs over {link} (ranks {pair['rank']} and {pair['peer']})"
        for (across, link), pair in sorted(slowest.items())
    ]
    inside = [pair["bandwidth"] for (across, _), pair in slowest.items() if not across]
    between = [pair for (across, _), pair in slowest.items() if across]
    if inside and between:
        told.append(f"a factor of {min(inside) / min(pair['bandwidth'] for pair in between):.3g}")
    level, advice = OK, ""
    for pair in between:
        stated = max((gbps or 0.0 for _, gbps in pair["nics"]), default=0.0) / 8 * 1e9
        if pair["bandwidth"] < stated / 2:
            level = NOTE
            advice = (f"a port of rank {pair['rank']} says {stated / 1e9:.3g} GB/s: look at the findings about ports, "
                      "GPUDirect and the chosen interface on both machines")  # fmt: skip
    findings.append(Finding("links", level, "; ".join(told), advice, WHY))
    return findings
