"""An artifact without kernels: real plans, real io and state memory, and an executor in numpy.

The fake model keeps a running hash of a request's tokens in its state slot and the tokens in its
pages, and refuses a step whose slot, pages, context or padding is not what it should be. Its next
token is a function of the whole history, so one wrong token changes everything after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from k3c.artifact import (
    FORMAT,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    Bucket,
    Buffer,
    CacheInfo,
    IoField,
    LayerCall,
    Manifest,
    ModelInfo,
    Plan,
    TargetInfo,
)
from k3c.errors import DeviceFault
from k3c.runtime.driver.cpu import CpuMemory, allocate
from k3c.runtime.driver.cpu_executor import CpuExecutor
from k3c.runtime.driver.driver import DTYPES
from k3c.runtime.loader import Loaded, LoadedBucket
from k3c.runtime.step_io import StepIo

VOCAB = 97
STOP = 96
PAGE_TOKENS = 4
LAYERS = 2  # both keep (tokens seen, hash) in their slots
PRIME = 1_000_003


@dataclass(frozen=True)
class Sizes:
    """What a test may vary."""

    max_requests: int = 4
    max_context_tokens: int = 64
    pages: int = 65
    decode: tuple[int, ...] = (1, 2, 4)
    prefill: tuple[int, ...] = (4, 16)
    segments: int = 4
    snapshots: int = 0  # slots beyond those of requests

    @property
    def slots(self) -> int:
        return self.max_requests + self.snapshots + 1


@dataclass
class Faults:
    """What goes wrong in the next step."""

    launch: bool = False
    nan_slots: set[int] = field(default_factory=set)
    before_launch: list = field(default_factory=list)  # called with no arguments at the launch


def next_hash(value: int, token: int) -> int:
    return (value * 31 + token + 1) % PRIME


def token_of(value: int) -> int:
    return value % VOCAB


def expected_tokens(prompt, count, stops=(STOP,)) -> list[int]:
    """What the fake model generates for a prompt, computed without any engine."""
    value, output = 0, []
    for token in prompt:
        value = next_hash(value, token)
    while len(output) < count:
        output.append(token_of(value))
        if output[-1] in stops:
            break
        value = next_hash(value, output[-1])
    return output


def _io_fields(bucket: Bucket, columns: int) -> list[tuple[str, str, str, tuple[int, ...]]]:
    rows, segments = bucket.dims["T"], bucket.dims["B"]
    fields = [("ids", "in", "i32", (rows,))]
    fields += [
        (n, "in", "i32", (segments,)) for n in ("seg_start", "seg_tokens", "slots", "context")
    ]
    fields.append(("page_table", "in", "i32", (segments, columns)))
    if bucket.phase == "score":
        return [*fields, ("targets", "in", "i32", (rows,)), ("logprobs", "out", "f32", (rows,))]
    for name, dtype in (
        ("sample_rows", "i32"),
        ("temperature", "f32"),
        ("top_k", "i32"),
        ("top_p", "f32"),
        ("min_p", "f32"),
        ("seed", "i64"),
        ("position", "i32"),
    ):
        fields.append((name, "in", dtype, (segments,)))
    return [
        *fields,
        ("tokens", "out", "i32", (segments,)),
        ("logits", "out", "f32", (segments, VOCAB)),
    ]


def make_plan(bucket: Bucket, sizes: Sizes) -> Plan:
    slots = sizes.slots
    columns = -(-sizes.max_context_tokens // PAGE_TOKENS)
    layer_bytes = slots * 16
    buffers = [
        Buffer("layer.state", layer_bytes, 64, "state_slots", "layer", 0, 1, 0, per_layer=True),
        Buffer("cache", sizes.pages * PAGE_TOKENS * 4, 64, "kv_pages", "", 0, 1, 0),
    ]
    io, offset = [], 0
    for name, direction, dtype, shape in _io_fields(bucket, columns):
        nbytes = int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        buffers.append(Buffer(name, nbytes, 64, "io", "", 0, 1, offset))
        io.append(IoField(name, direction, dtype, shape, name))
        offset += -(-nbytes // 64) * 64
    space_bytes = {
        "weights": 0,
        "arena": 0,
        "kv_pages": buffers[1].nbytes,
        "state_slots": LAYERS * 1024,
        "io": offset,
    }
    calls = tuple(LayerCall("layer", i, {"state_slots": 1024 * i}, {}) for i in range(LAYERS))
    return Plan(bucket, 0, space_bytes, 0, tuple(buffers), {"layer": ()}, calls, tuple(io), "", {})


def make_manifest(sizes: Sizes, buckets: tuple[Bucket, ...]) -> Manifest:
    cache = CacheInfo(
        sizes.max_requests,
        sizes.max_context_tokens,
        PAGE_TOKENS,
        sizes.pages,
        sizes.slots,
    )
    return Manifest(
        format=FORMAT,
        major=FORMAT_MAJOR,
        minor=FORMAT_MINOR,
        k3c_version="0",
        toolchain={},
        model=ModelInfo("fake", VOCAB, LAYERS, (STOP,), False, "f32"),
        target=TargetInfo("cpu", "cpu", "x86_64", ()),
        cache=cache,
        mesh={},
        rank=0,
        buckets=buckets,
        kernels=(),
        weights=(),
        space_bytes={},
        members={},
    )


def make_buckets(sizes: Sizes) -> tuple[Bucket, ...]:
    segments = sizes.segments
    return (
        *(Bucket(f"decode.b{n}", "decode", {"T": n, "B": n}) for n in sizes.decode),
        *(Bucket(f"prefill.t{n}", "prefill", {"T": n, "B": segments}) for n in sizes.prefill),
        Bucket("score.t8", "score", {"T": 8, "B": segments}),
    )


class FakeExecutor(CpuExecutor):
    """Runs the fake model on the real memories, and checks what it is given."""

    def __init__(self, plan: Plan, memory: Mapping[str, CpuMemory], sizes: Sizes, faults: Faults):
        super().__init__(plan, memory["io"].array, self.run_fake)
        self.io, self.faults, self.sizes = self.inputs, faults, sizes
        self.scores = plan.bucket.phase == "score"
        self.runs: list[list[int]] = []  # the live tokens per segment of each step
        slots = sizes.slots
        state = memory["state_slots"].array
        self.layers = [
            state[1024 * i : 1024 * i + 16 * slots].view(np.int64).reshape(slots, 2)
            for i in range(LAYERS)
        ]
        self.pages = memory["kv_pages"].array.view(np.int32).reshape(sizes.pages, PAGE_TOKENS)

    def run_fake(self) -> None:
        for hook in self.faults.before_launch:
            hook()
        if self.faults.launch:
            raise DeviceFault("launch failed with code -1, expected 0: injected", "fake")
        io, live_rows = self.io, 0
        self.runs.append([int(n) for n in io["seg_tokens"] if n])
        for segment, tokens in enumerate(io["seg_tokens"]):
            assert io["seg_start"][segment] == live_rows
            if tokens == 0:
                self._check_padded(segment)
                continue
            self._run_segment(segment, live_rows, int(tokens))
            live_rows += int(tokens)
        assert (io["ids"][live_rows:] == 0).all()
        if self.scores:
            assert (io["targets"][live_rows:] == -1).all()

    def _check_padded(self, segment: int) -> None:
        for name in ("slots", "context", "page_table"):
            assert not self.io[name][segment].any(), name
        if not self.scores:
            row = [float(self.io[n][segment]) for n in ("temperature", "top_k", "top_p", "min_p")]
            assert row == [0, 0, 1, 0]
            assert not any(self.io[n][segment] for n in ("seed", "position", "sample_rows"))
            self.io["tokens"][segment] = -7
            self.io["logits"][segment] = np.nan

    def _run_segment(self, segment: int, first: int, tokens: int) -> None:
        slot, context = int(self.io["slots"][segment]), int(self.io["context"][segment])
        table = self.io["page_table"][segment]
        assert slot > 0, "a live request in the scratch slot"
        values = set()
        for layer in self.layers:
            seen, value = (0, 0) if context == 0 else (int(layer[slot, 0]), int(layer[slot, 1]))
            assert seen == context, f"slot {slot} holds {seen} tokens, the step says {context}"
            for token in self.io["ids"][first : first + tokens]:
                value = next_hash(value, int(token))
            layer[slot] = context + tokens, value
            values.add(value)
        for i, token in enumerate(self.io["ids"][first : first + tokens]):
            page = int(table[(context + i) // PAGE_TOKENS])
            assert page > 0, "a live token in the scratch page"
            self.pages[page, (context + i) % PAGE_TOKENS] = token
        (value,) = values
        assert value == self._replay(table, context + tokens), "the pages hold other tokens"
        self._write_outputs(segment, first, tokens, value)

    def _replay(self, table, count: int) -> int:
        value = 0
        for i in range(count):
            page = self.pages[table[i // PAGE_TOKENS]]
            value = next_hash(value, int(page[i % PAGE_TOKENS]))
        return value

    def _write_outputs(self, segment: int, first: int, tokens: int, value: int) -> None:
        io = self.io
        if self.scores:
            rows = slice(first, first + tokens)
            io["logprobs"][rows] = -(io["ids"][rows] + io["targets"][rows] / 128)
            return
        end = int(io["context"][segment]) + tokens
        assert io["position"][segment] == end
        assert io["sample_rows"][segment] == first + tokens - 1
        token = token_of(value)
        distance = np.abs(np.arange(VOCAB) - token)
        io["logits"][segment] = -distance
        io["tokens"][segment] = token
        if int(io["slots"][segment]) in self.faults.nan_slots:
            io["logits"][segment] = np.nan
            io["tokens"][segment] = -1


@dataclass
class Fake:
    """A loaded fake and its controls."""

    loaded: Loaded
    faults: Faults

    def runs(self, name: str) -> list[list[int]]:
        executor = self.loaded.buckets[name].executor
        assert isinstance(executor, FakeExecutor)
        return executor.runs


def make_fake(sizes: Sizes | None = None, **changes) -> Fake:
    """Build a loaded artifact; keyword arguments change fields of `Sizes`."""
    sizes = replace(sizes or Sizes(), **changes)
    buckets, faults = make_buckets(sizes), Faults()
    plans = [make_plan(bucket, sizes) for bucket in buckets]
    memory = {
        space: allocate(space, max(p.space_bytes[space] for p in plans))
        for space in plans[0].space_bytes
    }
    for space in memory.values():
        # What was never written must not be read as zero.
        space.array[:] = 0xA5
    loaded = {}
    for plan in plans:
        executor = FakeExecutor(plan, memory, sizes, faults)
        loaded[plan.bucket.name] = LoadedBucket(plan, StepIo(plan, executor.inputs), executor)
    manifest = make_manifest(sizes, buckets)
    return Fake(Loaded(Path("fake"), manifest, loaded, memory, None, {}), faults)
