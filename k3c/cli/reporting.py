"""Verbs that say what is there: inspect, doctor."""

from __future__ import annotations

from typing import Annotated

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
