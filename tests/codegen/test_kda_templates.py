"""What the KDA, sampling and log probability templates state: refusals, layouts, costs, builds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from k3c.codegen.kernel_build import build_kernel
from k3c.codegen.kernel_key import KernelRequest
from k3c.codegen.template import pack, packed_nbytes, unpack
from k3c.codegen.templates.tvm import kda_decode, kda_prefill, sample, token_logprob
from k3c.ir.types import F32, Layout, TensorType
from k3c.targets.target import load_target
from tests.support.kda_case import KdaCase
from tests.support.kernel_runner import node

DECODE, PREFILL = kda_decode.TEMPLATES[0], kda_prefill.TEMPLATES[0]
TARGETS = ("cpu-avx2", "cpu-avx512")


def kda_node(rows: int, segments: int, width: int = 32):
    case = KdaCase(6, width, width, rows, (1,) * segments, (1,) * segments)
    return case.node(case.operands())


def sample_node(rows: int, vocab: int):
    floats = [torch.zeros(rows) for _ in range(3)]
    ints = [torch.zeros(rows, dtype=torch.int32) for _ in range(2)]
    seed = torch.zeros(rows, dtype=torch.int64)
    operands = [torch.zeros(rows, vocab), floats[0], ints[0], *floats[1:], seed, ints[1]]
    return node("sample", operands, [("i32", rows)])


def logprob_node(rows: int, vocab: int):
    operands = [torch.zeros(rows, vocab), torch.zeros(rows, dtype=torch.int32)]
    return node("token_logprob", operands, [("f32", rows)])


@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_builds_for_every_target_without_running(name):
    target = load_target(name)
    pairs = (
        (DECODE, kda_node(2, 2)),
        (PREFILL, kda_node(16, 2)),
        (sample.TEMPLATES[0], sample_node(2, 96)),
        (token_logprob.TEMPLATES[0], logprob_node(2, 96)),
    )
    for template, n in pairs:
        assert template.accepts(n, target) is None
        assert build_kernel(KernelRequest(template, template.constants(n, target)), target)


def test_decode_and_prefill_share_out_the_buckets():
    target = load_target(TARGETS[0])
    for rows, segments, taker in (
        (1, 1, DECODE),
        (8, 8, DECODE),
        (16, 8, PREFILL),
        (2, 1, PREFILL),
    ):
        accepted = [
            t for t in (DECODE, PREFILL) if t.accepts(kda_node(rows, segments), target) is None
        ]
        assert accepted == [taker]


@pytest.mark.parametrize("width", [30, 256])
def test_a_head_width_outside_the_limits_is_refused_with_the_number(width):
    refusal = DECODE.accepts(kda_node(1, 1, width), load_target(TARGETS[0]))
    assert refusal is not None
    assert "multiples of 4, at most 252" in refusal.reason
    assert str(width) in str(refusal.value)


def test_taps_are_packed_tap_major_and_unpack_to_what_they_were():
    taps = np.arange(24, dtype=np.float32).reshape(6, 4)
    type_ = TensorType(F32, (6, 4), Layout("taps_f32.4"))
    packed = pack(type_, [taps])
    assert packed.nbytes == packed_nbytes(type_)
    assert (packed.view(np.float32) == taps.T.reshape(-1)).all()
    assert (unpack(type_, packed)[0] == taps).all()


def test_layouts_and_constants_do_not_depend_on_the_bucket():
    target = load_target(TARGETS[0])
    small, large = kda_node(16, 2), kda_node(64, 2)
    assert PREFILL.layouts(small, target) == DECODE.layouts(kda_node(2, 2), target)
    assert PREFILL.constants(small, target) == PREFILL.constants(large, target)
    # Three slots each: scratch is planned by head, not by row.
    assert PREFILL.workspace_bytes(small, target) == PREFILL.workspace_bytes(large, target)


def test_cost_counts_the_live_state_once_read_and_once_written():
    n = kda_node(2, 2)
    cost = DECODE.cost(n, load_target(TARGETS[0]))
    state = n.operands[13].type.nbytes * 2 // n.operands[13].type.sizes[0]
    assert state < cost.write_bytes < cost.read_bytes
    without = dataclasses.replace(cost, flops=0)
    assert without.write_bytes < state + 3 * n.operands[12].type.nbytes + n.results[0].type.nbytes
