"""linear and norm_linear on GPUs, few rows and many, against the reference ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3c.codegen.templates.triton.linear_base import LinearTemplate
from k3c.codegen.templates.triton.linear_decode import LinearDecode
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.linear_case import (
    BOUNDS,
    LINEAR_DECODE,
    LINEAR_GEMM,
    NORM_DECODE,
    NORM_GEMM,
    RAGGED,
    REAL,
    WHOLE,
    Case,
    template_for,
)
from tests.support.triton_runner import run

H200 = load_target("h200")


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
def test_few_rows_match_the_reference_with_several_ranges(rows: int) -> None:
    Case(rows, 96, RAGGED).check(LINEAR_DECODE)


@pytest.mark.parametrize("rows", [17, 64, 65, 100])
def test_many_rows_match_the_reference_with_several_ranges(rows: int) -> None:
    Case(rows, 96, RAGGED).check(LINEAR_GEMM)


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_are_normalised_first(rows: int) -> None:
    Case(rows, 96, RAGGED, norm=True).check(NORM_DECODE)


@pytest.mark.parametrize("rows", [17])
def test_many_rows_are_normalised_first(rows: int) -> None:
    Case(rows, 224, RAGGED, norm=True).check(NORM_GEMM)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("rows", "inner"), [(3, 2048), (20, 1024)])
def test_parts_of_k_are_added_up(rows: int, inner: int, norm: bool) -> None:
    template = template_for(rows, norm)
    case = Case(rows, inner, ((20, "situ", "bf16"), (33, "none", "f32")), norm=norm)
    assert template.config(case.node(), H200)["SPLIT"] > 1
    case.check(template)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 3), (LINEAR_GEMM, 63)])
def test_float32_activations_keep_float32_accuracy(
    template: LinearTemplate, rows: int, stored: str
) -> None:
    Case(rows, 256, ((100, "none", "f32"),), "f32", stored).check(template)


@pytest.mark.parametrize(("template", "rows"), [(NORM_DECODE, 3), (NORM_GEMM, 20)])
def test_float32_norms_keep_float32_accuracy(template: LinearTemplate, rows: int) -> None:
    results = ((40, "situ", "f32"), (20, "none", "f32"))
    Case(rows, 96, results, "f32", norm=True).check(template)


@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 3), (LINEAR_GEMM, 20)])
def test_float32_weights_are_not_rounded(template: LinearTemplate, rows: int) -> None:
    Case(rows, 96, ((33, "none", "f32"),), "bf16", "f32").check(template, BOUNDS["f32"])


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 1), (LINEAR_GEMM, 30)])
def test_an_addend_is_added_after_rounding(template: LinearTemplate, rows: int, act: str) -> None:
    Case(rows, 96, ((100, "none", act),), act, addend=True).check(template)


@pytest.mark.parametrize(("template", "rows"), [(NORM_DECODE, 2), (NORM_GEMM, 30)])
def test_a_norm_and_an_addend_go_together(template: LinearTemplate, rows: int) -> None:
    Case(rows, 64, ((48, "none", "bf16"),), addend=True, norm=True).check(template)


@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 3), (LINEAR_GEMM, 17)])
def test_k_that_fills_no_vector_is_not_lost(template: LinearTemplate, rows: int) -> None:
    Case(rows, 13, ((5, "none", "f32"),)).check(template)


@pytest.mark.parametrize("config", LINEAR_DECODE.configs(Case(3, 768, WHOLE).node(), H200))
def test_every_candidate_for_few_rows_gives_the_result(config: dict[str, int]) -> None:
    class Fixed(LinearDecode):
        def config(self, node: Node, target: object) -> dict[str, int]:
            return config

    Case(3, 768, WHOLE).check(Fixed())


@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 2), (LINEAR_GEMM, 18)])
def test_a_nan_in_one_row_stays_in_that_row(template: LinearTemplate, rows: int) -> None:
    case = Case(rows, 96, ((40, "none", "bf16"),))
    tensors = case.tensors()
    tensors[0][1, 5] = torch.nan
    (y,) = run(template, case.node(), tensors)
    assert y[1].isnan().all()
    assert not y[0].isnan().any()


def test_row_results_do_not_depend_on_the_other_rows() -> None:
    case = Case(100, 96, ((40, "none", "bf16"),))
    x, w = case.tensors()
    (whole,) = run(LINEAR_GEMM, case.node(), [x, w])
    (part,) = run(LINEAR_GEMM, Case(19, 96, case.results).node(), [x[:19].clone(), w])
    assert torch.equal(whole[:19], part)


def test_one_kernel_serves_many_numbers_of_rows() -> None:
    few, many = (LINEAR_GEMM.stages(Case(r, 96, RAGGED).node(), H200) for r in (40, 60))
    assert [s.constants for s in few] == [s.constants for s in many]
    three, eight = (LINEAR_DECODE.stages(Case(r, 96, RAGGED).node(), H200) for r in (3, 8))
    assert [s.constants for s in three] == [s.constants for s in eight]


def test_all_templates_read_the_same_packed_bytes() -> None:
    expected = "rows.48-20s-33-24"
    assert LINEAR_DECODE.layouts(Case(3, 96, RAGGED).node(), H200) == {1: expected}
    assert LINEAR_GEMM.layouts(Case(30, 96, RAGGED).node(), H200) == {1: expected}
    assert NORM_DECODE.layouts(Case(3, 96, RAGGED, norm=True).node(), H200) == {2: expected}


def test_cost_counts_packed_weights_and_every_result() -> None:
    cost = LINEAR_DECODE.cost(Case(3, 96, ((100, "none", "f32"),)).node(), H200)
    # 100 columns are padded to 112.
    assert cost.read_bytes == 112 * 96 * 2 + 3 * 96 * 2
    assert cost.write_bytes == 3 * 100 * 4
    assert cost.flops == 2 * 3 * 96 * 100


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    n = Case(3, 96, RAGGED).node()
    gelu = replace(n, attrs={**n.attrs, "epilogues": ("none", "gelu", "none")})
    assert "epilogue must be none or situ (gelu)" in str(LINEAR_GEMM.accepts(gelu, H200))
    short = replace(n, results=n.results[:2], attrs={**n.attrs, "epilogues": ("none", "situ")})
    assert "use 88 weight rows (145)" in str(LINEAR_GEMM.accepts(short, H200))
    assert "want 17 to" in str(LINEAR_GEMM.accepts(n, H200))
    assert "want 1 to 16 rows (17)" in str(LINEAR_DECODE.accepts(Case(17, 96, RAGGED).node(), H200))


@pytest.mark.device
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 63, 100, 300])
def test_real_shapes_match_the_reference(name: str, rows: int) -> None:
    inner, results = REAL[name]
    # Sums of 7168 products in f32: 3e-6 is for fewer.
    Case(rows, inner, results).check(template_for(rows, False))
