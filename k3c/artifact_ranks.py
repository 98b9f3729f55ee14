"""What of an artifact differs from rank to rank: a plan and a weight of one of them.

An artifact holds the plans of all ranks at once. What differs is written as a mesh axis and a
factor; here it becomes a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from k3c.artifact import LayerCall, Plan, SourceRange, WeightEntry


def rank_count(mesh: Mapping[str, int]) -> int:
    """Return the ranks of a mesh: its axes and their sizes; ep runs over those of tp and dp."""
    return prod(size for axis, size in mesh.items() if axis != "ep")


def coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return a rank's place along each axis; neighbours along tp have neighbouring ranks.

    Args:
        mesh: Axes and sizes; one that is not there has size 1.
        rank: From 0 to `rank_count(mesh) - 1`.
    """
    tp, dp = mesh.get("tp", 1), mesh.get("dp", 1)
    in_stage = rank % (tp * dp)
    return {
        "tp": in_stage % tp,
        "dp": in_stage // tp,
        "pp": rank // (tp * dp),
        "ep": in_stage if mesh.get("ep", 1) > 1 else 0,
    }


def plan_of_rank(plan: Plan, mesh: Mapping[str, int], rank: int) -> Plan:
    """Return the plan as one rank runs it: no attribute of a layer depends on the rank any more."""
    place = coordinates(mesh, rank)
    return replace(plan, calls=tuple(_call(call, place) for call in plan.calls))


def _call(call: LayerCall, place: Mapping[str, int]) -> LayerCall:
    if not call.rank_attrs:
        return call
    own = {name: place[part.axis] * part.factor for name, part in call.rank_attrs.items()}
    return replace(call, attrs={**call.attrs, **own}, rank_attrs={})


def weight_of_rank(entry: WeightEntry, mesh: Mapping[str, int], rank: int) -> WeightEntry:
    """Return a weight with the indices that one rank reads of its sources."""
    place = coordinates(mesh, rank)
    return replace(entry, ranges=tuple(_range(part, place) for part in entry.ranges))


def _range(part: SourceRange, place: Mapping[str, int]) -> SourceRange:
    if not part.axis:
        return part
    size = part.stop - part.start
    start = part.start + place[part.axis] * size
    return SourceRange(part.dim, start, start + size, placed=part.placed)
