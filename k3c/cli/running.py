"""Verbs that run an artifact: generate, eval, bench, tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from k3c.cli.app import ArtifactArg, JsonOpt, TextFileOpt, TextOpt, TokensOpt, app

if TYPE_CHECKING:
    from k3c.runtime.request import SamplingOptions


@app.command()
def generate(
    artifact: ArtifactArg,
    prompt: TextOpt = None,
    tokens: TokensOpt = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate per request")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="keep the k likeliest tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this mass")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="drop tokens below this share of the likeliest")
    ] = 0.0,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="seed of the sampling; default: the request's number"),
    ] = None,
    top_logprobs: Annotated[int, typer.Option(help="log probabilities to report per token")] = 0,
    as_json: JsonOpt = False,
) -> None:
    """Continue a prompt; text streams as it is generated."""
    from k3c.generation import GenerateOptions, generate

    sampling: SamplingOptions = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    options = GenerateOptions(prompt, tokens, max_tokens, top_logprobs, as_json, sampling)
    generate(artifact, options)


@app.command("eval")
def eval_(
    artifact: ArtifactArg,
    text: TextFileOpt = None,
    tokens: TokensOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Measure the mean negative log likelihood of a text, in nats per token."""
    from k3c.evaluation import evaluate

    evaluate(artifact, text, tokens, as_json)


@app.command()
def bench(
    artifact: ArtifactArg,
    repeat: Annotated[int, typer.Option(help="measured steps per bucket")] = 10,
    workload: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="W1, W1L, W1S, W2 or W3: steps on synthetic weights, by kind of node"),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Measure start-up phases, and prefill and decode rates by bucket; or a standard workload."""
    if workload is not None:
        from k3c.workloads import bench_workload

        bench_workload(artifact, workload, repeat, as_json)
        return
    from k3c.bench import bench_artifact

    bench_artifact(artifact, repeat, as_json)


@app.command()
def tune(
    artifact: ArtifactArg,
    output: Annotated[Path, typer.Option("-o", "--output", help="table to write or to extend")],
    context: Annotated[int, typer.Option(help="tokens of a request before a decode step")] = 8192,
) -> None:
    """Measure the candidates of an artifact on this machine's GPU; writes codegen/tuning/*.json."""
    from k3c.files import require_folder
    from k3c.runtime.measuring.tuning import tune as measure

    require_folder(output)
    count = measure(artifact, output, context, lambda line: typer.echo(line, err=True))
    typer.echo(f"{output}: {count} nodes measured")
