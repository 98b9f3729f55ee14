"""Two ways to run a plan on a GPU: as one graph, or launch by launch. Both give equal bits.

The graph is built from explicit nodes, one for each command (an all_gather of one rank alone is one
for each part), with the edges that the commands ask for: nothing is captured, nothing runs while it
is built, and nothing can be launched on another stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int64, c_size_t, c_void_p

from k3c.errors import ArtifactError, DeviceFault
from k3c.runtime.binding import Bound
from k3c.runtime.driver.gpu_api import Api

# What a kernel takes after the plan's arguments: pointers to global and to profile scratch. No
# kernel has scratch of its own, so both are NULL.
TRAILING_POINTERS = 2
NO_SCRATCH = (0,) * TRAILING_POINTERS
POINTER_BYTES, INTEGER_BYTES = 8, 4
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


class Arguments:
    """Arguments of launches, where the driver reads them: an array of addresses of values."""

    def __init__(self, count: int) -> None:
        """Make room for the arguments of a plan's launch with up to `count` of them."""
        room = count + TRAILING_POINTERS
        self._values = (c_int64 * room)()
        first = ctypes.addressof(self._values)
        self._addresses = (c_void_p * room)(*range(first, first + 8 * room, 8))
        self.address = ctypes.addressof(self._addresses)

    def pack(self, bound: Bound) -> int:
        """Put in the arguments of a launch; return where the driver finds them.

        Raises:
            ArtifactError: An integer does not fit 32 bits.
        """
        for value, is_address in zip(bound.values, bound.addresses, strict=True):
            if not is_address and not INT32_MIN <= value <= INT32_MAX:
                what = f"argument {value} does not fit a 32-bit integer"
                raise ArtifactError(what, bound.label, "compile again with smaller buckets")
        # A 32-bit integer lies in the first four bytes of its place: the machine is little-endian.
        count = len(bound.values)
        self._values[: count + TRAILING_POINTERS] = (*bound.values, *NO_SCRATCH)
        return self.address


def parameter_bytes(bound: Bound) -> list[int]:
    """Return the bytes of each parameter that a launch passes."""
    given = [POINTER_BYTES if is_address else INTEGER_BYTES for is_address in bound.addresses]
    return given + [POINTER_BYTES] * TRAILING_POINTERS


def launch_shape(bound: Bound) -> tuple[int, int, int, int, int]:
    """Return blocks along x, y, z, threads of a block and its dynamic shared bytes.

    Raises:
        ArtifactError: The command has no grid.
    """
    assert bound.kernel is not None, f"{bound.label} is no launch"
    grid = bound.command.grid
    if len(grid) != 3 or min(grid) < 1:
        raise ArtifactError(f"grid is {list(grid)}, expected three numbers above 0", bound.label)
    return (*grid, bound.kernel.threads, bound.kernel.shared_bytes)


def copies(bound: Bound) -> list[tuple[int, int, int]]:
    """Return what a copy, or a collective of one rank alone, copies: to, from, bytes."""
    if bound.command.kind == "wait":
        return []
    to, source, nbytes = bound.values[:3]
    if bound.command.kind == "copy":
        return [(to, source, nbytes)]
    if bound.command.kernel == "combine_tokens":
        return [(to, source + bound.values[4] * nbytes, nbytes)]
    gathers = bound.command.kernel in ("all_gather", "dispatch_tokens")
    parts = bound.values[3] if gathers else 1
    found = [(to + part * nbytes, source, nbytes) for part in range(parts)]
    return [copy for copy in found if copy[0] != copy[1]]


class GraphStep:
    """A bucket's step as one executable graph."""

    def __init__(
        self, api: Api, commands: Sequence[Bound], functions: Mapping[str, int], stream: int
    ) -> None:
        """Build, instantiate and upload the graph; nothing runs.

        Args:
            api: The driver library.
            commands: All commands of the step.
            functions: The handle of each kernel, by symbol: all are loaded before.
            stream: The only stream that it is launched on.

        Raises:
            DeviceFault: The driver refuses a node or the graph.
        """
        self._api, self._functions, self._stream = api, functions, stream
        self._arguments = Arguments(max((len(c.values) for c in commands), default=0))
        self.where = commands[0].label.partition(",")[0] if commands else "an empty bucket"
        graph = api.created("graph_create", 0, where=self.where)
        try:
            self.nodes = self._add_nodes(graph, commands)
            self._check_count(graph)
            self._exec = api.instantiate(graph, self._namer(commands), self.where)
        except Exception:
            # Its own failure would hide the first one, which says what is wrong.
            api.functions["graph_destroy"](graph)
            raise
        api.call("graph_destroy", graph, where=self.where)
        api.call("graph_upload", self._exec, stream, where=self.where)
        self._launch = api.functions["graph_launch"]

    def run(self) -> None:
        """Launch the graph.

        Raises:
            DeviceFault: The launch failed.
        """
        code = self._launch(self._exec, self._stream)
        if code:
            raise self._api.fault("graph_launch", code, self.where)

    def close(self) -> None:
        """Free the executable graph."""
        self._api.call("graph_exec_destroy", self._exec, where=self.where)

    def _add_nodes(self, graph: int, commands: Sequence[Bound]) -> list[tuple[int, ...]]:
        """Add every command; return its nodes, which are one but for an all_gather."""
        nodes: list[tuple[int, ...]] = []
        for bound in commands:
            waits = [node for i in bound.after for node in nodes[i]]
            if bound.kernel is not None:
                launches = [i for i in bound.after if commands[i].kernel is not None]
                early = bound.kernel.pdl and len(launches) == len(waits) == 1
                nodes.append((self._add_kernel(graph, bound, waits, early),))
                continue
            after = (c_void_p * len(waits))(*waits)
            place = (graph, after, len(waits))
            added = [self._api.add_copy(*place, copy, bound.label) for copy in copies(bound)]
            if not added:
                added.append(self._api.created("graph_add_empty", *place, where=bound.label))
            nodes.append(tuple(added))
        return nodes

    def _add_kernel(self, graph: int, bound: Bound, waits: list[int], early: bool) -> int:
        """Add a launch; `early` lets it start while the kernel before it ends."""
        assert bound.kernel is not None, f"{bound.label} is no launch"
        function = self._functions[bound.kernel.symbol]
        # The driver copies the arguments, so one room serves all nodes.
        address = self._arguments.pack(bound)
        shape = self._api.kernel_node(function, launch_shape(bound), address)
        before = [] if early else waits
        after = (c_void_p * len(before))(*before)
        place = (graph, after, len(before), byref(shape))
        node = self._api.created("graph_add_kernel", *place, where=bound.label)
        if early:
            self._api.add_early_edge(graph, waits[0], node, bound.label)
        return node

    def _check_count(self, graph: int) -> None:
        count, expected = c_size_t(), sum(map(len, self.nodes))
        self._api.call("graph_nodes", graph, None, byref(count), where=self.where)
        if count.value != expected:
            what = f"the graph has {count.value} nodes, the plan has {expected} commands"
            raise DeviceFault(what, self.where)

    def _namer(self, commands: Sequence[Bound]) -> Callable[[int], str]:
        def name(node: int) -> str:
            pairs = zip(self.nodes, commands, strict=True)
            return next((c.label for nodes, c in pairs if node in nodes), self.where)

        return name


class CommandStep:
    """A bucket's step launch by launch: slower, and names the launch that failed."""

    def __init__(
        self, api: Api, commands: Sequence[Bound], functions: Mapping[str, int], stream: int
    ) -> None:
        """Pack the arguments of every launch; the arguments are those of `GraphStep`.

        Raises:
            ArtifactError: An argument or a grid is impossible.
        """
        self._api, self._stream = api, stream
        self._calls: list[tuple[str, tuple[int, ...], str]] = []
        self._arguments: list[Arguments] = []
        for bound in commands:
            if bound.kernel is None:
                self._calls += [("copy", (*c, stream), bound.label) for c in copies(bound)]
                continue
            self._arguments.append(Arguments(len(bound.values)))
            x, y, z, threads, shared = launch_shape(bound)
            function, address = functions[bound.kernel.symbol], self._arguments[-1].pack(bound)
            launch = (function, x, y, z, threads, 1, 1, shared, stream, address, 0)
            self._calls.append(("launch", launch, bound.label))

    def run(self) -> None:
        """Make every launch, in order.

        Raises:
            DeviceFault: A launch failed; the label says which.
        """
        for short, args, label in self._calls:
            self._api.call(short, *args, where=label)

    def close(self) -> None:
        """Nothing is held on the device."""
