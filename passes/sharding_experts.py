"""How rows and choices reach the experts of a rank: maps of experts, and tokens of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from k3c.errors import PassError
from k3c.ir.graph import Attr, LayerAttr, Node, Shard, Value, Weight
from k3c.ir.types import I32, Dim, SymDim, TensorType
from k3c.passes.sharding_rules import Slots, slots_of
from k3c.targets.mesh import Mesh

MAP_SOURCE = "placement.*.expert_map"  # not of the checkpoint: made from the placement
_MAP = "expert_map"


@dataclass
class Exchange:
    """The experts of one graph.

    Attributes:
        mesh: The ranks.
        wanted_slots: Physical experts of a rank with a map; 0: as the mesh needs.
        fresh: Makes a name that the graph does not have.
        weights: The maps that were made.
    """

    mesh: Mesh
    wanted_slots: int
    fresh: Callable[[str], str]
    weights: list[Weight] = field(default_factory=list[Weight])
    _routes: dict[str, Node] = field(default_factory=dict[str, Node])
    _seen: dict[str, Value] = field(default_factory=dict[str, Value])

    def slots(self, experts: int) -> Slots:
        """Return how a rank holds `experts` experts of a layer."""
        return slots_of(experts, self.mesh, self.wanted_slots)

    def direct(self, slots: Slots) -> bool:
        """Whether the choice itself tells the experts of this rank: no map, no other tokens."""
        return self.mesh.dp == 1 and not slots.mapped

    def routed(self, route: Node) -> None:
        """Remember the node that chose experts."""
        self._routes[route.results[1].name] = route

    def seen(self, node: Node, value: Value) -> Value | None:
        """Return what experts see in place of a value; None: the value itself."""
        experts = node.op in ("grouped_linear", "combine")
        return self._seen.get(value.name) if experts else None

    def map(self, experts: Value, values: Mapping[str, Value]) -> list[Node]:
        """Return the node that numbers chosen experts within this rank.

        Args:
            experts: The choice, as the whole model names it.
            values: The local form of every value.
        """
        route = self._routes[experts.name]
        weights, total = route.results[0], route.operands[1].type.sizes[0]
        slots = self.slots(total)
        own = [self._seen.get(v.name, values[v.name]) for v in (weights, experts)]
        attrs: dict[str, Attr] = {"num_experts": slots.count}
        if slots.mapped:
            own.append(self._map_weight(total, slots))
        else:
            attrs["first_expert"] = LayerAttr("first_expert")
        results = tuple(
            Value(self.fresh(f"{whole.name}_local"), value.type)
            for whole, value in zip((weights, experts), own, strict=False)
        )
        self._seen |= {weights.name: results[0], experts.name: results[1]}
        return [Node("map_experts", tuple(own), results, attrs, route.loc)]

    def dispatch(self, node: Node, values: Mapping[str, Value]) -> list[Node]:
        """Return the nodes that bring the rows of all ranks to an expert's product; once each.

        Raises:
            PassError: Two tensors go to the same choice of experts.
        """
        x, experts = node.operands[0], node.operands[2]
        if x.name in self._seen:
            return []
        if experts.name in self._seen:
            what = f"%{x.name} goes to experts to which other rows went"
            raise PassError(what, f"%{node.results[0].name}", "one dispatch for each choice")
        whole = x, self._routes[experts.name].results[0], experts
        own = tuple(values[v.name] for v in whole)
        every = tuple(self._of_all_ranks(v) for v in own)
        self._seen |= {v.name: result for v, result in zip(whole, every, strict=True)}
        sent = Node("dispatch_tokens", own, every, {"axis": "dp"}, node.loc)
        return [sent, *self.map(experts, values)]

    def _of_all_ranks(self, value: Value) -> Value:
        rows = times(value.type.shape[0], self.mesh.dp)
        kind = replace(value.type, shape=(rows, *value.type.shape[1:]))
        return Value(self.fresh(f"{value.name}_all"), kind)

    def _map_weight(self, experts: int, slots: Slots) -> Value:
        for weight in self.weights:
            return weight.value
        kind = TensorType(I32, (experts, 1 + slots.most_replicas))
        value = Value(self.fresh(_MAP), kind)
        # The tables of all ranks stand one below the other.
        self.weights.append(Weight(value, (MAP_SOURCE,), (Shard("ep", 0, experts),)))
        return value


def times(dim: Dim, factor: int) -> Dim:
    """Return a dimension `factor` times as large."""
    return replace(dim, times=dim.times * factor) if isinstance(dim, SymDim) else dim * factor
