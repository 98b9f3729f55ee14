"""THE contract between compiler and runtime: what an artifact says, as data.

Frozen dataclasses of integers, strings and tuples, and strict JSON both ways. The compiler writes
them, the runtime and the plan checker read them; nothing else crosses. `k3c/artifact_dir.py` reads
and writes the directory that holds them.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from k3c.errors import ArtifactError

T = TypeVar("T")

FORMAT = "k3c-artifact"
FORMAT_MAJOR = 1  # another major version is refused by name
FORMAT_MINOR = 0
ALIGN_BYTES = 64  # every buffer: a cache line, and what TVM's vector loads assume
WEIGHTS_DATA_START = 4096  # first data byte of a weights file, so that a map of it is page aligned

Space = Literal["weights", "arena", "kv_pages", "state_slots", "io"]
SPACES: tuple[Space, ...] = ("weights", "arena", "kv_pages", "state_slots", "io")
Phase = Literal["decode", "prefill", "score"]


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
    """One launch. `reads` and `writes` are buffer ids; `label` is the IR node, for reports."""

    kind: Literal["launch", "collective", "copy", "wait"]
    kernel: str
    args: tuple[Arg, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    label: str
    grid: tuple[int, ...] = ()
    stream: int = 0


@dataclass(frozen=True)
class LayerCall:
    """One call of a graph's commands: the layer index, its base in each space, its attributes."""

    graph: str
    layer: int
    bases: Mapping[str, int]
    attrs: Mapping[str, int]


@dataclass(frozen=True)
class IoField:
    """A tensor that the runtime fills (`direction` in) or reads (`out`) each step, in space io."""

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
    """A compiled kernel. `key` = sha256(template source, constants, target, tools, flags)."""

    key: str
    symbol: str
    binary: str
    template: str
    constants: Mapping[str, int | float | str]


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
    """A file of the artifact."""

    nbytes: int
    sha256: str


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
    """What a machine must be to run the kernels: architecture and CPU features or GPU arch list."""

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
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ArtifactError(f"not valid JSON: {exc}", where, "compile again") from exc
    return _build(kind, raw, where)


def _build(kind: Any, raw: Any, where: str) -> Any:
    """Convert one parsed JSON value to `kind`, checking every type on the way."""
    if kind is Any:
        return raw
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _build_dataclass(kind, raw, where)
    if origin is Literal:
        return _expect(raw in args, raw, f"one of {', '.join(map(str, args))}", where)
    if origin is tuple:
        _expect(isinstance(raw, list), raw, "a list", where)
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    if origin is Mapping or origin is dict:
        _expect(isinstance(raw, dict), raw, "an object", where)
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in raw.items()}
    if origin in (Union, types.UnionType):
        return _expect(type(raw) in args, raw, f"one of {args}", where)
    return _expect(type(raw) is kind, raw, kind.__name__, where)


def _build_dataclass(kind: Any, raw: Any, where: str) -> Any:
    _expect(isinstance(raw, dict), raw, "an object", where)
    hints = get_type_hints(kind)
    names = {f.name for f in fields(kind)}
    for name in sorted(names ^ raw.keys()):
        problem = "is missing" if name in names else "is unknown"
        raise ArtifactError(f"field {name} {problem}", where, "compile again with this version")
    return kind(**{name: _build(hints[name], raw[name], f"{where}.{name}") for name in raw})


def _expect(ok: bool, raw: Any, expected: str, where: str) -> Any:
    if not ok:
        raise ArtifactError(f"found {str(raw)[:80]!r}, expected {expected}", where, "compile again")
    return raw
