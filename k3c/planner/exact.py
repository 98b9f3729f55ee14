"""The plans that the runtime would run, for any mesh: the real pipeline, kernels not built.

`quick` is arithmetic; this is the compiler. Both must say the same about weights and state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3c.artifact import Bucket, Plan
from k3c.buckets import bucket_sizes
from k3c.codegen.template import packed_nbytes
from k3c.errors import PassError, PlanError
from k3c.export_cache import Compute, exported
from k3c.ir.graph import Module
from k3c.kernels import catalogue_of
from k3c.model.config import TextConfig
from k3c.passes.build_plan import run as build_plan
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.schedule import run as schedule
from k3c.passes.select_kernels import Selected
from k3c.passes.select_kernels import run as select_kernels
from k3c.passes.weight_table import WeightTable, weight_table
from k3c.targets.catalogue import Catalogue, Stage, Template
from k3c.targets.mesh import Mesh
from k3c.targets.target import Target

COMPUTE: dict[str, Compute] = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class StagePlans:
    """All buckets of one pipeline stage: what they run, where weights lie, where bytes lie."""

    selections: tuple[Selected, ...]
    weights: WeightTable
    plans: tuple[Plan, ...]

    def space_bytes(self, space: str) -> int:
        """Return the bytes of a space that serve every bucket."""
        return max(plan.space_bytes.get(space, 0) for plan in self.plans)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the weights that layouts and alignment add."""
        real = sum(entry.nbytes - entry.padding_bytes for entry in self.weights.entries)
        return self.weights.total_bytes - real


@dataclass
class Planner:
    """Plans one model for one device over any mesh; lowered modules are kept.

    Attributes:
        config: The model.
        target: The device.
        module: The exported model, level model.
        catalogue: The device's templates.
    """

    config: TextConfig
    target: Target
    module: Module
    catalogue: Catalogue
    _lowered: dict[Mesh, tuple[Module, ...]] = field(default_factory=dict)
    _selected: dict[tuple[object, ...], Selected] = field(default_factory=dict)

    def lowered(self, mesh: Mesh) -> tuple[Module, ...]:
        """Return the module of each pipeline stage at level kernel.

        Raises:
            PassError: The passes cannot share the model so.
        """
        if mesh.pp > 1:
            what = "pipeline stages are not supported yet"
            raise PassError(what, f"--mesh {mesh}", "take tp, dp and ep")
        if mesh not in self._lowered:
            ctx = PassContext(self.target, self.catalogue, mesh=mesh if mesh.ranks > 1 else None)
            self._lowered[mesh] = (run_pipeline(self.module, ctx).module,)
        return self._lowered[mesh]

    def select(self, mesh: Mesh, stage: int, bucket: Bucket) -> Selected:
        """Return one bucket of a stage with a kernel for every node."""
        key = mesh, stage, bucket.name, *sorted(bucket.dims.items())
        if key not in self._selected:
            module = self.lowered(mesh)[stage]
            check_bounds(module, bucket)
            self._selected[key] = select_kernels(module, bucket, self.catalogue, self.target)
        return self._selected[key]

    def plan(self, mesh: Mesh, stage: int, buckets: Sequence[Bucket]) -> StagePlans:
        """Return the checked plans of all buckets of a stage.

        Raises:
            PlanError: A symbol has no bound or a bucket is outside it, or a plan breaks a rule.
            CodegenError: No kernel implements a node.
        """
        selections = tuple(self.select(mesh, stage, bucket) for bucket in buckets)
        table = weight_table(selections, packed_nbytes)
        plans = tuple(build_plan(schedule(s), table, _symbol) for s in selections)
        return StagePlans(selections, table, plans)

    def plan_more(self, mesh: Mesh, stage: int, bucket: Bucket, weights: WeightTable) -> Plan:
        """Return the checked plan of one more bucket of a stage whose weights are laid out."""
        return build_plan(schedule(self.select(mesh, stage, bucket)), weights, _symbol)


def make_planner(config: TextConfig, target: Target, compute: str) -> Planner:
    """Export a model once for all meshes, or take it from the cache of exported models.

    Raises:
        ExportError: The model uses something that the IR cannot express.
    """
    page_tokens = bucket_sizes(target).page_tokens
    module = exported(config, COMPUTE[compute], page_tokens)
    return Planner(config, target, module, catalogue_of(target))


def check_bounds(module: Module, bucket: Bucket) -> None:
    """Check that every symbol has a bound, and that a bucket keeps to it.

    Raises:
        PlanError: It does not; the message names the symbol.
    """
    where = f"bucket {bucket.name}"
    for dim in module.dims:
        if dim.hi is None:
            hint = "give it a range: no bytes can be planned for it"
            raise PlanError(f"dimension {dim.name} has no upper bound", where, hint)
        size = bucket.dims.get(dim.name)
        if size is None:
            raise PlanError(f"dimension {dim.name} is not bound", where, "bind it in the bucket")
        if not dim.lo <= size <= dim.hi:
            what = f"dimension {dim.name} is {size:,}, the model takes {dim.lo:,}..{dim.hi:,}"
            raise PlanError(what, where, "ask for less")


def _symbol(template: Template, stage: Stage, target: Target) -> str:
    """Name a launch's kernel: nothing is built here, so the costly hash of its source is not."""
    return f"{template.name}.{stage.name}.{target.arch}"
