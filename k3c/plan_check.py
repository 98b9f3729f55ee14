"""The independent checker of a plan: it shares no code with the planner, and always runs.

The compiler calls it before it writes a plan, the loader before it runs one. Lifetimes are derived
again from what the commands read and write; nothing that the plan declares is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from k3c.artifact import ALIGN_BYTES, SPACES, Arg, Buffer, Command, LayerCall, Plan
from k3c.errors import PlanError
from k3c.plan_order import races, unknown_waits

STATE_SPACES = ("kv_pages", "state_slots")
COLLECTIVES = ("all_reduce", "all_gather", "dispatch_tokens", "combine_tokens")
ITEM_BYTES: Mapping[str, int] = {"i32": 4, "i64": 8, "f32": 4}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the rule that is broken, and a sentence with the numbers."""

    rule: str
    message: str


@dataclass(frozen=True)
class _Range:
    """Bytes [first, last) of a space, and what lies there."""

    first: int
    last: int
    owner: str


def require(plan: Plan) -> None:
    """Check a plan.

    Raises:
        PlanError: A rule is broken; the message has the first finding and how many there are.
    """
    findings = check(plan)
    if findings:
        first, more = findings[0], len(findings) - 1
        what = f"{first.rule}: {first.message}" + (f" (and {more} more)" if more else "")
        raise PlanError(what, f"plan {plan.bucket.name}", "compile again")


def check(plan: Plan) -> list[Finding]:
    """Return everything that is wrong with a plan; empty for a good one."""
    # The later rules look ids up, so they run only once every id resolves.
    findings = [*_check_buffers(plan), *_check_calls(plan), *_check_commands(plan)]
    if findings:
        return findings
    rules = (_check_args, _check_bounds, _check_lifetimes, _check_arena, _check_fixed_spaces)
    rules += (_check_initialised, _check_lower_bound, _check_io, _check_order)
    return [finding for rule in rules for finding in rule(plan)]


def check_together(plans: Sequence[Plan]) -> list[Finding]:
    """Return where plans of one artifact disagree about memory that outlives a step.

    What one bucket writes to the state, another reads: it must lie at the same bytes in both.
    """
    found: list[Finding] = []
    for plan in plans[1:]:
        for space in (*STATE_SPACES, "weights"):
            sizes = [p.space_bytes.get(space, 0) for p in (plans[0], plan)]
            if sizes[0] != sizes[1]:
                names = f"{plans[0].bucket.name} and {plan.bucket.name}"
                found.append(Finding("shared-space", f"{space}: {sizes} bytes in {names}"))
        if _state_places(plan) != _state_places(plans[0]):
            names = f"{plans[0].bucket.name} and {plan.bucket.name}"
            found.append(Finding("shared-state", f"the state lies at other bytes in {names}"))
    return found


def lower_bound_bytes(plan: Plan) -> int:
    """Return the largest set of arena bytes live at one command, each rounded to its alignment."""
    spans, most = _spans(plan), 0
    for graph, commands in plan.commands.items():
        arena = [b for b in plan.buffers if b.space == "arena" and b.graph == graph]
        for index in range(len(commands)):
            live = (b for b in arena if b.id in spans and _holds(spans[b.id], index))
            most = max(most, sum(_rounded(b.nbytes, b.align) for b in live))
    steps = (b for b in plan.buffers if b.space == "arena" and not b.graph)
    return most + sum(_rounded(b.nbytes, b.align) for b in steps)


def _rounded(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align


def _holds(span: tuple[int, int], index: int) -> bool:
    return span[0] <= index < span[1]


def _spans(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the first and one past the last command that touches each graph's own buffers."""
    spans: dict[str, tuple[int, int]] = {}
    own = {b.id for b in plan.buffers if b.graph}
    for commands in plan.commands.values():
        for index, command in enumerate(commands):
            for name in own.intersection((*command.reads, *command.writes)):
                spans[name] = (spans.get(name, (index, 0))[0], index + 1)
    return spans


def _check_buffers(plan: Plan) -> Iterator[Finding]:
    seen: set[str] = set()
    for b in plan.buffers:
        if b.id in seen:
            yield Finding("unique-id", f"two buffers are called {b.id!r}")
        seen.add(b.id)
        if b.graph and b.graph not in plan.commands:
            yield Finding("known-graph", f"buffer {b.id} belongs to unknown graph {b.graph!r}")
        if b.align < 1 or b.align & (b.align - 1) or ALIGN_BYTES % b.align:
            yield Finding("alignment", f"buffer {b.id}: align {b.align} does not divide 64")
        elif b.offset % b.align:
            yield Finding("alignment", f"buffer {b.id}: offset {b.offset}, align {b.align}")
        if b.nbytes < 0 or b.offset < 0:
            yield Finding("size", f"buffer {b.id}: {b.nbytes} bytes at offset {b.offset}")
        if b.space not in plan.space_bytes:
            yield Finding("known-space", f"buffer {b.id} lies in {b.space!r}, which has no size")
        if b.per_layer and (b.space in ("arena", "io") or not b.graph):
            yield Finding("per-layer", f"buffer {b.id} of {b.space} cannot have a copy per layer")
    for space, nbytes in plan.space_bytes.items():
        if space not in SPACES or nbytes < 0:
            yield Finding("known-space", f"space {space!r} has {nbytes} bytes")


def _check_calls(plan: Plan) -> Iterator[Finding]:
    needed: dict[str, set[str]] = {graph: set() for graph in plan.commands}
    for b in plan.buffers:
        if b.per_layer:
            needed.setdefault(b.graph, set()).add(b.space)
    for call in plan.calls:
        where = f"call of {call.graph} as layer {call.layer}"
        if call.graph not in plan.commands:
            yield Finding("known-graph", f"{where}: no such graph")
        for space in sorted(needed.get(call.graph, set()) - call.bases.keys()):
            yield Finding("base", f"{where}: no base in {space}")
        for space, base in call.bases.items():
            if space not in SPACES or base < 0 or base % ALIGN_BYTES:
                yield Finding("base", f"{where}: base {base} in {space}")
    for graph in sorted(plan.commands.keys() - {c.graph for c in plan.calls}):
        yield Finding("called", f"graph {graph} is never called")


def _check_commands(plan: Plan) -> Iterator[Finding]:
    owner = {b.id: b.graph for b in plan.buffers}
    attrs: dict[str, list[LayerCall]] = {}
    for call in plan.calls:
        attrs.setdefault(call.graph, []).append(call)
    for graph, commands in plan.commands.items():
        for index, command in enumerate(commands):
            where = f"{graph}[{index}] {command.label}"
            for name in (*command.reads, *command.writes, *_arg_buffers(command)):
                if name not in owner:
                    yield Finding("known-buffer", f"{where}: no buffer {name!r}")
                elif owner[name] not in ("", graph):
                    yield Finding("known-buffer", f"{where}: buffer {name} is {owner[name]}'s")
            for arg in command.args:
                for call in attrs.get(graph, []):
                    if arg.layer_attr and arg.layer_attr not in {**call.attrs, **call.rank_attrs}:
                        text = f"{where}: layer {call.layer} has no attribute {arg.layer_attr!r}"
                        yield Finding("layer-attribute", text)
    yield from (Finding("order", text) for text in unknown_waits(plan))


def _arg_buffers(command: Command) -> list[str]:
    return [arg.buffer for arg in command.args if arg.buffer]


def _check_args(plan: Plan) -> Iterator[Finding]:
    sizes = {b.id: b.nbytes for b in plan.buffers}
    for graph, commands in plan.commands.items():
        for index, command in enumerate(commands):
            where = f"{graph}[{index}] {command.label}"
            if any(_arg_kinds(arg) > 1 for arg in command.args):
                yield Finding("argument", f"{where}: an argument is two things at once")
            differ = set(_arg_buffers(command)) ^ {*command.reads, *command.writes}
            if differ:
                text = f"{where}: {sorted(differ)} differ between arguments and reads and writes"
                yield Finding("argument", text)
            if command.kind == "copy" and not _good_copy(command, sizes):
                yield Finding("copy", f"{where}: need to, from and a size that both hold")
            if command.kind == "collective" and not _good_collective(command, sizes):
                text = "need to, from, a size that both hold, ranks and a rank below them"
                yield Finding("collective", f"{where}: {text}")


def _arg_kinds(arg: Arg) -> int:
    return bool(arg.buffer) + bool(arg.layer_attr) + bool(arg.value)


def _good_copy(command: Command, sizes: Mapping[str, int]) -> bool:
    if len(command.args) != 3 or len(_arg_buffers(command)) != 2:
        return False
    to, source, nbytes = command.args
    if (to.buffer,) != command.writes or (source.buffer,) != command.reads:
        return False
    return 0 <= nbytes.value <= min(sizes[to.buffer], sizes[source.buffer])


def _good_collective(command: Command, sizes: Mapping[str, int]) -> bool:
    kinds = [bool(arg.buffer) for arg in command.args]
    if command.kernel not in COLLECTIVES or kinds != [True, True, False, False, False]:
        return False
    to, source, nbytes, ranks, rank = command.args
    if command.writes != (to.buffer,) or command.reads != (source.buffer,):
        return False
    every = nbytes.value * ranks.value
    given = every if command.kernel == "combine_tokens" else nbytes.value
    taken = every if command.kernel in ("all_gather", "dispatch_tokens") else nbytes.value
    held = given <= sizes[source.buffer] and taken <= sizes[to.buffer]
    placed = bool(rank.layer_attr) or 0 <= rank.value < ranks.value
    return held and nbytes.value >= 0 and placed


def _placed(plan: Plan, space: str) -> Iterator[_Range]:
    """Yield where each buffer of a space lies, once for each layer that has a copy of its own."""
    calls: dict[str, list[LayerCall]] = {}
    for call in plan.calls:
        calls.setdefault(call.graph, []).append(call)
    for b in plan.buffers:
        if b.space != space:
            continue
        if not b.per_layer:
            yield _Range(b.offset, b.offset + b.nbytes, b.id)
            continue
        for call in calls.get(b.graph, []):
            first = call.bases[b.space] + b.offset
            yield _Range(first, first + b.nbytes, f"{b.id} of layer {call.layer}")


def _check_bounds(plan: Plan) -> Iterator[Finding]:
    for space, size in plan.space_bytes.items():
        for place in _placed(plan, space):
            if place.last > size:
                text = f"{place.owner} ends at byte {place.last} of {space}, which has {size}"
                yield Finding("bounds", text)


def _check_lifetimes(plan: Plan) -> Iterator[Finding]:
    spans = _spans(plan)
    for b in plan.buffers:
        if b.graph and not 0 <= b.first <= b.last <= len(plan.commands[b.graph]):
            text = f"buffer {b.id} is declared live in [{b.first}, {b.last})"
            yield Finding("lifetime", f"{text} of {len(plan.commands[b.graph])} commands")
        first, last = spans.get(b.id, (b.first, b.last))
        if b.graph and (b.first > first or b.last < last):
            text = f"buffer {b.id} is declared live in [{b.first}, {b.last}), but used in"
            yield Finding("lifetime", f"{text} [{first}, {last})")


def _check_arena(plan: Plan) -> Iterator[Finding]:
    """No two arena buffers that are live together share a byte."""
    arena = sorted((b for b in plan.buffers if b.space == "arena"), key=lambda b: b.offset)
    spans = _spans(plan)
    for i, low in enumerate(arena):
        for high in arena[i + 1 :]:
            if high.offset >= low.offset + low.nbytes:
                break
            if high.nbytes and _live_together(low, high, spans):
                text = f"{low.id} and {high.id} are live together and share byte {high.offset}"
                yield Finding("overlap", f"{text} of the arena")


def _live_together(a: Buffer, b: Buffer, spans: Mapping[str, tuple[int, int]]) -> bool:
    # A step's buffer is live in every call of every graph: what it holds crosses the loop.
    if not a.graph or not b.graph:
        return True
    if a.graph != b.graph:
        return False
    (first_a, last_a), (first_b, last_b) = (_hull(x, spans.get(x.id)) for x in (a, b))
    return first_a < last_b and first_b < last_a


def _hull(buffer: Buffer, span: tuple[int, int] | None) -> tuple[int, int]:
    first, last = span or (buffer.first, buffer.last)
    return min(first, buffer.first), max(last, buffer.last)


def _check_fixed_spaces(plan: Plan) -> Iterator[Finding]:
    """Bytes of weights, state and io belong to one thing; only equal weights may be one range."""
    for space in ("weights", *STATE_SPACES, "io"):
        places = sorted(_placed(plan, space), key=lambda r: (r.first, r.last))
        if space == "weights":
            places = _without_twins(places)
        yield from (Finding("overlap", f"{text} of {space}") for text in _overlaps(places))
    fixed = {b.id for b in plan.buffers if b.space == "weights"}
    for graph, commands in plan.commands.items():
        for command in commands:
            for name in fixed.intersection(command.writes):
                yield Finding("read-only", f"{graph} {command.label} writes weight {name}")


def _without_twins(places: Iterable[_Range]) -> list[_Range]:
    return list({(r.first, r.last): r for r in places}.values())


def _overlaps(places: Sequence[_Range]) -> Iterator[str]:
    last, owner = 0, ""
    for place in places:
        if place.first < last and place.last > place.first:
            yield f"{owner} and {place.owner} share byte {place.first}"
        if place.last > last:
            last, owner = place.last, place.owner


def _check_initialised(plan: Plan) -> Iterator[Finding]:
    """Scratch is written before it is read in its graph; what crosses calls is written at all."""
    arena = {b.id: b for b in plan.buffers if b.space == "arena"}
    written_in_step: set[str] = set()
    read_in_step: set[str] = set()
    for graph, commands in plan.commands.items():
        written: set[str] = set()
        for command in commands:
            for name in command.reads:
                if name in arena and arena[name].graph and name not in written:
                    yield Finding("initialised", f"{graph} {command.label} reads {name} unwritten")
            written.update(command.writes)
            read_in_step.update(name for name in command.reads if name in arena)
        written_in_step |= written
    for name in sorted(read_in_step - written_in_step):
        if not arena[name].graph:
            yield Finding("initialised", f"{name} is read, but no command of the step writes it")


def _check_lower_bound(plan: Plan) -> Iterator[Finding]:
    derived, arena = lower_bound_bytes(plan), plan.space_bytes.get("arena", 0)
    if plan.arena_lower_bound_bytes != derived:
        text = f"declared {plan.arena_lower_bound_bytes} bytes, the commands need {derived}"
        yield Finding("lower-bound", text)
    if arena < derived:
        yield Finding("lower-bound", f"the arena has {arena} bytes, {derived} are live at one time")


def _check_io(plan: Plan) -> Iterator[Finding]:
    buffers = {b.id: b for b in plan.buffers}
    commands = [c for graph in plan.commands.values() for c in graph]
    written = {name for c in commands for name in c.writes}
    # A field that the runtime fills may be updated: read and written by one command.
    made = {name for c in commands for name in c.writes if name not in c.reads}
    names = [field.name for field in plan.io]
    for field in plan.io:
        b = buffers.get(field.buffer)
        need = ITEM_BYTES[field.dtype] * prod(field.shape)
        if b is None or b.space != "io" or b.graph or b.nbytes != need or min(field.shape) < 0:
            text = f"{field.name} needs {need} bytes of a step's io buffer"
            yield Finding("io", f"{text}, has {field.buffer!r} with {b.nbytes if b else 0}")
        if names.count(field.name) > 1:
            yield Finding("io", f"two fields are called {field.name}")
        if field.buffer not in written if field.direction == "out" else field.buffer in made:
            yield Finding("io", f"{field.name} ({field.direction}): wrong kind of access")


def _check_order(plan: Plan) -> Iterator[Finding]:
    return (Finding("order", text) for text in races(plan))


def _state_places(plan: Plan) -> set[tuple[str, str, int, int, int]]:
    """Return where each layer's state lies, by the value's own name."""
    return {
        (b.space, b.id.rpartition(".")[2], call.layer, call.bases[b.space] + b.offset, b.nbytes)
        for b in plan.buffers
        for call in plan.calls
        if b.space in STATE_SPACES and b.per_layer and call.graph == b.graph
    }
