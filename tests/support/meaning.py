"""Whether two modules mean the same: their outputs under the reference ops, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from k3c.ir.graph import Call, Module
from k3c.targets.mesh import Mesh
from tests.support.closeness import relative_error
from tests.support.interp import interpret_graph
from tests.support.random_tensors import inputs_of, layer_attrs_of, sources_of, weights_from
from tests.support.ranks import Group, run_graph


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


def assert_ranks_compute_the_same(
    before: Module, after: Module, mesh: Mesh, bound: float = 2.0**-6
) -> None:
    """Interpret every graph without state on all ranks of a mesh, and compare.

    Each data-parallel rank has rows of its own: those of the others, shifted. The default bound is
    a few steps of bf16: each rank rounds its part of a sum.
    """
    for old in before.graphs:
        if any(item.role == "state" for item in old.inputs):
            continue
        new, sources = after.graph(old.name), sources_of(old)
        attrs, calls = (
            layer_attrs_of(before, old),
            [c for c in after.schedule if c.graph == old.name],
        )
        own = [_shifted(inputs_of(old), dp) for dp in range(mesh.dp)]
        want = [interpret_graph(old, o, weights_from(sources, old), attrs) for o in own]
        group = Group(mesh, lambda n, _, s=sources: s[n])
        places = [group.place(rank)["dp"] for rank in range(mesh.ranks)]
        envs = [dict(own[dp]) for dp in places]
        run_graph(new, calls[-1] if calls else Call(old.name, 0), envs, group)
        for env, dp in zip(envs, places, strict=True):
            for name, value in new.outputs:
                error = relative_error(env[value.name], want[dp][name])
                assert error <= bound, f"@{old.name} {name} differs by {error}, bound {bound}"


def _shifted(inputs: Mapping[str, Tensor], by: int) -> dict[str, Tensor]:
    return {name: tensor.roll(by, 0) for name, tensor in inputs.items()}
