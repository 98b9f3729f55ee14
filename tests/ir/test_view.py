"""A graph as networkx and DOT."""

import networkx as nx

from k3c.ir.text import parse
from k3c.ir.view import critical_path, to_dot, to_networkx

TEXT = """k3ir 1
level model
dim T in [1, 8]

graph @g(io %x: bf16[T, 8]) -> bf16[T, 8] {
  weight %w: bf16[8, 8] from "a"
  %s = add(%x, %x) : bf16[T, 8]
  %p = linear(%x, %w) : bf16[T, 8]
  %y = add(%s, %p) : bf16[T, 8]
  %z = sigmoid_mul(%y, %x) : bf16[T, 8]
  return z=%z
}
"""
GRAPH = parse(TEXT).graphs[0]


def test_both_operands_of_a_square_are_edges():
    view = to_networkx(GRAPH)
    assert view.number_of_edges("%x", "node 0") == 2
    assert nx.is_directed_acyclic_graph(view)
    assert view.number_of_nodes() == 2 + 4 + 1


def test_the_critical_path_is_the_longest_chain():
    assert critical_path(GRAPH)[-2:] == (2, 3)
    assert len(critical_path(GRAPH)) == 3


def test_dot_text_is_the_same_every_time_and_quotes_labels():
    text = to_dot(GRAPH)
    assert text == to_dot(parse(TEXT).graphs[0])
    assert text.startswith('digraph "g" {')
    assert '"node 2" -> "node 3" [label="%y"];' in text
