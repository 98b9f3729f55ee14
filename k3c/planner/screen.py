"""The answer on one screen: at most 40 lines of 100 columns, readable without colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Console
from rich.text import Text

from k3c.planner.answer import Answer, Interval, MemoryLine, Speed
from k3c.planner.describe import gib, ms

COLUMNS = 100
LINES = 40
LABEL = 10  # columns of the labels at the left
BAR = 32  # columns of the longest bar
SHOWN_WARNINGS = 4
ELLIPSIS = "..."


def render(answer: Answer) -> Text:
    """Return the screen; styles are there for a terminal that shows them."""
    text = Text()
    for number, (label, words, style) in enumerate(_lines(answer)):
        assert number < LINES, f"line {number + 1} of {LINES}: {words}"
        text.append(f"{label:<{LABEL}}", style="bold")
        text.append(f"{_cut(words, COLUMNS - LABEL)}\n", style=style)
    return text


def show(answer: Answer) -> None:
    """Print the screen on standard output; without a terminal or with NO_COLOR it is plain."""
    console = Console(width=COLUMNS, highlight=False, soft_wrap=True)
    console.print(render(answer), end="")


_Line = tuple[str, str, str]


def _lines(answer: Answer) -> Iterator[_Line]:
    yield from _wrapped("answer", answer.verdict, 3, _verdict_style(answer))
    yield from _used(answer)
    yield from _state(answer)
    for speed in answer.speed:
        yield from _times(speed)
    yield from _memory(answer)
    yield from _changes(answer)
    yield from _seen(answer)
    for warning in answer.warnings[:SHOWN_WARNINGS]:
        yield "warning", warning, "yellow"


def _verdict_style(answer: Answer) -> str:
    return "green" if answer.fits else "bold red"


def _used(answer: Answer) -> Iterator[_Line]:
    """How the machine is used, and why."""
    d = answer.deployment
    words = [f"{d.name} ({d.mesh}), {d.ranks} ranks"]
    if d.replicas > 1:
        words.append(f"{d.replicas} replicas of it")
    if d.spare_ranks:
        words.append(f"{d.spare_ranks} ranks spare")
    experts = f"{d.physical_experts} experts a rank"
    if d.expert_replicas:
        experts += f" ({d.expert_replicas} of all are replicas)"
    yield "mesh", ", ".join([*words, experts]), ""
    for choice in answer.choices:
        yield "  why", f"{choice.name} {choice.value}: {choice.why}", ""


def _state(answer: Answer) -> Iterator[_Line]:
    """Requests, contexts, and what one more costs."""
    limits, asked, dp = answer.capacity, answer.request, answer.deployment.dp
    each = "" if dp == 1 else f" a data-parallel rank, {asked.max_num_seqs * dp:,} in all"
    yield (
        "requests",
        f"{asked.max_num_seqs:,}{each} of {asked.max_model_len:,} tokens; at most "
        f"{limits.max_num_seqs:,} of that length, or {limits.max_model_len:,} tokens each",
        "",
    )
    pairs = [f"{_tokens(c.context_tokens)} {c.per_data_rank:,}" for c in limits.contexts]
    yield "contexts", f"{' | '.join(pairs)}  (tokens each, requests)", ""
    yield (
        "one more",
        f"1M tokens {gib(limits.million_tokens_bytes)} | request {gib(limits.request_bytes)} | "
        f"snapshot {gib(limits.snapshot_bytes)} | expert slot {gib(limits.replica_slot_bytes)}",
        "",
    )


def _tokens(count: int) -> str:
    return f"{count // 2**20}M" if count >= 2**20 else f"{count // 1024}k"


def _times(speed: Speed) -> Iterator[_Line]:
    """First token, output tokens, rates, each with its error bar."""
    yield (
        "speed",
        f"first token {_time(speed.ttft_us)}, then {_time(speed.tpot_us)} a token with "
        f"{speed.concurrency:,} together",
        "",
    )
    yield (
        "",
        f"{_rate(speed.user_milli)} tokens/s a user, {_rate(speed.gpu_milli)} per GPU; alone "
        f"{_time(speed.single_tpot_us)} a token",
        "",
    )
    top = " | ".join(f"{k.kind} {ms(k.us)}" for k in islice(speed.decode_kinds, 5))
    yield "  of it", top, "dim"
    yield "  from", speed.source, "dim"


def _time(found: Interval) -> str:
    if found.low == found.high:
        return ms(found.value)
    return f"{ms(found.value)} ({ms(found.low)}..{ms(found.high)})"


def _rate(found: Interval) -> str:
    if found.low == found.high:
        return f"{found.value / 1e3:,.1f}"
    return f"{found.value / 1e3:,.1f} ({found.low / 1e3:,.1f}..{found.high / 1e3:,.1f})"


def _memory(answer: Answer) -> Iterator[_Line]:
    """Where the bytes of the fullest rank go, and its weights by kind."""
    full = answer.fullest
    which = f", stage {full.stage}" if len(answer.stages) > 1 else ""
    at_least = "at least " if answer.source == "quick" else ""
    yield (
        "memory",
        f"{at_least}{gib(full.total_bytes)} of {gib(full.device_bytes)} a rank{which}, "
        f"{gib(full.free_bytes) if full.free_bytes >= 0 else '-' + gib(-full.free_bytes)} free",
        "",
    )
    for line in _shown(full.lines):
        length = round(BAR * min(1.0, line.nbytes / full.device_bytes))
        mark = "" if line.exact else "~"
        words = f"{line.name:<14}{mark + gib(line.nbytes):>11} {'#' * length}"
        yield "", f"{words} {line.note}" if length < BAR - 12 else words, ""
    kinds = [f"{k.kind} {gib(k.weight_bytes)}" for k in answer.kinds if k.weight_bytes >= 2**20]
    yield from _wrapped("weights", " | ".join(kinds), 2, "")


def _shown(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    return [line for line in lines if line.nbytes]


def _changes(answer: Answer) -> Iterator[_Line]:
    for number, change in enumerate(answer.changes, 1):
        label = "change" if number == 1 else ""
        yield from _wrapped(label, f"{number} {change.option}: {change.effect}", 2, "")


def _seen(answer: Answer) -> Iterator[_Line]:
    """The meshes beside the one that was taken."""
    others = [c for c in answer.candidates if c.name != answer.deployment.name]
    if not others:
        return
    words = [
        f"{c.name} {'>' if c.source == 'quick' else ''}{ms(c.tpot_us)}"
        if c.fits
        else f"{c.name} -{gib(-c.free_bytes)}"
        for c in others
    ]
    yield from _wrapped("meshes", " | ".join(words), 1, "dim")


def _wrapped(label: str, words: str, most: int, style: str) -> Iterator[_Line]:
    """Break words over at most `most` lines."""
    room, line, lines = COLUMNS - LABEL, "", list[str]()
    for word in words.split(" "):
        if line and len(line) + 1 + len(word) > room:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    for number, words_of_line in enumerate(lines):
        yield label if number == 0 else "", words_of_line, style


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - len(ELLIPSIS)] + ELLIPSIS
