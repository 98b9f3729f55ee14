"""Random valid modules: sums, norms, projections, activations, casts and AttnRes pieces."""

from __future__ import annotations

import random
from collections.abc import Callable

from k3c.ir.graph import Graph, Input, Module, Node, Value, Weight
from k3c.ir.types import BF16, F32, SymDim, TensorType

T = SymDim("T", 1, 64)
WIDTHS = (16, 32)


class RandomGraph:
    """Adds random nodes over the values made so far; the same seed gives the same graph."""

    def __init__(self, seed: int) -> None:
        """Start with two inputs of each width."""
        self.random = random.Random(seed)
        self.values: list[Value] = []
        self.weights: list[Weight] = []
        self.nodes: list[Node] = []
        self.inputs = [
            Value(f"x{i}", TensorType(BF16, (T, width))) for i, width in enumerate(WIDTHS * 2)
        ]
        self.bank = Value("bank", TensorType(BF16, (3, T, 32)))
        self.values += self.inputs

    def build(self, nodes: int) -> Module:
        """Return a module with one graph of `nodes` random steps; many values are dead."""
        steps: list[Callable[[], None]] = [
            self._add, self._norm, self._linear, self._linear, self._situ, self._gate,
            self._join, self._mix, self._cast, self._repeat,
        ]  # fmt: skip
        for _ in range(nodes):
            self.random.choice(steps)()
        returned = self.random.sample(self.values, 3)
        inputs = (*(Input(v, "io") for v in self.inputs), Input(self.bank, "io"))
        outputs = tuple((f"out{i}", value) for i, value in enumerate(returned))
        graph = Graph("random", inputs, tuple(self.weights), tuple(self.nodes), outputs)
        return Module("model", (T,), (graph,), ())

    def _pick(self, like: Value | None = None) -> Value:
        return self.random.choice([v for v in self.values if like is None or v.type == like.type])

    def _weight(self, kind: TensorType) -> Value:
        value = Value(f"w{len(self.weights)}", kind)
        self.weights.append(Weight(value, (f"layers.*.{value.name}",)))
        return value

    def _emit(
        self, op: str, operands: tuple[Value, ...], kind: TensorType, **attrs: object
    ) -> None:
        result = Value(f"v{len(self.nodes)}", kind)
        self.nodes.append(Node(op, operands, (result,), attrs))  # pyright: ignore[reportArgumentType]
        self.values.append(result)

    def _add(self) -> None:
        a = self._pick()
        self._emit("add", (a, self._pick(a)), a.type)

    def _norm(self) -> None:
        x = self._pick()
        self._emit(
            "rms_norm", (x, self._weight(TensorType(F32, x.type.shape[1:]))), x.type, eps=1e-5
        )

    def _linear(self) -> None:
        x, rows = self._pick(), self.random.choice(WIDTHS)
        weight = self._weight(TensorType(BF16, (rows, x.type.shape[1])))
        self._emit("linear", (x, weight), TensorType(x.type.dtype, (T, rows)))

    def _situ(self) -> None:
        gate = self._pick()
        self._emit("situ", (gate, self._pick(gate)), gate.type, beta=4.0, linear_beta="none")

    def _gate(self) -> None:
        a = self._pick()
        self._emit("sigmoid_mul", (a, self._pick(a)), a.type)

    def _join(self) -> None:
        a = self._pick()
        self._emit("residual_join", (a, self._pick(a)), a.type, restart=self.random.choice((0, 1)))

    def _mix(self) -> None:
        """A whole AttnRes site, or its mixture alone."""
        kind = TensorType(BF16, (T, 32))
        prefixes = [v for v in self.values if v.type == kind]
        prefix = self.random.choice(prefixes)
        if self.random.random() < 0.5:
            self._emit("residual_join", (prefix, self.random.choice(prefixes)), kind, restart=0)
            prefix = self.values[-1]
        weights = self._weight(TensorType(F32, (32,))), self._weight(TensorType(F32, (1, 32)))
        self._emit("attn_res", (prefix, self.bank, *weights), kind, rows=2, eps=1e-5)
        norm = self._weight(TensorType(F32, (32,)))
        self._emit("rms_norm", (self.values[-1], norm), kind, eps=1e-6)

    def _cast(self) -> None:
        x = self._pick()
        dtype = self.random.choice((BF16, F32))
        self._emit("cast", (x,), TensorType(dtype, x.type.shape))

    def _repeat(self) -> None:
        """A node again, under another name."""
        if self.nodes:
            node = self.random.choice(self.nodes)
            self._emit(node.op, node.operands, node.results[0].type, **node.attrs)
