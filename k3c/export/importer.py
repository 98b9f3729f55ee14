"""Convert one ExportedProgram to a Graph of the model level.

torch renames dimensions and inputs, so both are restored from the input positions; a dimension
that torch specialised or merged with another is an error here, never a smaller graph. Anything
that has no meaning in the IR is an error with the op, the module and the source line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k3c.errors import ExportError
from k3c.export import trace
from k3c.export.dims import DimTable
from k3c.export.ops import REFERENCE
from k3c.ir.graph import Attr, Graph, Input, LayerAttr, Node, Role, Value, Weight
from k3c.ir.types import BF16, F32, F64, I32, I64, MXFP4, U8, DType, SymDim, TensorType

_DTYPES: Mapping[torch.dtype, DType] = {
    torch.bfloat16: BF16,
    torch.float32: F32,
    torch.float64: F64,
    torch.int32: I32,
    torch.int64: I64,
    torch.uint8: U8,
}
# What these say, the result's type says in the IR.
_TYPE_ARGUMENTS = ("wide", "dtype")
_ALIASES = ("view", "reshape", "_unsafe_view", "alias", "detach", "contiguous", "to", "expand")
_NO_EFFECT = ("_assert_tensor_metadata",)
_PACKED, _SCALE = ".weight_packed", ".weight_scale"


@dataclass(frozen=True)
class Port:
    """A tensor input of a graph: its role, and the symbolic dimension of each dynamic axis."""

    name: str
    role: Role
    dims: Mapping[int, SymDim]


@dataclass(frozen=True)
class ImportSpec:
    """What the importer must know about a program that the program does not say.

    `ports` and `layer_attrs` name the inputs by position: all ports first, then the attributes.
    `source` turns a parameter's name into its checkpoint name, with `*` for layer and expert.
    """

    name: str
    ports: tuple[Port, ...]
    layer_attrs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: Callable[[str], str]


def import_program(program: torch.export.ExportedProgram, spec: ImportSpec) -> Graph:
    """Convert an exported program.

    Args:
        program: Made with named dynamic dimensions; its parameters may be on the meta device.
        spec: Names, roles and dimensions of its inputs and outputs.

    Returns:
        A graph whose nodes are in execution order.

    Raises:
        ExportError: An op, an argument or a dimension has no meaning in the IR.
    """
    return _Importer(program, spec).run()


class _Importer:
    def __init__(self, program: torch.export.ExportedProgram, spec: ImportSpec) -> None:
        self.program, self.spec = program, spec
        self.dims = DimTable(spec.name)
        self.values: dict[fx.Node, Value | LayerAttr | tuple[Value, ...] | None] = {}
        self.inputs: list[Input] = []
        self.weights: dict[str, Weight] = {}
        self.nodes: list[Node] = []
        self.used: set[str] = set()

    def run(self) -> Graph:
        """Walk the program once."""
        self._bind_inputs()
        outputs: tuple[tuple[str, Value], ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = self._outputs(node)
            elif node.op != "placeholder":
                raise self._error(f"{node.op} {node.target} has no meaning in the IR", node)
        return Graph(
            self.spec.name,
            tuple(self.inputs),
            tuple(self.weights.values()),
            tuple(self.nodes),
            outputs,
        )

    def _error(self, what: str, node: fx.Node, hint: str = "") -> ExportError:
        where = ", ".join(
            filter(None, (self.spec.name, trace.module_path(node), trace.source_line(node)))
        )
        return ExportError(what, where, hint)

    def _bind_inputs(self) -> None:
        signature = self.program.graph_signature
        parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        holders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        user = [holders[name] for name in signature.user_inputs]
        names = (*(p.name for p in self.spec.ports), *self.spec.layer_attrs)
        assert len(user) == len(names), f"{self.spec.name}: {len(user)} inputs for names {names}"
        for port, node in zip(self.spec.ports, user, strict=False):
            self.dims.bind(port.name, port.dims, node.meta["val"].shape)
            value = Value(self._unique(port.name), self._type(node.meta["val"], node))
            self.inputs.append(Input(value, port.role))
            self.values[node] = value
        self.dims.check_ranges(self.program.range_constraints)
        self.dims.check_guards(trace.guards(self.program))
        for name, node in zip(self.spec.layer_attrs, user[len(self.spec.ports) :], strict=True):
            self.values[node] = LayerAttr(name)
        for name, node in holders.items():
            if name in parameters:
                self._weight(node, parameters[name], holders, parameters)
            elif node not in self.values:
                raise self._error(f"constant {name} is neither an input nor a weight", node)

    def _weight(
        self, node: fx.Node, fqn: str, holders: dict[str, fx.Node], parameters: dict[str, str]
    ) -> None:
        if fqn.endswith(_SCALE):
            # It stands for nothing of its own: its packed half is the mxfp4 weight.
            self.values[node] = None
            return
        kind = self._type(node.meta["val"], node)
        source = self.spec.source(fqn)
        if fqn.endswith(_PACKED):
            scale = fqn.removesuffix(_PACKED) + _SCALE
            if scale not in parameters.values():
                raise self._error(f"{fqn} has no {scale}", node)
            kind = TensorType(MXFP4, (*kind.shape[:-1], 2 * kind.sizes[-1]))
            source = source.removesuffix(_PACKED)
        value = Value(self._unique(trace.weight_name(fqn)), kind)
        self.weights[fqn] = Weight(value, (source,))
        self.values[node] = value

    def _type(self, meta: Any, node: fx.Node) -> TensorType:
        if meta.dtype not in _DTYPES:
            raise self._error(f"a tensor of {meta.dtype} has no type in the IR", node)
        shape = tuple(self.dims.lookup(size, node.name) for size in meta.shape)
        return TensorType(_DTYPES[meta.dtype], shape)

    def _unique(self, name: str) -> str:
        unique, count = name, 0
        while unique in self.used:
            count += 1
            unique = f"{name}_{count}"
        self.used.add(unique)
        return unique

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = trace.arguments(node)
            results = self.values[source]
            assert isinstance(results, tuple), f"getitem of {source}"
            self.values[node] = results[index]
            return
        target = node.target
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list, type(None))):
            # Arithmetic on sizes, for views; a size that reaches an op is refused there.
            self.values[node] = None
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise self._error(f"{target} of op {node.args[:1]} has no meaning in the IR", node)
        self._refuse_mutation(target, node)
        namespace, _, name = target._schema.name.partition("::")
        if namespace == "k3c" and name in REFERENCE:
            self._custom(name, target, node)
        elif namespace == "aten" and name in _NO_EFFECT:
            self.values[node] = None
        elif namespace == "aten" and name in _ALIASES:
            self._alias(target, node)
        elif namespace == "aten" and name in _ATEN:
            self._aten(name, node)
        else:
            what = f"op {target._schema} has no meaning in the IR"
            raise self._error(what, node, "write it as a k3c:: op in k3c/export/ops")

    def _refuse_mutation(self, target: Any, node: fx.Node) -> None:
        written = [
            a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        if written:
            raise self._error(
                f"op {target} changes its argument {', '.join(written)} in place",
                node,
                "ops are functional: return the new tensor",
            )

    def _alias(self, target: Any, node: fx.Node) -> None:
        source = trace.arguments(node)[0]
        value = self._operand(source, node)
        if self._type(node.meta["val"], node) != value.type:
            raise self._error(
                f"op {target} changes {value.type} to {self._type(node.meta['val'], node)}",
                node,
                "views have no meaning in the IR: let the k3c:: op take the shape it gets",
            )
        self.values[node] = value

    def _operand(self, source: Any, node: fx.Node) -> Value:
        value = self.values.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(value, Value):
            raise self._error(f"{source!r} is no tensor that op {node.target} can take", node)
        return value

    def _custom(self, name: str, target: Any, node: fx.Node) -> None:
        operands: list[Value] = []
        attrs: dict[str, Attr] = {}
        schema = target._schema.arguments
        given = dict(zip((a.name for a in schema), trace.arguments(node), strict=False)) | dict(
            node.kwargs
        )
        for argument in schema:
            item = given.get(argument.name, argument.default_value)
            value = self.values.get(item) if isinstance(item, fx.Node) else None
            if isinstance(value, LayerAttr):
                attrs[argument.name] = value
            elif isinstance(item, fx.Node) and self._is_scale(item):
                continue
            elif isinstance(item, fx.Node):
                operands.append(self._operand(item, node))
            elif argument.name not in _TYPE_ARGUMENTS:
                attrs[argument.name] = self._attr(argument.name, item, node)
        self._emit(name, operands, attrs, node)

    def _aten(self, name: str, node: fx.Node) -> None:
        op, order = _ATEN[name]
        operands = order(node)
        if operands is None:
            what = f"op {node.target} with arguments {node.args} {node.kwargs}"
            raise self._error(f"{what} has no meaning in the IR", node)
        self._emit(op, [self._operand(o, node) for o in operands], {}, node)

    def _is_scale(self, item: fx.Node) -> bool:
        return item.op == "placeholder" and item in self.values and self.values[item] is None

    def _attr(self, name: str, item: Any, node: fx.Node) -> Attr:
        if item is None:
            return "none"
        if isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, (list, tuple)) and all(type(i) is int for i in item):
            return tuple(item)
        raise self._error(f"argument {name}={item!r} of op {node.target} is no attribute", node)

    def _emit(self, op: str, operands: list[Value], attrs: dict[str, Attr], node: fx.Node) -> None:
        meta = node.meta["val"]
        several = isinstance(meta, (tuple, list))
        stem = trace.value_name(node, op)
        results = tuple(
            Value(self._unique(f"{stem}_{i}" if several else stem), self._type(m, node))
            for i, m in enumerate(meta if several else (meta,))
        )
        self.nodes.append(Node(op, tuple(operands), results, attrs, trace.source_line(node)))
        self.values[node] = results if several else results[0]

    def _outputs(self, node: fx.Node) -> tuple[tuple[str, Value], ...]:
        leaves = pytree.tree_leaves(trace.arguments(node)[0])
        names = self.spec.outputs
        assert len(leaves) == len(names), f"{self.spec.name}: {len(leaves)} results for {names}"
        for name, leaf in zip(names, leaves, strict=True):
            self._check_updated(name, leaf)
        return tuple((n, self._operand(x, node)) for n, x in zip(names, leaves, strict=True))

    def _check_updated(self, name: str, leaf: Any) -> None:
        """Refuse a state that comes back as it went in: whoever reads it may write it in place."""
        roles = {i.value.name: i.role for i in self.inputs}
        value = self.values.get(leaf)
        if not isinstance(value, Value) or roles.get(value.name) != "state":
            return
        for user in leaf.users:
            if isinstance(user.target, torch._ops.OpOverload):
                at = next(i for i, a in enumerate(user.args) if a is leaf)
                raise self._error(
                    f"op {user.target} takes state {name} as argument "
                    f"{user.target._schema.arguments[at].name} and does not return it",
                    user,
                    "return the new state; an update in place is lost in a functional graph",
                )
        raise self._error(f"state {name} is returned unchanged", leaf)


def _plain(node: fx.Node) -> list[Any] | None:
    """Return the two tensor arguments of an op called with nothing else."""
    args = trace.arguments(node)
    tensors = all(isinstance(a, fx.Node) for a in args)
    return args if len(args) == 2 and tensors and not node.kwargs else None


def _add(node: fx.Node) -> list[Any] | None:
    args = _plain(node)
    same = args and args[0].meta["val"].shape == args[1].meta["val"].shape
    return args if same else None


def _embedding(node: fx.Node) -> list[Any] | None:
    args = _plain(node)
    return args and args[::-1]


_ATEN: Mapping[str, tuple[str, Callable[[fx.Node], list[Any] | None]]] = {
    "linear": ("linear", _plain),
    "add": ("add", _add),
    "embedding": ("embed", _embedding),
}
