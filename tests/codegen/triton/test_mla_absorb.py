import numpy as np
import pytest
import torch

from k3c.codegen.template import pack, unpack
from k3c.codegen.templates.triton.mla_absorb import TEMPLATES
from k3c.errors import CodegenError
from k3c.targets.target import load_target
from tests.support.triton_runner import GPU_TARGETS, check, compiles, node, value

ABSORB_Q, ABSORB_V = TEMPLATES
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# f32: sums of up to 512 in another order; with bf16 weights the latents are two bf16 halves, exact
# to 2^-17. bf16: that decides how a result rounds, and with a gate the product rounds again.
Q_BOUND = 3e-6
V_BOUND = {"f32": 2e-5, "bf16": 2**-7}
# heads, dn, dr, dv, r
SHAPES = [(1, 128, 64, 128, 512), (6, 16, 8, 16, 64), (3, 20, 5, 12, 36)]
KINDS = [("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16")]


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


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("act", "stored"), KINDS)
def test_queries_enter_the_latent_space(rows, shape, act, stored):
    torch.manual_seed(0)
    (n, tensors), _ = _case(shape, rows, act, stored)
    check(ABSORB_Q, n, tensors, Q_BOUND)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("act", "stored"), KINDS)
def test_values_leave_the_latent_space(rows, shape, act, stored, gate):
    torch.manual_seed(1)
    _, (n, tensors) = _case(shape, rows, act, stored, gate)
    check(ABSORB_V, n, tensors, V_BOUND[act], result_dtypes=[act])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", ["q", "v"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_packed_half_unpacks_to_its_rows_and_zeros(shape, half, dtype):
    heads, nope, _, value_dim, latent = shape
    layout = f"mla_rows.{half}.{heads}-{nope}-{value_dim}"
    type_ = value("w", dtype, heads * (nope + value_dim), latent, layout=layout).type
    weight = np.arange(1, type_.elements + 1).astype(np.uint16 if dtype == "bf16" else np.float32)
    (back,) = unpack(type_, pack(type_, [weight.reshape(type_.sizes)]))
    want = weight.reshape(heads, -1, latent).copy()
    want[:, nope:] *= half == "v"
    want[:, :nope] *= half == "q"
    assert (back.reshape(want.shape) == want).all()


def test_a_layout_for_other_heads_is_an_error():
    type_ = value("w", "f32", 64, 32, layout="mla_rows.q.3-16-16").type
    with pytest.raises(CodegenError, match=r"\[96, r\]"):
        pack(type_, [np.zeros((64, 32), np.float32)])


def test_a_weight_with_other_rows_is_refused():
    (n, tensors), _ = _case((4, 16, 8, 16, 64), 3, "f32", "f32")
    wrong = node("mla_absorb_q", [tensors[0], tensors[1][:100].contiguous()],
                 [("f32", 3, 4, 72)], **n.attrs)  # fmt: skip
    assert "128 rows" in str(ABSORB_Q.accepts(wrong, load_target("h200")))


def test_a_gate_of_another_dtype_is_refused():
    _, (n, tensors) = _case((4, 16, 8, 16, 64), 3, "f32", "f32", gate=True)
    tensors[2] = tensors[2].bfloat16()
    wrong = node("mla_absorb_v", tensors, [("f32", 3, 64)], **n.attrs)
    assert "gate" in str(ABSORB_V.accepts(wrong, load_target("h200")))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("rows", [8, 64, 8192])
def test_k3_shapes_compile_and_fit(rows, target):
    (for_q, _), (for_v, _) = _case((6, 128, 64, 128, 512), rows, "bf16", "bf16", gate=True)
    assert compiles(ABSORB_Q, for_q, load_target(target))
    assert compiles(ABSORB_V, for_v, load_target(target))


@pytest.mark.device
@pytest.mark.parametrize("heads", [6, 96])
@pytest.mark.parametrize("rows", [1, 8, 33, 64, 500])
def test_k3_widths_on_a_device(rows, heads):
    torch.manual_seed(2)
    (for_q, q), (for_v, o) = _case((heads, 128, 64, 128, 512), rows, "bf16", "bf16", gate=True)
    check(ABSORB_Q, for_q, q, Q_BOUND)
    check(ABSORB_V, for_v, o, V_BOUND["bf16"])
