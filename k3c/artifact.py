"""THE contract between compiler and runtime: what an artifact says, as data.

Frozen dataclasses of integers, strings and tuples, and strict JSON both ways. The compiler writes
them, the runtime and the plan checker read them; nothing else crosses. `k3c/artifact_dir.py` reads
and writes the directory that holds them.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from k3c.errors import ArtifactError

T = TypeVar("T")

FORMAT = "k3c-artifact"
FORMAT_MAJOR = 2  # another major version is refused by name
FORMAT_MINOR = 0
ALIGN_BYTES = 64  # every buffer: a cache line, and what TVM's vector loads assume
PART_BYTES = 1 << 24  # what a hash of a part of a large member covers
WEIGHTS_DATA_START = 4096  # first data byte of a weights file, so that a map of it is page aligned

Space = Literal["weights", "arena", "kv_pages", "state_slots", "io"]
SPACES: tuple[Space, ...] = ("weights", "arena", "kv_pages", "state_slots", "io")
Phase = Literal["decode", "prefill", "score", "verify"]


@dataclass(frozen=True)
class Bucket:
    """A phase with every symbolic dimension bound, e.g. `decode.b4`: T=4 rows, B=4 requests."""

    name: str
    phase: Phase
    dims: Mapping[str, int]


@dataclass(frozen=True)
class Buffer:
    """A range of bytes in one space.

    Attributes:
        id: Unique within a plan; `<graph>.<value>` for a graph's own, `<value>` for a step's.
        nbytes: Size in bytes.
        align: Alignment of the address in bytes.
        space: The allocation it lies in.
        graph: The graph whose calls it belongs to; empty: live through the whole step.
        first: Index of the first command of `graph` that touches it.
        last: One past the last command that touches it (half open).
        offset: Bytes from the start of the space, or from the layer's base where `per_layer`.
        per_layer: Each call has its own copy, at `LayerCall.bases[space] + offset`.
    """

    id: str
    nbytes: int
    align: int
    space: Space
    graph: str
    first: int
    last: int
    offset: int
    per_layer: bool = False


@dataclass(frozen=True)
class Arg:
    """One kernel argument: exactly one of a buffer, an integer, or a layer attribute's name."""

    buffer: str = ""
    value: int = 0
    layer_attr: str = ""


@dataclass(frozen=True)
class Command:
    """One thing that the device does in a call of a graph.

    Attributes:
        kind: "launch" of a kernel; "copy" (args: to, from, bytes); "collective" (args: to, from,
            bytes of this rank's part, ranks, this rank; an all_gather's result holds the parts in
            order of rank); "wait" does nothing, but commands can wait for it.
        kernel: A launch's kernel by its symbol; "all_reduce" or "all_gather" for a collective.
        args: What the kernel is called with, in order.
        reads: Ids of the buffers that it reads.
        writes: Ids of the buffers that it writes.
        label: The IR node, for reports.
        grid: Blocks along x, y and z on a GPU; empty on a CPU.
        after: Commands of the same graph, by index, that must be done before it starts. With none
            it waits only for the whole call before. A CPU runs commands in the order of the plan.
        floor_ns: What the target cannot do it faster than, by bytes and operations, nanoseconds; of
            several commands of one node the first one has it.
    """

    kind: Literal["launch", "collective", "copy", "wait"]
    kernel: str
    args: tuple[Arg, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    label: str
    grid: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    floor_ns: int = 0


@dataclass(frozen=True)
class LayerCall:
    """One call of a graph's commands: the layer index, its base in each space, its attributes."""

    graph: str
    layer: int
    bases: Mapping[str, int]
    attrs: Mapping[str, int]


@dataclass(frozen=True)
class IoField:
    """A tensor in space io that the runtime fills (`direction` in) or reads (out) each step.

    A step may leave in an input what its next run needs: its token, one more token of context.
    """

    name: str
    direction: Literal["in", "out"]
    dtype: Literal["i32", "i64", "f32"]
    shape: tuple[int, ...]
    buffer: str


@dataclass(frozen=True)
class Plan:
    """Everything that one step of one bucket does and where every byte of it lies.

    `commands` are per graph; a step runs them once for each entry of `calls`, in order.
    `space_bytes` are the sizes that the runtime allocates; `arena_lower_bound_bytes` is the largest
    set of arena bytes live at one time. `estimates` holds bytes, flops and launches of one step.
    """

    bucket: Bucket
    rank: int
    space_bytes: Mapping[str, int]
    arena_lower_bound_bytes: int
    buffers: tuple[Buffer, ...]
    commands: Mapping[str, tuple[Command, ...]]
    calls: tuple[LayerCall, ...]
    io: tuple[IoField, ...]
    entry: str
    estimates: Mapping[str, int]


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        key: sha256(template source, constants, target, tools, flags).
        symbol: Its name in the plans, unique in the artifact.
        binary: The member that holds it.
        template: The template that it was made from.
        constants: What the template was specialised on.
        entry: The function's name in the binary.
        threads: Threads of a block; 0 on a CPU, as are the next two where they say nothing.
        shared_bytes: Dynamic shared memory of a block.
        arch: The architecture that the binary was made for, e.g. x86_64, sm_90a, gfx950.
        min_driver: Oldest driver that loads it, as the CUDA or HIP version "12.4"; empty: any.
        pdl: It may start while the kernel before it ends, and waits by itself for that one's end
            before it touches anything but weights.
    """

    key: str
    symbol: str
    binary: str
    template: str
    constants: Mapping[str, int | float | str]
    entry: str
    threads: int
    shared_bytes: int
    arch: str
    min_driver: str
    pdl: bool


@dataclass(frozen=True)
class WeightEntry:
    """A packed weight of one call: where it lies in space weights and how it was packed.

    `nbytes` includes `padding_bytes`, zero bytes that a layout adds to fill whole tiles.
    """

    name: str
    layer: int
    sources: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    layout: str
    offset: int
    nbytes: int
    padding_bytes: int


@dataclass(frozen=True)
class Member:
    """A file of the artifact.

    Attributes:
        nbytes: Its size.
        sha256: Of its bytes; where there are `parts`, of their digests one after another.
        parts: The sha256 of each `PART_BYTES` of a large file, so that all cores can check it.
    """

    nbytes: int
    sha256: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A configuration that a variant of a bucket uses for one node, for `k3c tune`.

    Attributes:
        bucket: The variant, e.g. `decode.b8.v3`.
        graph: The graph of the node.
        label: The label of the node's commands.
        template: Name of the template.
        key: What names the node in the tuning table.
        config: The configuration.
    """

    bucket: str
    graph: str
    label: str
    template: str
    key: str
    config: Mapping[str, int]


@dataclass(frozen=True)
class CandidateList:
    """All candidates of an artifact."""

    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What the runtime must know of the model."""

    name: str
    vocab_size: int
    num_layers: int
    stop_ids: tuple[int, ...]
    has_tokenizer: bool
    compute: Literal["f32", "bf16"]


@dataclass(frozen=True)
class TargetInfo:
    """What a machine must be to run the kernels: architecture, CPU features, a GPU's driver.

    `min_driver` is the oldest driver as the CUDA or HIP version "12.4"; empty on a CPU.
    """

    name: str
    kind: Literal["cpu", "cuda", "hip"]
    arch: str
    features: tuple[str, ...]
    min_driver: str = ""


@dataclass(frozen=True)
class CacheInfo:
    """Sizes of the hybrid state. Page 0 and slot 0 are scratch and count as pages and slots."""

    max_requests: int
    max_context_tokens: int
    page_tokens: int
    pages: int
    slots: int


@dataclass(frozen=True)
class Manifest:
    """The artifact's table of contents. `space_bytes` are the maxima over all plans."""

    format: str
    major: int
    minor: int
    k3c_version: str
    toolchain: Mapping[str, str]
    model: ModelInfo
    target: TargetInfo
    cache: CacheInfo
    mesh: Mapping[str, int]
    rank: int
    buckets: tuple[Bucket, ...]
    kernels: tuple[Kernel, ...]
    weights: tuple[WeightEntry, ...]
    space_bytes: Mapping[str, int]
    members: Mapping[str, Member]


def aligned(nbytes: int) -> int:
    """Return the first place at or after byte `nbytes` where a buffer may begin."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def to_json(value: Any) -> str:
    """Return a dataclass as JSON text: sorted keys, one deterministic form, a final newline."""
    return json.dumps(asdict(value), sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def from_json(kind: type[T], text: str, where: str) -> T:
    """Parse JSON text into a dataclass of type `kind`, strictly.

    Args:
        kind: The dataclass to build.
        text: The JSON text.
        where: File name for error messages.

    Raises:
        ArtifactError: The text is not JSON, a field is missing, unknown or of another type.
    """
    try:
        return _builder(kind)(json.loads(text))
    except (ValueError, RecursionError) as exc:
        raise ArtifactError(f"not valid JSON: {exc}", where, "compile again") from exc
    except _Mismatch as exc:
        raise ArtifactError(exc.what, where + exc.path, exc.hint) from None


class _Mismatch(Exception):
    """A value is not of its type; `path` grows while the exception leaves the enclosing values."""

    def __init__(self, what: str, hint: str = "compile again") -> None:
        self.what, self.hint, self.path = what, hint, ""
        super().__init__(what)


def _demand(ok: bool, raw: Any, expected: str) -> Any:
    if not ok:
        raise _Mismatch(f"found {str(raw)[:80]!r}, expected {expected}")
    return raw


# A plan holds thousands of values: what a type demands is worked out once, not for each value.
@cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """Return a function that checks one parsed JSON value and converts it to `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda raw: raw
    if is_dataclass(kind):
        return _dataclass_builder(kind)
    if origin is Literal:
        return _checked(lambda raw: raw in args, f"one of {', '.join(map(str, args))}")
    if origin is tuple:
        return _tuple_builder(_builder(args[0]))
    if origin is Mapping or origin is dict:
        return _mapping_builder(_builder(args[1]))
    if origin in (Union, types.UnionType):
        return _checked(lambda raw: type(raw) in args, f"one of {args}")
    return _checked(lambda raw: type(raw) is kind, kind.__name__)


def _checked(ok: Callable[[Any], bool], expected: str) -> Callable[[Any], Any]:
    return lambda raw: _demand(ok(raw), raw, expected)


def _tuple_builder(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(raw: Any) -> tuple[Any, ...]:
        values: list[Any] = []
        try:
            for each in _demand(type(raw) is list, raw, "a list"):
                values.append(item(each))
        except _Mismatch as exc:
            exc.path = f"[{len(values)}]{exc.path}"
            raise
        return tuple(values)

    return build


def _mapping_builder(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(raw: Any) -> dict[str, Any]:
        given: dict[str, Any] = _demand(type(raw) is dict, raw, "an object")
        key, values = "", dict[str, Any]()
        try:
            for key, each in given.items():
                values[key] = item(each)
        except _Mismatch as exc:
            exc.path = f".{key}{exc.path}"
            raise
        return values

    return build


def _dataclass_builder(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    items = {f.name: _builder(hints[f.name]) for f in fields(kind)}

    def build(raw: Any) -> Any:
        given: dict[str, Any] = _demand(type(raw) is dict, raw, "an object")
        if given.keys() != items.keys():
            name = min(given.keys() ^ items.keys())
            problem = "is missing" if name in items else "is unknown"
            raise _Mismatch(f"field {name} {problem}", "compile again with this version")
        name, values = "", dict[str, Any]()
        try:
            for name, item in items.items():
                values[name] = item(given[name])
        except _Mismatch as exc:
            exc.path = f".{name}{exc.path}"
            raise
        return kind(**values)

    return build
