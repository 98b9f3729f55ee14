"""linear on panels, decode and prefill, against the reference op."""

from dataclasses import dataclass, replace

import pytest
import torch

from k3c.codegen.templates.tvm.linear import LINEAR_DECODE
from k3c.codegen.templates.tvm.linear_gemm import LINEAR_PREFILL
from k3c.ir.graph import Node
from k3c.targets.target import load_target
from tests.support.kernel_runner import check, node, run

# f32: sums of at most 256 products in another order than torch's, each within half a unit in the
# last place. bf16: a sum near a rounding boundary may round the other way, one unit of 2^-8.
BOUNDS = {"f32": 1e-5, "bf16": 2**-7}
TORCH = {"bf16": torch.bfloat16, "f32": torch.float32}
TARGET = load_target("cpu-avx2")


@dataclass(frozen=True)
class Case:
    """A linear: rows, K, (width, epilogue, dtype) of each result, dtypes of x and w."""

    rows: int
    inner: int
    results: tuple[tuple[int, str, str], ...]
    act: str = "bf16"
    stored: str = "bf16"
    addend: bool = False

    def tensors(self) -> list[torch.Tensor]:
        torch.manual_seed(self.rows + self.inner)
        total = sum(w * (2 if e == "situ" else 1) for w, e, _ in self.results)
        x = torch.randn(self.rows, self.inner).to(TORCH[self.act])
        w = (torch.randn(total, self.inner) / self.inner**0.5).to(TORCH[self.stored])
        if not self.addend:
            return [x, w]
        return [x, w, torch.randn(self.rows, self.results[0][0]).to(TORCH[self.act])]

    def node(self) -> Node:
        results = [(dtype, self.rows, width) for width, _, dtype in self.results]
        kinds = tuple(kind for _, kind, _ in self.results)
        return node("linear", self.tensors(), results, epilogues=kinds, beta=4.0, linear_beta=25.0)

    def check(self, template: object) -> None:
        widths = [w for w, _, _ in self.results]
        dtypes = [d for _, _, d in self.results]
        check(
            template, self.node(), self.tensors(), BOUNDS[self.act],
            widths=widths, result_dtypes=dtypes,
        )  # fmt: skip


RAGGED = ((48, "none", "bf16"), (20, "situ", "bf16"), (33, "none", "f32"))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_decode_matches_the_reference_with_several_ranges(rows: int) -> None:
    Case(rows, 96, RAGGED).check(LINEAR_DECODE)


@pytest.mark.parametrize("rows", [1, 3, 8, 63, 100])
def test_prefill_matches_the_reference_with_several_ranges(rows: int) -> None:
    Case(rows, 96, RAGGED).check(LINEAR_PREFILL)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 3), (LINEAR_PREFILL, 63)])
def test_float32_activations_keep_float32_accuracy(
    template: object, rows: int, stored: str
) -> None:
    Case(rows, 256, ((100, "none", "f32"),), "f32", stored).check(template)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 1), (LINEAR_PREFILL, 100)])
def test_an_addend_is_added_after_rounding(template: object, rows: int, act: str) -> None:
    Case(rows, 96, ((100, "none", act),), act, addend=True).check(template)


@pytest.mark.parametrize("template", [LINEAR_DECODE, LINEAR_PREFILL])
def test_k_that_fills_no_vector_is_not_lost(template: object) -> None:
    Case(3, 13, ((5, "none", "f32"),)).check(template)


@pytest.mark.parametrize(("template", "rows"), [(LINEAR_DECODE, 2), (LINEAR_PREFILL, 7)])
def test_a_nan_in_one_row_stays_in_that_row(template: object, rows: int) -> None:
    case = Case(rows, 96, ((40, "none", "bf16"),))
    tensors = case.tensors()
    tensors[0][1, 5] = torch.nan
    (y,) = run(template, case.node(), tensors)
    assert y[1].isnan().all()
    assert not y[0].isnan().any()


def test_row_results_do_not_depend_on_the_other_rows() -> None:
    case = Case(100, 96, ((40, "none", "bf16"),))
    x, w = case.tensors()
    (whole,) = run(LINEAR_PREFILL, case.node(), [x, w])
    (part,) = run(LINEAR_PREFILL, Case(7, 96, case.results).node(), [x[:7].clone(), w])
    assert torch.equal(whole[:7], part)


def test_one_kernel_serves_every_number_of_rows_in_prefill() -> None:
    few, many = (Case(rows, 96, RAGGED).node() for rows in (16, 256))
    assert LINEAR_PREFILL.constants(few, TARGET) == LINEAR_PREFILL.constants(many, TARGET)
    assert LINEAR_PREFILL.scalars(few) == (("rows", 16),)


def test_both_templates_read_the_same_packed_bytes() -> None:
    n = Case(3, 96, RAGGED).node()
    assert LINEAR_DECODE.layouts(n, TARGET) == LINEAR_PREFILL.layouts(n, TARGET)
    assert LINEAR_DECODE.layouts(n, TARGET) == {1: "panel_bf16.v8.48-20s-33"}


def test_cost_counts_packed_weights_and_every_result() -> None:
    cost = LINEAR_DECODE.cost(Case(3, 96, ((100, "none", "f32"),)).node(), TARGET)
    # 100 columns fill 7 panels of 16.
    assert cost.read_bytes == 7 * 16 * 96 * 2 + 3 * 96 * 2
    assert cost.write_bytes == 3 * 100 * 4
    assert cost.flops == 2 * 3 * 96 * 100


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    n = Case(3, 96, RAGGED).node()
    gelu = replace(n, attrs={**n.attrs, "epilogues": ("none", "gelu", "none")})
    assert "epilogue must be none or situ (gelu)" in str(LINEAR_PREFILL.accepts(gelu, TARGET))
    short = replace(n, results=n.results[:2], attrs={**n.attrs, "epilogues": ("none", "situ")})
    assert "use 88 weight rows (121)" in str(LINEAR_PREFILL.accepts(short, TARGET))
    nine = Case(9, 96, RAGGED).node()
    assert "1 to 8 rows (9)" in str(LINEAR_DECODE.accepts(nine, TARGET))
    ids = replace(
        n, operands=(node("x", [torch.zeros(3, 96).int()], []).operands[0], n.operands[1])
    )
    assert "operand 0 of linear must be f32 or bf16 (i32)" in str(
        LINEAR_DECODE.accepts(ids, TARGET)
    )
