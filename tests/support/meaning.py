"""Whether two modules mean the same: their outputs under the reference ops, bit by bit."""

from __future__ import annotations

import torch

from k3c.ir.graph import Module
from tests.support.interp import interpret_graph
from tests.support.random_tensors import inputs_of, layer_attrs_of, sources_of, weights_from


def assert_same_meaning(before: Module, after: Module) -> None:
    """Interpret every graph of both on the same random tensors and compare bitwise.

    Bitwise, because no pass may change a rounding. NaN equals NaN: a scratch page or an unwritten
    row may hold one.
    """
    weights = weights_from(sources_of(before))
    for old, new in zip(before.graphs, after.graphs, strict=True):
        attrs = layer_attrs_of(before, old)
        want = interpret_graph(old, inputs_of(old), weights(old), attrs)
        got = interpret_graph(new, inputs_of(new), weights(new), attrs)
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            same = torch.equal(tensor.nan_to_num(7.0), got[name].nan_to_num(7.0))
            assert same, f"@{old.name} {name} differs"
