import numpy as np
import pytest
import torch

from k3c.codegen.kernel_build import build_kernel
from k3c.codegen.kernel_key import KernelRequest
from k3c.codegen.template import pack, unpack
from k3c.codegen.templates.tvm.mla_absorb import TEMPLATES
from k3c.errors import CodegenError
from k3c.targets.target import load_target
from tests.support.kernel_runner import check, node, value, with_layouts

ABSORB_Q, ABSORB_V = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: sums of up to 512 in another order. bf16: that order decides how a result rounds, and with a
# gate the product rounds again: one unit in the last place.
F32_BOUND, BF16_BOUND = 3e-6, 2**-7
# heads, dn, dr, dv, r
SHAPES = [(4, 128, 64, 128, 512), (6, 16, 8, 16, 64), (3, 20, 5, 12, 36), (12, 32, 16, 48, 128)]


def _case(shape, rows, act, stored, gate=False):
    heads, nope, rope, value_dim, latent = shape
    kv_b = (torch.randn(heads * (nope + value_dim), latent) / latent**0.5).to(DTYPES[stored])
    sizes = {"heads": heads, "nope_dim": nope, "v_dim": value_dim}
    q = torch.randn(rows, heads * (nope + rope)).to(DTYPES[act])
    for_q = node("mla_absorb_q", [q, kv_b], [("f32", rows, heads, latent + rope)], **sizes)
    o_lat = torch.randn(rows, heads, latent)
    z = torch.randn(rows, heads * value_dim).to(DTYPES[act])
    operands = [o_lat, kv_b, z] if gate else [o_lat, kv_b]
    for_v = node("mla_absorb_v", operands, [(act, rows, heads * value_dim)], **sizes)
    return (for_q, [q, kv_b]), (for_v, operands)


@pytest.mark.parametrize("rows", [1, 3, 5, 63])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("act", "stored"), [("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16")])
def test_queries_enter_the_latent_space(rows, shape, act, stored):
    (n, tensors), _ = _case(shape, rows, act, stored)
    check(ABSORB_Q, n, tensors, F32_BOUND)


@pytest.mark.parametrize("rows", [1, 3, 5, 63])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("act", "stored"), [("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16")])
def test_values_leave_the_latent_space(rows, shape, act, stored, gate):
    _, (n, tensors) = _case(shape, rows, act, stored, gate)
    bound = F32_BOUND if act == "f32" else BF16_BOUND
    check(ABSORB_V, n, tensors, bound, result_dtypes=[act])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", ["q", "v"])
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_packed_half_unpacks_to_its_rows_and_zeros(shape, half, lanes, dtype):
    heads, nope, _, value_dim, latent = shape
    layout = f"mla_absorb_{half}.{dtype}.v{lanes}.{heads}-{nope}-{value_dim}"
    type_ = value("w", dtype, heads * (nope + value_dim), latent, layout=layout).type
    weight = np.arange(1, type_.elements + 1).astype(np.uint16 if dtype == "bf16" else np.float32)
    (back,) = unpack(type_, pack(type_, [weight.reshape(type_.sizes)]))
    want = weight.reshape(heads, -1, latent).copy()
    want[:, nope:] *= half == "v"
    want[:, :nope] *= half == "q"
    assert (back.reshape(want.shape) == want).all()


def test_a_layout_for_other_heads_is_an_error():
    type_ = value("w", "f32", 64, 32, layout="mla_absorb_q.f32.v8.3-16-16").type
    with pytest.raises(CodegenError, match=r"f32\[96, r\]"):
        pack(type_, [np.zeros((64, 32), np.float32)])


def test_a_weight_with_other_rows_is_refused():
    (n, tensors), _ = _case((4, 16, 8, 16, 64), 3, "f32", "f32")
    wrong = node("mla_absorb_q", [tensors[0], tensors[1][:100].contiguous()],
                 [("f32", 3, 4, 72)], **n.attrs)  # fmt: skip
    assert "128 rows" in str(ABSORB_Q.accepts(wrong, load_target("cpu")))


def test_a_gate_of_another_dtype_is_refused():
    _, (n, tensors) = _case((4, 16, 8, 16, 64), 3, "f32", "f32", gate=True)
    tensors[2] = tensors[2].bfloat16()
    wrong = node("mla_absorb_v", tensors, [("f32", 3, 64)], **n.attrs)
    assert "gate" in str(ABSORB_V.accepts(wrong, load_target("cpu")))


def test_kernels_for_16_lanes_compile_their_own_layout():
    target = load_target("cpu-avx512")
    (n, _), _ = _case((4, 16, 8, 16, 64), 3, "bf16", "bf16")
    packed = with_layouts(ABSORB_Q, n, target)
    assert packed.operands[1].type.layout.name == "mla_absorb_q.bf16.v16.4-16-16"
    assert build_kernel(KernelRequest(ABSORB_Q, ABSORB_Q.constants(n, target)), target)
