"""One bucket on a GPU: inputs from pinned memory, the step, its tokens back, two steps deep."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from k3c.artifact import IoField, Plan, aligned
from k3c.runtime.driver.driver import DTYPES, Array
from k3c.runtime.driver.gpu_device import Gpu

DEPTH = 2  # steps that may be started and not finished
FETCHED = ("logits", "logprobs")  # large outputs, brought to the host only when they are asked for


class Step(Protocol):
    """All launches of a bucket."""

    def run(self) -> None:
        """Enqueue them."""
        ...

    def close(self) -> None:
        """Free what they hold on the device."""
        ...


@dataclass(frozen=True)
class _Range:
    """Bytes that lie together on the device and in pinned memory."""

    device: int
    host: int
    nbytes: int


class _Block:
    """Some io fields in pinned memory, in the order in which they lie on the device."""

    def __init__(self, gpu: Gpu, plan: Plan, fields: list[IoField], io_address: int) -> None:
        buffers = {b.id: b for b in plan.buffers}
        places = sorted((buffers[f.buffer].offset, f.name, f) for f in fields)
        nbytes = sum(aligned(buffers[f.buffer].nbytes) for f in fields)
        where = f"io of {plan.bucket.name}"
        self.host = gpu.allocate_pinned(nbytes, where) if nbytes else 0
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(self.host) if nbytes else b""
        self.fields: dict[str, Array] = {}
        self.ranges: list[_Range] = []
        cursor = 0
        for offset, name, field in places:
            self.fields[name] = np.ndarray(field.shape, DTYPES[field.dtype], memory, cursor)
            size = buffers[field.buffer].nbytes
            self._extend(_Range(io_address + offset, self.host + cursor, size))
            cursor += aligned(size)

    def _extend(self, new: _Range) -> None:
        """Add a range, to the last one where it continues that on both sides."""
        last = self.ranges[-1] if self.ranges else None
        if last is not None and last.device + aligned(last.nbytes) == new.device:
            self.ranges[-1] = _Range(last.device, last.host, new.host + new.nbytes - last.host)
        else:
            self.ranges.append(new)


class Outputs(Mapping[str, Array]):
    """A finished step's output fields; the large ones are copied when they are looked at."""

    def __init__(self, gpu: Gpu, plan: Plan, small: Mapping[str, Array], io: int) -> None:
        """Name the fields.

        Args:
            gpu: The device.
            plan: The plan.
            small: The fields that every step brings.
            io: Address of space io.
        """
        self._gpu, self._small, self._io = gpu, small, io
        self._offsets = {b.id: b.offset for b in plan.buffers}
        self._large = {f.name: f for f in plan.io if f.direction == "out" and f.name in FETCHED}
        self._kept: dict[str, Array] = {}

    def forget(self) -> None:
        """Drop what was copied of an earlier step."""
        self._kept.clear()

    def __getitem__(self, name: str) -> Array:
        if name in self._small:
            return self._small[name]
        if name not in self._kept:
            field = self._large[name]
            array = np.empty(field.shape, DTYPES[field.dtype])
            address = self._io + self._offsets[field.buffer]
            self._gpu.read_into(address, array.ctypes.data, array.nbytes)
            self._kept[name] = array
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._small, *self._large))

    def __len__(self) -> int:
        return len(self._small) + len(self._large)


class GpuExecutor:
    """Starts and finishes the steps of one bucket, on the driver's one stream."""

    def __init__(self, gpu: Gpu, plan: Plan, io_address: int, step: Step) -> None:
        """Pin the host's side of the io fields.

        Args:
            gpu: The device.
            plan: The plan.
            io_address: First byte of space io.
            step: All launches.

        Raises:
            DeviceFault: There is no memory to pin.
        """
        self._gpu, self._step, self._where = gpu, step, f"bucket {plan.bucket.name}"
        self._in = _Block(gpu, plan, [f for f in plan.io if f.direction != "out"], io_address)
        small = [f for f in plan.io if f.direction == "out" and f.name not in FETCHED]
        self._out = [_Block(gpu, plan, small, io_address) for _ in range(DEPTH)]
        self._outputs = [Outputs(gpu, plan, block.fields, io_address) for block in self._out]
        self._done = [gpu.new_event(self._where) for _ in range(DEPTH)]
        self._started = self._finished = 0

    @property
    def inputs(self) -> Mapping[str, Array]:
        """The input fields, in pinned memory."""
        return self._in.fields

    def start(self, upload: bool) -> None:
        """Enqueue a step: its inputs where `upload`, its launches, its small outputs.

        Raises:
            DeviceFault: A call failed.
        """
        assert self._started - self._finished < DEPTH, f"{self._where}: {DEPTH} steps are started"
        gpu, turn = self._gpu, self._started % DEPTH
        gpu.enter()
        call, stream = gpu.api.call, gpu.stream
        if upload:
            for r in self._in.ranges:
                call("copy_in", r.device, r.host, r.nbytes, stream, where=self._where)
        self._step.run()
        for r in self._out[turn].ranges:
            call("copy_out", r.host, r.device, r.nbytes, stream, where=self._where)
        call("event_record", self._done[turn], stream, where=self._where)
        self._started += 1

    def finish(self) -> Outputs:
        """Wait for the oldest started step.

        Raises:
            DeviceFault: The device failed.
        """
        assert self._finished < self._started, f"{self._where}: no step is started"
        turn = self._finished % DEPTH
        self._gpu.enter()
        self._gpu.api.call("event_wait", self._done[turn], where=self._where)
        self._finished += 1
        self._outputs[turn].forget()
        return self._outputs[turn]

    def close(self) -> None:
        """Free the step; the device frees events and pinned memory."""
        self._step.close()
