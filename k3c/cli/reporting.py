"""Verbs that say what is there: inspect, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from k3c.cli.app import ArtifactArg, JsonOpt, app


@app.command()
def inspect(
    artifact: ArtifactArg,
    as_json: JsonOpt = False,
    passes: Annotated[bool, typer.Option("--passes", help="matches and refusals per pass")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="every byte of every space")] = False,
) -> None:
    """Print what an artifact holds."""
    from k3c.inspection import inspect_artifact

    inspect_artifact(artifact, as_json, passes, memory)


@app.command()
def doctor(as_json: JsonOpt = False) -> None:
    """Print versions, CPU features and devices; say what is missing and how to get it."""
    from k3c.doctor import run_doctor

    run_doctor(as_json)


@app.command()
def report(
    artifact: ArtifactArg,
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write")],
    topology: Annotated[str, typer.Option(help="draw this topology: a name or a file")] = "",
    placement: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="draw where experts are: a file of k3c place"),
    ] = None,
    load: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="with --placement: tokens per expert and layer"),
    ] = None,
) -> None:
    """Write what an artifact is as one HTML file: memory, steps, passes, kernels."""
    from k3c.report.extras import placement_facts, topology_facts
    from k3c.report.facts import artifact_facts
    from k3c.report.page import write_report

    facts = artifact_facts(artifact)
    if topology:
        facts["topology"] = topology_facts(topology)
    if placement is not None:
        facts["placement"] = placement_facts(placement, load)
    nbytes = write_report(output, facts)
    typer.echo(f"{output}: {nbytes:,} bytes")
