"""A plan that does not fit the target is refused before a weight is read."""

from dataclasses import replace

import pytest

from k3c.artifact import SPACES, Bucket, Plan
from k3c.compile import _check_fits
from k3c.errors import PlanError
from k3c.targets.mesh import Mesh
from k3c.targets.target import load_target, physical_memory_bytes

GIB = 2**30


def no_mesh(spare_bytes):
    return None


def plan(**space_bytes):
    sizes = {space: space_bytes.get(space, 0) for space in SPACES}
    return Plan(Bucket("decode.b1", "decode", {}), 0, sizes, 0, (), {}, (), (), "step", {})


def test_the_largest_need_of_every_space_counts():
    target = replace(load_target("cpu-avx2"), memory_bytes=4 * GIB)
    first, second = plan(weights=2 * GIB, arena=GIB), plan(weights=2 * GIB, kv_pages=GIB)
    _check_fits([first, second], target, no_mesh)
    with pytest.raises(PlanError, match=r"4\.5 GiB planned, 4\.0 GiB there.*arena 1\.5") as error:
        _check_fits(
            [replace(first, space_bytes={**first.space_bytes, "arena": GIB * 3 // 2}), second],
            target,
            no_mesh,
        )
    assert error.value.exit_code == 3
    assert "--max-num-seqs" in error.value.hint


def test_the_best_target_of_this_machine_has_its_memory():
    flags = frozenset(load_target("cpu-avx2").features)
    assert load_target("cpu", flags).memory_bytes == physical_memory_bytes()


def test_the_smallest_mesh_that_fits_is_named():
    target = replace(load_target("h200"), memory_bytes=GIB)
    with pytest.raises(PlanError) as error:
        _check_fits([plan(weights=GIB, io=7, arena=5)], target, lambda spare: Mesh(spare, spare))
    assert "--mesh tp=12,ep=12 fits" in error.value.hint
