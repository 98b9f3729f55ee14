"""Streams the weights file to the device: threads read pieces into pinned memory and copy them.

Every thread has one small pinned buffer and one stream. It takes a part of the file and repeats:
read a piece, hash it, copy it, wait. Reading, hashing and waiting let other threads run, so the
copy engine stays busy while most threads read. A part that is not what it should be ends the load.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from k3c.artifact import PART_BYTES, WEIGHTS_DATA_START
from k3c.artifact_dir import WEIGHTS_FILE, check_digest
from k3c.errors import ArtifactError, DeviceFault
from k3c.runtime.driver.driver import WeightsFile
from k3c.runtime.driver.gpu_device import Gpu

THREADS = 12  # that only read: of 8, 12 and 16 the fastest on 16 cores
HASH_THREADS = 32  # that read and hash, at most: one core hashes a thirtieth of what the link moves
PIECE_BYTES = 4 << 20
LINE_EVERY_S = 5.0
STALL_S = 120.0  # without one part in this time the disk is said to have stalled


@dataclass
class _Stream:
    """One load: what is left to do, what is done, and what went wrong first."""

    gpu: Gpu
    weights: WeightsFile
    address: int
    file: int
    file_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    next_part: int = 0
    done_bytes: int = 0
    error: BaseException | None = None

    def take(self) -> int | None:
        """Return the next part to load; None when all are taken or the load has failed."""
        with self.lock:
            if self.error is not None or self.next_part * PART_BYTES >= self.file_bytes:
                return None
            self.next_part += 1
            return self.next_part - 1

    def count(self, nbytes: int) -> None:
        """Add loaded bytes."""
        with self.lock:
            self.done_bytes += nbytes

    def fail(self, error: BaseException) -> None:
        """Keep the first error; the other threads end after their part."""
        with self.lock:
            self.error = self.error or error

    def work(self) -> None:
        """Load parts until none is left."""
        try:
            self._load_parts()
        # Raised again by the thread that waits for this one.
        except BaseException as error:
            self.fail(error)

    def _load_parts(self) -> None:
        api = self.gpu.api
        api.make_current(self.gpu.device)
        buffer = api.created("host_alloc", PIECE_BYTES, 0, where="buffer for weights")
        stream = self.gpu.new_stream("stream for weights")
        try:
            while (part := self.take()) is not None:
                self._load(part, buffer, stream)
        except BaseException:
            # After a failure these may fail too, and must not hide it.
            api.functions["stream_destroy"](stream)
            api.functions["host_free"](buffer)
            raise
        api.call("stream_destroy", stream, where="stream for weights")
        api.call("host_free", buffer, where="buffer for weights")

    def _load(self, part: int, buffer: int, stream: int) -> None:
        """Read, hash and copy one part."""
        view = memoryview((ctypes.c_ubyte * PIECE_BYTES).from_address(buffer)).cast("B")
        first = part * PART_BYTES
        end, digest = min(first + PART_BYTES, self.file_bytes), hashlib.sha256()
        call, where = self.gpu.api.call, f"weights, part {part}"
        while first < end:
            nbytes = min(PIECE_BYTES, end - first)
            self._read(first, view[:nbytes])
            if self.weights.check:
                digest.update(view[:nbytes])
            skip = max(0, WEIGHTS_DATA_START - first)
            to = self.address + first + skip - WEIGHTS_DATA_START
            if nbytes > skip:
                call("copy_in", to, buffer + skip, nbytes - skip, stream, where=where)
                call("stream_wait", stream, where=where)
            first += nbytes
            self.count(nbytes)
        if self.weights.check:
            check_digest(WEIGHTS_FILE, self.weights.member, part, digest.hexdigest())

    def _read(self, first: int, view: memoryview) -> None:
        while view:
            try:
                found = os.preadv(self.file, [view], first)
            except OSError as exc:
                what = f"cannot be read at byte {first}: {exc.strerror}"
                raise DeviceFault(what, str(self.weights.path)) from exc
            if found == 0:
                raise ArtifactError(f"ends at byte {first}", str(self.weights.path))
            view, first = view[found:], first + found


def stream_weights(
    gpu: Gpu,
    weights: WeightsFile,
    address: int,
    say: Callable[[str], None],
    threads: int | None = None,
) -> None:
    """Load the weights; says how far it is every few seconds.

    Args:
        gpu: The device.
        weights: The file.
        address: Where its data go; nothing happens where there are none.
        say: Takes a line of progress.
        threads: How many read; None: as many as fill the link, or as there are cores to hash.

    Raises:
        ArtifactError: The file is short, or a hash differs.
        DeviceFault: Reading or copying failed, or nothing was read for minutes.
    """
    file_bytes = weights.nbytes + WEIGHTS_DATA_START
    file = os.open(weights.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found = os.fstat(file).st_size
        if found < file_bytes:
            what = f"{found} bytes, the plan needs {file_bytes}"
            raise ArtifactError(what, str(weights.path), "compile again")
        load = _Stream(gpu, weights, address, file, file_bytes)
        if weights.nbytes:
            cores = len(os.sched_getaffinity(0))
            usual = min(HASH_THREADS, max(cores, THREADS)) if weights.check else THREADS
            _run(load, say, threads or usual)
    finally:
        os.close(file)


def _run(load: _Stream, say: Callable[[str], None], threads: int) -> None:
    """Start the threads and watch them."""
    count = min(threads, -(-load.file_bytes // PART_BYTES))
    workers = [threading.Thread(target=load.work, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    start_s = said_s = moved_s = time.monotonic()
    seen_bytes = 0
    while any(worker.is_alive() for worker in workers):
        for worker in workers:
            worker.join(0.05)
        now_s = time.monotonic()
        if load.done_bytes != seen_bytes:
            seen_bytes, moved_s = load.done_bytes, now_s
        if now_s - moved_s > STALL_S:
            what = f"no part of the weights came in {STALL_S:.0f} s, {seen_bytes} bytes are done"
            load.fail(DeviceFault(what, str(load.weights.path), "check the disk"))
            break
        if now_s - said_s >= LINE_EVERY_S:
            said_s = now_s
            say(progress(load.done_bytes, load.file_bytes, now_s - start_s))
    if load.error is not None:
        raise load.error


def progress(done_bytes: int, all_bytes: int, seconds: float) -> str:
    """Return a line that says phase, bytes, rate and the time that is left."""
    rate = done_bytes / seconds
    left = f"{(all_bytes - done_bytes) / rate:.0f} s left" if rate else "not started"
    done, total = done_bytes / 1e9, all_bytes / 1e9
    return f"weights to the device: {done:.1f} of {total:.1f} GB, {rate / 1e9:.1f} GB/s, {left}"
