"""`k3c compile --candidates`: every bucket once for each candidate configuration of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3c.artifact import Bucket, Candidate, CandidateList
from k3c.errors import ConfigError
from k3c.ir.graph import Module
from k3c.kernels import catalogue_of
from k3c.passes.build_plan import label_of
from k3c.passes.select_kernels import Selected, node_key
from k3c.passes.select_kernels import run as select_kernels
from k3c.targets.target import Target


def select_variants(module: Module, buckets: Sequence[Bucket], target: Target) -> list[Selected]:
    """Select the kernels of every bucket as often as its most varied node has candidates.

    Raises:
        CodegenError: No kernel implements a node.
        ConfigError: The target's kernels have no candidates.
    """
    if target.kind == "cpu":
        raise ConfigError(f"kernels of {target.name} have no candidates", "--candidates")
    catalogue = catalogue_of(target)
    found: list[Selected] = []
    for bucket in buckets:
        first = select_kernels(module, bucket, catalogue, target)
        for variant in range(_most_candidates(first)):
            named = replace(bucket, name=f"{bucket.name}.v{variant}")
            one = replace(target, variant=variant)
            found.append(select_kernels(module, named, catalogue, one))
    return found


def candidate_list(selections: Sequence[Selected]) -> CandidateList:
    """Return what each variant uses for each node."""
    return CandidateList(
        tuple(
            Candidate(
                bucket=selected.bucket.name,
                graph=graph.name,
                label=label_of(node),
                template=template.name,
                key=template.tuning_key(node),
                config=dict(template.config(node, selected.target)),
            )
            for selected in selections
            for graph in selected.module.graphs
            for node in graph.nodes
            if node_key(graph, node) in selected.choices
            for template in (selected.template(graph, node),)
        )
    )


def _most_candidates(selected: Selected) -> int:
    return max(
        len(selected.template(graph, node).configs(node, selected.target))
        for graph in selected.module.graphs
        for node in graph.nodes
        if node_key(graph, node) in selected.choices
    )
