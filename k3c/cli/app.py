"""The command line's application, and the options that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

from k3c import __version__

app = typer.Typer(
    name="k3c",
    help="Compile a Kimi K3 checkpoint ahead of time and run the artifact.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Compute(StrEnum):
    """Activation type of an artifact."""

    bfloat16 = "bfloat16"
    float32 = "float32"


ModelArg = Annotated[Path, typer.Argument(help="Hugging Face model directory, or a config.json")]
ArtifactArg = Annotated[Path, typer.Argument(help="artifact directory, made by k3c compile")]
ComputeOpt = Annotated[Compute, typer.Option(help="activation type")]
JsonOpt = Annotated[bool, typer.Option("--json", help="print JSON")]
# typer reads annotations at run time and does not know `X | None` in every place it is allowed.
TextOpt = Annotated[Optional[str], typer.Option("--prompt", help="text to continue")]  # noqa: UP045
BucketsOpt = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--buckets", help="compile these only, e.g. decode.b1,prefill.t2048; default: all"
    ),
]
CandidatesOpt = Annotated[bool, typer.Option("--candidates", help="make an artifact for k3c tune")]
MeshOpt = Annotated[str, typer.Option(help="ranks that share the model, e.g. tp=16,ep=16")]
RankOpt = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--rank", help="pack this one's weights at once; the others by k3c pack"),
]
LatentOpt = Annotated[str, typer.Option(help="latent projections: replicated or sharded")]
SharedOpt = Annotated[str, typer.Option(help="shared experts: replicated or sharded")]
VocabularyOpt = Annotated[str, typer.Option(help="embedding and head: replicated or sharded")]
PlacementOpt = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="which experts every rank holds: a file of k3c place"),
]
TextFileOpt = Annotated[Optional[Path], typer.Option("--text", help="UTF-8 text file")]  # noqa: UP045
TokensOpt = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--tokens", help="JSON file: a list of lists of token ids, run as one batch"),
]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"k3c {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option(help="show a traceback on errors")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Compile a Kimi K3 checkpoint ahead of time and run the artifact."""
