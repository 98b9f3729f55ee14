"""Weights get the byte order that their kernels read.

Before:  weight %w13: mxfp4[32, 256, 128] from ...
After:   weight %w13: mxfp4[32, 256, 128] as mx32_cpu.v8 from ...

The template that implements a node names the layout of each weight that it wants packed: every
MXFP4 expert matrix, and the panels of other GEMMs. Saves decoding and gathering at run time: a
weight is packed once, at compile time, and memory-mapped. All buckets read the same bytes, so the
layout must not depend on the bucket: it is asked for at the smallest and at the largest one.
Runs last: it moves the module to level kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from k3c.errors import PassError
from k3c.ir.edit import bind_node, substitute
from k3c.ir.graph import Graph, Module, Node, Value
from k3c.ir.ops import COLLECTIVES
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Refused
from k3c.ir.types import MXFP4, ROW_MAJOR, Layout, SymDim
from k3c.passes.context import KERNEL_LEVEL, MXFP4_HAS_LAYOUT, NO_DEAD_NODES, PassContext

NAME = "layout_mxfp4"
REQUIRES = (NO_DEAD_NODES,)
ENSURES = (KERNEL_LEVEL, MXFP4_HAS_LAYOUT)
REQUIRED = True
ANCHORS: tuple[str, ...] = ()
RULES = ()


def expected(module: Module) -> int | None:
    """Every mxfp4 weight gets a layout."""
    return sum(w.value.type.dtype == MXFP4 for g in module.graphs for w in g.weights)


def run(module: Module, ctx: PassContext) -> Module:
    """Set layouts and the level.

    Raises:
        PassError: A layout depends on the bucket, or two nodes want one weight in two layouts.
    """
    graphs = tuple(_GraphLayouts(graph, module.dims, ctx).apply() for graph in module.graphs)
    return replace(module, level="kernel", graphs=graphs)


@dataclass(frozen=True)
class _GraphLayouts:
    graph: Graph
    dims: tuple[SymDim, ...]
    ctx: PassContext

    def apply(self) -> Graph:
        """Return the graph with layouts on its weights."""
        wanted = self._wanted()
        values: dict[str, Value] = {}
        for weight in self.graph.weights:
            value = weight.value
            layout = Layout(wanted.get(value.name, ROW_MAJOR.name))
            if layout == value.type.layout:
                continue
            values[value.name] = replace(value, type=replace(value.type, layout=layout))
            rule = "mxfp4" if value.type.dtype == MXFP4 else "panel"
            self.ctx.log.matches[rule] = self.ctx.log.matches.get(rule, 0) + 1
        weights = tuple(
            replace(w, value=values.get(w.value.name, w.value)) for w in self.graph.weights
        )
        nodes = tuple(substitute(node, values) for node in self.graph.nodes)
        return replace(self.graph, weights=weights, nodes=nodes)

    def _wanted(self) -> dict[str, str]:
        """Return the layout that the nodes want for each weight, by name."""
        weights = {weight.value.name for weight in self.graph.weights}
        wanted: dict[str, str] = {}
        for node in (n for n in self.graph.nodes if n.op not in COLLECTIVES):
            for operand, layout in self._of_node(node).items():
                name = node.operands[operand].name
                where = f"graph @{self.graph.name}, %{name}"
                if name not in weights:
                    what = f"{node.op} wants %{name} packed, which is not a weight"
                    raise PassError(what, where, "only weights can be packed")
                if wanted.setdefault(name, layout) != layout:
                    what = f"two nodes want layouts {wanted[name]} and {layout}"
                    raise PassError(what, where, "give each node a weight of its own")
        return wanted

    def _of_node(self, node: Node) -> Mapping[int, str]:
        small = self._at(node, {dim.name: dim.lo for dim in self.dims})
        large = self._at(node, {dim.name: dim.hi or dim.lo for dim in self.dims})
        if small is None or large is None:
            refusal = Refusal(f"no template implements {node.op}", f"%{node.results[0].name}")
            mine = Refused(self.graph.name, "layout", node.results[0].name, refusal)
            self.ctx.log.refused.append(mine)
            return {}
        if small != large:
            what = f"layouts of {node.op} depend on the bucket: {dict(small)} and {dict(large)}"
            where = f"graph @{self.graph.name}, %{node.results[0].name}"
            raise PassError(what, where, "templates of one op must share a layout")
        return small

    def _at(self, node: Node, dims: Mapping[str, int]) -> Mapping[int, str] | None:
        """Return the layouts that the first accepting template wants at one binding."""
        bound, target = bind_node(node, dims), self.ctx.target
        for template in self.ctx.catalogue.for_op(node.op):
            if template.accepts(bound, target) is None:
                return template.layouts(bound, target)
        return None
