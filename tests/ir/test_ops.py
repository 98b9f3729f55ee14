"""The op registry against the reference ops: the same names, in-place pairs and shapes."""

import pytest

from k3c.export.ops import REFERENCE
from k3c.ir.graph import Node, Value
from k3c.ir.ops import OPS, epilogues
from k3c.ir.types import BF16, F32, I32, MXFP4, SymDim, TensorType

T = SymDim("T", 1, 64)


def test_every_op_but_the_cast_has_a_reference():
    assert OPS.keys() - REFERENCE.keys() == {"cast"}


def test_every_reference_is_an_op_of_the_ir():
    assert REFERENCE.keys() <= OPS.keys()


@pytest.mark.parametrize("name", sorted(OPS))
def test_in_place_pairs_name_operands_and_results_of_one_type(name):
    spec = OPS[name]
    for result, operand in spec.in_place.items():
        shape = spec.signature.operands[operand].shapes
        assert spec.signature.results[result].shapes == shape


def test_in_place_pairs_are_those_of_the_kernels():
    pairs = {name: dict(spec.in_place) for name, spec in OPS.items() if spec.in_place}
    assert pairs == {
        "attn_res_norm": {0: 0, 2: 2},
        "kda": {1: 12, 2: 13},
        "kda_fb": {1: 13, 2: 14},
        "kda_verify": {1: 15, 2: 16, 3: 17, 4: 18},
        "kda_fold": {0: 0, 1: 1},
        "mla_append": {0: 2},
        "advance": {0: 1, 1: 2, 2: 4},
    }


def test_results_are_inferred_from_operands_where_they_say_enough():
    x, w = TensorType(BF16, (T, 32)), TensorType(F32, (32,))
    assert OPS["rms_norm"].infer((x, w), {"eps": 1e-6}) == (x,)
    experts = TensorType(I32, (T, 4))
    found = OPS["dispatch"].infer((experts,), {"num_experts": 6})
    assert found == (TensorType(I32, (7,)), experts)


def test_results_that_operands_leave_open_are_not_guessed():
    ids, table = TensorType(I32, (T,)), TensorType(BF16, (100, 32))
    assert OPS["embed"].infer((ids, table), {}) is None
    assert OPS["rms_norm"].infer((table, ids), {"eps": 1e-6}) is None


def node(op, operands, results, **attrs):
    values = [Value(f"v{i}", kind) for i, kind in enumerate((*operands, *results))]
    return Node(op, tuple(values[: len(operands)]), tuple(values[len(operands) :]), attrs)


def linear(results, **attrs):
    operands = TensorType(BF16, (T, 32)), TensorType(BF16, (24, 32))
    return node("linear", operands, [TensorType(BF16, (T, n)) for n in results], **attrs)


SITU = {"beta": 4.0, "linear_beta": "none"}


@pytest.mark.parametrize(
    ("good", "found"),
    [
        (linear([24]), ("none",)),
        (linear([8, 16]), ("none", "none")),
        (linear([8, 8], epilogues=("none", "situ"), **SITU), ("none", "situ")),
        (linear([12], epilogues=("situ",), **SITU), ("situ",)),
    ],
)
def test_column_ranges_take_all_weight_rows(good, found):
    assert OPS["linear"].check(good) is None
    assert epilogues(good) == found


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (linear([8, 8]), "the results take 16 weight rows, the weight has 24"),
        (linear([8, 8], epilogues=("situ",), **SITU), "1 epilogues for 2 results"),
        (linear([12], epilogues=("situ",)), "epilogue situ needs attributes beta and linear_beta"),
        (linear([12], epilogues=("gelu",), **SITU), "not of kind epilogues"),
    ],
)
def test_wrong_column_ranges_are_named(bad, what):
    problem = OPS["linear"].check(bad)
    assert problem
    assert what in problem.what


def test_an_addend_needs_a_single_plain_result():
    x, w, b = (TensorType(BF16, s) for s in ((T, 32), (24, 32), (T, 24)))
    assert OPS["linear"].check(node("linear", (x, w, b), (b,))) is None
    two = (TensorType(BF16, (T, 12)),) * 2
    problem = OPS["linear"].check(node("linear", (x, w, b), two))
    assert problem
    assert "an addend needs a single result" in problem.what


def test_experts_take_one_row_a_token_or_one_for_each_expert():
    w, experts = TensorType(MXFP4, (4, 16, 32)), TensorType(I32, (T, 2))
    result = TensorType(BF16, (T, 2, 16))
    for shape in ((T, 32), (T, 2, 32)):
        x = TensorType(BF16, shape)
        assert (
            OPS["grouped_linear"].check(node("grouped_linear", (x, w, experts), (result,))) is None
        )
    x = TensorType(BF16, (T, 3, 32))
    problem = OPS["grouped_linear"].check(node("grouped_linear", (x, w, experts), (result,)))
    assert problem
    assert "k is 3, not 2" in problem.what
    assert problem.operand == 2
