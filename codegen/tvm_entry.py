"""The entry function of a bucket: every command of its plan in order, addresses baked in.

One function per graph takes the base addresses of the spaces, this call's base in each and its
layer attributes, and calls the kernels; the entry calls one of them for each `LayerCall`. The entry
has the packed-call signature of a kernel: five opaque pointers in the order of `SPACES`. A kernel's
non-zero status ends the step at once with status -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from k3c.artifact import SPACES, Arg, Buffer, Command, LayerCall, Plan
from k3c.codegen.tvm_lower import plain_object
from k3c.errors import CodegenError
from k3c.targets.target import Target

PACKED_PREFIX = "__tvm_ffi_"
# TVM annotates indices as expressions, and takes integers all the same.
tir: Any = tirx
# TVMFFIAny is 16 bytes, two int64 here: the type index (small, so its padding is zero), the value.
_ANY_WORDS = 2
_TYPE_INT, _TYPE_POINTER = 1, 4
_C_SIGNATURE = 1


def entry_object(plan: Plan, target: Target) -> bytes:
    """Compile the entry function of a plan, exported as `__tvm_ffi_<plan.entry>`."""
    functions = {}
    for graph in sorted({call.graph for call in plan.calls}):
        name = _graph_symbol(plan, graph)
        functions[name] = _graph_function(plan, graph, name)
    name = PACKED_PREFIX + plan.entry
    functions[name] = _entry_function(plan, name)
    return plain_object(functions, target)


@dataclass(frozen=True)
class _GraphParameters:
    """Parameters of a graph's function: all int64, then where a kernel's result would go."""

    spaces: dict[str, Any]
    bases: dict[str, Any]
    attrs: dict[str, Any]
    result: Any

    @property
    def ordered(self) -> list[Any]:
        """All parameters in call order."""
        return [*self.spaces.values(), *self.bases.values(), *self.attrs.values(), self.result]


def _graph_function(plan: Plan, graph: str, name: str) -> Any:
    """Return the function that runs the commands of one graph."""
    parameters = _GraphParameters(
        {s: tir.Var(s, "int64") for s in SPACES},
        {s: tir.Var(f"{s}_base", "int64") for s in SPACES},
        {a: tir.Var(a, "int64") for a in _attr_names(plan, graph)},
        tir.Var("result", "handle"),
    )
    commands = plan.commands[graph]
    buffers = {b.id: b for b in plan.buffers}
    most = max((len(c.args) for c in commands), default=1)
    stack = tir.decl_buffer((_ANY_WORDS * max(most, 1),), "int64", "stack")
    body: list[Any] = [tir.AllocBuffer(stack)]
    for command in commands:
        values = [_argument(arg, buffers, parameters) for arg in command.args]
        body += _call_kernel(command, values, stack, parameters.result)
    return _function(name, parameters.ordered, body)


def _entry_function(plan: Plan, name: str) -> Any:
    """Return the packed function that calls one graph function for each call of the schedule."""
    handle, args = tir.Var("handle", "handle"), tir.Var("args", "handle")
    count, result = tir.Var("count", "int32"), tir.Var("result", "handle")
    given = tir.decl_buffer((_ANY_WORDS * len(SPACES),), "int64", "given")
    spaces = [tir.BufferLoad(given, [_ANY_WORDS * i + 1]) for i in range(len(SPACES))]
    body: list[Any] = [tir.DeclBuffer(given, data=args)]
    for call in plan.calls:
        label = f"{call.graph} as layer {call.layer}"
        bases = [_i64(call.bases.get(space, 0)) for space in SPACES]
        attrs = [_i64(_attr(call, a)) for a in _attr_names(plan, call.graph)]
        body += _checked(_graph_symbol(plan, call.graph), [*spaces, *bases, *attrs, result], label)
    return _function(name, [handle, args, count, result], body)


def _call_kernel(
    command: Command, values: Sequence[tuple[int, Any]], stack: Any, result: Any
) -> list[Any]:
    if command.kind != "launch":
        raise CodegenError(
            f"command kind {command.kind!r} on a cpu target, need launch", command.label
        )
    stores: list[Any] = []
    for index, (type_index, value) in enumerate(values):
        stores.append(tir.BufferStore(stack, _i64(type_index), [_ANY_WORDS * index]))
        stores.append(tir.BufferStore(stack, value, [_ANY_WORDS * index + 1]))
    null = tir.reinterpret("handle", tir.const(0, "uint64"))
    arguments = [null, stack.data, tir.const(len(values), "int32"), result]
    return stores + _checked(PACKED_PREFIX + command.kernel, arguments, command.label)


def _checked(symbol: str, arguments: list[Any], label: str) -> list[Any]:
    """Return statements that call a C function and end with status -1 when its status is not 0.

    An assertion is the only statement that the code generator turns into a failing return.
    """
    status = tir.Var("status", "int32")
    fine = tir.EQ(status, tir.const(0, "int32"))
    message = [tvm.ir.StringImm(f"{label} failed")]
    return [
        tir.Bind(status, tir.call_extern("int32", symbol, *arguments)),
        tir.AssertStmt(fine, tvm.ir.StringImm("RuntimeError"), message),
    ]


def _argument(
    arg: Arg, buffers: dict[str, Buffer], parameters: _GraphParameters
) -> tuple[int, Any]:
    """Return type index and value of one kernel argument."""
    if not arg.buffer:
        return _TYPE_INT, parameters.attrs[arg.layer_attr] if arg.layer_attr else _i64(arg.value)
    buffer = buffers[arg.buffer]
    address = parameters.spaces[buffer.space] + _i64(buffer.offset)
    return _TYPE_POINTER, address + parameters.bases[buffer.space] if buffer.per_layer else address


def _function(name: str, parameters: list[Any], body: list[Any]) -> Any:
    done = tir.Return(tir.const(0, "int32"))
    function = tir.PrimFunc(parameters, tir.SeqStmt([*body, done]), _int32_type())
    return function.with_attr("global_symbol", name).with_attr("calling_conv", _C_SIGNATURE)


def _int32_type() -> Any:
    return tvm.ir.PrimType("int32")


def _attr_names(plan: Plan, graph: str) -> list[str]:
    return sorted({a.layer_attr for c in plan.commands[graph] for a in c.args if a.layer_attr})


def _attr(call: LayerCall, name: str) -> int:
    if name not in call.attrs:
        raise CodegenError(f"layer attribute {name} is not given", f"{call.graph} {call.layer}")
    return call.attrs[name]


def _graph_symbol(plan: Plan, graph: str) -> str:
    return f"{plan.entry}_{graph}"


def _i64(value: int) -> Any:
    return tir.const(value, "int64")
