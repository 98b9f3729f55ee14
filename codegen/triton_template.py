"""What all Triton templates share: stages from constexprs, argument types, the tuning table.

A `@triton.jit` function takes the operands in order, the results that are not in place, the
workspace where there is one, and the scalars as 32-bit integers; then its constexprs. Every stage
of a template takes all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from k3c.codegen.template import operand_bytes, result_bytes
from k3c.codegen.triton_aot import TYPES, encode
from k3c.codegen.tuning import Config, tuned
from k3c.ir.graph import Node, Value
from k3c.ir.ops import OPS
from k3c.ir.refusal import Refusal
from k3c.ir.types import I32, I64, TensorType
from k3c.targets.catalogue import Cost, Scalar, Stage
from k3c.targets.target import Target

Grid = tuple[int, int, int]

GRID_X_LIMIT = 2**31 - 1
GRID_YZ_LIMIT = 65535
INT32_LIMIT = 2**31
POINTERS = {
    "bf16": "*bf16",
    "f32": "*fp32",
    "f8e4m3": "*fp8e4nv",
    "i32": "*i32",
    "i64": "*i64",
    "mxfp4": "*u8",
    "u8": "*u8",
}
# 16-bit floats have no type of their own in numpy: a workspace is planned in bytes, typed f32.
WORKSPACE_TYPE = "*fp32"


class TritonTemplate(ABC):
    """Base of the GPU templates.

    Attributes:
        name: Unique name.
        op: The op it implements.
        reference: Name of the reference op.
        kernels: The `@triton.jit` function of each stage, by the stage's name.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    reference: ClassVar[str]
    kernels: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return None where the template implements `node`, else why it does not."""

    @abstractmethod
    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launches in order."""

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layouts of packed weights: none."""
        return {}

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the run-time integers: rows."""
        return (("rows", node.results[0].type.sizes[0]),)

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of scratch: none."""
        return 0

    def cost(self, node: Node, target: Target) -> Cost:
        """Return every operand read once and every result written once."""
        return Cost(operand_bytes(node), result_bytes(node), 0)

    def configs(self, node: Node, target: Target) -> tuple[Config, ...]:
        """Return the configurations worth measuring, the rule's choice first."""
        return ({},)

    def config(self, node: Node, target: Target) -> Config:
        """Return the measured best configuration, or the rule's choice where none was measured.

        A target that asks for a variant gets that candidate: then all are to be measured.
        """
        candidates = self.configs(node, target)
        if target.variant is not None:
            return candidates[target.variant % len(candidates)]
        return tuned(target.name, self.name, self.tuning_key(node), candidates)

    def tuning_key(self, node: Node) -> str:
        """Return what names a node in the tuning table: dtypes and shapes of what it computes.

        Of state, which is overwritten in place, the first dimension says only how much there is;
        integers that come in say where things are, not what is computed.
        """
        state = set(OPS[node.op].in_place.values())
        words = [
            _shape_of(v.type, first=i not in state)
            for i, v in enumerate(node.operands)
            if i in state or v.type.dtype not in (I32, I64)
        ]
        return " ".join([*words, *(_shape_of(r.type) for r in _fresh(node))])

    def stage(
        self, node: Node, target: Target, name: str, grid: Grid, *,
        num_warps: int = 4, num_stages: int = 2, pdl: bool = False, max_registers: int = 0,
        **constexprs: Any,
    ) -> Stage:  # fmt: skip
        """Return one launch.

        Args:
            node: The node; its types become the kernel's argument types.
            target: The device.
            name: The stage, a key of `kernels`.
            grid: Blocks along x, y, z.
            num_warps: Warps a block.
            num_stages: Depth of software pipelining.
            pdl: Whether the kernel waits for its predecessor itself; needs a constexpr PDL.
            max_registers: Registers a thread, on NVIDIA; 0: as many as the compiler likes.
            constexprs: The function's constexprs.
        """
        x, y, z = grid
        assert 0 < x <= GRID_X_LIMIT, f"{self.name}: grid x is {x}, limit {GRID_X_LIMIT}"
        assert 0 < y <= GRID_YZ_LIMIT, f"{self.name}: grid y is {y}, limit {GRID_YZ_LIMIT}"
        assert 0 < z <= GRID_YZ_LIMIT, f"{self.name}: grid z is {z}, limit {GRID_YZ_LIMIT}"
        constants = {key: encode(value) for key, value in constexprs.items()}
        if "PDL" in self.kernels[name].arg_names:
            constants["PDL"] = int(pdl)
        constants |= {"num_warps": num_warps, "num_stages": num_stages, "pdl": int(pdl)}
        if max_registers and target.kind == "cuda":
            constants["max_registers"] = max_registers
        constants[TYPES] = " ".join(self.argument_types(node, target))
        return Stage(name, constants, grid)

    def argument_types(self, node: Node, target: Target) -> list[str]:
        """Return the types of the run-time arguments, as Triton spells them."""
        kinds = [POINTERS[v.type.dtype.name] for v in (*node.operands, *_fresh(node))]
        kinds += [WORKSPACE_TYPE] if self.workspace_bytes(node, target) else []
        return kinds + ["i32"] * len(self.scalars(node))


def _fresh(node: Node) -> list[Value]:
    """Return the results that are not in place."""
    shared = OPS[node.op].in_place
    return [result for i, result in enumerate(node.results) if i not in shared]


def _shape_of(kind: TensorType, first: bool = True) -> str:
    sizes = [str(n) for n in kind.sizes]
    return f"{kind.dtype}[{','.join(sizes if first else ['*', *sizes[1:]])}]"
