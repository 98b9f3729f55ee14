"""Whether two modules mean the same: their outputs under the reference ops, bit by bit."""

from __future__ import annotations

from k3c.ir.graph import Module
from tests.support.closeness import relative_error
from tests.support.interp import interpret_graph
from tests.support.random_tensors import inputs_of, layer_attrs_of, sources_of, weights_from


def assert_same_meaning(before: Module, after: Module, bound: float = 0.0) -> None:
    """Interpret every graph of `before` on the same random tensors in both and compare.

    The default bound is bitwise, because no pass may change a rounding; a caller whose GEMMs are
    not exact states a bound of max|difference| / max|value|. NaN equals NaN: a scratch page or an
    unwritten row may hold one.
    """
    for old in before.graphs:
        new = after.graph(old.name)
        attrs, sources = layer_attrs_of(before, old), sources_of(old)
        want = interpret_graph(old, inputs_of(old), weights_from(sources, old), attrs)
        got = interpret_graph(new, inputs_of(new), weights_from(sources, new), attrs)
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            error = relative_error(got[name].nan_to_num(7.0), tensor.nan_to_num(7.0))
            assert error <= bound, f"@{old.name} {name} differs by {error}, bound {bound}"
