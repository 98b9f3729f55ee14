"""Expert placement against EPLB: balance, held-out batches, decode, time and moves.

    PYTHONPATH=. python perf/placement.py perf/results/2026-12-01-placement.json

Both plan from the same counted rows; ours also gets the steps and the pairs of experts where the
traffic has topics. Batches to judge by are drawn with another seed. See perf/README.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from k3c.placement import statistics as stats
from k3c.placement import traffic as made_up
from k3c.placement.loads import ExpertLoad
from k3c.placement.placement import contiguous, slots_for
from k3c.placement.rebalance import rebalance
from k3c.placement.solve import place
from k3c.placement.statistics import Routes
from perf import eplb

EXPERTS, TOP_K = 896, 16
Make = Callable[[Sequence[int]], ExpertLoad]
WHOLE = range(1, 93)
JUDGED = range(1, 3)  # layers of the drawn batches
MESHES = [(ranks, spare) for ranks in (16, 64, 72) for spare in (0, 1)]
LOADS: dict[str, Make] = {
    "balanced, 4096-token sample": lambda n: made_up.balanced(n, EXPERTS, TOP_K, 4096),
    "lognormal 0.5": lambda n: made_up.lognormal(n, EXPERTS, TOP_K, 0.5),
    "lognormal 1.0": lambda n: made_up.lognormal(n, EXPERTS, TOP_K, 1.0),
    "zipf 1.01 capped": lambda n: made_up.zipf(n, EXPERTS, TOP_K, 1.01),
}
TRAFFIC = {"steady": None, "16 topics, 0.7": (16, 0.7), "64 topics, 2.0": (64, 2.0)}
BATCHES, DECODES = 8, 48
REQUESTS, TOKENS_EACH = 32, 128  # a prefill step of 4096 tokens


def slots_of(ranks: int, spare: int) -> int:
    return slots_for(EXPERTS, ranks, spare)


def eplb_layers(load: ExpertLoad, ranks: int, slots: int) -> list[list[list[int]]]:
    return [eplb.eplb(rows.tolist(), ranks, slots) for rows in load.rows]


def planned(load: ExpertLoad, ranks: int, spare: int) -> dict[str, object]:
    """Balance on the load that was planned from, and the time it took."""
    slots = slots_of(ranks, spare)
    wall, cpu = time.perf_counter(), time.process_time()
    ours = place(load, ranks, slots)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    theirs = eplb_layers(load, ranks, slots)
    theirs_worst = np.array([
        eplb.max_over_mean(rows, placed)
        for rows, placed in zip(load.rows.tolist(), theirs, strict=True)
    ])  # fmt: skip
    worst = stats.max_over_mean(ours, load.layers, load.rows)
    bands = stats.max_over_mean(
        contiguous(EXPERTS, ranks, load.layers, spare), load.layers, load.rows
    )
    return {
        "bands": summary(bands), "eplb": summary(theirs_worst), "ours": summary(worst),
        "layers_where_eplb_is_better": int((theirs_worst < worst * (1 - 1e-9)).sum()),
        "layers_with_twins_of_eplb": sum(map(eplb.has_twins, theirs)),
        "ours_wall_s": round(wall, 2), "ours_cpu_s": round(cpu, 2),
    }  # fmt: skip


def summary(values: np.ndarray) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 5), "worst": round(float(values.max()), 5)}


def routes_of_lists(placed: Sequence[Sequence[int]]) -> Routes:
    """Routes of a layer of EPLB: twins are two replicas that share a rank."""
    homes: list[list[int]] = [[] for _ in range(EXPERTS)]
    for rank, experts in enumerate(placed):
        for expert in experts:
            homes[expert].append(rank)
    # The order of `Placement.homes`, so that both use replicas alike.
    homes = [sorted(r, key=lambda rank, e=e: (rank - e) % len(placed)) for e, r in enumerate(homes)]
    count = np.array([len(ranks) for ranks in homes])
    home = np.array([[r[n % len(r)] for n in range(int(count.max()))] for r in homes])
    return Routes(len(placed), home, count)


def judged(load: ExpertLoad, batches: list, decodes: list) -> dict[str, object]:
    """Excess of held-out batches and experts read in decode, for every mesh."""
    found: dict[str, object] = {}
    for ranks, spare in MESHES:
        slots = slots_of(ranks, spare)
        ours = place(load, ranks, slots)
        each = {"eplb": [routes_of_lists(p) for p in eplb_layers(load, ranks, slots)],
                "ours": [stats.routes(ours, layer) for layer in load.layers]}  # fmt: skip
        line: dict[str, object] = {}
        for name, by_layer in each.items():
            line[name] = {
                "excess": round(excess(by_layer, batches), 5),
                **{f"distinct_b{b}": round(distinct(by_layer, decodes, b), 4) for b in (1, 8, 64)},
            }
        line["chance"] = round(chance(ranks), 5)
        found[f"{ranks} ranks, {spare} spare"] = line
    return found


def excess(by_layer: list[Routes], batches: list) -> float:
    """Mean over layers and batches of max/mean - 1 rows of a rank."""
    values = [
        where.tokens(batch).max() * where.ranks / batch.size - 1
        for where, drawn in zip(by_layer, batches, strict=True)
        for batch in drawn
    ]
    return float(np.mean(values))


def distinct(by_layer: list[Routes], decodes: list, batch: int) -> float:
    values = [
        where.distinct(drawn[:, :batch]).max(axis=1).mean()
        for where, drawn in zip(by_layer, decodes, strict=True)
    ]
    return float(np.mean(values))


def chance(ranks: int) -> float:
    """The excess of ranks with equal chances for every row: what no placement takes away."""
    rows = REQUESTS * TOKENS_EACH * TOP_K
    drawn = np.random.default_rng(0).multinomial(rows, np.full(ranks, 1 / ranks), size=400)
    return float(drawn.max(axis=1).mean() * ranks / rows - 1)


def held_out(make: Make, topics: tuple[int, float] | None) -> dict[str, object]:
    mean = make(JUDGED)
    if topics is None:
        traffic, load = made_up.steady(mean), mean
    else:
        traffic = made_up.topical(mean, *topics, seed=1)
        load = traffic.observe(128, 16, 32, seed=2)
    rng = np.random.default_rng(3)
    at = range(len(load.layers))
    batches = [[traffic.batch(n, REQUESTS, TOKENS_EACH, rng) for _ in range(BATCHES)] for n in at]
    decodes = [np.stack([traffic.batch(n, 64, 1, rng) for _ in range(DECODES)]) for n in at]
    return judged(load, batches, decodes)


def drifted(load: ExpertLoad, sigma: float) -> ExpertLoad:
    rng = np.random.default_rng(9)
    return replace(load, rows=load.rows * np.exp(sigma * rng.standard_normal(load.rows.shape)))


def moved() -> dict[str, object]:
    """What a drift of 20 % an expert costs in moves on 72 ranks."""
    load = LOADS["lognormal 1.0"](WHOLE)
    new = drifted(load, 0.2)
    before = place(load, 72, 13)
    old, anew = (eplb_layers(part, 72, 13) for part in (load, new))
    sent = sum(
        len(set(b) - set(a))
        for one, two in zip(old, anew, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    theirs = [eplb.max_over_mean(r, p) for r, p in zip(new.rows.tolist(), anew, strict=True)]
    found: dict[str, object] = {
        "before": summary(stats.max_over_mean(before, new.layers, new.rows)),
        "eplb anew": {"moves": sent, **summary(np.array(theirs))},
    }
    for limit in (None, 1840, 920, 92):
        start = time.perf_counter()
        after = rebalance(new, before, limit)
        found[f"limit {limit}"] = {
            "moves": stats.moves(before, after).slots,
            "s": round(time.perf_counter() - start, 2),
            **summary(stats.max_over_mean(after, new.layers, new.rows)),
        }
    return found


def main(output: Path) -> None:
    result: dict[str, object] = {"planning": {}, "held_out": {}, "moves": {}}
    for name, make in LOADS.items():
        load = make(WHOLE)
        lines = {f"{r} ranks, {s} spare": planned(load, r, s) for r, s in MESHES}
        result["planning"][name] = lines
        print(name, json.dumps(lines), flush=True)
    result["moves"] = moved()
    print(json.dumps(result["moves"]), flush=True)
    for name, make in LOADS.items():
        result["held_out"][name] = {}
        for kind, topics in TRAFFIC.items():
            lines = held_out(make, topics)
            result["held_out"][name][kind] = lines
            print(name, kind, json.dumps(lines), flush=True)
    output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
