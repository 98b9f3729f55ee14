"""Lines of memory that closed forms give exactly: the same in both kinds of answer."""

from __future__ import annotations

from dataclasses import replace

from k3c.planner import quick
from k3c.planner.answer import KindLine, MemoryLine
from k3c.planner.draft import draft_weight_bytes, record_bytes
from k3c.planner.problem import Asked
from k3c.planner.quick import Load, Part


def state_lines(part: Part, load: Load) -> list[MemoryLine]:
    """Return the pages, state slots and kept states of a rank, as the plan lays them out."""
    snapshots = load.snapshots * quick.slot_bytes(part, load.act_bytes)
    slots = quick.state_bytes(part, load) - snapshots
    pages = f"{load.pages:,} pages of {load.page_tokens} tokens, 1 of them scratch"
    requests = f"{load.requests:,} requests and 1 scratch slot"
    return [
        MemoryLine("mla_pages", quick.page_bytes(part, load), True, pages),
        MemoryLine("kda_slots", slots, True, requests),
        MemoryLine("snapshots", snapshots, True, f"{load.snapshots:,} kept states"),
    ]


def spare_lines(part: Part) -> list[MemoryLine]:
    """Return the physical experts of a rank beyond those that the mesh needs."""
    nbytes = spare_bytes(part)
    if not nbytes:
        return []
    note = f"{part.spare_slots} more in each of {part.moe_layers} layers"
    return [MemoryLine("spare_experts", nbytes, True, note)]


def spare_bytes(part: Part) -> int:
    """Return the bytes of `spare_lines`: experts in every layer, and tables of their replicas."""
    without = replace(part, spare_slots=0)
    return sum(quick.weight_bytes(part).values()) - sum(quick.weight_bytes(without).values())


def draft_lines(asked: Asked, part: Part, load: Load) -> list[MemoryLine]:
    """Return what speculation adds to a rank; the draft runs on the ranks of the last stage.

    Its kernels are not planned yet: the bytes are those of its own configuration.
    """
    draft = asked.draft
    if draft is None:
        return []
    weights = draft_weight_bytes(draft, part.mesh.tp) if part.is_last else 0
    cache = load.pages * load.page_tokens * draft.token_bytes if part.is_last else 0
    slots = load.requests + 1
    rows = f"{slots:,} slots x {draft.width} rows, 1 slot for padding of widths 1..{draft.width}"
    per_slot = record_bytes(part.config, part.mesh.tp, part.kda_layers, draft.width, load.act_bytes)
    return [
        MemoryLine("draft_weights", weights, False, f"{draft.layers} layers of {draft.name}"),
        MemoryLine("draft_kv", cache, False, f"{draft.token_bytes:,} bytes a token"),
        MemoryLine("draft_records", slots * per_slot, False, rows),
    ]


def kind_lines(asked: Asked, part: Part, weights_bytes: int | None) -> tuple[KindLine, ...]:
    """Return weights, state and tokens by kind of part.

    A layer's state is of its own kind: KDA layers keep slots, MLA layers keep tokens, and the
    draft's layers are the draft's.

    Args:
        asked: What the rank is asked to hold.
        part: What it holds.
        weights_bytes: All bytes of its packed weights, spare experts left out: what no kind has is
            padding. None: unknown.
    """
    act, layers, weights = asked.act_bytes, quick.kind_layers(part), quick.weight_bytes(part)
    states = {"kda": quick.slot_bytes(part, act)}
    tokens = {"mla": quick.token_bytes(part, act)}
    found = [
        KindLine(k, layers[k], weights[k], states.get(k, 0), tokens.get(k, 0)) for k in quick.KINDS
    ]
    if weights_bytes is not None:
        packed = weights_bytes + spare_bytes(part)
        found.append(KindLine("padding", 0, packed - sum(weights.values()), 0, 0))
    draft = asked.draft
    if draft is not None and part.is_last:
        nbytes = draft_weight_bytes(draft, part.mesh.tp)
        records = record_bytes(part.config, part.mesh.tp, part.kda_layers, draft.width, act)
        found.append(KindLine("draft", draft.layers, nbytes, records, draft.token_bytes))
    return tuple(found)
