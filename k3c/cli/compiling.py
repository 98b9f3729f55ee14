"""Verbs that make something from a checkpoint: export, compile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from k3c.cli.app import (
    ArtifactArg,
    BucketsOpt,
    CandidatesOpt,
    Compute,
    ComputeOpt,
    LatentOpt,
    MeshOpt,
    ModelArg,
    PlacementOpt,
    RankOpt,
    SharedOpt,
    VocabularyOpt,
    app,
)


@app.command()
def export(
    model: ModelArg,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", help="file to write; default: standard output"),
    ] = None,
    compute: ComputeOpt = Compute.bfloat16,
) -> None:
    """Print the model as IR text; a bare config.json is enough."""
    from k3c.compile import export_text
    from k3c.files import require_folder, write_text

    if output is not None:
        require_folder(output)
    text = export_text(model, compute.value)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)


@app.command("compile")
def compile_(
    model: ModelArg,
    output: Annotated[Path, typer.Option("-o", "--output", help="artifact directory to make")],
    target: Annotated[str, typer.Option(help="device to compile for")],
    compute: ComputeOpt = Compute.bfloat16,
    max_num_seqs: Annotated[int, typer.Option(help="requests held at the same time")] = 8,
    max_model_len: Annotated[
        int, typer.Option(help="tokens of one request, prompt included")
    ] = 8192,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="rows of the largest prefill step at most")
    ] = 8192,
    buckets: BucketsOpt = None,
    candidates: CandidatesOpt = False,
    mesh: MeshOpt = "",
    rank: RankOpt = None,
    latent: LatentOpt = "replicated",
    shared: SharedOpt = "sharded",
    vocabulary: VocabularyOpt = "sharded",
    placement: PlacementOpt = None,
    explain: Annotated[bool, typer.Option(help="say what is built again, and why")] = False,
) -> None:
    """Compile a checkpoint, or a config.json without weights, into an artifact for one target."""
    from k3c.compile import CompileOptions, compile_unless_made
    from k3c.console import Console

    options = CompileOptions(
        target, compute.value, max_num_seqs, max_model_len, max_num_batched_tokens, candidates,
        tuple(buckets.split(",")) if buckets else (), mesh, rank, latent, shared, vocabulary,
        placement, explain,
    )  # fmt: skip
    with Console() as console:
        compile_unless_made(model, output, options, console)


@app.command()
def pack(
    model: ModelArg,
    artifact: ArtifactArg,
    rank: Annotated[int, typer.Option(help="whose weights to pack")],
) -> None:
    """Add one rank's weights to an artifact of several; a run that was stopped is resumed."""
    from k3c.console import Console
    from k3c.pack import pack as pack_rank

    with Console() as console:
        pack_rank(model, artifact, rank, console)
