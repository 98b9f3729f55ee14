"""Predictions of the cost model against figures that it has not seen: public ones and our own.

`python perf/predict.py [OUT.json]` prints a table and writes all of it as JSON. Public figures and
the reasons of those left out are in `public_figures.toml`; our own steps in the planner's tables.
No figure is predicted with a constant of its own source: `_check` refuses.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3c.planner.efficiency import Efficiency, used_steps
from k3c.planner.estimate import KindEstimate, launch, total
from k3c.planner.measured import CURRENT, Step, measured_steps
from k3c.planner.peers import PeerStep, peer_part, peer_step, profile, unfused_tail
from k3c.planner.public import lookup
from k3c.planner.serving import Wave, serve
from k3c.targets.collectives import choose
from k3c.targets.target import load_target
from k3c.targets.topology import load_topology

FIGURES = Path(__file__).parent / "public_figures.toml"
MEDIAN, WORST = 0.15, 0.40  # what the predictions are held to
# Which of its blogs a figure of vLLM's is from is not always known: they count as one source.
BLOG = "vllm blog"


@dataclass(frozen=True)
class Prediction:
    """A figure beside its prediction, in the figure's unit.

    Attributes:
        what: The figure.
        source: Who published or measured it.
        kind: `public` or `ours`.
        unit: ms or us.
        value: The figure.
        us: The prediction.
        low: Low end of its error bar.
        high: High end of its error bar.
        constants: Sources of the measurements that went in.
    """

    what: str
    source: str
    kind: str
    unit: str
    value: float
    us: float
    low: float
    high: float
    constants: tuple[str, ...]

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive: too slow."""
        return self.us / self.value - 1


def predictions() -> list[Prediction]:
    """Return all of them: public figures first."""
    return [*public_predictions(), *map(own_prediction, own_steps())]


def left_out() -> list[tuple[str, str]]:
    """Return the public figures that are not predicted, and why."""
    return [(f["what"], f["left_out"]) for f in _figures() if "left_out" in f]


def public_predictions() -> list[Prediction]:
    """Return the predictions of the public figures whose configuration is named."""
    found = [_public(figure) for figure in _figures() if "predict" in figure]
    for one in found:
        _check(one)
    return found


def own_steps() -> list[Step]:
    """Return our measured steps: of each workload and bucket the last measurement."""
    last = {step.name: step for step in measured_steps("h200")}
    return [step for name, step in sorted(last.items()) if step is last[name]]


def own_prediction(step: Step, workload: bool = False) -> Prediction:
    """Return the prediction of one of our steps by a model that has not seen it.

    Args:
        step: The step.
        workload: Leave all steps of its workload out, not this bucket alone.
    """
    name = step.name.split()[0]
    unseen = frozenset(
        s.name
        for s in measured_steps("h200")
        if s.name == step.name or (workload and s.name.split()[0] == name)
    )
    efficiency = Efficiency(load_target("h200"), unseen)
    found = total([launch(efficiency, sample.work) for sample in step.samples])
    constants = used_steps(unseen)
    assert step.name not in constants, f"{step.name} is predicted from itself"
    version = "" if step.experts == CURRENT else ", first expert kernels"
    return Prediction(
        f"{step.name}{version}", f"perf/results: {step.name}", "ours", "ms", step.us / 1e3,
        found.us / 1e3, found.low_us / 1e3, found.high_us / 1e3, constants,
    )  # fmt: skip


def summary(found: Sequence[Prediction]) -> dict[str, float | int]:
    """Return the median and the worst error, and how many figures lie within their bars."""
    errors = [abs(one.error) for one in found]
    return {
        "figures": len(found),
        "median": round(statistics.median(errors), 4),
        "worst": round(max(errors), 4),
        "within_bar": sum(one.low <= one.value <= one.high for one in found),
    }


def _figures() -> list[dict[str, Any]]:
    return tomllib.loads(FIGURES.read_text("utf-8"))["figure"]


Times = tuple[float, float, float, tuple[str, ...]]


def _public(figure: Mapping[str, Any]) -> Prediction:
    how: Mapping[str, Callable[[Mapping[str, Any]], Times]] = {
        "decode": _serving,
        "ttft": _serving,
        "kernel": _kernel,
        "part": _part,
        "tail": _tail,
        "collective": _collective,
    }
    # A blog's kernel times may not go into the predictions of its own figures.
    blog = figure["source"].startswith(BLOG)
    setup = {**figure["predict"], "left_out": frozenset({BLOG}) if blog else frozenset[str]()}
    us, low, high, constants = how[setup["how"]](setup)
    scale = 1e3 if figure["unit"] == "ms" else 1.0
    return Prediction(
        figure["what"], figure["source"], "public", figure["unit"], figure["value"],
        us / scale, low / scale, high / scale, constants,
    )  # fmt: skip


def _serving(setup: Mapping[str, Any]) -> Times:
    topology, peer = load_topology(setup["topology"]), profile(setup["peer"], setup["left_out"])
    tokens, answer = setup["input"], setup["output"]
    middle = tokens + answer // 2
    decode = peer_step(
        peer, PeerStep("decode", setup["concurrency"], middle, setup["tp"]), topology
    )
    prompt = peer_step(peer, PeerStep("prefill", tokens, tokens, setup["tp"]), topology)
    served = serve(decode, [prompt], Wave(setup["concurrency"], answer, setup["tp"]))
    wanted = served.ttft_us if setup["how"] == "ttft" else served.tpot_us
    kinds = prompt.kinds if setup["how"] == "ttft" else decode.kinds
    if setup["how"] == "decode" and setup["concurrency"] > 1:
        kinds += prompt.kinds
    return wanted.value, wanted.low, wanted.high, _sources(kinds, peer.source)


def _part(setup: Mapping[str, Any]) -> Times:
    topology, peer = load_topology(setup["topology"]), profile(setup["peer"])
    step = PeerStep("decode", setup["tokens"], 8192, setup["tp"])
    kinds = [
        kind
        for kind in peer_part(peer, "kda", step, topology)
        if kind.kind in ("gemm", "kda_decode")
    ]
    found = total(kinds)
    return found.us, found.low_us, found.high_us, _sources(kinds, peer.source)


def _tail(setup: Mapping[str, Any]) -> Times:
    topology = load_topology(setup["topology"])
    step = PeerStep("decode", setup["tokens"], 8192, setup["tp"], setup["tp"])
    kinds = unfused_tail(step, topology)
    found = total(kinds)
    return found.us, found.low_us, found.high_us, _sources(kinds)


def _kernel(setup: Mapping[str, Any]) -> Times:
    us, spread, source = lookup(
        setup["device"], setup["family"], setup["implementation"], {"heads": setup["heads"]},
        setup["tokens"],
    )  # fmt: skip
    return us, us / (1 + spread), us * (1 + spread), (source,)


def _collective(setup: Mapping[str, Any]) -> Times:
    topology = load_topology(setup["topology"])
    taken = choose("all_reduce", setup["nbytes"], range(setup["tp"]), topology)
    return taken.us, taken.low_us, taken.high_us, (taken.source,)


def _sources(kinds: Sequence[KindEstimate], *more: str) -> tuple[str, ...]:
    parts = (part for kind in kinds for part in kind.detail.split("; "))
    return tuple(sorted({*parts, *more}))


def _check(one: Prediction) -> None:
    """Refuse a prediction that used a measurement of the figure's own source."""
    source = BLOG if one.source.startswith(BLOG) else one.source
    used = [constant for constant in one.constants if source in constant]
    # A pull request may say which kernels ran; its times may not be used.
    assert not [u for u in used if u != one.source and "pull requests" not in u], (one.what, used)


def _report(found: Sequence[Prediction]) -> None:
    for one in found:
        bar = f"{one.low:.2f} to {one.high:.2f}"
        print(f"{one.what[:86]:<87}{one.value:>9.2f}{one.us:>9.2f}  {bar:<19}{one.error:>+7.1%}")
    for name in ("public", "ours"):
        print(name, summary([one for one in found if one.kind == name]))
    print("all", summary(found))
    whole = [own_prediction(step, workload=True) for step in own_steps()]
    print("ours, whole workload left out", summary(whole))
    print(f"{len(left_out())} public figures left out, each with its reason in {FIGURES.name}")


def main(out: Path | None) -> None:
    """Print the table, and write it."""
    found = predictions()
    _report(found)
    if out is None:
        return
    whole = {p.what: p for p in (own_prediction(s, workload=True) for s in own_steps())}
    rows = [
        {
            **asdict(one),
            "error": round(one.error, 4),
            "error_without_workload": round(whole[one.what].error, 4)
            if one.what in whole
            else None,
        }
        for one in found
    ]
    data = {
        "what": "predictions of the cost model, none with a constant of its own source",
        "goal": {"median": MEDIAN, "worst": WORST},
        "summary": {
            "all": summary(found),
            "public": summary([p for p in found if p.kind == "public"]),
            "ours": summary([p for p in found if p.kind == "ours"]),
            "ours, whole workload left out": summary(list(whole.values())),
        },
        "predictions": rows,
        "left_out": [{"what": what, "why": why} for what, why in left_out()],
    }
    text = json.dumps(data, indent=1, sort_keys=True)
    out.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
