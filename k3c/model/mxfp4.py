"""MXFP4: e2m1 codes, 32 of them to an e8m0 scale, two codes to a byte, the low nibble first.

Blocks run along the last (input) axis. A weight is `code * 2**(scale - 127)`, exact in bf16 and
f32 for every scale that keeps it in range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3c.ir.types import MX_BLOCK

# Values of the sixteen e2m1 codes: bit 3 is the sign, bits 2..0 the magnitude code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
E8M0_NAN = 255


def e8m0_table() -> Tensor:
    """Return f32[256], the value of each scale byte: 2**(byte - 127), NaN at 255 by the format."""
    # 2**-127 is subnormal in f32; a power computed in f64 and converted is exact.
    table = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - E8M0_BIAS)
    table[E8M0_NAN] = torch.nan
    return table.to(torch.float32)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode MXFP4.

    Args:
        packed: u8[..., K/2], two codes a byte, low nibble first.
        scale: u8[..., K/32], e8m0 bytes.
        dtype: Element type of the result.

    Returns:
        dtype[..., K]; NaN where the scale byte is 255.
    """
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)
    values = table[codes.long()].unflatten(-1, (-1, MX_BLOCK))
    factors = e8m0_table().to(packed.device)[scale.long()]
    return (values * factors.unsqueeze(-1)).flatten(-2).to(dtype)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode to MXFP4 with round to nearest, ties to the even code.

    The scale's exponent is that of the block's largest magnitude minus 2, the exponent of 6, so
    at most the values above 6 * scale saturate (OCP Microscaling v1.0, 6.3).

    Args:
        values: Finite float[..., K], K a multiple of 32.

    Returns:
        packed u8[..., K/2] and scale u8[..., K/32].
    """
    blocks = values.to(torch.float32).unflatten(-1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(-1)
    # frexp reads the exponent from the bits: no rounding can carry it into the next power of two.
    exponent = torch.frexp(amax).exponent - 1
    scale = (exponent - 2 + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    scale = torch.where(amax == 0, torch.zeros_like(scale), scale)
    # 2**(127 - scale) stands at 254 - scale; the product is exact or a zero code.
    ratio = blocks * e8m0_table()[E8M0_NAN - 1 - scale].unsqueeze(-1)
    codes = _nearest_code(ratio.abs()) | (torch.signbit(ratio).to(torch.uint8) << 3)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale.to(torch.uint8)


def _nearest_code(magnitude: Tensor) -> Tensor:
    """Return the magnitude code u8 of each f32 value >= 0; midpoints go to the even code."""
    bounds = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    # A value above a bound has the next code; where that code is even, so has the bound itself.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(3))
    return torch.bucketize(magnitude, bounds, out_int32=True).to(torch.uint8)
