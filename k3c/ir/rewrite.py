"""Apply rules to a module until none fires; count matches, keep refusals with their reasons.

A rule that fits a place but must not fire there gives a `Refusal`. Besides the rule's own check,
the engine refuses where a fusion would lose a value that others read, form a cycle, read a value
after it was overwritten, or drop an attribute or operand that the rule does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from k3c.ir.edit import Index, ordered, substitute, substitute_outputs
from k3c.ir.graph import Graph, Module, Node, Value, Weight
from k3c.ir.ops import OPS
from k3c.ir.pattern import Match, Pattern, find
from k3c.ir.refusal import Refusal

__all__ = ["Refused", "Replacement", "RewriteLog", "Rule", "apply_rules", "rewrite_graph"]


@dataclass(frozen=True)
class Replacement:
    """What stands in the place of the matched nodes.

    Attributes:
        nodes: New nodes; results may keep the values of the nodes that they replace.
        removes: Positions that go besides the pattern's nodes.
        later: Value name -> the value that everything after the match reads in its place.
        weights: New weights.
    """

    nodes: tuple[Node, ...]
    removes: tuple[int, ...] = ()
    later: Mapping[str, Value] = field(default_factory=dict[str, Value])
    weights: tuple[Weight, ...] = ()


def _always(match: Match) -> bool:
    return True


def _no_refusal(match: Match) -> Refusal | None:
    return None


@dataclass(frozen=True)
class Rule:
    """A rewrite as data.

    Attributes:
        name: Unique within its pass.
        pattern: Parsed once, when the pass is imported.
        rewrite: Makes the replacement.
        check: Returns why the rule must not fire here, or None.
        when: Structure that the pattern cannot say; False is a miss, not a refusal.
        handles: `op.attr` or `op.operand` names of optional parts that the rewrite carries over.
    """

    name: str
    pattern: Pattern
    rewrite: Callable[[Match], Replacement]
    check: Callable[[Match], Refusal | None] = _no_refusal
    when: Callable[[Match], bool] = _always
    handles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Refused:
    """A refusal and where: graph, rule and the first result of the pattern's root."""

    graph: str
    rule: str
    value: str
    refusal: Refusal


@dataclass
class RewriteLog:
    """Counts of one pass. `matches` is by rule name."""

    matches: dict[str, int] = field(default_factory=dict[str, int])
    refused: list[Refused] = field(default_factory=list[Refused])

    @property
    def total(self) -> int:
        """Number of rewrites."""
        return sum(self.matches.values())


def apply_rules(module: Module, rules: Sequence[Rule], log: RewriteLog) -> Module:
    """Return the module with the rules applied to every graph; `log` is added to."""
    return replace(module, graphs=tuple(rewrite_graph(g, rules, log) for g in module.graphs))


def rewrite_graph(graph: Graph, rules: Sequence[Rule], log: RewriteLog) -> Graph:
    """Return the graph after the last rule has fired; nodes in order, rules in order."""
    changed = True
    while changed:
        changed = False
        refused: list[Refused] = []
        for rule, match in _matches(graph, rules):
            result = _try(rule, match)
            if isinstance(result, Graph):
                graph, changed = result, True
                log.matches[rule.name] = log.matches.get(rule.name, 0) + 1
                break
            value = graph.nodes[match.nodes[len(rule.pattern.nodes) - 1]].results[0].name
            refused.append(Refused(graph.name, rule.name, value, result))
        else:
            # Only refusals that still hold when nothing fires any more are reported.
            log.refused += refused
    return graph


def _matches(graph: Graph, rules: Sequence[Rule]) -> list[tuple[Rule, Match]]:
    index = Index(graph)
    found: list[tuple[Rule, Match]] = []
    for position in range(len(graph.nodes)):
        for rule in rules:
            match = find(rule.pattern, index, position)
            if match and rule.when(match):
                found.append((rule, match))
    return found


def _try(rule: Rule, match: Match) -> Graph | Refusal:
    refusal = _unknown_parts(rule, match) or rule.check(match)
    if refusal:
        return refusal
    change = rule.rewrite(match)
    return _lost_value(match, change) or _replaced(match, change)


def _unknown_parts(rule: Rule, match: Match) -> Refusal | None:
    """Refuse what the rule would drop: unknown attributes, optional operands, set options."""
    for which, position in match.nodes.items():
        node, spec = match.index.graph.nodes[position], OPS[rule.pattern.nodes[which].op]
        for name, value in node.attrs.items():
            known = spec.attrs.get(name)
            if known is None:
                return Refusal(f"{node.op} has an attribute {name} that the rule does not know")
            optional = known.default is not None and not known.is_default(value)
            if optional and f"{node.op}.{name}" not in rule.handles:
                return Refusal(f"{node.op} has {name} set, which the rule does not carry over")
        for role in spec.roles[len(rule.pattern.nodes[which].operands) : len(node.operands)]:
            if f"{node.op}.{role}" not in rule.handles:
                return Refusal(f"{node.op} has an operand {role} that the rule does not know")
    return None


def _gone(match: Match, change: Replacement) -> set[int]:
    return set(match.positions) | set(change.removes)


def _lost_value(match: Match, change: Replacement) -> Refusal | None:
    """Refuse where a value that would no longer exist is read by a node that stays."""
    index, gone = match.index, _gone(match, change)
    made = {value.name for node in change.nodes for value in node.results}
    for position in sorted(gone):
        for value in index.graph.nodes[position].results:
            if value.name in made or value.name in change.later:
                continue
            if value.name in index.returned or set(index.read_by(value)) - gone:
                return Refusal("a value inside the pattern has other uses", f"%{value.name}")
    return None


def _replaced(match: Match, change: Replacement) -> Graph | Refusal:
    graph, gone = match.index.graph, _gone(match, change)
    first = min(gone)
    nodes: list[Node] = []
    for position, node in enumerate(graph.nodes):
        if position == first:
            nodes += change.nodes
        if position not in gone:
            nodes.append(substitute(node, change.later) if position > first else node)
    order = ordered(nodes)
    if isinstance(order, str):
        return Refusal("the fused node would have to run before and after", f"%{order}")
    late = _read_too_late(graph, change)
    if late:
        return late
    graph = replace(graph, nodes=order, weights=graph.weights + change.weights)
    return drop_dead_weights(substitute_outputs(graph, change.later))


def _read_too_late(graph: Graph, change: Replacement) -> Refusal | None:
    """Refuse where a new node overwrites what the graph returns or what it reads twice."""
    returned = {change.later.get(v.name, v).name for _, v in graph.outputs}
    for node in change.nodes:
        for operand in OPS[node.op].in_place.values():
            name = node.operands[operand].name
            if name in returned:
                return Refusal("a returned value would be overwritten", f"%{name}")
            if sum(value.name == name for value in node.operands) > 1:
                return Refusal("a value would be overwritten that its node reads twice", f"%{name}")
    return None


def drop_dead_weights(graph: Graph) -> Graph:
    """Return the graph without weights that no node reads."""
    read = {value.name for node in graph.nodes for value in node.operands}
    return replace(graph, weights=tuple(w for w in graph.weights if w.value.name in read))
