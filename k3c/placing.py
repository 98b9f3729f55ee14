"""`k3c place`: choose which rank holds which routed experts, and say what it costs and brings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer

from k3c.errors import ConfigError
from k3c.files import require_folder, write_text
from k3c.ir.types import MXFP4
from k3c.model.config import TextConfig, load_config
from k3c.placement import statistics, traffic
from k3c.placement.loads import ExpertLoad, check_model, load_from_json
from k3c.placement.pack import published_worst
from k3c.placement.placement import Placement, contiguous, placement_from_json, slots_for
from k3c.placement.rebalance import check_previous, rebalance
from k3c.placement.solve import place
from k3c.placement.state import normalised
from k3c.placement.survive import Recovery, survive
from k3c.targets.topology import load_topology

_MADE_UP = ("zipf", "lognormal")
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


@dataclass(frozen=True)
class PlaceOptions:
    """What the command line asks for.

    Attributes:
        load: A load file, or `zipf:EXPONENT`, `lognormal:SIGMA`: a made-up load.
        target: Topology, whose ranks share the experts; empty: `ranks` says how many.
        ranks: Number of ranks; 0: those of the topology.
        spare: Slots of a rank beyond the fewest that hold all experts.
        previous: Placement that runs now; its experts stay where the load lets them.
        max_moves: Slots that a rebalance may write; None: no limit.
        dead: Ranks of `previous` that are gone.
    """

    load: str
    target: str = ""
    ranks: int = 0
    spare: int = 0
    previous: Path | None = None
    max_moves: int | None = None
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Balance:
    """Rows of the busiest rank over the mean: over all layers, and in the worst layer."""

    mean: float
    worst: float


@dataclass(frozen=True)
class PlaceReport:
    """What was chosen and what it does; see `screen` for the words."""

    experts: int
    ranks: int
    slots_per_rank: int
    replicas: int
    layers: int
    expert_bytes: int
    now: Balance
    eplb: Balance | None
    placed: Balance
    distinct_now: dict[int, float]
    distinct: dict[int, float]
    islands: int
    between_islands: float
    between_islands_nearest: float
    moves: int
    moved_bytes: int
    lost_experts: int
    hash: str
    previous: bool = field(default=False)

    @property
    def replica_bytes_per_layer(self) -> int:
        """Bytes of a layer's replicas on all ranks."""
        return self.replicas * self.expert_bytes

    @property
    def replica_bytes(self) -> int:
        """Bytes of all replicas of all layers on all ranks."""
        return self.replica_bytes_per_layer * self.layers


def place_experts(model: Path, output: Path, options: PlaceOptions, as_json: bool) -> None:
    """Choose a placement, write it, and print what it does.

    Raises:
        ConfigError: An option is wrong, or the load or the placement is of another model.
        ParseError: A file is damaged.
        PlacementError: The ranks cannot hold the experts.
    """
    require_folder(output)
    config = load_config(model)
    moe = [n for n in range(config.num_hidden_layers) if config.is_moe(n)]
    load = _load(options.load, config, moe)
    check_model(load, config.num_experts, config.num_experts_per_token, moe)
    before = _previous(options, load)
    recovery = survive(before, options.dead) if before and options.dead else None
    if recovery is not None:
        ranks, islands = recovery.placement.num_ranks, ()
    else:
        ranks, islands = _ranks(options, before)
    placed = _place(load, recovery.placement if recovery else before, (ranks, islands), options)
    report = _report(config, load, (before, recovery, placed), islands)
    write_text(output, placed.to_json())
    typer.echo(
        json.dumps(_facts(report), sort_keys=True) if as_json else screen(report), nl=as_json
    )


def _place(
    load: ExpertLoad, before: Placement | None, where: tuple[int, Sequence[int]],
    options: PlaceOptions,
) -> Placement:  # fmt: skip
    ranks, islands = where
    slots = slots_for(load.num_experts, ranks, options.spare)
    if before is None:
        return place(load, ranks, slots, islands)
    if before.num_ranks != ranks or (options.spare and before.slots_per_rank != slots):
        what = f"the placement has {before.num_ranks} ranks of {before.slots_per_rank} slots"
        hint = "leave --previous out to place anew, or name dead ranks with --dead"
        raise ConfigError(f"{what}, expected {ranks} of {slots}", "--previous", hint)
    return rebalance(load, before, options.max_moves)


def _load(text: str, config: TextConfig, layers: Sequence[int]) -> ExpertLoad:
    name, colon, value = text.partition(":")
    if colon and name in _MADE_UP:
        try:
            scale = float(value)
        except ValueError:
            raise ConfigError(f"found {text!r}", "--load", "write it as zipf:1.2") from None
        make = traffic.zipf if name == "zipf" else traffic.lognormal
        return make(layers, config.num_experts, config.num_experts_per_token, scale)
    path = Path(text)
    if not path.is_file():
        hint = f"a file, or a made-up load: {':1.2, '.join(_MADE_UP)}:1.0"
        raise ConfigError(f"no load file {text}", "--load", hint)
    return load_from_json(path.read_text(encoding="utf-8"), str(path))


def _previous(options: PlaceOptions, load: ExpertLoad) -> Placement | None:
    if options.previous is None:
        for name, value in (("--max-moves", options.max_moves), ("--dead", options.dead or None)):
            if value is not None:
                raise ConfigError("nothing to move from", name, "give --previous FILE")
        return None
    if options.max_moves is not None and options.max_moves < 0:
        what = f"found {options.max_moves}, expected a number from 0 on"
        raise ConfigError(what, "--max-moves", "0 moves nothing")
    if not options.previous.is_file():
        raise ConfigError(f"no placement file {options.previous}", "--previous", "see k3c place")
    text = options.previous.read_text(encoding="utf-8")
    before = placement_from_json(text, str(options.previous))
    check_previous(load, before)
    return before


def _ranks(options: PlaceOptions, before: Placement | None) -> tuple[int, Sequence[int]]:
    """Return the number of ranks and the island of each; hosts where all ranks are one island."""
    if not options.target:
        if before and not options.ranks:
            return before.num_ranks, ()
        if options.ranks < 1:
            raise ConfigError("no ranks given", "--ranks", "give --ranks N or --target TOPOLOGY")
        return options.ranks, ()
    topology = load_topology(options.target)
    if options.ranks not in (0, topology.ranks):
        what = f"{options.ranks} ranks, {options.target} has {topology.ranks}"
        raise ConfigError(what, "--ranks", "leave it out, or leave --target out")
    groups = topology.islands()
    groups = groups if len(groups) > 1 else topology.hosts
    island = {rank: at for at, group in enumerate(groups) for rank in group}
    return topology.ranks, tuple(island[rank] for rank in range(topology.ranks))


def _report(
    config: TextConfig, load: ExpertLoad,
    found: tuple[Placement | None, Recovery | None, Placement], islands: Sequence[int],
) -> PlaceReport:  # fmt: skip
    previous, recovery, placed = found
    base = recovery.placement if recovery else previous
    now = base or contiguous(
        load.num_experts, placed.num_ranks, load.layers,
        placed.slots_per_rank - slots_for(load.num_experts, placed.num_ranks),
    )  # fmt: skip
    crossing = statistics.island_traffic(
        placed, load.layers, load.rows, islands or [0] * placed.num_ranks
    )
    steady = traffic.steady(load)
    moved = statistics.moves(base, placed) if base else statistics.Moves(0, 0, 0)
    lost = sum(map(len, recovery.lost.values())) if recovery else 0
    moved_slots = moved.slots + (recovery.copies + lost if recovery else 0)
    size = expert_bytes(config)
    return PlaceReport(
        load.num_experts, placed.num_ranks, placed.slots_per_rank, placed.num_replicas,
        len(load.layers), size, _balance(now, load), _eplb(placed, load) if not base else None,
        _balance(placed, load), statistics.decode_experts(now, steady),
        statistics.decode_experts(placed, steady), len(set(islands)) or 1, crossing.by_number,
        crossing.nearest, moved_slots, moved_slots * size, lost, placed.hash(), base is not None,
    )  # fmt: skip


def expert_bytes(config: TextConfig) -> int:
    """Return the bytes of one routed expert of one layer: gate, up and down in MXFP4."""
    weights = 3 * config.moe_intermediate_size * config.routed_expert_hidden_size
    return int(weights * MXFP4.bits) // 8


def _balance(placed: Placement, load: ExpertLoad) -> Balance:
    found = statistics.max_over_mean(placed, load.layers, load.rows)
    return Balance(float(found.mean()), float(found.max()))


def _eplb(placed: Placement, load: ExpertLoad) -> Balance:
    rows = normalised(load.rows, placed.num_ranks)
    found = published_worst(rows, placed.num_ranks, placed.slots_per_rank)
    return Balance(float(found.mean()), float(found.max()))


def _facts(report: PlaceReport) -> dict[str, object]:
    return {
        **asdict(report),
        "replica_bytes": report.replica_bytes,
        "replica_bytes_per_layer": report.replica_bytes_per_layer,
    }


def screen(report: PlaceReport) -> str:
    """Return the answer on one screen."""
    r = report
    even = r.experts % r.ranks == 0
    chosen = f"{r.experts} / {r.ranks}" + ("" if even else ", rounded up")
    lines = [
        f"{r.experts} experts in each of {r.layers} layers on {r.ranks} ranks: "
        f"{r.slots_per_rank} physical experts a rank ({chosen}"
        f"{_spare(r)}), {r.replicas} replicas a layer",
        "",
        f"{'':42}{'now' if r.previous else 'bands':>9}{'EPLB' if r.eplb else '':>9}{'placed':>9}",
        _row(
            "busiest rank / mean rank, all layers",
            r.now.mean,
            r.eplb and r.eplb.mean,
            r.placed.mean,
        ),
        _row("  in the worst layer", r.now.worst, r.eplb and r.eplb.worst, r.placed.worst),
    ]
    for batch, value in r.distinct.items():
        name = f"experts read by the busiest rank, b = {batch}"
        lines.append(_row(name, r.distinct_now[batch], None, value, digits=1))
    if r.islands > 1:
        lines += [
            "",
            f"rows between {r.islands} islands or hosts: {r.between_islands:.1%}; if each took the "
            f"nearest replica: {r.between_islands_nearest:.1%}",
        ]
    lines += [
        "",
        f"replicas: {r.replicas} x {_size(r.expert_bytes)} = "
        f"{_size(r.replica_bytes_per_layer)} a layer, x {r.layers} layers = "
        f"{_size(r.replica_bytes)} on {r.ranks} ranks, {_size(r.replica_bytes / r.ranks)} each",
    ]
    if r.previous:
        lines.append(f"moves: {r.moves} physical experts, {_size(r.moved_bytes)} of weights")
    if r.lost_experts:
        lines.append(f"lost: {r.lost_experts} experts have no living replica and are read again")
    return "\n".join([*lines, f"placement: sha256 {r.hash}", ""])


def _size(nbytes: float) -> str:
    unit = next(u for u in ("GB", "MB", "kB") if nbytes >= _UNITS[u] or u == "kB")
    return f"{nbytes / _UNITS[unit]:.2f} {unit}"


def _spare(report: PlaceReport) -> str:
    spare = report.slots_per_rank - -(-report.experts // report.ranks)
    return f", and {spare} spare" if spare else ""


def _row(name: str, now: float, eplb: float | None, placed: float, digits: int = 4) -> str:
    middle = "" if eplb is None else f"{eplb:.{digits}f}"
    return f"{name:42}{now:>9.{digits}f}{middle:>9}{placed:>9.{digits}f}"
