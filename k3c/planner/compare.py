"""Two answers side by side: two machines, two meshes, two sets of options, or two saved files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from k3c.errors import ConfigError
from k3c.planner.answer import Answer, answer_from_json
from k3c.planner.describe import gib, ms
from k3c.planner.planning import plan_model
from k3c.planner.problem import PlanOptions

LABEL, COLUMN, CHANGE = 24, 30, 12  # columns of a row: 100 with the spaces between
_HINT = "TARGET[@MESH][+option=value], or the file of an earlier --json"
_NUMBERS = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "input_len", "output_len",
            "snapshots", "snapshot_every", "graph_budget_bytes", "spare_slots")  # fmt: skip


def compare(model: Path | None, sides: tuple[str, str], options: PlanOptions) -> tuple[Answer, ...]:
    """Return the answers of two sides.

    Args:
        model: The model; None where both sides are files.
        sides: Each `TARGET[@MESH][+option=value]`, or the file of an earlier `--json`.
        options: What both have where a side says nothing.

    Raises:
        ConfigError: A side cannot be read.
        ArtifactError: A file holds no answer of this version.
    """
    return tuple(_side(model, side, options) for side in sides)


def _side(model: Path | None, side: str, options: PlanOptions) -> Answer:
    if side.endswith(".json"):
        path = Path(side)
        if not path.is_file():
            raise ConfigError("no such file", side, f"--compare takes {_HINT}")
        return answer_from_json(path.read_text(encoding="utf-8"), side)
    if model is None:
        raise ConfigError(f"no model to plan {side!r} for", "--compare", "name the model first")
    return plan_model(model, parse_side(side, options))


def parse_side(side: str, options: PlanOptions) -> PlanOptions:
    """Return the options of `TARGET[@MESH][+option=value...]`.

    Args:
        side: The text.
        options: What it starts from.

    Raises:
        ConfigError: An option is unknown or its value is no number.
    """
    place, *changes = side.split("+")
    target, _, mesh = place.partition("@")
    found = replace(options, target=target or options.target, mesh=mesh or options.mesh)
    known = {field.name for field in fields(PlanOptions)} - {"target", "mesh"}
    for change in changes:
        name, _, value = change.partition("=")
        key = name.strip().lstrip("-").replace("-", "_")
        if key not in known or not value:
            allowed = ", ".join(sorted(k.replace("_", "-") for k in known))
            raise ConfigError(f"found {change!r}", f"--compare {side}", f"known: {allowed}")
        found = replace(found, **{key: _value(key, value, side)})
    return found


def _value(key: str, value: str, side: str) -> str | int | Path:
    if key == "draft":
        return Path(value)
    if key not in _NUMBERS:
        return value
    if not value.lstrip("-").isdecimal():
        raise ConfigError(f"{key} is {value!r}, expected a number", f"--compare {side}")
    return int(value)


def comparison_json(answers: tuple[Answer, ...]) -> str:
    """Return both answers as one JSON text."""
    found = {"a": asdict(answers[0]), "b": asdict(answers[1])}
    return json.dumps(found, sort_keys=True, indent=1) + "\n"


def show_comparison(answers: tuple[Answer, ...]) -> None:
    """Print both answers side by side, with what changes from the first to the second."""
    text = Text()
    for label, first, second, change in _rows(*answers):
        text.append(f"{label:<{LABEL}}", style="bold")
        text.append(f" {_cut(first):<{COLUMN}} {_cut(second):<{COLUMN}} ")
        text.append(f"{change:>{CHANGE}}\n", style="dim" if not change else "")
    console = Console(width=LABEL + 2 * COLUMN + CHANGE + 3, highlight=False, soft_wrap=True)
    console.print(text, end="")


def _cut(words: str) -> str:
    return words if len(words) <= COLUMN else words[: COLUMN - 3] + "..."


_Row = tuple[str, str, str, str]


def _rows(a: Answer, b: Answer) -> Iterator[_Row]:
    yield "", a.request.target, b.request.target, "change"
    yield "answer", _verdict(a), _verdict(b), ""
    yield "mesh", a.deployment.name, b.deployment.name, ""
    yield _count("ranks", a.deployment.ranks, b.deployment.ranks)
    yield _count("replicas in the machine", a.deployment.replicas, b.deployment.replicas)
    yield _count("spare ranks", a.deployment.spare_ranks, b.deployment.spare_ranks)
    for name in ("latent", "shared", "vocabulary"):
        yield name, getattr(a.deployment, name), getattr(b.deployment, name), ""
    yield _count("requests a data rank", a.request.max_num_seqs, b.request.max_num_seqs)
    yield _count("largest of them", a.capacity.max_num_seqs, b.capacity.max_num_seqs)
    yield _count("tokens of a request", a.request.max_model_len, b.request.max_model_len)
    yield _count("longest request", a.capacity.max_model_len, b.capacity.max_model_len)
    yield from _memory(a, b)
    yield from _speed(a, b)


def _verdict(answer: Answer) -> str:
    free = answer.fullest.free_bytes
    return f"fits, {gib(free)} free" if answer.fits else f"no: {gib(-free)} missing"


def _memory(a: Answer, b: Answer) -> Iterator[_Row]:
    names = [line.name for line in a.fullest.lines]
    names += [line.name for line in b.fullest.lines if line.name not in names]
    tables = [{line.name: line.nbytes for line in x.fullest.lines} for x in (a, b)]
    for name in names:
        first, second = (table.get(name, 0) for table in tables)
        if first or second:
            yield f"  {name}", gib(first), gib(second), _ratio(first, second)
    total = a.fullest.total_bytes, b.fullest.total_bytes
    yield "memory of a rank", gib(total[0]), gib(total[1]), _ratio(*total)
    million = a.capacity.million_tokens_bytes, b.capacity.million_tokens_bytes
    yield "1M tokens", gib(million[0]), gib(million[1]), _ratio(*million)


def _speed(a: Answer, b: Answer) -> Iterator[_Row]:
    if not a.speed or not b.speed:
        return
    x, y = a.speed[0], b.speed[0]
    for label, first, second in (
        ("time to first token", x.ttft_us, y.ttft_us),
        ("time per output token", x.tpot_us, y.tpot_us),
        ("  of one request alone", x.single_tpot_us, y.single_tpot_us),
    ):
        yield label, ms(first.value), ms(second.value), _ratio(first.value, second.value)
    for label, first, second in (
        ("tokens/s a user", x.user_milli, y.user_milli),
        ("tokens/s per GPU", x.gpu_milli, y.gpu_milli),
    ):
        texts = f"{first.value / 1e3:,.1f}", f"{second.value / 1e3:,.1f}"
        yield label, *texts, _ratio(first.value, second.value)


def _count(label: str, first: int, second: int) -> _Row:
    return label, f"{first:,}", f"{second:,}", _ratio(first, second)


def _ratio(first: int, second: int) -> str:
    """Return the change as a factor or a share; empty where there is none."""
    if first == second:
        return ""
    if not first:
        return "new"
    factor = second / first
    return f"x{factor:.2f}" if factor >= 1.995 or factor <= 0.5 else f"{factor - 1:+.1%}"
