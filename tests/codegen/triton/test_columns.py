"""The columns of ranks, joined and kept apart."""

import pytest
import torch

from k3c.codegen.templates.triton.columns import TEMPLATES
from k3c.ir.graph import LayerAttr
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node

BY_OP = {t.op: t for t in TEMPLATES}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "width"), [(4, 3, 17, 66), (2, 1, 1100, 2200)]
)
def test_parts_stand_side_by_side_and_padding_is_cut_off(ranks, rows, columns, width, act):
    parts = torch.randn(ranks, rows, columns).to(DTYPES[act])
    n = node("join_columns", [parts], [(act, rows, width)])
    check(BY_OP["join_columns"], n, [parts], 0.0, columns=width)


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize("first", [0, 36, 84])
def test_kept_columns_are_those_of_the_whole_norm(first, act):
    torch.manual_seed(first)
    x, w = torch.randn(3, 96).to(DTYPES[act]), torch.randn(96)
    attrs = {"eps": 1e-5, "columns": 12, "first_column": LayerAttr("first_column")}
    n = node("norm_columns", [x, w], [(act, 3, 12)], **attrs)
    # f32: a sum of 96 squares and a root; bf16: one unit in the last place.
    bound = 3e-6 if act == "f32" else 2**-7
    check(BY_OP["norm_columns"], n, [x, w], bound, {"first_column": first})


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_both_compile_for_every_target_at_real_shapes(target):
    parts = torch.empty(16, 4, 10240, device="meta")
    n = node("join_columns", [parts], [("f32", 4, 163840)])
    compiles(BY_OP["join_columns"], n, load_target(target))
    attrs = {"eps": 1e-5, "columns": 224, "first_column": LayerAttr("first_column")}
    operands = [torch.empty(64, 3584, dtype=torch.bfloat16), torch.empty(3584)]
    n = node("norm_columns", operands, [("bf16", 64, 224)], **attrs)
    compiles(BY_OP["norm_columns"], n, load_target(target))
