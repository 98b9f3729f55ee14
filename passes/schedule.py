"""Order the nodes of each graph: program order, unless moving a node lowers the peak of live bytes.

Before: any valid order. After: a valid order with the same or a lower peak of arena bytes, and for
every node its level: nodes of one level do not depend on each other. Runs once per bucket, because
sizes decide; deterministic. The order also keeps every read of a buffer before its overwriting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from k3c.artifact import aligned
from k3c.ir.graph import Graph
from k3c.ir.ops import COLLECTIVES
from k3c.passes.assign_buffers import Assignment, Boundary, assign, in_place
from k3c.passes.select_kernels import Selected

MAX_MOVES = 100  # each lowers the peak; real graphs need a handful

Order = tuple[int, ...]


@dataclass(frozen=True)
class Scheduled:
    """A selection whose nodes are in launch order.

    Attributes:
        selected: The module with its nodes reordered.
        levels: For each graph, the level of each node, in launch order.
        moves: For each graph, how many nodes were moved.
    """

    selected: Selected
    levels: Mapping[str, tuple[int, ...]]
    moves: Mapping[str, int]


@dataclass(frozen=True)
class _Scene:
    """What an order is judged by; nodes are their indices in program order.

    Attributes:
        before: For each node, the nodes that must precede it.
        touched: Scratch touched by each node, workspace aside.
        nbytes: Size of each scratch buffer.
        workspace: Bytes of each node's workspace.
    """

    before: tuple[frozenset[int], ...]
    touched: tuple[frozenset[str], ...]
    nbytes: Mapping[str, int]
    workspace: tuple[int, ...]


def run(selected: Selected) -> Scheduled:
    """Order the nodes of all graphs.

    Raises:
        PassError: A graph reads a value after it was overwritten.
    """
    boundary = Boundary.of(selected.module, selected.state_spaces)
    graphs: list[Graph] = []
    levels: dict[str, tuple[int, ...]] = {}
    moves: dict[str, int] = {}
    for graph in selected.module.graphs:
        scene = _scene(graph, assign(graph, boundary), selected)
        order, moves[graph.name] = _lower_peak(scene)
        graphs.append(replace(graph, nodes=tuple(graph.nodes[i] for i in order)))
        depth = _levels(scene, order)
        levels[graph.name] = tuple(depth[i] for i in order)
    module = replace(selected.module, graphs=tuple(graphs))
    return Scheduled(replace(selected, module=module), levels, moves)


def _scene(graph: Graph, assignment: Assignment, selected: Selected) -> _Scene:
    scratch = {
        s.id: aligned(s.type.nbytes)
        for s in assignment.storages.values()
        if s.space == "arena" and s.graph
    }
    touched = tuple(
        frozenset(assignment.owner[v.name] for v in (*node.operands, *node.results))
        & scratch.keys()
        for node in graph.nodes
    )
    workspace = tuple(
        0
        if node.op in COLLECTIVES
        else aligned(selected.template(graph, node).workspace_bytes(node, selected.target))
        for node in graph.nodes
    )
    return _Scene(_dependencies(graph, assignment), touched, scratch, workspace)


def _dependencies(graph: Graph, assignment: Assignment) -> tuple[frozenset[int], ...]:
    """Return for each node the nodes before it: producers, and readers of what it overwrites."""
    before: list[set[int]] = [set() for _ in graph.nodes]
    writer: dict[str, int] = {}
    # By storage, the nodes that read its present contents.
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        shared = in_place(node)
        for operand in node.operands:
            storage = assignment.owner[operand.name]
            if storage in writer:
                before[index].add(writer[storage])
        # A result that is written straight into a carry overwrites it without being in place.
        for i, result in enumerate(node.results):
            storage = assignment.owner[result.name]
            before[index].update(readers.pop(storage, []))
            if i not in shared and storage in writer:
                before[index].add(writer[storage])
            writer[storage] = index
        for operand in node.operands:
            readers.setdefault(assignment.owner[operand.name], []).append(index)
    return tuple(frozenset(b - {i}) for i, b in enumerate(before))


def _lower_peak(scene: _Scene) -> tuple[Order, int]:
    """Move one node at a time to where the peak is lowest, while that lowers it."""
    order = tuple(range(len(scene.before)))
    peak, moves = _peak(scene, order), 0
    while moves < MAX_MOVES:
        best = min(
            ((_peak(scene, o), i, o) for i, o in enumerate(_moved(scene, order))), default=None
        )
        if best is None or best[0] >= peak:
            break
        peak, order, moves = best[0], best[2], moves + 1
    return order, moves


def _moved(scene: _Scene, order: Order) -> list[Order]:
    """Return every valid order that differs from `order` by the place of one node."""
    found: list[Order] = []
    for at, node in enumerate(order):
        low = at
        while low > 0 and order[low - 1] not in scene.before[node]:
            low -= 1
        high = at
        while high + 1 < len(order) and node not in scene.before[order[high + 1]]:
            high += 1
        rest = order[:at] + order[at + 1 :]
        # One place up is the next node's one place down: not tried twice.
        places = [p for p in range(low, high + 1) if p not in (at, at + 1)]
        found += [(*rest[:p], node, *rest[p:]) for p in places]
    return found


def _peak(scene: _Scene, order: Order) -> int:
    """Return the largest number of scratch bytes live at one node."""
    last: dict[str, int] = {}
    for place, node in enumerate(order):
        for name in scene.touched[node]:
            last[name] = place
    live = peak = 0
    seen: set[str] = set()
    for place, node in enumerate(order):
        new = scene.touched[node] - seen
        seen |= new
        live += sum(scene.nbytes[name] for name in new)
        peak = max(peak, live + scene.workspace[node])
        live -= sum(scene.nbytes[name] for name in scene.touched[node] if last[name] == place)
    return peak


def _levels(scene: _Scene, order: Sequence[int]) -> list[int]:
    levels = [0] * len(order)
    for node in order:
        levels[node] = 1 + max((levels[b] for b in scene.before[node]), default=-1)
    return levels
