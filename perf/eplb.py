"""The baseline of expert placement: EPLB, written from its published rules.

Per layer, from the rows of each logical expert: replicas one by one for the expert with the most
rows a replica; then all replicas, heaviest first, onto the lightest rank with a slot left. K3 has
no expert groups, so the rules' hierarchical form has one group on one node: this. Nothing forbids
two replicas of an expert on one rank.

Source: k3_serving.md section 7.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def eplb(rows: Sequence[float], ranks: int, slots: int) -> list[list[int]]:
    """Return the logical experts of each rank's slots."""
    replicas = [1] * len(rows)
    heaviest = [(-load, expert) for expert, load in enumerate(rows)]
    heapq.heapify(heaviest)
    for _ in range(ranks * slots - len(rows)):
        _, expert = heapq.heappop(heaviest)
        replicas[expert] += 1
        heapq.heappush(heaviest, (-rows[expert] / replicas[expert], expert))
    items = [(rows[e] / replicas[e], e) for e in range(len(rows)) for _ in range(replicas[e])]
    items.sort(key=lambda item: -item[0])
    lightest = [(0.0, rank) for rank in range(ranks)]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for load, expert in items:
        total, rank = heapq.heappop(lightest)
        placed[rank].append(expert)
        if len(placed[rank]) < slots:
            heapq.heappush(lightest, (total + load, rank))
    return placed


def max_over_mean(rows: Sequence[float], placed: Sequence[Sequence[int]]) -> float:
    """Return the rows of the busiest rank over the mean, replicas of an expert taken as equal."""
    replicas = [0] * len(rows)
    for experts in placed:
        for expert in experts:
            replicas[expert] += 1
    loads = [sum(rows[e] / replicas[e] for e in experts) for experts in placed]
    return max(loads) * len(placed) / sum(rows)


def has_twins(placed: Sequence[Sequence[int]]) -> bool:
    """Whether a rank holds an expert twice, which a placement of ours never does."""
    return any(len(set(experts)) != len(experts) for experts in placed)
