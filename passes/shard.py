"""Give every rank its part of the model: local shapes, and collectives where parts meet.

Before:  weight %w_o: bf16[7168, 12288] from "...o_proj.weight"
         %o = linear(%y, %w_o) : bf16[T, 7168]
After:   weight %w_o: bf16[7168, 768] from "...o_proj.weight" @ (-, tp*768)
         %o_part = linear(%y, %w_o) : bf16[T, 7168]
         %o = all_reduce(%o_part) {axis: tp} : bf16[T, 7168]

All ranks of a stage run the same text: a shape is what a rank holds, a source says which part of
it. Heads, rows of gates and ups, columns of downs and the vocabulary go over tp, routed experts
over ep (or their rows and columns over tp); what belongs to one rank alone is a layer attribute
(first_expert, first_row, first_column). A sum of partial products is rounded on each rank, then
reduced, as late as its readers allow, and two reductions that do not wait for each other are one
message. Over dp every rank has requests of its own: dispatch_tokens brings the latent rows and the
choices of all of them to the experts, combine_tokens sums and brings them back. Experts that do
not divide, or that a placement deals out, are found by a map: map_experts.
Saves memory and bytes read by the number of ranks; without a mesh the module stays as it is.
Runs after canonicalize, before every fusion: fusions see the parts, and concatenate them.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.errors import PassError
from k3c.ir.edit import Index, ordered
from k3c.ir.graph import Attr, Call, Graph, Input, LayerAttr, Module, Node, Value, Weight
from k3c.ir.types import TensorType
from k3c.passes.context import MODEL_LEVEL, NO_DEAD_NODES, PassContext
from k3c.passes.sharding_experts import Exchange
from k3c.passes.sharding_nodes import (
    local_types,
    most_tokens,
    on_local_operands,
    one_message,
    resized,
    with_fewer_rows,
)
from k3c.passes.sharding_rules import Rule, rule_of, shard_of
from k3c.targets.mesh import Mesh

NAME = "shard"
REQUIRES = (MODEL_LEVEL, NO_DEAD_NODES)
ENSURES = (NO_DEAD_NODES,)
REQUIRED = False
ANCHORS: tuple[str, ...] = ()
RULES = ()

# The dimension of each state that lies apart; pages of MLA hold no heads and are whole on a rank.
_STATE_DIMS = {"conv_state": 2, "kda_state": 1}


def expected(module: Module) -> int | None:
    """No number: it depends on the mesh."""
    return None


def run(module: Module, ctx: PassContext) -> Module:
    """Shard every graph over the mesh of the context.

    Raises:
        PassError: A tensor has no rule or does not divide, or a node cannot work on parts.
    """
    mesh = ctx.mesh
    if mesh is None or module.mesh:
        return module
    if mesh.dp > 1 and mesh.ep > 1:
        module = with_fewer_rows(module, most_tokens(mesh.dp))
    sharders = [_Sharder(graph, mesh, ctx.expert_slots) for graph in module.graphs]
    graphs = tuple(sharder.run() for sharder in sharders)
    for sharder in sharders:
        for rule in sharder.rules.values():
            ctx.log.matches[rule] = ctx.log.matches.get(rule, 0) + 1
    starts = {s.graph.name: s.starts for s in sharders}
    schedule = tuple(_with_starts(call, starts.get(call.graph, {})) for call in module.schedule)
    return replace(module, level="mesh", mesh=mesh.axes, graphs=graphs, schedule=schedule)


def _with_starts(call: Call, starts: dict[str, tuple[str, int]]) -> Call:
    return replace(call, rank_attrs={**call.rank_attrs, **starts}) if starts else call


class _Sharder:
    """Shards one graph.

    `partial` values must be summed over tp before anything but a sum reads them; `local_rows` hold
    rows of this rank's experts only. `starts` are the layer attributes that name a rank's part.
    """

    def __init__(self, graph: Graph, mesh: Mesh, expert_slots: int) -> None:
        self.graph, self.mesh, self.index = graph, mesh, Index(graph)
        self.exchange = Exchange(mesh, expert_slots, self.index.fresh)
        self.rules: dict[str, Rule] = {w.value.name: rule_of(w) for w in graph.weights}
        self.weights: dict[str, Weight] = {}
        self.values: dict[str, Value] = {}
        self.partial: set[str] = set()
        self.local_rows: set[str] = set()
        self.starts: dict[str, tuple[str, int]] = {}
        self.nodes: list[Node] = []

    def run(self) -> Graph:
        """Return the graph of one rank."""
        inputs = tuple(self._input(item) for item in self.graph.inputs)
        for weight in self.graph.weights:
            self._weight(weight)
        for node in self.graph.nodes:
            self._node(node)
        outputs = tuple((name, self._summed(value)) for name, value in self.graph.outputs)
        nodes = ordered(one_message(self.nodes))
        assert not isinstance(nodes, str), f"{self.graph.name}: a cycle at %{nodes}"
        weights = (*self.weights.values(), *self.exchange.weights)
        return Graph(self.graph.name, inputs, weights, nodes, outputs)

    def _input(self, item: Input) -> Input:
        value, dim = item.value, _STATE_DIMS.get(item.value.name)
        if item.role == "state" and dim is not None:
            size = value.type.shape[dim]
            if not isinstance(size, int) or size % self.mesh.tp:
                what = f"{value.type} does not divide by tp={self.mesh.tp}"
                raise PassError(what, f"graph @{self.graph.name}, %{value.name}", "another mesh")
            value = replace(value, type=resized(value.type, dim, size // self.mesh.tp))
        self.values[value.name] = value
        return replace(item, value=value)

    def _weight(self, weight: Weight) -> None:
        shard, value = shard_of(weight, self.mesh, self.exchange.wanted_slots), weight.value
        if shard is not None:
            value = replace(value, type=resized(value.type, shard.dim, shard.size))
            weight = replace(weight, value=value, shards=(shard,))
        self.values[value.name] = value
        self.weights[value.name] = weight

    def _node(self, node: Node) -> None:
        """Add the local form of a node."""
        rule = self._rule(node)
        if node.op == "linear" and rule.endswith("columns") and self._shard(node):
            self._emit(node, partial=True)
        elif node.op == "linear" and rule in ("vocabulary", "latent_rows") and self._shard(node):
            self._gather(node)
        elif node.op == "embed" and self._shard(node):
            self._start("first_row", "tp", self._shard(node))
            self._emit(node, {"first_row": LayerAttr("first_row")}, partial=True)
        elif node.op == "rms_norm" and self._feeds_latent_columns(node):
            self._norm_columns(node)
        elif self.mesh.ep > 1 and node.op == "route_topk":
            self._route(node)
        elif self.mesh.ep > 1 and node.op == "grouped_linear":
            self._experts(node)
        elif node.op == "grouped_linear":
            self._emit(node, partial=rule == "expert_columns" and bool(self._shard(node)))
        elif self.mesh.dp > 1 and node.op == "combine" and self._reads_local_rows(node):
            self._return(node)
        elif node.op in ("add", "combine"):
            self._sum(node)
        else:
            self._rowwise(node)

    def _rowwise(self, node: Node) -> None:
        """Add a node whose rows do not meet; only some may read rows of local experts."""
        local_rows = self._reads_local_rows(node)
        if local_rows and node.op != "situ":
            what = f"{node.op} reads rows that other ranks have"
            raise PassError(what, f"graph @{self.graph.name}, %{node.results[0].name}")
        self._emit(node, local_rows=local_rows)

    def _sum(self, node: Node) -> None:
        """Add a node that is linear in its operands: the sum over the ranks may come after it."""
        names = [v.name for v in node.operands]
        keep = node.op == "combine" or all(name in self.partial for name in names)
        parts = any(name in self.partial | self.local_rows for name in names)
        self._emit(node, partial=keep and parts, sum_first=not keep)

    def _route(self, node: Node) -> None:
        """Add a routing: its weights are those of this rank's experts, or a map takes them."""
        slots = self.exchange.slots(node.operands[1].type.sizes[0])
        attrs: dict[str, Attr] = {}
        if self.exchange.direct(slots):
            self._start("first_expert", "ep", slots.count)
            attrs = {"num_experts": slots.count, "first_expert": LayerAttr("first_expert")}
        self._emit(node, attrs)
        self.exchange.routed(node)
        if self.mesh.dp == 1 and slots.mapped:
            self.nodes += self.exchange.map(node.results[1], self.values)

    def _experts(self, node: Node) -> None:
        """Add a product with the experts of this rank, of the rows of all ranks of dp."""
        total = node.operands[1].type.sizes[0]
        slots, x = self.exchange.slots(total), node.operands[0]
        if self.mesh.dp > 1 and x.name not in self.local_rows:
            self._summed(x)
            self.nodes += self.exchange.dispatch(node, self.values)
        attrs: dict[str, Attr] = {"total_experts": total}
        if not slots.mapped:
            self._start("first_expert", "ep", slots.count)
        if self.exchange.direct(slots):
            attrs["first_expert"] = LayerAttr("first_expert")
        self._emit(node, attrs, local_rows=True)

    def _return(self, node: Node) -> None:
        """Add the sum of the experts' rows, and what brings every rank its own."""
        result = node.results[0]
        every = Value(self.index.fresh(f"{result.name}_all"), result.type)
        self._emit(replace(node, results=(every,)))
        partial = self.mesh.tp > 1
        own = replace(result, name=self.index.fresh(f"{result.name}_part")) if partial else result
        axis: dict[str, Attr] = {"axis": "dp"}
        back = Node("combine_tokens", (self.values[every.name],), (own,), axis, node.loc)
        self.nodes.append(back)
        self.values[result.name] = own
        self.partial |= {result.name} if partial else set()

    def _norm_columns(self, node: Node) -> None:
        """Add a norm of whole rows that keeps this rank's columns."""
        size = node.operands[1].type.sizes[0] // self.mesh.tp
        self._start("first_column", "tp", size)
        attrs: dict[str, Attr] = {"first_column": LayerAttr("first_column"), "columns": size}
        self._emit(replace(node, op="norm_columns"), attrs)

    def _gather(self, node: Node) -> None:
        """Add a product whose columns lie on all ranks, and what brings them together."""
        result = node.results[0]
        part = Value(self.index.fresh(f"{result.name}_part"), result.type)
        self._emit(replace(node, results=(part,)))
        local = self.values[part.name]
        whole = TensorType(local.type.dtype, (self.mesh.tp, *local.type.shape))
        parts = Value(self.index.fresh(f"{result.name}_parts"), whole)
        gather = Node("all_gather", (local,), (parts,), {"axis": "tp"}, node.loc)
        self.nodes += [gather, Node("join_columns", (parts,), (result,), loc=node.loc)]
        self.values[result.name] = result

    def _emit(
        self, node: Node, attrs: dict[str, Attr] | None = None, *,
        partial: bool = False, local_rows: bool = False, sum_first: bool = True,
    ) -> None:  # fmt: skip
        """Add a node on local operands with local result types."""
        sum_first = sum_first and node.op != "combine"
        operands = tuple(
            self.exchange.seen(node, v) or (self._summed(v) if sum_first else self.values[v.name])
            for v in node.operands
        )
        local = on_local_operands(node, operands, self.mesh.tp)
        local = replace(local, attrs={**local.attrs, **(attrs or {})})
        types = local_types(node, local)
        results: list[Value] = []
        for value, kind in zip(node.results, types, strict=True):
            name = self.index.fresh(f"{value.name}_part") if partial else value.name
            results.append(Value(name, kind))
            self.values[value.name] = results[-1]
            self.partial |= {value.name} if partial else set()
            self.local_rows |= {value.name} if local_rows else set()
        self.nodes.append(replace(local, results=tuple(results)))

    def _summed(self, value: Value) -> Value:
        """Return the local form of a value, summed over the ranks where it is a part of a sum."""
        local = self.values[value.name]
        if value.name not in self.partial:
            return local
        self.partial.remove(value.name)
        whole = self.values[value.name] = replace(local, name=value.name)
        maker = self.index.node_of(value)
        loc = maker.loc if maker else ""
        self.nodes.append(Node("all_reduce", (local,), (whole,), {"axis": "tp"}, loc))
        return whole

    def _rule(self, node: Node) -> Rule:
        return self.rules.get(node.operands[1].name, "all") if len(node.operands) > 1 else "all"

    def _shard(self, node: Node) -> int:
        """Return how much of the second operand a rank has in the sharded dimension; 0: all."""
        weight = self.weights.get(node.operands[1].name)
        return weight.shards[0].size if weight and weight.shards and weight.shards[0] else 0

    def _reads_local_rows(self, node: Node) -> bool:
        return any(v.name in self.local_rows for v in node.operands)

    def _feeds_latent_columns(self, node: Node) -> bool:
        readers = [self.graph.nodes[p] for p in self.index.read_by(node.results[0])]
        rules = {self._rule(r) for r in readers if r.op == "linear"}
        return rules == {"latent_columns"} and len(readers) == 1 and bool(self._shard(readers[0]))

    def _start(self, name: str, axis: str, size: int) -> None:
        known = self.starts.setdefault(name, (axis, size))
        if known != (axis, size):
            what = f"{name} is {axis}*{size} here and {known[0]}*{known[1]} elsewhere"
            raise PassError(what, f"graph @{self.graph.name}", "give each its own attribute")
