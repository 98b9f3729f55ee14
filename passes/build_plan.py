"""Turn a scheduled module into the plan of its bucket: buffers, commands, calls, io, estimates.

Before: nodes in launch order, each with its template. After: a `k3c.artifact.Plan`, checked by
`plan_check`. Arguments follow the kernel ABI: operands, results that are not in place, workspace
where there is one, then the template's scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from k3c.artifact import (
    ALIGN_BYTES,
    Arg,
    Buffer,
    Command,
    IoField,
    LayerCall,
    Plan,
    RankAttr,
    Space,
    aligned,
)
from k3c.errors import PassError
from k3c.ir.graph import Call, Graph, LayerAttr, Module, Node
from k3c.ir.ops import COLLECTIVES
from k3c.passes import plan_memory
from k3c.passes.assign_buffers import Assignment, Boundary, Storage, assign, in_place
from k3c.passes.collective_commands import collective_commands, place_attrs
from k3c.passes.schedule import Scheduled
from k3c.passes.select_kernels import Selected
from k3c.passes.weight_table import WeightTable
from k3c.plan_check import require
from k3c.targets.catalogue import Cost, Stage, Template
from k3c.targets.target import Target

KernelSymbol = Callable[[Template, Stage, Target], str]
STATE_SPACES: tuple[Space, ...] = ("kv_pages", "state_slots")
IO_DTYPES = ("i32", "i64", "f32")


@dataclass(frozen=True)
class _Body:
    """One graph's commands, and the scratch that they use: id, bytes, first, last."""

    graph: Graph
    assignment: Assignment
    commands: tuple[Command, ...]
    scratch: Mapping[str, int]
    spans: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class _StateTable:
    """Where state lies: offsets from the layer's base, the bases, the size of each space."""

    offsets: Mapping[str, int]
    bases: Mapping[tuple[str, int], Mapping[Space, int]]
    space_bytes: Mapping[Space, int]


def run(scheduled: Scheduled, weights: WeightTable, kernel_symbol: KernelSymbol) -> Plan:
    """Build and check the plan of one bucket.

    Args:
        scheduled: The bucket's module in launch order.
        weights: Places of all weights, the same for all buckets.
        kernel_symbol: Names the kernel that a stage of a template launches.

    Raises:
        PassError: A value is read after it was overwritten, or a carry is lost.
        PlanError: The plan breaks a rule of the checker.
    """
    selected = scheduled.selected
    module = selected.module
    boundary = Boundary.of(module, selected.state_spaces)
    build = _Builder(boundary, selected, kernel_symbol, dict(module.mesh))
    bodies = {graph.name: build.body(graph) for graph in module.graphs}
    _refuse_lost_carries(module, bodies)
    steps = _step_storages(bodies)
    state = _state_table(module, boundary)
    arena = plan_memory.plan(_problem(bodies, steps))
    io_offsets, io_bytes = _stack([s for s in steps.values() if s.space == "io"])
    step_buffers = _step_buffers(steps, {**arena.offsets, **io_offsets}, bodies)
    plan = Plan(
        bucket=selected.bucket,
        stage=0,
        space_bytes=_space_bytes(weights.total_bytes, arena.height_bytes, state, io_bytes),
        arena_lower_bound_bytes=arena.lower_bound_bytes,
        buffers=(*step_buffers, *_own_buffers(bodies, state, weights, arena.offsets)),
        commands={name: body.commands for name, body in bodies.items()},
        calls=tuple(_call(c, module.graph(c.graph), state, weights) for c in module.schedule),
        io=_io_fields(steps, bodies, boundary),
        entry=_entry(selected),
        estimates=_estimates(selected),
    )
    require(plan)
    return plan


def _entry(selected: Selected) -> str:
    """Name the function that makes all launches of a step; a GPU replays a graph instead."""
    name = selected.bucket.name.replace(".", "_")
    return f"step_{name}" if selected.target.kind == "cpu" else ""


def _space_bytes(weights: int, arena: int, state: _StateTable, io: int) -> dict[str, int]:
    sizes = {"weights": weights, "arena": arena, "io": io}
    return sizes | {str(space): nbytes for space, nbytes in state.space_bytes.items()}


@dataclass(frozen=True)
class _Builder:
    """Makes the commands of one graph after another."""

    boundary: Boundary
    selected: Selected
    kernel_symbol: KernelSymbol
    mesh: Mapping[str, int]

    def body(self, graph: Graph) -> _Body:
        """Return the commands of a graph and the scratch that they use."""
        assignment = assign(graph, self.boundary)
        scratch = {
            s.id: s.type.nbytes
            for s in assignment.storages.values()
            if s.space == "arena" and s.graph
        }
        commands: list[Command] = []
        for node in graph.nodes:
            if node.op in COLLECTIVES:
                commands += collective_commands(node, assignment, self.mesh)
            else:
                commands += self._launches(graph, node, assignment, scratch)
        commands += [_copy(to, source, assignment) for to, source in assignment.copies]
        return _Body(graph, assignment, _chained(commands), scratch, _spans(commands))

    def _launches(
        self, graph: Graph, node: Node, assignment: Assignment, scratch: dict[str, int]
    ) -> list[Command]:
        """Return a launch for each stage of a node's template; its workspace goes to `scratch`."""
        template, target = self.selected.template(graph, node), self.selected.target
        workspace = template.workspace_bytes(node, target)
        args = _buffer_args(node, assignment)
        if workspace:
            args.append(f"{graph.name}.{node.results[0].name}.workspace")
            scratch[args[-1]] = workspace
        floor_ns = _floor_ns(template.cost(node, target), target)
        commands: list[Command] = []
        for stage in template.stages(node, target):
            symbol = self.kernel_symbol(template, stage, target)
            launch = _Launch(symbol, stage.grid, _scalars(template, node), floor_ns)
            commands.append(_command(node, launch, args, assignment))
            floor_ns = 0
        return commands


def _buffer_args(node: Node, assignment: Assignment) -> list[str]:
    shared = in_place(node)
    results = [r for i, r in enumerate(node.results) if i not in shared]
    return [assignment.owner[value.name] for value in (*node.operands, *results)]


@dataclass(frozen=True)
class _Launch:
    """What one stage of a template launches; its buffers are those of the node."""

    symbol: str
    grid: tuple[int, ...]
    scalars: tuple[Arg, ...]
    floor_ns: int


def label_of(node: Node) -> str:
    """Return what reports call the commands of a node."""
    return f"{node.op} -> %{node.results[0].name}"


def _floor_ns(cost: Cost, target: Target) -> int:
    """Return the nanoseconds that the slower of moving and computing takes at the target's best."""
    # 1 GB/s moves a byte a nanosecond; 1 GFLOP/s computes an operation a nanosecond.
    moving_ns = (cost.read_bytes + cost.write_bytes) / target.bandwidth_gbs
    return round(max(moving_ns, cost.flops / target.peak_gflops))


def _scalars(template: Template, node: Node) -> tuple[Arg, ...]:
    return tuple(
        Arg(layer_attr=value.name) if isinstance(value, LayerAttr) else Arg(value=value)
        for _, value in template.scalars(node)
    )


def _command(node: Node, launch: _Launch, args: list[str], assignment: Assignment) -> Command:
    owner = assignment.owner
    reads = dict.fromkeys(owner[v.name] for v in node.operands)
    written = [owner[v.name] for v in node.results]
    # What is neither an operand nor a result is the workspace.
    written += [a for a in args if a not in reads and a not in written]
    return Command(
        kind="launch",
        kernel=launch.symbol,
        args=(*(Arg(buffer=name) for name in args), *launch.scalars),
        reads=tuple(reads),
        writes=tuple(dict.fromkeys(written)),
        label=label_of(node),
        grid=launch.grid,
        floor_ns=launch.floor_ns,
    )


def _copy(to: str, source: str, assignment: Assignment) -> Command:
    nbytes = assignment.storages[to].type.nbytes
    args = (Arg(buffer=to), Arg(buffer=source), Arg(value=nbytes))
    return Command("copy", "", args, (source,), (to,), f"copy -> {to}")


def _chained(commands: list[Command]) -> tuple[Command, ...]:
    """Let each command wait for the one before it: one chain, the order of the list."""
    return tuple(replace(c, after=(i - 1,) if i else ()) for i, c in enumerate(commands))


def _spans(commands: list[Command]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for index, command in enumerate(commands):
        for name in (*command.reads, *command.writes):
            spans[name] = (spans.get(name, (index, 0))[0], index + 1)
    return spans


def _refuse_lost_carries(module: Module, bodies: Mapping[str, _Body]) -> None:
    """Check that no call reads a carry that an earlier call overwrote without returning it."""
    lost: dict[str, str] = {}
    for call in module.schedule:
        graph, assignment = bodies[call.graph].graph, bodies[call.graph].assignment
        for item in graph.inputs:
            if item.value.name in lost:
                what = f"carry %{item.value.name} was overwritten by {lost[item.value.name]}"
                raise PassError(what, f"graph {call.graph}, layer {call.layer}", "return it there")
        for name in assignment.lost:
            lost[name] = call.graph
        for name, _ in graph.outputs:
            lost.pop(name, None)


def _step_storages(bodies: Mapping[str, _Body]) -> dict[str, Storage]:
    """Return the carries and io fields of the module, by id, sorted."""
    found = {
        s.id: s for b in bodies.values() for s in b.assignment.storages.values() if not s.graph
    }
    return dict(sorted(found.items()))


def _problem(bodies: Mapping[str, _Body], steps: Mapping[str, Storage]) -> plan_memory.Problem:
    """Put the graphs one after another on a time line, under carries that are always live."""
    items: list[plan_memory.Buffer] = []
    start = 0
    for name in sorted(bodies):
        body = bodies[name]
        for buffer, nbytes in body.scratch.items():
            first, last = body.spans[buffer]
            items.append(plan_memory.Buffer(buffer, nbytes, start + first, start + last))
        start += max(len(body.commands), 1)
    items += [
        plan_memory.Buffer(s.id, s.type.nbytes, 0, start)
        for s in steps.values()
        if s.space == "arena"
    ]
    return plan_memory.Problem(tuple(items))


def _stack(storages: list[Storage]) -> tuple[dict[str, int], int]:
    """Place buffers one after another; return their offsets and the whole size."""
    offsets: dict[str, int] = {}
    cursor = 0
    for storage in storages:
        offsets[storage.id] = cursor
        cursor += aligned(storage.type.nbytes)
    return offsets, cursor


def _state_table(module: Module, boundary: Boundary) -> _StateTable:
    """Give every layer its own bytes of state, in schedule order."""
    offsets: dict[str, int] = {}
    cursors: dict[Space, int] = dict.fromkeys(STATE_SPACES, 0)
    bases: dict[tuple[str, int], dict[Space, int]] = {}
    for call in module.schedule:
        graph = module.graph(call.graph)
        names = [item.value.name for item in graph.inputs if item.role == "state"]
        for space in STATE_SPACES:
            storages = [boundary.storage(name, graph.name) for name in sorted(names)]
            placed, nbytes = _stack([s for s in storages if s.space == space])
            if placed:
                offsets |= placed
                bases.setdefault((call.graph, call.layer), {})[space] = cursors[space]
                cursors[space] += nbytes
    return _StateTable(offsets, bases, cursors)


def _step_buffers(
    steps: Mapping[str, Storage], offsets: Mapping[str, int], bodies: Mapping[str, _Body]
) -> list[Buffer]:
    end = max((len(b.commands) for b in bodies.values()), default=0)
    return [
        Buffer(s.id, s.type.nbytes, ALIGN_BYTES, s.space, "", 0, end, offsets[s.id])
        for s in steps.values()
    ]


def _own_buffers(
    bodies: Mapping[str, _Body],
    state: _StateTable,
    weights: WeightTable,
    offsets: Mapping[str, int],
) -> list[Buffer]:
    """Return the buffers of graphs: weights, state and scratch."""
    found: list[Buffer] = []
    for name, body in bodies.items():
        end = len(body.commands)
        for weight in body.graph.weights:
            place = weights.places[name, weight.value.name]
            label, kept = f"{name}.{weight.value.name}", place.per_layer
            first, last = body.spans.get(label, (0, 0))
            found.append(
                Buffer(
                    label,
                    place.nbytes,
                    ALIGN_BYTES,
                    "weights",
                    name,
                    first,
                    last,
                    place.offset,
                    kept,
                )
            )
        for s in body.assignment.storages.values():
            if s.per_layer:
                at = state.offsets[s.id]
                found.append(
                    Buffer(s.id, s.type.nbytes, ALIGN_BYTES, s.space, name, 0, end, at, True)
                )
        for label, nbytes in sorted(body.scratch.items()):
            first, last = body.spans[label]
            found.append(
                Buffer(label, nbytes, ALIGN_BYTES, "arena", name, first, last, offsets[label])
            )
    return found


def _call(call: Call, graph: Graph, state: _StateTable, weights: WeightTable) -> LayerCall:
    place = call.graph, call.layer
    bases: dict[str, int] = {"weights": weights.bases[place]}
    bases |= {str(space): base for space, base in state.bases.get(place, {}).items()}
    own = {name: RankAttr(axis, factor) for name, (axis, factor) in call.rank_attrs.items()}
    rank_attrs = {**own, **place_attrs(graph)}
    return LayerCall(call.graph, call.layer, bases, dict(call.attrs), rank_attrs)


def _io_fields(
    steps: Mapping[str, Storage], bodies: Mapping[str, _Body], boundary: Boundary
) -> tuple[IoField, ...]:
    inputs = {item.value.name for b in bodies.values() for item in b.graph.inputs}
    fields: list[IoField] = []
    for s in steps.values():
        if s.space == "io":
            dtype = s.type.dtype.name
            assert boundary.roles[s.id] == "io", f"{s.id} is {boundary.roles[s.id]}, need io"
            assert dtype in IO_DTYPES, f"io field {s.id} is {dtype}, need one of {IO_DTYPES}"
            direction = "in" if s.id in inputs else "out"
            fields.append(IoField(s.id, direction, dtype, s.type.sizes, s.id))
    return tuple(fields)


def _estimates(selected: Selected) -> dict[str, int]:
    """Sum the templates' costs over all calls of a step; `floor_us` is the roofline of the sum."""
    totals = {"read_bytes": 0, "write_bytes": 0, "flops": 0, "launches": 0}
    calls = Counter(call.graph for call in selected.module.schedule)
    for graph in selected.module.graphs:
        times = calls[graph.name]
        for node in (n for n in graph.nodes if n.op not in COLLECTIVES):
            cost = selected.template(graph, node).cost(node, selected.target)
            totals["read_bytes"] += times * cost.read_bytes
            totals["write_bytes"] += times * cost.write_bytes
            totals["flops"] += times * cost.flops
            totals["launches"] += times
    target = selected.target
    # 1 GB/s moves 1,000 bytes a microsecond; 1 GFLOP/s computes 1,000 operations.
    moving_us = (totals["read_bytes"] + totals["write_bytes"]) / (target.bandwidth_gbs * 1e3)
    computing_us = totals["flops"] / (target.peak_gflops * 1e3)
    return {**totals, "floor_us": round(max(moving_us, computing_us))}
