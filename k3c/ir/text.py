"""The text form of the IR: `show(parse(t)) == t` for every text that `show` printed.

A node's `loc`, the line of the model source that it came from, stands behind it as a comment
(`# k3c/model/kda.py:70`) and parses back. Comments on lines of their own are dropped.
"""

from __future__ import annotations

from k3c.ir.parser import parse
from k3c.ir.printer import show, show_attrs, show_graph, show_node

__all__ = ["parse", "show", "show_attrs", "show_graph", "show_node"]
