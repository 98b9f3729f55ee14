"""Every op: its shape rule agrees with its body, it mutates nothing, and every name exists."""

import pytest
import torch

from k3c.export.ops import REFERENCE, library

KERNEL_OPS = {
    *("attn_res_norm", "kda", "mla_absorb_q", "mla_attend", "mla_absorb_v"),
    *("dispatch", "grouped_gemm", "combine_norm", "add", "kda_fb", "norm_linear"),
    *("kda_verify", "kda_fold"),
    *("route_dispatch", "all_reduce", "all_gather", "join_columns", "norm_columns", "advance"),
    *("map_experts", "dispatch_tokens", "combine_tokens"),
}
MODEL_OPS = sorted(set(REFERENCE) - KERNEL_OPS)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def example_arguments(act):
    """Operands and attributes of each op for activations of dtype `act`."""
    wide = torch.float64 if act == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(1)

    def x(*shape, dtype=act):
        return torch.randn(*shape, generator=generator).to(dtype)

    def u8(*shape):
        return torch.randint(100, 130, shape, generator=generator, dtype=torch.uint8)

    where = (i32(0, 1), i32(1, 3), i32(1, 2), i32(4, 0))
    pages = (i32(0, 1), i32(1, 3), i32(4, 0), i32(1, 2, 3, 0).view(2, 2))
    heads, cache, conv = 2, x(4, 16, 12), [x(8, 4, dtype=wide) for _ in range(3)]
    f = torch.zeros(2)
    return {
        "embed": (i32(3, 1), x(6, 4), act),
        "residual_join": (x(5, 4), x(5, 4), i32(1)[0]),
        "attn_res": (x(5, 4), x(3, 5, 4), x(4, dtype=wide), x(1, 4, dtype=wide), i32(2)[0], 1e-5),
        "bank_commit": (x(3, 5, 4), x(5, 4), i32(-1)[0]),
        "rms_norm": (x(5, 4), x(4, dtype=wide), 1e-5),
        "linear": (x(5, 4), x(3, 4), True),
        "short_conv": (x(5, 8), x(5, 8), x(5, 8), *conv, x(3, 3, 24), *where),
        "l2_norm": (x(5, 8), heads, 0.5, 1e-6),
        "kda_gate": (x(5, 8), x(2, dtype=wide), x(8, dtype=wide), -5.0),
        "kda_recurrence": (
            *(x(5, 8, dtype=wide) for _ in range(2)), x(5, 8), -x(5, 8, dtype=wide).abs(),
            x(5, 2), x(3, 2, 4, 4, dtype=wide), *where, 2,
        ),
        "gated_rms_norm": (x(5, 8), x(4, dtype=wide), x(5, 8), heads, 1e-5),
        "mla_append": (x(5, 12), x(8, dtype=wide), cache, *pages, 1e-5),
        "mla_attention": (x(5, 2 * 7), x(2 * 5, 8), cache, *pages, heads, 3, 2),
        "sigmoid_mul": (x(5, 4), x(5, 4)),
        "situ": (x(5, 4), x(5, 4), 4.0, None),
        "route_topk": (x(5, 6, dtype=wide), x(6, dtype=wide), 2, True, 1.0),
        "grouped_linear": (x(5, 32), u8(4, 3, 16), u8(4, 3, 1), i32(*range(10)).view(5, 2) % 4),
        "combine": (x(5, 2, 4), x(5, 2, dtype=wide)),
        "gather_rows": (x(5, 4), i32(4, 0)),
        "sample": (x(2, 9, dtype=wide), f + 1, f.int(), f + 1, f, f.long(), f.int()),
        "token_logprob": (x(2, 9, dtype=wide), i32(3, -1)),
    }  # fmt: skip


def test_every_op_of_the_ir_has_a_reference():
    assert set(REFERENCE) >= KERNEL_OPS
    assert set(example_arguments(torch.float32)) == set(MODEL_OPS)


@pytest.mark.parametrize("act", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODEL_OPS)
def test_shape_rule_and_body_agree_and_nothing_is_mutated(name, act):
    arguments = example_arguments(act)[name]
    op = getattr(library, name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["short_conv", "kda_recurrence", "mla_append"])
def test_one_row_aliases_no_operand(name):
    # A single row makes slices contiguous, where a view is easily returned by mistake.
    arguments = list(example_arguments(torch.float32)[name])
    rows = len(arguments[0])
    one = [
        a[:1] if torch.is_tensor(a) and a.dim() == 2 and len(a) == rows else a for a in arguments
    ]
    segments = (i32(0), i32(1), i32(1), i32(0))
    pages = (i32(0), i32(1), i32(0), i32(1).view(1, 1))
    tail = {"short_conv": segments, "kda_recurrence": (*segments, 2), "mla_append": (*pages, 1e-5)}
    one[-len(tail[name]) :] = tail[name]
    torch.library.opcheck(getattr(library, name).default, one, test_utils="test_schema")
