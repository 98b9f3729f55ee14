"""Measure how fast weights come to a GPU: the copy engine's ceiling, the loader, a registered map.

`python perf/weight_load.py [--gib 8] [--folder /tmp] [--device 0] [--rounds 3]` makes a synthetic
weights file there, prints GB/s of each way and one JSON object. The file's pages are warm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from k3c.artifact import PART_BYTES, WEIGHTS_DATA_START, Member
from k3c.artifact_dir import member_of_parts, weights_header
from k3c.runtime.driver.cuda_api import CudaApi
from k3c.runtime.driver.driver import WeightsFile
from k3c.runtime.driver.gpu_api import Symbols
from k3c.runtime.driver.gpu_device import Gpu, GpuMemory
from k3c.runtime.driver.gpu_weights import stream_weights

THREADS = (2, 4, 8, 12, 16)
PINNED_BYTES = 256 << 20
READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY: the map is


class BenchApi(CudaApi):
    """libcuda with the two calls that only this measurement needs."""

    symbols: ClassVar[Symbols] = {
        **CudaApi.symbols,
        "host_register": ("cuMemHostRegister_v2", "pzu"),
        "host_unregister": ("cuMemHostUnregister", "p"),
    }


def write_file(path: Path, nbytes: int) -> Member:
    """Write weights that no compression or deduplication shortens; return their entry."""
    block = np.random.default_rng(0).integers(0, 256, PART_BYTES, np.uint8)
    digests, left = [], nbytes + WEIGHTS_DATA_START
    with path.open("wb") as file:
        for index in range(-(-left // PART_BYTES)):
            block[:8] = np.frombuffer(index.to_bytes(8, "little"), np.uint8)
            part = bytearray(block.tobytes())
            if index == 0:
                part[:WEIGHTS_DATA_START] = weights_header(nbytes)
            data = bytes(part[: min(left, PART_BYTES)])
            digests.append(hashlib.sha256(data).digest())
            file.write(data)
            left -= len(data)
    return member_of_parts(nbytes + WEIGHTS_DATA_START, digests)


def pinned_copies(gpu: Gpu, memory: GpuMemory, buffer: int) -> None:
    """Copy one pinned buffer again and again: what the link can do."""
    for first in range(0, memory.nbytes, PINNED_BYTES):
        nbytes = min(PINNED_BYTES, memory.nbytes - first)
        gpu.api.call("copy_in", memory.address + first, buffer, nbytes, gpu.stream)
    gpu.wait("bench")


def registered_map(gpu: Gpu, memory: GpuMemory, path: Path) -> None:
    """Map the file, register the map, and copy from it."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    gpu.api.call("host_register", address, len(mapped), READ_ONLY)
    source = address + WEIGHTS_DATA_START
    gpu.api.call("copy_in", memory.address, source, memory.nbytes, gpu.stream)
    gpu.wait("bench")
    gpu.api.call("host_unregister", address)


def best_gbs(nbytes: int, rounds: int, run: Callable[[], None]) -> float:
    """Return the best rate of some rounds, GB/s."""
    seconds = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return round(nbytes / min(seconds) / 1e9, 2)


def measure(gpu: Gpu, memory: GpuMemory, path: Path, member: Member, rounds: int) -> dict:
    """Return GB/s of each way, by name."""
    nbytes, found = memory.nbytes, {}

    def record(name: str, run: Callable[[], None]) -> None:
        found[name] = best_gbs(nbytes, rounds, run)
        print(f"{name:<28}{found[name]:>8.2f} GB/s", flush=True)

    buffer = gpu.allocate_pinned(PINNED_BYTES, "bench")
    record("pinned copies (ceiling)", lambda: pinned_copies(gpu, memory, buffer))
    for threads in THREADS:
        for check in (False, True):
            weights = WeightsFile(path, nbytes, member, check)
            name = f"loader, {threads} threads" + (", hashed" if check else "")
            record(
                name, lambda w=weights, t=threads: stream_weights(gpu, w, memory.address, print, t)
            )
    try:
        record("registered map", lambda: registered_map(gpu, memory, path))
    except Exception as exc:
        print(f"registered map: {exc}")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    nbytes, path = int(args.gib * 2**30), args.folder / "k3c-weight-load.bin"
    api = BenchApi()
    api.call("init", 0)
    gpu = Gpu(api, args.device)
    memory = GpuMemory(gpu, api.created("memory_alloc", nbytes), nbytes)
    try:
        member = write_file(path, nbytes)
        found = measure(gpu, memory, path, member, args.rounds)
        _check_arrived(memory, path)
    finally:
        path.unlink(missing_ok=True)
    device = {"device": api.device_name(args.device), "cores": len(os.sched_getaffinity(0))}
    print(json.dumps({**device, "gib": args.gib, "gb_per_s": found}, sort_keys=True))


def _check_arrived(memory: GpuMemory, path: Path) -> None:
    """Compare the first and the last bytes on the device with the file's."""
    size = min(1 << 20, memory.nbytes)
    with path.open("rb") as file:
        for offset in (0, memory.nbytes - size):
            file.seek(WEIGHTS_DATA_START + offset)
            assert memory.read(offset, size) == file.read(size), f"other bytes at {offset}"


if __name__ == "__main__":
    main()
