"""Verbs that plan before anything is compiled or rented: plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from k3c.cli.app import Compute, ComputeOpt, JsonOpt, app
from k3c.errors import ConfigError

MIB = 2**20
ModelOpt = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(help="Hugging Face model directory, or a config.json"),
]
DraftOpt = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="the speculative draft: its folder, or its config.json"),
]
GraphOpt = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--graph-budget-mib", help="memory that launch graphs may take"),
]
LengthOpt = Annotated[Optional[int], typer.Option(help="tokens of a prompt")]  # noqa: UP045
AnswerOpt = Annotated[Optional[int], typer.Option(help="tokens generated")]  # noqa: UP045
CompareOpt = Annotated[
    Optional[tuple[str, str]],  # noqa: UP045
    typer.Option(help="two of TARGET[@MESH][+option=value] or files of --json, side by side"),
]
ShareOpt = Annotated[str, typer.Option(help="auto, replicated or sharded")]


@app.command()
def plan(
    model: ModelOpt = None,
    target: Annotated[str, typer.Option(help="topology or device, or a topology's file")] = "",
    mesh: Annotated[str, typer.Option(help="e.g. TEP16 or tp=16,ep=16; default: search")] = "",
    goal: Annotated[str, typer.Option(help="latency, throughput or fit")] = "latency",
    compute: ComputeOpt = Compute.bfloat16,
    max_num_seqs: Annotated[int, typer.Option(help="requests of a data-parallel rank")] = 8,
    max_model_len: Annotated[int, typer.Option(help="tokens of a request, prompt included")] = 8192,
    max_num_batched_tokens: Annotated[int, typer.Option(help="rows of a prefill step")] = 8192,
    input_len: LengthOpt = None,
    output_len: AnswerOpt = None,
    snapshots: Annotated[int, typer.Option(help="kept states beside running requests")] = 0,
    snapshot_every: Annotated[int, typer.Option(help="tokens between kept states; 0: none")] = 0,
    draft: DraftOpt = None,
    graph_budget: GraphOpt = None,
    spare_slots: Annotated[int, typer.Option(help="more physical experts a rank")] = 0,
    latent: ShareOpt = "auto",
    shared: ShareOpt = "auto",
    vocabulary: ShareOpt = "auto",
    as_json: JsonOpt = False,
    compare: CompareOpt = None,
) -> None:
    """Say whether a model fits a machine, how, and how fast it will be; no weight is read."""
    from k3c.planner.problem import PlanOptions
    from k3c.planner.verb import run_plan

    if model is None and compare is None:
        raise ConfigError("no model named", "k3c plan", "k3c plan MODEL --target NAME")
    options = PlanOptions(
        target, mesh, goal, compute.value, max_num_seqs, max_model_len, max_num_batched_tokens,
        -1 if input_len is None else input_len, -1 if output_len is None else output_len,
        snapshots, snapshot_every, draft, -1 if graph_budget is None else graph_budget * MIB,
        spare_slots, latent, shared, vocabulary,
    )  # fmt: skip
    raise typer.Exit(run_plan(model, options, as_json, compare))
