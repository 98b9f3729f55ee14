"""A graph as a networkx graph and as DOT text, to look at and to ask questions of.

networkx answers questions; it never owns the IR. There is no ONNX view: most ops have no ONNX
meaning, so it would say no more than the DOT text.
"""

from __future__ import annotations

import json
from typing import Any

import networkx as nx

from k3c.ir.graph import Graph
from k3c.ir.printer import show_node


def to_networkx(graph: Graph) -> nx.MultiDiGraph[str]:
    """Return a graph with an edge for every operand.

    Nodes are `%value` for inputs and weights and `node <position>` for operations, with attribute
    `label`; edges have `value` and `operand`. A multigraph keeps both edges of `add(%x, %x)`.
    """
    view: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=graph.name)
    maker: dict[str, str] = {}
    for value in [*(i.value for i in graph.inputs), *(w.value for w in graph.weights)]:
        maker[value.name] = f"%{value.name}"
        view.add_node(f"%{value.name}", label=f"%{value.name}: {value.type}")
    for position, node in enumerate(graph.nodes):
        key = f"node {position}"
        view.add_node(key, label=show_node(node).partition("  #")[0])
        for operand, value in enumerate(node.operands):
            view.add_edge(maker[value.name], key, value=f"%{value.name}", operand=operand)
        maker |= {value.name: key for value in node.results}
    for name, value in graph.outputs:
        view.add_node(f"return {name}", label=f"{name}: {value.type}")
        view.add_edge(maker[value.name], f"return {name}", value=f"%{value.name}", operand=0)
    return view


def critical_path(graph: Graph) -> tuple[int, ...]:
    """Return positions of the longest chain of nodes that wait for each other."""
    path: list[str] = nx.dag_longest_path(nx.DiGraph(to_networkx(graph)))
    return tuple(int(key.split()[1]) for key in path if key.startswith("node "))


def to_dot(graph: Graph) -> str:
    """Return the graph as DOT text; the same graph gives the same text."""
    view: Any = to_networkx(graph)
    lines = [f"digraph {json.dumps(graph.name)} {{", "  node [shape=box];"]
    lines += [
        f"  {json.dumps(key)} [label={json.dumps(data['label'])}];"
        for key, data in view.nodes(data=True)
    ]
    lines += [
        f"  {json.dumps(tail)} -> {json.dumps(head)} [label={json.dumps(data['value'])}];"
        for tail, head, data in view.edges(data=True)
    ]
    return "\n".join([*lines, "}"]) + "\n"
