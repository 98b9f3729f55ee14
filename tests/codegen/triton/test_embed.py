"""embed and gather_rows on GPUs."""

from __future__ import annotations

import pytest
import torch

from k3c.codegen.templates.triton.embed import Embed, GatherRows
from k3c.ir.graph import LayerAttr, Node
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node

TORCH = {"bf16": torch.bfloat16, "f32": torch.float32}
EXACT = 0.0


def _embed(rows: int, width: int, stored: str, act: str) -> tuple[Node, list[torch.Tensor]]:
    torch.manual_seed(rows)
    ids = torch.randint(0, 50, (rows,), dtype=torch.int32)
    tensors = [ids, torch.randn(50, width).to(TORCH[stored])]
    return node("embed", tensors, [(act, rows, width)]), tensors


@pytest.mark.parametrize("rows", [1, 3, 63])
@pytest.mark.parametrize(("stored", "act"), [("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16")])
def test_rows_of_the_table_are_copied(rows: int, stored: str, act: str) -> None:
    n, tensors = _embed(rows, 100, stored, act)
    check(Embed(), n, tensors, EXACT, result_dtypes=[act])


def test_a_row_longer_than_a_block_is_copied_whole() -> None:
    n, tensors = _embed(3, 1300, "bf16", "bf16")
    check(Embed(), n, tensors, EXACT, result_dtypes=["bf16"])


def test_rows_of_other_ranks_and_no_rows_are_zero() -> None:
    n, tensors = _embed(8, 96, "bf16", "bf16")
    tensors[0] = torch.tensor([99, 100, 120, 149, 150, 0, -1, 2**31 - 1], dtype=torch.int32)
    n = Node(n.op, n.operands, n.results, {"first_row": LayerAttr("first_row")})
    (y,) = check(Embed(), n, tensors, EXACT, {"first_row": 100}, result_dtypes=["bf16"])
    assert y.float().abs().amax(1).eq(0).tolist() == [1, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_gathered_rows_are_copied(act: str) -> None:
    torch.manual_seed(5)
    index = torch.tensor([4, 0, 4, 62], dtype=torch.int32)
    tensors = [torch.randn(63, 100).to(TORCH[act]), index]
    check(GatherRows(), node("gather_rows", tensors, [(act, 4, 100)]), tensors, EXACT)


def test_a_gather_does_not_change_the_dtype() -> None:
    tensors = [torch.randn(4, 32), torch.zeros(2, dtype=torch.int32)]
    n = node("gather_rows", tensors, [("bf16", 2, 32)])
    assert "differ in dtype" in str(GatherRows().accepts(n, load_target("h200")))


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_every_target_has_the_kernels(target: str) -> None:
    n, _ = _embed(8, 7168, "bf16", "bf16")
    compiles(Embed(), n, load_target(target))
    tensors = [torch.zeros(8, 7168).bfloat16(), torch.zeros(2, dtype=torch.int32)]
    compiles(GatherRows(), node("gather_rows", tensors, [("bf16", 2, 7168)]), load_target(target))
