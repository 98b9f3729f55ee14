"""A decode step makes the next step's input by itself.

Before:  graph @head(...) { ... %t = sample(...) ... return tokens=%t, logits=%l }
After:   the same, and a graph @decode_head like it with
             %ids, %context, %position = advance(%t, %ids, %context, %seg_tokens, %position)
             return tokens=%t, logits=%l, ids=%ids, context=%context, position=%position

Decode buckets run @decode_head in place of @head. Saves the wait for the host between two steps of
the same requests: the runtime can launch one behind the other. Runs after all fusions, and only
where the catalogue implements advance.
"""

from __future__ import annotations

from dataclasses import replace

from k3c.ir.edit import Index
from k3c.ir.graph import Graph, Input, Module, Node, Value
from k3c.ir.types import TensorType
from k3c.passes.context import NO_DEAD_NODES, PassContext

NAME = "add_advance"
REQUIRES = (NO_DEAD_NODES,)
ENSURES = ()
REQUIRED = False
ANCHORS: tuple[str, ...] = ()
RULES = ()

HEAD, DECODE_HEAD = "head", "decode_head"
_READ = ("ids", "context", "seg_tokens", "position")
_UPDATED = ("ids", "context", "position")


def expected(module: Module) -> int | None:
    """No number: it depends on the catalogue."""
    return None


def run(module: Module, ctx: PassContext) -> Module:
    """Add the head of decode steps."""
    heads = [g for g in module.graphs if g.name == HEAD]
    done = any(g.name == DECODE_HEAD for g in module.graphs)
    types = _io_types(module)
    samples = [n for g in heads for n in g.nodes if n.op == "sample"]
    fields = all(name in types for name in _READ)
    if done or not samples or not fields or not ctx.implements("advance"):
        return module
    ctx.log.matches["advance"] = 1
    graph = _advancing(heads[0], samples[0].results[0], types)
    return replace(module, graphs=(*module.graphs, graph))


def _io_types(module: Module) -> dict[str, TensorType]:
    inputs = [item for graph in module.graphs for item in graph.inputs if item.role == "io"]
    return {item.value.name: item.value.type for item in inputs}


def _advancing(head: Graph, tokens: Value, types: dict[str, TensorType]) -> Graph:
    index, known = Index(head), {item.value.name: item.value for item in head.inputs}
    fields = {name: known.get(name, Value(name, types[name])) for name in _READ}
    added = tuple(Input(value, "io") for name, value in fields.items() if name not in known)
    results = tuple(Value(index.fresh(f"next_{name}"), types[name]) for name in _UPDATED)
    node = Node("advance", (tokens, *fields.values()), results)
    return replace(
        head,
        name=DECODE_HEAD,
        inputs=(*head.inputs, *added),
        nodes=(*head.nodes, node),
        outputs=(*head.outputs, *zip(_UPDATED, results, strict=True)),
    )
