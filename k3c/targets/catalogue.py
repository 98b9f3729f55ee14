"""What the passes know of kernel templates: a protocol, so that they need not import codegen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3c.ir.graph import LayerAttr, Node
from k3c.ir.refusal import Refusal

if TYPE_CHECKING:
    from k3c.targets.target import Target

Constant = int | float | str
Scalar = tuple[str, int | LayerAttr]


@dataclass(frozen=True)
class Cost:
    """What one launch moves and computes: bytes read and written, floating point operations."""

    read_bytes: int
    write_bytes: int
    flops: int


@dataclass(frozen=True)
class Stage:
    """One launch of a template.

    Attributes:
        name: Names the kernel within the template; empty where there is only one.
        constants: Compile-time constants; two stages with equal ones share a kernel.
        grid: Blocks along x, y and z; empty on a CPU, whose kernels loop themselves.
    """

    name: str
    constants: Mapping[str, Constant]
    grid: tuple[int, ...] = ()


class Template(Protocol):
    """A kernel template: one way to implement one op on a target, in one launch or several.

    All its launches take the same arguments, and run one after another.

    The shapes of a node given to it are bound integers. `reference` is the op's name in
    `k3c.export.ops`, against which tests compare the kernel.
    """

    @property
    def name(self) -> str:
        """Unique name, the start of the kernel's symbol."""
        ...

    @property
    def op(self) -> str:
        """The op of the IR that it implements."""
        ...

    @property
    def reference(self) -> str:
        """Name of the reference op."""
        ...

    def accepts(self, node: Node, target: Target) -> Refusal | None:
        """Return None where the template implements `node`, else why it does not."""
        ...

    def layouts(self, node: Node, target: Target) -> Mapping[int, str]:
        """Return the layout name of each weight operand it wants packed, by operand index.

        It must not depend on the bucket: all buckets read the same packed bytes.
        """
        ...

    def stages(self, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the launches in order."""
        ...

    def configs(self, node: Node, target: Target) -> tuple[Mapping[str, int], ...]:
        """Return the configurations worth measuring, the rule's choice first; at least one."""
        ...

    def config(self, node: Node, target: Target) -> Mapping[str, int]:
        """Return the configuration that `stages` uses."""
        ...

    def tuning_key(self, node: Node) -> str:
        """Return what names a node in the tuning table."""
        ...

    def scalars(self, node: Node) -> tuple[Scalar, ...]:
        """Return the integer arguments in order: a name, and a number or a layer attribute."""
        ...

    def workspace_bytes(self, node: Node, target: Target) -> int:
        """Return the bytes of scratch that the launches share; planned as part of the arena."""
        ...

    def cost(self, node: Node, target: Target) -> Cost:
        """Return what the launches cost together, for the plan's estimates."""
        ...


@dataclass(frozen=True)
class Catalogue:
    """Templates in order of preference: the first that accepts a node implements it."""

    templates: tuple[Template, ...]

    def __post_init__(self) -> None:
        """Check that names are unique: symbols and plans refer to templates by name."""
        names = [t.name for t in self.templates]
        twice = sorted({n for n in names if names.count(n) > 1})
        assert not twice, f"templates named twice: {', '.join(twice)}"

    def for_op(self, op: str) -> tuple[Template, ...]:
        """Return the templates of an op, most preferred first; empty where there is none."""
        return tuple(t for t in self.templates if t.op == op)
