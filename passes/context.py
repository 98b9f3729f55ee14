"""What a pass gets besides the module, and conditions that it requires or ensures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3c.ir.edit import count_ops, drop_dead
from k3c.ir.graph import Module
from k3c.ir.rewrite import RewriteLog
from k3c.ir.types import MXFP4, ROW_MAJOR

if TYPE_CHECKING:
    from k3c.placement.placement import Placement
    from k3c.targets.catalogue import Catalogue
    from k3c.targets.mesh import Mesh
    from k3c.targets.target import Target


@dataclass(frozen=True)
class PassContext:
    """What passes know of the world.

    Attributes:
        target: The device.
        catalogue: Its kernel templates, injected.
        log: Of the running pass.
        mesh: The ranks that share the model; None: one.
        placement: Which experts every rank holds; None: by number, as `contiguous` places them.
    """

    target: Target
    catalogue: Catalogue
    log: RewriteLog = field(default_factory=RewriteLog)
    mesh: Mesh | None = None
    placement: Placement | None = None

    @property
    def expert_slots(self) -> int:
        """Physical experts of a rank and layer that a map must find; 0: as the mesh needs."""
        if self.placement is None or self.placement.is_contiguous:
            return 0
        return self.placement.slots_per_rank

    def implements(self, op: str) -> bool:
        """Whether the catalogue has a template for an op: fusions for some targets ask."""
        return bool(self.catalogue.for_op(op))


@dataclass(frozen=True)
class Condition:
    """A property of a module; `check` returns what breaks it, or None."""

    name: str
    check: Callable[[Module], str | None]


def absent(*ops: str) -> Condition:
    """No graph holds a node of these ops."""

    def check(module: Module) -> str | None:
        left = [op for op in ops if count_ops(module.graphs, (op,))]
        counts = [f"{count_ops(module.graphs, (op,))} {op}" for op in left]
        return f"left: {', '.join(counts)}" if left else None

    return Condition(f"no {' or '.join(ops)}", check)


def _dead(module: Module) -> str | None:
    dead = [g.name for g in module.graphs if len(drop_dead(g).nodes) != len(g.nodes)]
    return f"dead nodes in {', '.join(dead)}" if dead else None


def _packed(module: Module) -> str | None:
    plain = [
        f"{g.name}.{w.value.name}"
        for g in module.graphs
        for w in g.weights
        if w.value.type.dtype == MXFP4 and w.value.type.layout == ROW_MAJOR
    ]
    return f"no layout on {', '.join(plain)}" if plain else None


def _level(*levels: str) -> Condition:
    def check(module: Module) -> str | None:
        return None if module.level in levels else f"the level is {module.level}"

    return Condition(f"level {' or '.join(levels)}", check)


MODEL_LEVEL = _level("model")
BEFORE_KERNELS = _level("model", "mesh")
KERNEL_LEVEL = _level("kernel")
NO_DEAD_NODES = Condition("no dead nodes", _dead)
MXFP4_HAS_LAYOUT = Condition("every mxfp4 weight has a layout", _packed)
