"""Verbs of topologies: k3c topology list, show, schema, detect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from k3c.cli.app import JsonOpt, app

topology = typer.Typer(
    help="What connects devices: list and show topologies, detect this machine's.",
    no_args_is_help=True,
)
app.add_typer(topology, name="topology")

NameArg = Annotated[str, typer.Argument(help="a name of k3c topology list, or your own .toml")]


@topology.command("list")
def list_(as_json: JsonOpt = False) -> None:
    """List what --target takes: topologies and single devices."""
    from k3c.topology_report import list_topologies

    list_topologies(as_json)


@topology.command()
def show(name: NameArg, as_json: JsonOpt = False) -> None:
    """Print hosts, links, islands, the weakest cut and warnings."""
    from k3c.topology_report import show_topology

    show_topology(name, as_json)


@topology.command()
def schema() -> None:
    """Print the JSON schema of a topology's file."""
    from k3c.targets.topology_file import schema_text

    typer.echo(schema_text(), nl=False)


@topology.command()
def detect(
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", help="file to write; default: standard output"),
    ] = None,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--from", help="recorded outputs: topo.txt, gpus.txt, nvlink.txt, nics.txt"),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="machines like this one, joined")] = 1,
) -> None:
    """Write the topology of this machine as a toml file to edit and to give to --target."""
    from k3c.files import require_folder, write_text
    from k3c.targets.detect import detect as detect_machine

    if output is not None:
        require_folder(output)
    text = detect_machine(folder, hosts)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)


@topology.command()
def collectives(
    name: NameArg,
    ranks: Annotated[int, typer.Option(min=0, help="the first N of its ranks; 0: all")] = 0,
    as_json: JsonOpt = False,
) -> None:
    """Print how each collective would be done there, by size, and how long it takes."""
    from k3c.topology_report import show_collectives

    show_collectives(name, ranks, as_json)
