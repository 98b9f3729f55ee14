"""The GPU driver library of `stub_gpu.c`, and a whole artifact whose kernels run on it.

The artifact is the fake model of `fake_plan` with kernels in C. They check what they are given: a
wrong context, slot, page or token ends a request with an error or changes all its later tokens.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from k3c.artifact import Arg, Command, Kernel, LayerCall, Manifest, Plan, TargetInfo
from k3c.artifact_writer import ArtifactWriter
from k3c.plan_check import require
from tests.support.fake_plan import (
    PAGE_TOKENS,
    PRIME,
    Sizes,
    make_buckets,
    make_manifest,
    make_plan,
)

VARIABLES = {"cuda": "K3C_LIBCUDA", "hip": "K3C_LIBHIP"}
ARCHS = {"cuda": "sm_90a", "hip": "gfx950"}
MODEL = ("ids", "seg_start", "seg_tokens", "slots", "context", "page_table", "tokens", "logits")
MODEL_WRITES = ("tokens", "logits", "layer.state", "cache")
ADVANCE = ("tokens", "ids", "context", "seg_tokens", "position")
ADVANCED = ("ids", "context", "position")
WEIGHT_BYTES = 128

KERNELS = r"""
#include <stdint.h>
#include <stdlib.h>
#define P(type, i) (*(type **)parameters[i])
#define I(i) (*(int32_t *)parameters[i])

/* ids, seg_start, seg_tokens, slots, context, page_table, tokens, logits, state, cache, weight;
   segments, vocab, columns */
const char model_parameters[] = "pppppppppppiiipp";
void model(void **parameters, const unsigned *shape) {
  int32_t *ids = P(int32_t, 0), *start = P(int32_t, 1), *count = P(int32_t, 2);
  int32_t *slots = P(int32_t, 3), *context = P(int32_t, 4), *table = P(int32_t, 5);
  int32_t *tokens = P(int32_t, 6), *cache = P(int32_t, 9);
  float *logits = P(float, 7);
  int64_t *state = P(int64_t, 8);
  int good = *P(char, 10) == 1 && parameters[14] && !P(char, 14) && !P(char, 15);
  for (int s = 0; s < I(11); ++s) {
    int32_t *pages = table + s * I(13), seen = context[s];
    int64_t *slot = state + 2 * slots[s], value = seen ? slot[1] : 0, again = 0;
    if (count[s] == 0) { tokens[s] = -7; continue; }
    int fine = good && slots[s] > 0 && (!seen || slot[0] == seen);
    for (int t = 0; t < count[s]; ++t) {
      int32_t page = pages[(seen + t) / PAGE], id = ids[start[s] + t];
      fine = fine && page > 0;
      value = (value * 31 + id + 1) % PRIME;
      if (fine) cache[page * PAGE + (seen + t) % PAGE] = id;
    }
    for (int t = 0; fine && t < seen + count[s]; ++t)
      again = (again * 31 + cache[pages[t / PAGE] * PAGE + t % PAGE] + 1) % PRIME;
    fine = fine && again == value;
    slot[0] = seen + count[s];
    slot[1] = value;
    tokens[s] = fine ? value % I(12) : -1;
    for (int v = 0; v < I(12); ++v) logits[s * I(12) + v] = -abs(v - tokens[s]);
  }
}

/* tokens, ids, context, seg_tokens, position; segments */
const char advance_parameters[] = "pppppipp";
void advance(void **parameters, const unsigned *shape) {
  for (int s = 0; s < I(5); ++s) {
    if (P(int32_t, 3)[s] == 0) continue;
    P(int32_t, 1)[s] = P(int32_t, 0)[s] < 0 ? 0 : P(int32_t, 0)[s];
    P(int32_t, 2)[s] += 1;
    P(int32_t, 4)[s] += 1;
  }
}

/* ids, targets, state, logprobs; rows */
const char scores_parameters[] = "ppppipp";
void scores(void **parameters, const unsigned *shape) {
  for (int t = 0; t < I(4); ++t)
    P(float, 3)[t] = -(P(int32_t, 0)[t] + P(int32_t, 1)[t] / 128.0f);
}

/* y[n] = 2 x[n] + add */
const char twice_parameters[] = "ppiipp";
void twice(void **parameters, const unsigned *shape) {
  for (int i = 0; i < I(2); ++i) P(float, 1)[i] = 2 * P(float, 0)[i] + I(3);
}
"""


def _compile(source: Path, made: Path, *flags: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on the PATH")
    command = [compiler, "-shared", "-fPIC", "-O1", *flags, "-o", str(made), str(source), "-ldl"]
    subprocess.run([*command, "-lpthread"], check=True, capture_output=True)


@cache
def stub_library(kind: str) -> Path:
    """Build the stub once a process; return its path."""
    made = Path(tempfile.mkdtemp(prefix="k3c-stub-")) / f"{kind}.so"
    flags = ["-DHIP"] if kind == "hip" else []
    _compile(Path(__file__).with_name("stub_gpu.c"), made, *flags)
    return made


@cache
def kernel_library() -> Path:
    """Build the kernels once a process; return the path that a module's image holds."""
    folder = Path(tempfile.mkdtemp(prefix="k3c-kernels-"))
    (folder / "kernels.c").write_text(KERNELS)
    _compile(folder / "kernels.c", folder / "k.so", f"-DPAGE={PAGE_TOKENS}", f"-DPRIME={PRIME}")
    return folder / "k.so"


class Stub:
    """The stub's controls."""

    def __init__(self, kind: str) -> None:
        self.kind, self.library = kind, ctypes.CDLL(str(stub_library(kind)))
        self.library.stub_calls.restype = ctypes.c_long
        self.library.stub_used_bytes.restype = ctypes.c_size_t
        self.library.stub_reset()

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return self.library.stub_calls(name.encode())

    def fail(self, name: str, code: int, after: int = 1) -> None:
        """Let the `after`-th call of a function from now on return `code`."""
        self.library.stub_fail(name.encode(), after, code)

    def device(self, major=9, minor=0, version=13000, total=2**32, arch=None) -> None:
        """Change what the device is."""
        name = arch.encode() if arch else None
        self.library.stub_device(major, minor, version, ctypes.c_size_t(total), name)

    def integer(self, name: str) -> int:
        """Read an int variable of the stub."""
        return ctypes.c_int.in_dll(self.library, name).value

    def break_context(self, code: int) -> None:
        """Let every call that needs a context fail from now on; 0 ends that."""
        ctypes.c_int.in_dll(self.library, "stub_broken").value = code

    @property
    def used_bytes(self) -> int:
        """Bytes that are allocated on the device."""
        return self.library.stub_used_bytes()

    @property
    def order(self) -> list[str]:
        """Names of the kernels that have run, in order."""
        variable = (ctypes.c_char * (1 << 16)).in_dll(self.library, "stub_order")
        return variable.value.decode().split()


def make_stub(monkeypatch, kind: str = "cuda") -> Stub:
    """Let the driver open the stub; its state is fresh."""
    monkeypatch.setenv(VARIABLES[kind], str(stub_library(kind)))
    return Stub(kind)


def gpu_kernel(symbol: str, kind: str = "cuda", **changes) -> Kernel:
    """A kernel of the C library."""
    kernel = Kernel(
        "00",
        symbol,
        "kernels/fake.cubin",
        symbol,
        {},
        entry=symbol,
        threads=128,
        shared_bytes=0,
        arch=ARCHS[kind],
        min_driver="",
        pdl=False,
    )
    return replace(kernel, **changes)


def launch(kernel: str, buffers, numbers, writes, after=()) -> Command:
    """A launch of one block."""
    args = (*(Arg(buffer=b) for b in buffers), *(Arg(value=n) for n in numbers))
    reads = tuple(b for b in buffers if b not in writes or b in ADVANCED)
    return Command("launch", kernel, args, reads, tuple(writes), kernel, (1, 1, 1), after)


def with_gpu_commands(plan: Plan, vocab: int, advance: bool = True) -> Plan:
    """Give a fake plan its launches; a decode plan ends with `advance` where it is asked for."""
    weight = replace(plan.buffers[1], id="weight", nbytes=64, space="weights", offset=64)
    commands, calls = {}, list(plan.calls)
    rows, segments = plan.bucket.dims["T"], plan.bucket.dims["B"]
    if plan.bucket.phase == "score":
        names = ("ids", "targets", "layer.state", "logprobs")
        commands["layer"] = (launch("scores", names, (rows,), ("logprobs",)),)
    else:
        columns = next(f.shape[1] for f in plan.io if f.name == "page_table")
        names = (*MODEL, "layer.state", "cache", "weight")
        numbers = (segments, vocab, columns)
        commands["layer"] = (launch("model", names, numbers, MODEL_WRITES),)
    if plan.bucket.phase == "decode" and advance:
        commands["head"] = (launch("advance", ADVANCE, (segments,), ADVANCED),)
        calls.append(LayerCall("head", -1, {}, {}))
    made = replace(
        plan,
        space_bytes={**plan.space_bytes, "weights": WEIGHT_BYTES},
        buffers=(*plan.buffers, weight),
        commands=commands,
        calls=tuple(calls),
    )
    require(made)
    return made


def gpu_manifest(sizes: Sizes, kind: str = "cuda") -> Manifest:
    """The manifest without members."""
    target = TargetInfo({"cuda": "h200", "hip": "mi355x"}[kind], kind, ARCHS[kind], (), "6.0")
    names = ("model", "advance", "scores")
    return replace(
        make_manifest(sizes, make_buckets(sizes)),
        target=target,
        kernels=tuple(gpu_kernel(name, kind) for name in names),
    )


def write_gpu_artifact(
    folder: Path, kind: str = "cuda", sizes: Sizes | None = None, advance: bool = True, **changes
) -> Path:
    """Write the artifact to `folder / "artifact"`; keyword arguments change the manifest."""
    sizes = sizes or Sizes()
    manifest = replace(gpu_manifest(sizes, kind), **changes)
    vocab = manifest.model.vocab_size
    plans = [with_gpu_commands(make_plan(b, sizes), vocab, advance) for b in manifest.buckets]
    space_bytes = {s: max(p.space_bytes[s] for p in plans) for s in plans[0].space_bytes}
    with ArtifactWriter(folder / "artifact") as writer:
        for plan in plans:
            writer.add_plan(plan)
        writer.add_bytes("kernels/fake.cubin", bytes(str(kernel_library()), "utf-8"))
        weights = writer.start_weights(WEIGHT_BYTES)
        weights.write_at(64, bytes([1]) * 64)
        writer.end_weights(weights)
        writer.finish(replace(manifest, space_bytes=space_bytes))
    return folder / "artifact"
