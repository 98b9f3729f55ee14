"""Matching, replacing and refusing."""

import pytest

from k3c.errors import ParseError
from k3c.ir.edit import Index, drop_dead, merge_duplicates, ordered
from k3c.ir.graph import Node
from k3c.ir.pattern import find, parse_pattern
from k3c.ir.refusal import Refusal
from k3c.ir.rewrite import Replacement, RewriteLog, Rule, apply_rules
from k3c.ir.text import parse, show

HEAD = """k3ir 1
level model
dim T in [1, 64]

graph @g(io %x: bf16[T, 8], io %r: bf16[T, 8], state %c: bf16[P, 4, 8], io %n: i32[B], io %t: i32[B, M]) -> {out} {{
  weight %w: bf16[8, 8] from "w"
  weight %v: f32[8] from "v"
{body}  return {ret}
}}
""".replace("dim T", "dim P in [2, 9]\ndim B in [1, 2]\ndim M in [1, 2]\ndim T")  # noqa: E501
X = "bf16[T, 8]"


def graph(body, ret="y=%y", out=X):
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    return parse(HEAD.format(out=out, body=lines, ret=ret))


def swallow(match):
    """Drop the add: the norm of a sum becomes the norm of its first operand."""
    old = match.node("y")
    return Replacement((Node("rms_norm", (match["a"], match["w"]), old.results, old.attrs),))


SUM_NORM = parse_pattern("%s = add(%a, %b)\n%y = rms_norm(%s, %w)")
LINEAR_SUM = parse_pattern("%p = linear(%x, %w)\n%y = add(%p, %b)")


def test_a_pattern_binds_free_values_and_nodes():
    module = graph(f"%s = add(%x, %r) : {X}\n%y = rms_norm(%s, %v) {{eps: 1e-05}} : {X}")
    match = find(SUM_NORM, Index(module.graphs[0]), 1)
    assert match
    assert (match["a"].name, match["b"].name, match["w"].name) == ("x", "r", "v")
    assert match.positions == (0, 1)
    assert match.attr("y", "eps") == 1e-05
    assert "a" in match
    assert "q" not in match


@pytest.mark.parametrize("operands", ["%p, %r", "%r, %p"])
def test_operands_of_a_commutative_op_match_in_both_orders(operands):
    module = graph(f"%p = linear(%x, %w) : {X}\n%y = add({operands}) : {X}")
    match = find(LINEAR_SUM, Index(module.graphs[0]), 1)
    assert match
    assert match["b"].name == "r"


def test_a_sum_of_a_value_with_itself_matches_once():
    module = graph(f"%p = linear(%x, %w) : {X}\n%y = add(%p, %p) : {X}")
    match = find(LINEAR_SUM, Index(module.graphs[0]), 1)
    assert match
    assert match["b"] == match["p"]


def test_a_value_that_stands_twice_in_a_pattern_must_be_one_value():
    twice = parse_pattern("%y = add(%a, %a)")
    same = graph(f"%y = add(%x, %x) : {X}")
    other = graph(f"%y = add(%x, %r) : {X}")
    assert find(twice, Index(same.graphs[0]), 0)
    assert find(twice, Index(other.graphs[0]), 0) is None


def test_nodes_beside_the_root_are_found_among_readers():
    both = parse_pattern("%n = rms_norm(%s, %v)\n%s = add(%a, %b)\n%y = linear(%s, %w)")
    module = graph(
        f"""%s = add(%x, %r) : {X}
        %y = linear(%s, %w) : {X}
        %n2 = rms_norm(%s, %v) {{eps: 1.0}} : {X}""",
        "y=%y, n=%n2", f"{X}, {X}",
    )  # fmt: skip
    match = find(both, Index(module.graphs[0]), 1)
    assert match
    assert match["n"].name == "n2"
    assert match.positions == (0, 1, 2)


def test_open_results_match_any_number():
    some = parse_pattern("%y... = linear(%x, %w)")
    one = graph(f"%y = linear(%x, %w) : {X}")
    two = graph("%y, %z = linear(%x, %w) : bf16[T, 4], bf16[T, 4]", out="bf16[T, 4]")
    assert find(some, Index(one.graphs[0]), 0)
    assert find(some, Index(two.graphs[0]), 0)
    assert find(parse_pattern("%y = linear(%x, %w)"), Index(two.graphs[0]), 0) is None


def test_a_pattern_with_a_mistake_shows_the_line():
    with pytest.raises(ParseError, match=r"line 2"):
        parse_pattern("%a = add(%x, %y)\n%b = add %a")


def run(module, *rules):
    log = RewriteLog()
    return show(apply_rules(module, rules, log)), log


def test_a_rule_fires_until_nothing_matches_and_is_counted():
    body = f"""%s = add(%x, %r) : {X}
        %m = rms_norm(%s, %v) {{eps: 1e-05}} : {X}
        %u = add(%m, %r) : {X}
        %y = rms_norm(%u, %v) {{eps: 1e-05}} : {X}"""
    text, log = run(graph(body), Rule("swallow", SUM_NORM, swallow))
    assert "add" not in text
    assert log.matches == {"swallow": 2}
    assert "weight %w" not in text


def test_a_refusal_is_kept_once_with_its_reason_and_place():
    rule = Rule("never", SUM_NORM, swallow, lambda m: Refusal("the sum is odd", f"%{m['s'].name}"))
    body = f"%s = add(%x, %r) : {X}\n%y = rms_norm(%s, %v) {{eps: 1e-05}} : {X}"
    text, log = run(graph(body), rule)
    assert text == show(graph(body))
    assert [(r.graph, r.rule, r.value, str(r.refusal)) for r in log.refused] == [
        ("g", "never", "y", "the sum is odd (%s)")
    ]


def test_a_value_with_other_uses_is_not_lost():
    body = f"%s = add(%x, %r) : {X}\n%y = rms_norm(%s, %v) {{eps: 1e-05}} : {X}"
    module = graph(body, "y=%y, s=%s", f"{X}, {X}")
    text, log = run(module, Rule("swallow", SUM_NORM, swallow))
    assert text == show(module)
    assert "other uses (%s)" in str(log.refused[0].refusal)


def test_an_optional_operand_is_refused_not_missed():
    # FU05: a node with an operand that the pattern does not know must not vanish from the report.
    module = graph(f"%p = linear(%x, %w, %r) : {X}\n%y = add(%p, %r) : {X}")
    rule = Rule("sum", LINEAR_SUM, lambda m: Replacement((), later={"y": m["p"]}))
    text, log = run(module, rule)
    assert "add" in text
    assert "linear has an operand addend" in str(log.refused[0].refusal)


def test_a_set_option_is_refused_unless_the_rule_carries_it_over():
    situ = "{beta: 4.0, epilogues: (situ), linear_beta: none}"
    module = graph(f"%p = linear(%x, %w) {situ} : bf16[T, 4]", "y=%p", "bf16[T, 4]")
    pattern = parse_pattern("%p = linear(%x, %w)")
    text, log = run(module, Rule("any", pattern, lambda m: Replacement((m.node("p"),))))
    assert text == show(module)
    assert "linear has beta set" in str(log.refused[0].refusal)


def test_a_default_that_is_written_out_does_not_stop_a_rule():
    module = graph(f"%p = linear(%x, %w) {{epilogues: (none)}} : {X}\n%y = add(%p, %r) : {X}")
    rule = Rule("sum", LINEAR_SUM, lambda m: Replacement((), later={"y": m["b"]}))
    _, log = run(module, rule)
    assert log.matches == {"sum": 1}


def test_a_fusion_that_would_make_a_cycle_is_refused():
    # %m reads the sum and feeds the product: a node of both sum and product would wait for itself.
    module = graph(
        f"""%s = add(%x, %r) : {X}
        %m = rms_norm(%s, %v) {{eps: 1e-05}} : {X}
        %y = sigmoid_mul(%s, %m) : {X}"""
    )
    pattern = parse_pattern("%s = add(%a, %b)\n%y = sigmoid_mul(%s, %m)")

    def both(match):
        return Replacement((Node("add", (match["a"], match["m"]), (match["s"],)),),
                           later={"y": match["s"]})  # fmt: skip

    text, log = run(module, Rule("cycle", pattern, both))
    assert text == show(module)
    assert "before and after" in str(log.refused[0].refusal)


def test_later_nodes_and_outputs_read_the_new_value():
    module = graph(f"%p = cast(%x) : {X}\n%y = add(%p, %r) : {X}", "y=%y, p=%p", f"{X}, {X}")
    drop = Rule("drop", parse_pattern("%c = cast(%a)"),
                lambda m: Replacement((), later={m["c"].name: m["a"]}))  # fmt: skip
    text, _ = run(module, drop)
    assert "%y = add(%x, %r)" in text
    assert "return y=%y, p=%x" in text


APPEND = "mla_append(%x, %v, %c, %n, %n, %n, %t) {eps: 1e-05} : bf16[P, 4, 8]"


def test_order_puts_readers_before_the_node_that_overwrites():
    module = graph(f"%k = {APPEND}\n%y = add(%x, %r) : {X}")
    append, add = module.graphs[0].nodes
    reader = Node(
        "cast", (append.operands[2],), (append.results[0].__class__("z", append.operands[2].type),)
    )
    assert ordered([append, add, reader]) == (add, reader, append)
    assert ordered([add, append]) == (add, append)


def test_two_nodes_that_overwrite_one_value_have_no_order():
    append = graph(f"%k = {APPEND}", "c=%k", "bf16[P, 4, 8]").graphs[0].nodes[0]
    other = Node(
        append.op,
        append.operands,
        (append.results[0].__class__("q", append.results[0].type),),
        append.attrs,
    )
    assert ordered([append, other]) == "k"


def test_dead_nodes_and_weights_go_and_inputs_stay():
    module = graph(f"%a = linear(%x, %w) : {X}\n%y = add(%x, %r) : {X}")
    clean = drop_dead(module.graphs[0])
    assert [n.op for n in clean.nodes] == ["add"]
    assert clean.weights == ()
    assert clean.inputs == module.graphs[0].inputs


def test_nodes_that_overwrite_are_never_merged():
    body = f"%k = {APPEND}\n%l = {APPEND}\n%y = add(%x, %r) : {X}"
    merged = merge_duplicates(graph(body).graphs[0])
    assert [n.op for n in merged.nodes] == ["mla_append", "mla_append", "add"]
