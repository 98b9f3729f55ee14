"""THE contract between compiler and runtime: what an artifact says, as data.

Frozen dataclasses of integers, strings and tuples, and strict JSON both ways (in
`k3c/artifact_json.py`). The compiler writes them, the runtime and the plan checker read them;
nothing else crosses. `k3c/artifact_dir.py` reads and writes the directory that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from k3c.artifact_json import from_json as from_json
from k3c.artifact_json import to_json as to_json

FORMAT = "k3c-artifact"
FORMAT_MAJOR = 3  # another major version is refused by name
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
            bytes of this rank's part, ranks, this rank's place among them; an all_gather's result
            holds the parts in order); "wait" does nothing, but commands can wait for it.
        kernel: A launch's kernel by its symbol; a collective's name: "all_reduce", "all_gather",
            "dispatch_tokens" (gathers the rows of all ranks, all that an expert of the rank needs)
            or "combine_tokens" (sums, and leaves every rank its own rows).
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
class RankAttr:
    """A number that differs from rank to rank: `factor` times the place along a mesh axis."""

    axis: str
    factor: int


@dataclass(frozen=True)
class LayerCall:
    """One call of a graph's commands: the layer index, its base in each space, its attributes.

    `rank_attrs` are attributes too; see `k3c/artifact_ranks.py`.
    """

    graph: str
    layer: int
    bases: Mapping[str, int]
    attrs: Mapping[str, int]
    rank_attrs: Mapping[str, RankAttr] = field(default_factory=dict[str, RankAttr])


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

    It is the plan of all ranks of a pipeline stage, which have the same bytes in the same places.
    `commands` are per graph; a step runs them once for each entry of `calls`, in order.
    `space_bytes` are the sizes that the runtime allocates; `arena_lower_bound_bytes` is the largest
    set of arena bytes live at one time. `estimates` holds bytes, flops and launches of one step.
    """

    bucket: Bucket
    stage: int
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
class SourceRange:
    """What a rank reads of a checkpoint tensor: indices start .. stop - 1 of dimension `dim`.

    Indices past the tensor's end are zero. `dim` -1: all of it. With an `axis` these are the
    indices of the first rank along that mesh axis; the next one's follow, as many. Where they are
    `placed`, they are physical experts, counted over all ranks: the placement says which logical
    expert each of them is.
    """

    dim: int
    start: int
    stop: int
    axis: str = ""
    placed: bool = False


@dataclass(frozen=True)
class WeightEntry:
    """A packed weight of one call: where it lies in space weights and how it was packed.

    `nbytes` includes `padding_bytes`, zero bytes that a layout adds to fill whole tiles. `ranges`
    has what the rank reads of each source; empty: all of every one.
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
    ranges: tuple[SourceRange, ...] = ()


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
    """What the runtime must know of the model.

    `has_weights`: the artifact holds those of its rank; others get theirs by `k3c pack`, which
    holds the digest of a checkpoint's configuration against `config_sha256`.
    """

    name: str
    vocab_size: int
    num_layers: int
    stop_ids: tuple[int, ...]
    has_tokenizer: bool
    compute: Literal["f32", "bf16"]
    has_weights: bool = True
    config_sha256: str = ""


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
