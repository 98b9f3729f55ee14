"""The command line: verbs only. Each verb imports what it needs and calls one function.

Exit codes: 0 ok, 2 wrong request, 3 does not fit, 4 damaged or foreign data, 5 environment,
1 our own fault.
"""

from __future__ import annotations

import errno
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from k3c import __version__
from k3c.errors import ConfigError, DeviceFault, K3CError

if TYPE_CHECKING:
    from k3c.runtime.request import SamplingOptions

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
RankOpt = Annotated[int, typer.Option(help="which of them to compile for")]
LatentOpt = Annotated[str, typer.Option(help="latent projections: replicated or sharded")]
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
    rank: RankOpt = 0,
    latent: LatentOpt = "replicated",
) -> None:
    """Compile a checkpoint, or a config.json without weights, into an artifact for one target."""
    from k3c.compile import CompileOptions, compile_model
    from k3c.console import Console

    options = CompileOptions(
        target,
        compute.value,
        max_num_seqs,
        max_model_len,
        max_num_batched_tokens,
        candidates,
        tuple(buckets.split(",")) if buckets else (),
        mesh,
        rank,
        latent,
    )
    with Console() as console:
        compile_model(model, output, options, console)


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


@app.command()
def doctor(as_json: JsonOpt = False) -> None:
    """Print versions, CPU features and devices; say what is missing and how to get it."""
    from k3c.doctor import run_doctor

    run_doctor(as_json)


def _as_k3c_error(exc: BaseException) -> K3CError | None:
    """Return what the user should read for an exception, or None when it is our own fault."""
    if isinstance(exc, K3CError):
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DeviceFault("the disk is full", str(exc.filename or ""), "free space and try again")
    if isinstance(
        exc, PermissionError | IsADirectoryError | NotADirectoryError | FileNotFoundError
    ):
        return ConfigError(exc.strerror or "cannot open", str(exc.filename or ""), "check the path")
    if isinstance(exc, ModuleNotFoundError) and exc.name in {
        "torch",
        "tvm",
        "networkx",
        "safetensors",
    }:
        hint = "pip install 'k3c-compiler[cpu]'; k3c doctor lists what is missing"
        return DeviceFault(f"this verb needs {exc.name}, which is not installed", "", hint)
    return None


def main() -> None:
    """Run the command line; every error ends as one line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`| head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as exc:
        if "--debug" in sys.argv:
            raise
        error = _as_k3c_error(exc)
        if error is None:
            print(f"error[{type(exc).__name__}]: {exc}; rerun with --debug", file=sys.stderr)
            sys.exit(1)
        print(f"error[{type(error).__name__}]: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
