"""Elementwise ops and the decode step's next input on GPUs."""

import pytest
import torch

from k3c.codegen.templates.triton.pointwise import TEMPLATES
from k3c.ir.graph import LayerAttr, Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, value

BY_OP = {t.op: t for t in TEMPLATES}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: exp, a division and a few products. bf16: one unit in the last place, when a value that
# lies between two of them rounds the other way.
BOUND = {"f32": 3e-6, "bf16": 2**-7}
ACTS = pytest.mark.parametrize("act", DTYPES)
SITU = {"beta": 4.0, "linear_beta": "none"}


@ACTS
@pytest.mark.parametrize("op", ["add", "sigmoid_mul"])
@pytest.mark.parametrize(("rows", "width"), [(1, 7168), (63, 51), (3, 256)])
def test_elementwise_ops_equal_the_reference(op, rows, width, act):
    torch.manual_seed(width)
    a, b = (torch.randn(rows, width).to(DTYPES[act]) for _ in range(2))
    check(BY_OP[op], node(op, [a, b], [(act, rows, width)]), [a, b], BOUND[act])


def test_routed_rows_are_elements_too():
    gate, up = (torch.randn(3, 4, 40) for _ in range(2))
    check(BY_OP["situ"], node("situ", [gate, up], [("f32", 3, 4, 40)], **SITU), [gate, up], 3e-6)


@ACTS
@pytest.mark.parametrize("linear_beta", [25.0, "none"])
@pytest.mark.parametrize("size", [30, 1, 1e-3])
def test_situ_caps_both_branches_and_keeps_the_digits_of_small_values(linear_beta, size, act):
    torch.manual_seed(0)
    gate, up = ((size * torch.randn(5, 96)).to(DTYPES[act]) for _ in range(2))
    n = node("situ", [gate, up], [(act, 5, 96)], beta=4.0, linear_beta=linear_beta)
    check(BY_OP["situ"], n, [gate, up], BOUND[act])


def test_situ_is_finite_at_the_ends_of_float32():
    gate = torch.tensor([[3e38, -3e38, 0.0, 100.0, -100.0]])
    n = node("situ", [gate, gate], [("f32", 1, 5)], beta=4.0, linear_beta=25.0)
    (y,) = check(BY_OP["situ"], n, [gate, gate], 3e-6)
    assert torch.isfinite(y).all()


@ACTS
@pytest.mark.parametrize("restart", [0, 1])
def test_residual_join_never_reads_the_prefix_at_a_restart(restart, act):
    prefix, delta = (torch.randn(3, 96).to(DTYPES[act]) for _ in range(2))
    if restart:
        prefix[:] = torch.nan
    n = node("residual_join", [prefix, delta], [(act, 3, 96)], restart=LayerAttr("restart"))
    check(BY_OP["residual_join"], n, [prefix, delta], 0.0, {"restart": restart})


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("count", [3, 200])
def test_advance_moves_live_segments_only_and_makes_no_id_below_zero(count):
    gen = torch.Generator().manual_seed(count)
    tokens, ids, context, position = (
        torch.randint(0, 99, (count,), generator=gen, dtype=torch.int32) for _ in range(4)
    )
    live = torch.randint(0, 2, (count,), generator=gen, dtype=torch.int32)
    tokens[0], live[0] = -1, 1
    tensors = [tokens, ids, context, live, position]
    n = node("advance", tensors, [("i32", count)] * 3)
    got = check(BY_OP["advance"], n, tensors, 0.0)
    assert got[0][0] == 0


def test_advance_leaves_rows_without_a_segment_alone():
    tensors = [i32(7, 8), i32(1, 2, 3), i32(4, 5), i32(1, 1), i32(0, 0)]
    n = node("advance", tensors, [("i32", 3), ("i32", 2), ("i32", 2)])
    assert check(BY_OP["advance"], n, tensors, 0.0)[0].tolist() == [7, 8, 3]


@ACTS
@pytest.mark.parametrize("target", GPU_TARGETS)
def test_every_target_has_the_kernels(target, act):
    device, kind = load_target(target), (act, 8192, 7168)
    operands, out = (value("a", *kind), value("b", *kind)), (value("y", *kind),)
    attrs = {"situ": SITU, "residual_join": {"restart": LayerAttr("restart")}}
    for op in ("add", "sigmoid_mul", "situ", "residual_join"):
        compiles(BY_OP[op], Node(op, operands, out, attrs.get(op, {})), device)
    words = [value(name, "i32", 512) for name in "tixsp"]
    n = Node("advance", tuple(words), (words[1], words[2], words[4]), {})
    compiles(BY_OP["advance"], n, device)
