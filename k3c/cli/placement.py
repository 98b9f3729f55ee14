"""The verb of expert placement: k3c place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from k3c.cli.app import JsonOpt, ModelArg, app
from k3c.errors import ConfigError


@app.command()
def place(
    model: ModelArg,
    load: Annotated[str, typer.Option(help="load file, or zipf:EXPONENT, lognormal:SIGMA")],
    output: Annotated[Path, typer.Option("-o", "--output", help="placement file to write")],
    target: Annotated[str, typer.Option(help="topology whose ranks share the experts")] = "",
    ranks: Annotated[int, typer.Option(help="number of ranks, without a topology")] = 0,
    spare: Annotated[int, typer.Option(help="slots a rank beyond the fewest")] = 0,
    previous: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="placement that runs now: move as little as it takes"),
    ] = None,
    max_moves: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="physical experts to move at most; default: no limit"),
    ] = None,
    dead: Annotated[str, typer.Option(help="ranks of the previous placement that are gone")] = "",
    as_json: JsonOpt = False,
) -> None:
    """Choose which rank holds which routed experts, for the load they get."""
    from k3c.placing import PlaceOptions, place_experts

    try:
        gone = tuple(int(word) for word in dead.split(",")) if dead else ()
    except ValueError:
        raise ConfigError(f"found {dead!r}", "--dead", "write ranks as 3,7") from None
    options = PlaceOptions(load, target, ranks, spare, previous, max_moves, gone)
    place_experts(model, output, options, as_json)
