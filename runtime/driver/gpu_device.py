"""One opened GPU: its library, its stream, and host memory that it can copy from and to."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from k3c.runtime.driver.gpu_api import Api

NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream, nor it for ours
NO_TIMING = 2  # of an event


class Gpu:
    """A device that is current in the thread that used it last; everything is on one stream."""

    def __init__(self, api: Api, device: int) -> None:
        """Take the device.

        Args:
            api: The driver library.
            device: The library's number of the device.

        Raises:
            DeviceFault: The driver does not give it.
        """
        self.api, self.device = api, device
        self._thread = 0
        self._pinned: list[int] = []
        self._events: list[int] = []
        self.enter()
        self.stream = self.new_stream("the device's stream")

    def enter(self) -> None:
        """Make the device current in this thread; free of cost in the thread that did it last."""
        thread = threading.get_ident()
        if thread != self._thread:
            self.api.make_current(self.device)
            self._thread = thread

    def new_stream(self, where: str) -> int:
        """Return a stream that waits for no other."""
        return self.api.created("stream_create", NON_BLOCKING, where=where)

    def new_event(self, where: str) -> int:
        """Return an event; `close` frees it."""
        self._events.append(self.api.created("event_create", NO_TIMING, where=where))
        return self._events[-1]

    def new_timer(self, where: str) -> int:
        """Return an event that keeps the time; `close` frees it."""
        self._events.append(self.api.created("event_create", 0, where=where))
        return self._events[-1]

    def record(self, event: int) -> None:
        """Let an event happen after everything that is on the stream."""
        self.api.call("event_record", event, self.stream, where="measure")

    def elapsed_ms(self, first: int, last: int) -> float:
        """Wait for two timers and return the milliseconds between them."""
        self.api.call("event_wait", last, where="measure")
        found = ctypes.c_float()
        self.api.call("event_elapsed", ctypes.byref(found), first, last, where="measure")
        return found.value

    def allocate_pinned(self, nbytes: int, where: str) -> int:
        """Return the address of memory that the device copies at full rate; `close` frees it."""
        self._pinned.append(self.api.created("host_alloc", nbytes, 0, where=where))
        return self._pinned[-1]

    def wait(self, where: str) -> None:
        """Wait for everything on the stream."""
        self.api.call("stream_wait", self.stream, where=where)

    def read_into(self, address: int, host: int, nbytes: int) -> None:
        """Copy from the device to the host, and wait."""
        self.enter()
        self.api.call("copy_out", host, address, nbytes, self.stream, where="read")
        self.wait("read")

    def write_from(self, address: int, data: bytes) -> None:
        """Copy from the host to the device, and wait."""
        self.enter()
        self.api.call("copy_in", address, data, len(data), self.stream, where="write")
        self.wait("write")

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy on the device, in order with everything on the stream; does not wait."""
        self.enter()
        self.api.call("copy", to, source, nbytes, self.stream, where="copy")

    def close(self) -> None:
        """Free everything that was made here, and give the device up."""
        for short, handles in (("event_destroy", self._events), ("host_free", self._pinned)):
            for handle in handles:
                self.api.call(short, handle, where="close")
        self.api.call("stream_destroy", self.stream, where="close")
        self.api.release(self.device)


@dataclass(frozen=True)
class GpuMemory:
    """One space on the device."""

    gpu: Gpu
    address: int
    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of some bytes, after everything that was launched before."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, f"{offset}+{nbytes} of {self.nbytes}"
        data = ctypes.create_string_buffer(nbytes)
        self.gpu.read_into(self.address + offset, ctypes.addressof(data), nbytes)
        return data.raw

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite some bytes, after everything that was launched before."""
        assert 0 <= offset <= offset + len(data) <= self.nbytes, f"{offset} of {self.nbytes}"
        self.gpu.write_from(self.address + offset, data)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes from one place to another, in order with everything on the stream."""
        assert 0 <= min(to, source) <= max(to, source) + nbytes <= self.nbytes, f"{to}, {source}"
        self.gpu.copy(self.address + to, self.address + source, nbytes)
