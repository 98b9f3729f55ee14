"""The assembly that decodes MXFP4 on NVIDIA, interpreted here: it agrees with the packer.

Only what that text uses is known: 32-bit integer instructions and products of pairs of bf16, which
are exact for these operands.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from k3c.codegen.template import pack
from k3c.codegen.templates.triton import mxfp4_gpu_decode as decode
from k3c.codegen.templates.triton.mxfp4_gpu_layout import CODE_BYTES
from k3c.ir.types import DTYPES, Layout, TensorType

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
WORD = 0xFFFFFFFF


def run_assembly(text: str, outputs: int, inputs: list[int]) -> list[int]:
    """Return the output words of assembly whose operands are $0, $1, ... outputs first."""
    registers = {f"${outputs + i}": word for i, word in enumerate(inputs)}

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"[^;{}]+(?:\{[^}]*\}[^;]*)*;", text.strip()[1:-1]):
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        packs = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        _step(name, packs, registers, read)
    return [registers[f"${i}"] for i in range(outputs)]


def _step(
    name: str, packs: list[str], registers: dict[str, int], read: Callable[[str], int]
) -> None:
    target, *rest = packs
    if name == "mov.b32" and target.startswith("{"):
        low, high = re.findall(r"\w+", target)
        registers[low], registers[high] = read(rest[0]) & 0xFFFF, read(rest[0]) >> 16
    elif name == "mov.b32" and rest[0].startswith("{"):
        low, high = re.findall(r"\w+", rest[0])
        registers[target] = registers[low] | registers[high] << 16
    else:
        registers[target] = _value(name, [read(r) for r in rest]) & WORD


def _value(name: str, operands: list[int]) -> int:
    a, *others = operands
    match name:
        case "mov.b32":
            return a
        case "and.b32":
            return a & others[0]
        case "shl.b32":
            return a << others[0]
        case "shf.l.wrap.b32":
            return ((others[0] << 32 | a) << others[1]) >> 32
        case "mad.lo.u32":
            return a * others[0] + others[1]
        case "prmt.b32":
            both = (a | others[0] << 32).to_bytes(8, "little")
            return int.from_bytes(bytes(both[others[1] >> 4 * i & 7] for i in range(4)), "little")
        case "lop3.b32":
            b, c, table = others
            bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
            return sum((table >> index & 1) << i for i, index in enumerate(bits))
        case "mul.rn.bf16x2":
            halves = (_product(a >> s & 0xFFFF, others[0] >> s & 0xFFFF) << s for s in (0, 16))
            return sum(halves)
    raise AssertionError(f"{name} is not known here")


def _product(a: int, b: int) -> int:
    """Return the bf16 bits of a product that bf16 holds."""
    wide = np.array([a << 16, b << 16], np.uint32).view(np.float32).astype(np.float64)
    bits = (wide[:1] * wide[1:]).astype(np.float32).view(np.uint32)[0]
    assert np.isnan(wide).any() or int(bits) & 0xFFFF == 0, "the product is not exact in bf16"
    return int(bits) >> 16


@pytest.mark.parametrize(
    ("fast", "low", "high"), [(True, 0, 128), (True, 0, 1), (False, 0, 254), (False, 0, 1)]
)
def test_the_assembly_decodes_what_was_packed(fast: bool, low: int, high: int) -> None:
    random = np.random.default_rng(high)
    codes = random.integers(0, 256, (1, 16, 64), dtype=np.uint8)
    scales = random.integers(low, high, (1, 16, 4), dtype=np.uint8)
    type_ = TensorType(DTYPES["mxfp4"], (1, 16, 128), Layout("mxfp4_gpu.16x128.16"))
    data = pack(type_, [codes, scales])
    words = data[:CODE_BYTES].view(np.uint32).reshape(16, 4, 4)
    factors = data[CODE_BYTES:].view(np.uint32)
    nibbles = np.stack([codes[0] & 15, codes[0] >> 4], -1).reshape(16, 128)
    want = MAGNITUDES[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    with np.errstate(over="ignore"):
        want = (want * 2.0 ** (np.repeat(scales[0], 32, 1).astype(float) - 127)).astype(np.float32)
    for row in range(0, 16, 5):
        for lane in range(4):
            got = decoded(words[row, lane], int(factors[row]), fast)
            columns = [
                32 * w + 16 * j + 8 * h + 2 * lane + e
                for w in range(4)
                for j in range(2)
                for h in range(2)
                for e in range(2)
            ]
            assert (got == want[row, columns]).all()


def decoded(words: np.ndarray[Any, Any], scales: int, fast: bool) -> np.ndarray[Any, Any]:
    """Return f32[32], what a lane decodes of its four words."""
    if fast:
        factors = run_assembly(decode._FAST_FACTORS.value, 2, [scales])
    else:
        # As `_factors` has it: a power of two each, byte 0 subnormal.
        powers = [(scales >> 8 * i & 0xFF) << 7 or 0x40 for i in range(4)]
        factors = [powers[0] | powers[2] << 16, powers[1] | powers[3] << 16]
    text = (decode._FAST if fast else decode._EXACT).value
    pairs = []
    for u in range(2):
        pairs += run_assembly(text, 8, [int(words[2 * u]), int(words[2 * u + 1]), factors[u]])
    halves = [h for pair in pairs for h in (pair & 0xFFFF, pair >> 16)]
    return (np.array(halves, np.uint32) << 16).view(np.float32)
