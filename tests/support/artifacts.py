"""A small artifact without a model: two buckets, one kernel, weights of 200 bytes."""

from __future__ import annotations

import random
from pathlib import Path

from k3c.artifact import (
    FORMAT,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    Bucket,
    CacheInfo,
    Kernel,
    Manifest,
    ModelInfo,
    Plan,
    TargetInfo,
)
from k3c.artifact_writer import ArtifactWriter

BUCKETS = (
    Bucket("decode.b1", "decode", {"T": 1, "B": 1}),
    Bucket("decode.b2", "decode", {"T": 2, "B": 2}),
)
WEIGHTS_BYTES = 200


def cpu_kernel(symbol: str, template: str = "toy") -> Kernel:
    """A kernel of `kernels.so`."""
    return Kernel(
        "00",
        symbol,
        "kernels.so",
        template,
        {"n": 1},
        entry=symbol,
        threads=0,
        shared_bytes=0,
        arch="x86_64",
        min_driver="",
        pdl=False,
    )


def small_manifest() -> Manifest:
    return Manifest(
        format=FORMAT,
        major=FORMAT_MAJOR,
        minor=FORMAT_MINOR,
        k3c_version="0.0.1",
        toolchain={"tvm": "0"},
        model=ModelInfo("toy", 16, 1, (0,), False, "f32"),
        target=TargetInfo("cpu-avx2", "cpu", "x86_64", ("avx2",)),
        cache=CacheInfo(1, 16, 16, 2, 2),
        mesh={},
        rank=0,
        buckets=BUCKETS,
        kernels=(cpu_kernel("add_00", template="add"),),
        weights=(),
        space_bytes={"weights": WEIGHTS_BYTES, "arena": 0},
        members={},
    )


def empty_plan(bucket: Bucket) -> Plan:
    return Plan(bucket, 0, {"weights": WEIGHTS_BYTES}, 0, (), {}, (), (), "entry", {})


def write_small_artifact(destination: Path) -> Manifest:
    data = random.Random(7).randbytes(72)
    with ArtifactWriter(destination) as out:
        for bucket in BUCKETS:
            out.add_plan(empty_plan(bucket))
        out.add_bytes("kernels.so", b"\x7fELF")
        out.add_text("ir/01-canonicalize.k3", "k3ir 1\n")
        weights = out.start_weights(WEIGHTS_BYTES)
        weights.write_at(0, data[:8])
        weights.write_at(64, memoryview(data)[8:])
        out.end_weights(weights)
        return out.finish(small_manifest())
