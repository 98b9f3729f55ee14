"""MXFP4 against a table written independently, and the encoder's edge cases."""

import math

import pytest
import torch

from k3c.model.mxfp4 import dequantize, e8m0_table, quantize

MAGNITUDES = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def decode_by_hand(packed, scale):
    """One element at a time, in Python floats."""
    rows = []
    for codes, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        row = []
        for column in range(2 * len(codes)):
            nibble = codes[column // 2] >> (4 if column % 2 else 0) & 0xF
            value = math.copysign(MAGNITUDES[nibble & 7], -1.0 if nibble & 8 else 1.0)
            row.append(math.ldexp(value, scales[column // 32] - 127))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_exact_for_every_code_and_every_block_of_a_row(dtype):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (7, 48), dtype=torch.uint8, generator=generator)
    scale = torch.randint(90, 160, (7, 3), dtype=torch.uint8, generator=generator)
    found = dequantize(packed, scale, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.double(), decode_by_hand(packed, scale))
    # Exchanging the nibbles or the blocks must not go unseen on this input.
    swapped = (packed >> 4) | (packed << 4)
    assert not torch.equal(dequantize(swapped, scale, dtype), found)
    assert not torch.equal(dequantize(packed, scale.flip(-1), dtype), found)


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (0, 2.0**-127),
        (1, 2.0**-126),
        (126, 0.5),
        (127, 1.0),
        (128, 2.0),
        (134, 128.0),
        (254, 2.0**127),
    ],
)
def test_scale_byte_is_a_power_of_two(byte, value):
    assert e8m0_table()[byte].item() == value


def test_scale_byte_255_is_nan_and_only_that_byte():
    assert e8m0_table().isnan().nonzero().tolist() == [[255]]
    packed = torch.zeros((1, 16), dtype=torch.uint8)
    assert dequantize(packed, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


def test_code_8_is_minus_zero():
    packed = torch.full((1, 16), 0x88, dtype=torch.uint8)
    found = dequantize(packed, torch.tensor([[127]], dtype=torch.uint8))
    assert torch.equal(found, torch.zeros(1, 32))
    assert found.signbit().all()


def test_expert_axis_is_kept():
    packed = torch.arange(2 * 3 * 16, dtype=torch.uint8).reshape(2, 3, 16)
    scale = torch.full((2, 3, 1), 120, dtype=torch.uint8)
    both = dequantize(packed, scale)
    assert torch.equal(both[1], dequantize(packed[1], scale[1]))


def test_quantizing_what_was_decoded_changes_nothing():
    values = torch.randn((5, 96), generator=torch.Generator().manual_seed(1)) * 37
    decoded = dequantize(*quantize(values))
    assert torch.equal(dequantize(*quantize(decoded)), decoded)
    # Half a step at the top of a block: 1/6 of its largest value, and saturation above 6.
    worst = ((decoded - values).abs().unflatten(-1, (-1, 32)).amax(-1)) / (
        values.abs().unflatten(-1, (-1, 32)).amax(-1)
    )
    assert worst.max() <= 0.25


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (5.01, 7),
        (0.26, 1),
    ],
)
def test_midpoints_go_to_the_even_code(value, code):
    block = torch.zeros(32)
    block[0], block[1] = 4.0, value
    packed, scale = quantize(block)
    assert scale.item() == 127
    assert packed[0] >> 4 == code


def test_exponent_of_a_value_just_below_a_power_of_two_is_not_rounded_up():
    block = torch.full((32,), torch.nextafter(torch.tensor(2.0), torch.tensor(0.0)).item())
    _, scale = quantize(block)
    # 2 - 2**-23 has the exponent of 1.x: 0, minus the 2 of the largest code.
    assert scale.item() == 127 - 2


def test_tiny_and_zero_blocks_stay_finite():
    tiny = torch.full((32,), 5e-37)
    tiny[1::2] *= -1
    values = torch.stack([tiny, torch.zeros(32)])
    decoded = dequantize(*quantize(values))
    assert decoded.isfinite().all()
    assert torch.equal(decoded[1], torch.zeros(32))
