"""Random contents for a space on a device, to measure an artifact that has no weights.

A few MiB are drawn on the host and copied over the space on the device, so that 100 GiB take no
longer than writing them. Values keep the model's arithmetic finite; they mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3c.artifact import WeightEntry
from k3c.runtime.driver.gpu_device import GpuMemory

POOL_BYTES = 1 << 24
SEED = 0
WEIGHT_SPREAD = 0.02
# As an e2m1 pair each of these is harmless, and as an e8m0 scale it is 2^-15 to 2^0.
MXFP4_BYTES = (112, 128)

ROUTING_BIAS = "e_score_correction_bias"

Bytes = npt.NDArray[np.uint8]


def fill_weights(memory: GpuMemory, entries: Sequence[WeightEntry]) -> None:
    """Fill space weights: normal numbers of a trained model's size, factors near one.

    The bias of the routing stays as it is, zero: all experts are equally likely.

    Args:
        memory: The space.
        entries: Every packed weight.
    """
    random = np.random.default_rng(SEED)
    pools = {
        "bf16": _to_bf16(WEIGHT_SPREAD * random.standard_normal(POOL_BYTES // 2)),
        "f32": (1 + 0.1 * random.standard_normal(POOL_BYTES // 4)).astype(np.float32),
        "mxfp4": random.integers(*MXFP4_BYTES, POOL_BYTES, np.uint8),
    }
    sources = {name: _Source(memory, pool.view(np.uint8)) for name, pool in pools.items()}
    for entry in entries:
        if not entry.name.endswith(ROUTING_BIAS):
            sources[entry.dtype].copy_to(entry.offset, entry.nbytes)
    memory.gpu.wait("synthetic weights")
    for source in sources.values():
        source.free()


def fill_state(memory: GpuMemory) -> None:
    """Fill a space of state or scratch with small numbers, whatever their type.

    The bytes are those of bf16 numbers near 0.02; read as f32 they are of the same size.
    """
    random = np.random.default_rng(SEED + 1)
    pool = _to_bf16(WEIGHT_SPREAD * random.standard_normal(POOL_BYTES // 2))
    source = _Source(memory, pool.view(np.uint8))
    source.copy_to(0, memory.nbytes)
    memory.gpu.wait("synthetic state")
    source.free()


def draw_logits(memory: GpuMemory) -> None:
    """Fill memory with independent normal router logits: every choice of experts is as likely."""
    random = np.random.default_rng(SEED + 2)
    pool = random.standard_normal(POOL_BYTES // 4).astype(np.float32)
    source = _Source(memory, pool.view(np.uint8))
    source.copy_to(0, memory.nbytes)
    memory.gpu.wait("synthetic routing")
    source.free()


class _Source:
    """A pool of random bytes on the device."""

    def __init__(self, memory: GpuMemory, pool: Bytes) -> None:
        self._memory, self._nbytes = memory, pool.nbytes
        self._address = memory.gpu.api.created("memory_alloc", pool.nbytes, where="random bytes")
        memory.gpu.write_from(self._address, pool.tobytes())

    def copy_to(self, offset: int, nbytes: int) -> None:
        """Enqueue the copies that fill some bytes of the space."""
        gpu, end = self._memory.gpu, offset + nbytes
        for at in range(offset, end, self._nbytes):
            size = min(self._nbytes, end - at)
            to = self._memory.address + at
            gpu.api.call("copy", to, self._address, size, gpu.stream, where="random bytes")

    def free(self) -> None:
        """Free the pool."""
        self._memory.gpu.api.call("memory_free", self._address, where="random bytes")


def _to_bf16(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Return the bits of numbers cut to bf16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
