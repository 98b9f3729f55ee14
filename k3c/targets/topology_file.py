"""Read a topology from its toml file: the schema first, then what a schema cannot say."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3c.errors import ConfigError
from k3c.targets.target import Target, known_targets, load_target
from k3c.targets.topology import Fabric, Topology

SCHEMA = Path(__file__).parent / "topology.schema.json"
HELP = "k3c topology schema prints the format"

Json = dict[str, Any]


def schema_text() -> str:
    """Return the published JSON schema of the format."""
    return SCHEMA.read_text(encoding="utf-8")


def read_topology(path: Path, shipped: bool = False) -> Topology:
    """Read a topology's file.

    Args:
        path: The file.
        shipped: It is one of this package, which a test holds to the schema: it is not done again.

    Raises:
        ConfigError: It cannot be read, is not toml, or breaks the schema or a rule beyond it.
    """
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        hint = "name a file that you can read, or one of k3c topology list"
        raise ConfigError(f"cannot read the topology: {exc.strerror}", where, hint) from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"byte {exc.start} is not UTF-8", where, HELP) from None
    return parse_topology(text, path.stem, where, shipped)


def parse_topology(text: str, name: str, where: str, shipped: bool = False) -> Topology:
    """Return the topology of a file's text.

    Args:
        text: The toml text.
        name: What to call it.
        where: The file, for messages.
        shipped: It is known to keep to the schema.

    Raises:
        ConfigError: It is not toml, or breaks the schema or a rule beyond it.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"not toml: {exc}", where, HELP) from None
    if not shipped:
        _check_schema(data, where)
    kept = _kept_ranks(data, where)
    fabrics = [_fabric(data, index, kept, where) for index in range(len(data.get("fabric", [])))]
    _check_degraded(data, where)
    _check_names(fabrics, where)
    per_host = data["ranks_per_host"]
    host_ids = sorted({rank // per_host for rank in kept})
    topology = Topology(
        name,
        _target(data["target"], where),
        tuple(tuple(kept[r] for r in sorted(kept) if r // per_host == host) for host in host_ids),
        tuple(fabrics),
        tuple(host_ids),
        tuple(sorted(kept)),
        _missing(data),
        data.get("about", ""),
    )
    _check_connected(topology, where)
    return topology


def _check_schema(data: Json, where: str) -> None:
    # Its import takes 0.15 s, which shipped files need not pay.
    import jsonschema

    checker: Any = jsonschema.Draft202012Validator(json.loads(schema_text()))
    # A misspelt key also misses the right one: name the one that is there.
    errors = sorted(
        checker.iter_errors(data),
        key=lambda e: (e.validator != "additionalProperties", list(map(str, e.path)), e.message),
    )
    if not errors:
        return
    error = errors[0]
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.path).lstrip(".")
    what, hint = _in_words(error, key)
    raise ConfigError(what, where, hint or HELP)


def _in_words(error: Any, key: str) -> tuple[str, str]:
    """Return what is wrong, with the value found and the value expected, and what to do."""
    rule, wanted, found = error.validator, error.validator_value, error.instance
    place = key or "the file"
    if rule == "additionalProperties":
        known = sorted(error.schema["properties"])
        extra = sorted(set(found) - set(known))[0]
        near = difflib.get_close_matches(extra, known, 1)
        what = f"{place}: unknown key {extra!r}, expected one of {', '.join(known)}"
        return what, f"did you mean {near[0]!r}?" if near else f"remove it; {HELP}"
    if rule == "required":
        missing = sorted(set(wanted) - set(found))
        return (
            f"{place}: found {', '.join(sorted(found))}; {missing[0]!r} is missing",
            f"add {key and key + '.'}{missing[0]}; {HELP}",
        )
    words = {
        "exclusiveMinimum": f"a number above {wanted}",
        "minimum": f"{wanted} or more",
        "type": f"a value of type {wanted}",
        "enum": f"one of {wanted}",
        "const": f"{wanted}",
    }
    expected = words.get(rule, f"{rule} {wanted}")
    return f"{place}: found {json.dumps(found)}, expected {expected}", ""


def _target(name: str, where: str) -> Target:
    if name not in known_targets():
        near = difflib.get_close_matches(name, known_targets(), 1)
        what = f"target: found {name!r}, expected one of {', '.join(known_targets())}"
        raise ConfigError(what, where, f"did you mean {near[0]!r}?" if near else "name a device")
    return load_target(name)


def _kept_ranks(data: Json, where: str) -> dict[int, int]:
    """Return the new number of each rank that is there, by its number in the file."""
    hosts, per_host = data["hosts"], data["ranks_per_host"]
    lost = data.get("missing_hosts", [])
    gone = data.get("missing_ranks", [])
    for key, numbers, count in (
        ("missing_hosts", lost, hosts),
        ("missing_ranks", gone, hosts * per_host),
    ):
        for number in numbers:
            if number >= count:
                what = f"{key}: found {number}, expected 0..{count - 1}"
                raise ConfigError(what, where, "numbers count from 0 over all that was built")
    every = range(hosts * per_host)
    kept = [r for r in every if r // per_host not in lost and r not in gone]
    if len(kept) != data["ranks"]:
        what = (
            f"ranks: found {data['ranks']}, expected {len(kept)}: {hosts} hosts x {per_host} ranks"
            f" less {len(every) - len(kept)} missing"
        )
        raise ConfigError(what, where, f"set ranks = {len(kept)}, or mend the hosts")
    return {rank: index for index, rank in enumerate(kept)}


def _groups(data: Json, index: int, where: str) -> list[list[int]]:
    fabric = data["fabric"][index]
    hosts, per_host = data["hosts"], data["ranks_per_host"]
    total = hosts * per_host
    place = f"fabric[{index}]"
    if ("span" in fabric) == ("groups" in fabric):
        found = "both span and groups" if "span" in fabric else "neither span nor groups"
        hint = 'span = "host" or "all", or groups = [[0, 1], [2, 3]]'
        raise ConfigError(f"{place}: found {found}, expected one of them", where, hint)
    if fabric.get("span") == "all":
        return [list(range(total))]
    if fabric.get("span") == "host":
        return [list(range(h * per_host, (h + 1) * per_host)) for h in range(hosts)]
    seen: set[int] = set()
    for rank in (rank for group in fabric["groups"] for rank in group):
        if rank >= total or rank in seen:
            why = "twice" if rank in seen else f"of 0..{total - 1}"
            hint = "each rank is in at most one group of a fabric"
            raise ConfigError(f"{place}.groups: found rank {rank}, {why}", where, hint)
        seen.add(rank)
    return [sorted(group) for group in fabric["groups"]]


def _fabric(data: Json, index: int, kept: Mapping[int, int], where: str) -> Fabric:
    raw = data["fabric"][index]
    groups = _groups(data, index, where)
    paths = raw.get("paths", 1)
    up = {rank: paths for group in groups for rank in group}
    for entry in data.get("degraded", []):
        if entry["fabric"] == raw["name"]:
            for rank in _degraded_ranks(data, entry):
                if rank in up:
                    up[rank] = min(up[rank], entry["paths_up"])
    present = [[rank for rank in group if rank in kept] for group in groups]
    wires = [len(group) - 1 if raw["shape"] == "mesh" else 1 for group in groups]
    return Fabric(
        raw["name"],
        raw["kind"],
        raw["shape"],
        tuple(tuple(kept[rank] for rank in group) for group in present if group),
        tuple(max(1, w) for w, group in zip(wires, present, strict=True) if group),
        {kept[r]: raw["gbs"] * up[r] / paths for group in present for r in group},
        raw["gbs"],
        paths,
        raw["us"],
        raw.get("multicast", False),
        raw.get("switches", 0),
        raw["source"],
    )


def _degraded_ranks(data: Json, entry: Json) -> list[int]:
    per_host = data["ranks_per_host"]
    ranks = list(entry.get("ranks", []))
    for host in entry.get("hosts", []):
        ranks += range(host * per_host, (host + 1) * per_host)
    if "ranks" not in entry and "hosts" not in entry:
        ranks += range(data["hosts"] * per_host)
    return ranks


def _check_degraded(data: Json, where: str) -> None:
    fabrics = {fabric["name"]: fabric for fabric in data.get("fabric", [])}
    limits = {"hosts": data["hosts"], "ranks": data["hosts"] * data["ranks_per_host"]}
    for index, entry in enumerate(data.get("degraded", [])):
        place = f"degraded[{index}]"
        if entry["fabric"] not in fabrics:
            known = ", ".join(fabrics) or "none"
            what = f"{place}.fabric: found {entry['fabric']!r}, expected one of {known}"
            raise ConfigError(what, where, "name a fabric of this file")
        paths = fabrics[entry["fabric"]].get("paths", 1)
        if entry["paths_up"] > paths:
            what = f"{place}.paths_up: found {entry['paths_up']}, expected 0..{paths}"
            raise ConfigError(what, where, f"fabric {entry['fabric']} has paths = {paths}")
        for key, limit in limits.items():
            for number in entry.get(key, []):
                if number >= limit:
                    what = f"{place}.{key}: found {number}, expected 0..{limit - 1}"
                    raise ConfigError(what, where, "numbers count from 0 over all that was built")


def _check_names(fabrics: list[Fabric], where: str) -> None:
    names = [fabric.name for fabric in fabrics]
    for name in names:
        if names.count(name) > 1:
            what = f"fabric: found {name!r} {names.count(name)} times, expected once"
            raise ConfigError(what, where, "give each fabric its own name")


def _check_connected(topology: Topology, where: str) -> None:
    # Every pair needs a fabric of its own: nothing forwards between two.
    for a in range(topology.ranks):
        for b in range(a + 1, topology.ranks):
            if not any(f.pair_gbs(a, b) for f in topology.fabrics):
                ids = topology.rank_ids
                what = f"ranks {ids[a]} and {ids[b]} of {topology.ranks} share no fabric"
                hint = 'add one that spans both, such as pcie with span = "host" or a network'
                raise ConfigError(what, where, hint)


def _missing(data: Json) -> str:
    parts: list[str] = []
    for key, word in (("missing_hosts", "host"), ("missing_ranks", "rank")):
        numbers = sorted(data.get(key, []))
        if numbers:
            parts.append(f"{word}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}")
    return " and ".join(parts)


def topology_text(data: Mapping[str, Any]) -> str:
    """Return the toml text of a topology's contents.

    Args:
        data: Keys and values as the schema has them; empty lists are left out.
    """
    tables = {key: value for key, value in data.items() if key in ("fabric", "degraded")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if key not in tables]
    for key, entries in tables.items():
        for entry in entries:
            lines += ["", f"[[{key}]]", *(f"{k} = {json.dumps(v)}" for k, v in entry.items())]
    return "\n".join(lines) + "\n"
