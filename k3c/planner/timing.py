"""Times of steps, of a first token and of an output token, from estimates of single steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from k3c.artifact import Bucket
from k3c.buckets import bucket_sizes
from k3c.passes.select_kernels import Selected
from k3c.planner.answer import Interval, KindTime, Speed
from k3c.planner.estimate import estimate_step
from k3c.planner.exact import Planner
from k3c.planner.problem import decode_size
from k3c.targets.mesh import Mesh
from k3c.targets.topology import Topology

MILLI = 1000


@dataclass(frozen=True)
class Step:
    """The predicted time of one step, and of each kind of node in it."""

    us: float
    low_us: float
    high_us: float
    kinds: tuple[KindTime, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Clock:
    """Predicts times of one model on one machine; what was predicted once is kept."""

    planner: Planner
    machine: Topology
    _known: dict[tuple[object, ...], Step] = field(default_factory=dict)

    def decode(self, mesh: Mesh, requests: int, context_tokens: int) -> Step:
        """Return a decode step of `requests` requests of a data-parallel rank.

        Pipeline stages work on a share of the requests each, one after another.
        """
        share = -(-requests // mesh.pp)
        size = decode_size(self.planner.target, share)
        one = self._stages(mesh, ("decode", size, size, context_tokens))
        return _times(one, -(-share // size))

    def prompt(self, mesh: Mesh, tokens: int, chunk_tokens: int) -> Step:
        """Return the steps of one prompt on an idle deployment: chunk after chunk.

        A chunk costs more the more context lies before it, by the same amount each: the mean of the
        first and the last whole chunk stands for all.
        """
        sizes = bucket_sizes(self.planner.target).prefill_rows
        chunk = max((n for n in sizes if n <= chunk_tokens), default=sizes[0])
        whole, rest = divmod(tokens, chunk)
        steps: list[Step] = []
        if whole:
            first = self._chunk(mesh, chunk, chunk)
            last = self._chunk(mesh, chunk, whole * chunk) if whole > 1 else first
            steps += [_times(first, whole / 2), _times(last, whole / 2)]
        if rest:
            steps.append(self._chunk(mesh, next(n for n in sizes if n >= rest), tokens))
        return _sum(steps)

    def _chunk(self, mesh: Mesh, rows: int, context_tokens: int) -> Step:
        return self._stages(mesh, ("prefill", rows, 1, context_tokens))

    @property
    def _page(self) -> int:
        return bucket_sizes(self.planner.target).page_tokens

    def _stages(self, mesh: Mesh, size: tuple[str, int, int, int]) -> Step:
        """Return a step of all stages; `size`: phase, rows, requests, tokens of context."""
        key = mesh, *size
        if key not in self._known:
            bucket = _bucket(*size, self._page)
            steps = [
                estimate(self.planner.select(mesh, stage, bucket), mesh, self.machine, size[3])
                for stage in range(mesh.pp)
            ]
            self._known[key] = _sum(steps)
        return self._known[key]


def estimate(selected: Selected, mesh: Mesh, machine: Topology, context_tokens: int) -> Step:
    """Return the predicted time of one step of one stage."""
    found = estimate_step(selected, mesh, machine, context_tokens=context_tokens)
    kinds = tuple(KindTime(k.kind, round(k.us), round(k.floor_us)) for k in found.kinds)
    sources = tuple(dict.fromkeys(k.source for k in found.kinds))
    return Step(found.us, found.low_us, found.high_us, kinds, sources)


def pace(clock: Clock, mesh: Mesh, wants: Wants) -> Pace:
    """Return the time and the rate of output tokens alone: what meshes are ranked by."""
    decode = clock.decode(mesh, wants.requests, wants.context_tokens)
    tokens, ranks = _share(clock, mesh, wants)
    return Pace(_interval(decode), _rate(decode, tokens / ranks))


def _share(clock: Clock, mesh: Mesh, wants: Wants) -> tuple[int, int]:
    """Return the tokens of a step of all replicas, and the GPUs of the machine."""
    replicas = max(1, clock.machine.ranks // mesh.ranks)
    return wants.requests * mesh.dp * replicas, max(clock.machine.ranks, mesh.ranks)


def speed(clock: Clock, mesh: Mesh, wants: Wants) -> Speed:
    """Return times and rates of a deployment."""
    prompt = clock.prompt(mesh, wants.input_len, wants.chunk_tokens)
    decode = clock.decode(mesh, wants.requests, wants.context_tokens)
    alone = clock.decode(mesh, 1, wants.context_tokens)
    tokens, ranks = _share(clock, mesh, wants)
    return Speed(
        concurrency=wants.requests,
        context_tokens=wants.context_tokens,
        ttft_us=_interval(prompt),
        tpot_us=_interval(decode),
        user_milli=_rate(decode, 1),
        gpu_milli=_rate(decode, tokens / ranks),
        single_tpot_us=_interval(alone),
        decode_kinds=decode.kinds,
        prefill_kinds=prompt.kinds,
        source="; ".join(decode.sources),
    )


@dataclass(frozen=True)
class Wants:
    """What times are given for: a prompt, an answer, requests of a data-parallel rank together."""

    input_len: int
    output_len: int
    requests: int
    chunk_tokens: int

    @property
    def context_tokens(self) -> int:
        """Tokens of context in the middle of an answer."""
        return self.input_len + self.output_len // 2


@dataclass(frozen=True)
class Pace:
    """Time per output token, and thousandths of tokens per second and GPU of the machine."""

    tpot_us: Interval
    gpu_milli: Interval


def _bucket(phase: str, rows: int, requests: int, context_tokens: int, page_tokens: int) -> Bucket:
    pages = -(-context_tokens // page_tokens)
    dims = {"T": rows, "B": requests, "S": requests + 1, "P": requests * pages + 1, "M": pages}
    assert phase in ("decode", "prefill"), phase
    return Bucket(f"{phase}.{rows}", phase, dims)


def _times(step: Step, count: float) -> Step:
    kinds = tuple(
        KindTime(k.kind, round(k.us * count), round(k.floor_us * count)) for k in step.kinds
    )
    return replace(
        step, us=step.us * count, low_us=step.low_us * count, high_us=step.high_us * count,
        kinds=kinds,
    )  # fmt: skip


def _sum(steps: Sequence[Step]) -> Step:
    times, floors = Counter[str](), Counter[str]()
    for step in steps:
        for kind in step.kinds:
            times[kind.kind] += kind.us
            floors[kind.kind] += kind.floor_us
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    kinds = tuple(KindTime(name, us, floors[name]) for name, us in ordered)
    low, high = sum(s.low_us for s in steps), sum(s.high_us for s in steps)
    sources = tuple(dict.fromkeys(source for s in steps for source in s.sources))
    return Step(sum(s.us for s in steps), low, high, kinds, sources)


def _interval(step: Step) -> Interval:
    return Interval(round(step.us), round(step.low_us), round(step.high_us))


def _rate(step: Step, tokens: float) -> Interval:
    """Return `tokens` a step in thousandths of tokens a second; a longer step is the lower end."""
    values = [round(tokens * 1e6 * MILLI / us) for us in (step.us, step.high_us, step.low_us)]
    return Interval(*values)
