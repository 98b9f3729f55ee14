"""The three largest things to change, each by planning again with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from k3c.buckets import bucket_sizes
from k3c.planner.answer import Capacity, Change, Speed
from k3c.planner.describe import gib, ms, short_name
from k3c.planner.planned import CHOICES, Desk, Planned, Timed
from k3c.planner.timing import speed

SHOWN = 3
NO_EFFECT = "no effect"


def largest_changes(
    desk: Desk, planned: Planned, limits: Capacity, timed: Sequence[Timed]
) -> tuple[Change, ...]:
    """Return the changes that gain most for the goal.

    Args:
        desk: The problem, and what times it.
        planned: The plan to change.
        limits: Its largest legal numbers.
        timed: Other meshes that were timed.
    """
    found = [
        *_requests(desk, planned, limits),
        *_lengths(desk, planned, limits),
        *_chunks(desk, planned),
        *_fixed_choices(desk, planned),
        *_meshes(desk, planned, timed),
    ]
    if not planned.fits:
        found = [change for change in found if change.fits]
    found = [change for change in found if change.effect != NO_EFFECT]
    ordered = sorted(found, key=lambda c: (-_gain(desk, planned, c), c.option))
    return tuple(ordered[:SHOWN])


def _gain(desk: Desk, planned: Planned, change: Change) -> float:
    """Return how much better the goal is met, as a share; what else it gains counts a tenth."""
    now, goal = desk.speed(planned.timed.mesh), desk.problem.request.goal
    free = planned.fullest.memory()
    seqs = _total(planned, desk.problem.request.max_num_seqs)
    shares = {
        "latency": 1 - change.tpot_us / now.tpot_us.value,
        "throughput": change.max_num_seqs * now.tpot_us.value / (seqs * change.tpot_us) - 1,
        "fit": (change.free_bytes - free.free_bytes) / free.device_bytes,
    }
    rest = [max(0.0, gain) for name, gain in shares.items() if name != goal]
    first = 1 - change.ttft_us / now.ttft_us.value
    return shares[goal] + sum([*rest, max(0.0, first)]) / 10


def _total(planned: Planned, requests: int) -> int:
    timed = planned.timed
    return requests * timed.mesh.dp * timed.quick.replicas


def _requests(desk: Desk, planned: Planned, limits: Capacity) -> Iterator[Change]:
    """More requests, up to what fits and one step runs; and half as many."""
    asked = desk.problem.asked
    widest = bucket_sizes(desk.problem.machine.target).decode_requests[-1] * planned.timed.mesh.pp
    more = min(limits.max_num_seqs, widest)
    for count in dict.fromkeys((more, asked.requests // 2)):
        if count < 1 or count == asked.requests:
            continue
        times = speed(desk.clock, planned.timed.mesh, replace(desk.wants, requests=count))
        books = [(led, led.total_bytes(count, asked.context_tokens)) for led in planned.ledgers]
        free = min(led.device_bytes - total for led, total in books)
        yield _change(desk, planned, f"--max-num-seqs {count}", (free, count, times))


def _lengths(desk: Desk, planned: Planned, limits: Capacity) -> Iterator[Change]:
    """A shorter longest request: pages for more of them."""
    asked = desk.problem.asked
    tokens = limits.max_model_len if not planned.fits else asked.context_tokens // 2
    request = desk.problem.request
    if tokens < request.input_len + request.output_len:
        return
    books = [(led, led.total_bytes(asked.requests, tokens)) for led in planned.ledgers]
    free = min(led.device_bytes - total for led, total in books)
    found = free, asked.requests, desk.speed(planned.timed.mesh)
    yield _change(desk, planned, f"--max-model-len {tokens}", found)


def _chunks(desk: Desk, planned: Planned) -> Iterator[Change]:
    """Smaller prefill steps: less scratch, a later first token."""
    rows = bucket_sizes(desk.problem.machine.target).prefill_rows
    asked = desk.problem.asked
    for chunk in (max((n for n in rows if n < asked.chunk_tokens), default=0), 2 * rows[-1]):
        if chunk < rows[0] or chunk > rows[-1]:
            continue
        smaller = replace(asked, chunk_tokens=chunk)
        other = replace(desk, problem=replace(desk.problem, asked=smaller))
        free = other.plan(planned.timed, largest_only=True).fullest.memory().free_bytes
        times = speed(desk.clock, planned.timed.mesh, replace(desk.wants, chunk_tokens=chunk))
        found = free, asked.requests, times
        yield _change(desk, planned, f"--max-num-batched-tokens {chunk}", found)


def _fixed_choices(desk: Desk, planned: Planned) -> Iterator[Change]:
    """What the user decided, decided the other way."""
    for name in CHOICES:
        said = getattr(desk.problem.options, name)
        if said == "auto" or planned.timed.mesh.tp == 1:
            continue
        there = "sharded" if said == "replicated" else "replicated"
        mesh = replace(planned.timed.mesh, **{name: there})
        yield from _mesh(desk, planned, desk.time_mesh(mesh), f"--{name} {there}")


def _meshes(desk: Desk, planned: Planned, timed: Sequence[Timed]) -> Iterator[Change]:
    """The other mesh that is best at each goal, of those that were timed."""
    mine = short_name(planned.timed.mesh)
    others = [t for t in timed if short_name(t.mesh) != mine]
    if not others:
        return
    fast = min(others, key=lambda t: (t.pace.tpot_us.value, str(t.mesh)))
    rich = max(others, key=lambda t: (t.pace.gpu_milli.value, str(t.mesh)))
    for other in dict.fromkeys((fast.mesh, rich.mesh)):
        chosen = fast if other == fast.mesh else rich
        yield from _mesh(desk, planned, chosen, f"--mesh {chosen.mesh}")


def _mesh(desk: Desk, planned: Planned, other: Timed, option: str) -> Iterator[Change]:
    books = desk.plan(other, largest_only=True)
    free, count = books.fullest.memory().free_bytes, desk.problem.asked.requests
    found = free, count, desk.speed(other.mesh)
    yield _change(desk, replace(planned, timed=other), option, found, planned)


def _change(
    desk: Desk,
    planned: Planned,
    option: str,
    found: tuple[int, int, Speed],
    before: Planned | None = None,
) -> Change:
    """Return a change with its effect in numbers, beside what is planned now."""
    now = before or planned
    free, requests, times = found
    was_times = desk.speed(now.timed.mesh)
    was = now.fullest.memory().free_bytes
    total, held = _total(planned, requests), _total(now, desk.problem.asked.requests)
    parts = [
        _compared("a token", was_times.tpot_us.value, times.tpot_us.value),
        _compared("to the first token", was_times.ttft_us.value, times.ttft_us.value),
        f"{times.gpu_milli.value / 1e3:,.1f} tokens/s/GPU"
        if times.gpu_milli.value != was_times.gpu_milli.value
        else "",
        f"{total:,} requests" if total != held else "",
        f"{gib(free)} free" if free >= 0 else f"{gib(-free)} too much",
    ]
    if free == was:
        parts.pop()
    effect = ", ".join(filter(None, parts)) or NO_EFFECT
    return Change(option, effect, free >= 0, free, total, times.tpot_us.value, times.ttft_us.value)


def _compared(what: str, now_us: int, then_us: int) -> str:
    if now_us == then_us:
        return ""
    return f"{ms(then_us)} {what} ({then_us / now_us - 1:+.0%})"
