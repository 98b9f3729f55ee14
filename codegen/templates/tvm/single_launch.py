"""What all CPU templates share: one node is one launch, of a kernel that loops over the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from k3c.ir.graph import Node
from k3c.targets.catalogue import Constant, Stage, Template
from k3c.targets.target import Target


class TvmTemplate(Template, Protocol):
    """A template whose only kernel TVM compiles."""

    def constants(self, node: Node, target: Target) -> Mapping[str, Constant]:
        """Return the compile-time constants; two nodes with equal ones share a kernel."""
        ...

    def build(self, constants: Mapping[str, Constant], target: Target) -> Any:
        """Return the kernel as a TIR function."""
        ...


class SingleLaunch:
    """Makes `stages` of a template's constants; there is one configuration, nothing to tune."""

    def configs(self, node: Node, target: Target) -> tuple[Mapping[str, int], ...]:
        """Return the only configuration."""
        return ({},)

    def config(self, node: Node, target: Target) -> Mapping[str, int]:
        """Return the only configuration."""
        return {}

    def tuning_key(self, node: Node) -> str:
        """Return the op: there is nothing to look up."""
        return node.op

    def stages(self: TvmTemplate, node: Node, target: Target) -> tuple[Stage, ...]:
        """Return the only launch."""
        return (Stage("", self.constants(node, target)),)
