"""Small plans of one kernel, `twice`, and a GPU driver on the stub to run them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from k3c.artifact import Bucket, Buffer, IoField, LayerCall, Plan
from k3c.runtime.driver.cuda import CudaDriver
from k3c.runtime.driver.driver import Settings
from k3c.runtime.driver.hip import HipDriver
from tests.support.fake_plan import Sizes
from tests.support.stub_gpu import gpu_kernel, gpu_manifest, kernel_library, launch

SPACES = {"weights": 64, "arena": 512, "kv_pages": 0, "state_slots": 64, "io": 512}


def settings(**changes):
    return replace(Settings(0, "whole", "none", print), **changes)


def make_manifest(kind="cuda", **kernel):
    names = ("twice",)
    kernels = tuple(gpu_kernel(name, kind, **kernel) for name in names)
    return replace(gpu_manifest(Sizes(), kind), kernels=kernels, space_bytes=SPACES)


def open_driver(tmp_path, kind="cuda", kernel=None, **changes):
    """A driver with its spaces allocated and its kernel open."""
    (tmp_path / "kernels").mkdir(exist_ok=True)
    (tmp_path / "kernels/fake.cubin").write_text(str(kernel_library()))
    driver = (CudaDriver if kind == "cuda" else HipDriver)(settings(**changes))
    manifest = make_manifest(kind, **(kernel or {}))
    driver.check(manifest, "here")
    memory = {space: driver.allocate(space, nbytes) for space, nbytes in SPACES.items()}
    driver.open_kernels(tmp_path, manifest)
    return driver, memory


BUFFERS = (
    *(Buffer(n, 20, 64, "arena", "g", 0, 9, 64 * i) for i, n in enumerate("xyzw")),
    Buffer("parts", 128, 64, "arena", "g", 0, 9, 256),
    Buffer("part", 64, 64, "arena", "g", 0, 9, 384),
    Buffer("state", 20, 64, "state_slots", "g", 0, 9, 0, per_layer=True),
    Buffer("tokens", 4, 64, "io", "", 0, 9, 64),
    Buffer("ids", 4, 64, "io", "", 0, 9, 0),
)


def make_plan(*commands, calls=1):
    io = (
        IoField("ids", "in", "i32", (1,), "ids"),
        IoField("tokens", "out", "i32", (1,), "tokens"),
    )
    places = tuple(LayerCall("g", i, {"state_slots": 0}, {"add": 10 + i}) for i in range(calls))
    bucket = Bucket("decode.b1", "decode", {"T": 1, "B": 1})
    return Plan(bucket, 0, SPACES, 0, BUFFERS, {"g": commands}, places, io, "", {})


def twice(source, to, add=1, after=(), n=5):
    return launch("twice", (source, to), (n, add), (to,), after)


def run(driver, memory, plan):
    executor = driver.bind(plan, memory)
    memory["arena"].write(0, np.arange(5, dtype=np.float32).tobytes())
    executor.start(upload=True)
    executor.finish()
    return executor


def floats(memory, offset, count=5):
    return np.frombuffer(memory["arena"].read(offset, 4 * count), np.float32).tolist()
