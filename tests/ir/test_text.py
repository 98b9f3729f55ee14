"""Printing and parsing IR text."""

import re

import pytest

from k3c.errors import ParseError
from k3c.ir.graph import Call, LayerAttr, Shard
from k3c.ir.text import parse, show
from tests.support.random_graph import RandomGraph

TEXT = """k3ir 1
level kernel
mesh (ep=8, tp=2)
dim T in [8, 512]
dim Q in [1, ?]

graph @latent_moe(
  carry %x: bf16[T, 7168] @ (ep, -),
  state %s: f32[4]
) -> bf16[T, 896] @ (ep, -), f32[4] {
  weight %w: bf16[896, 7168] as panel.v8.512-384s from "layers.*.gate.weight", "a \\"b\\""
  weight %w13: mxfp4[896, 6144, 3584] as mx32_sm90 @ (ep, -, -) from "layers.*.w13"
  %y, %z = linear(%x, %w) {beta: 4.0, epilogues: (none, situ), eps: 1e-06, linear_beta: none, neg: -1, ok: true, rows: layer.rows, sizes: (1, 2), text: "a b", word: "true"} : bf16[T, 896] @ (ep, -), f32[T]  # k3c/model/x.py:12
  return x=%y, s=%s
}

schedule {
  latent_moe -1 {}
  latent_moe 3 {commit_row: -1, rows: 1}
}
"""  # noqa: E501


def test_text_with_every_construct_parses_and_prints_unchanged():
    module = parse(TEXT)
    assert show(module) == TEXT
    assert parse(show(module)) == module


def test_parsed_values_have_the_types_that_the_text_says():
    module = parse(TEXT)
    node = module.graphs[0].nodes[0]
    assert node.attrs["rows"] == LayerAttr("rows")
    assert node.attrs["word"] == "true"
    assert node.attrs["ok"] is True
    assert (node.attrs["neg"], type(node.attrs["beta"])) == (-1, float)
    assert node.loc == "k3c/model/x.py:12"
    assert module.schedule[1] == Call("latent_moe", 3, {"commit_row": -1, "rows": 1})
    assert module.graphs[0].weights[0].sources == ("layers.*.gate.weight", 'a "b"')
    assert module.dims[1].hi is None


def test_long_heads_stand_one_parameter_a_line():
    params = ", ".join(f"io %input_{i}: f32[4]" for i in range(8))
    module = parse(f"k3ir 1\nlevel model\ngraph @g({params}) {{ return }}")
    text = show(module)
    assert "\ngraph @g(\n  io %input_0: f32[4],\n" in text
    assert parse(text) == module


def test_comments_and_white_space_do_not_matter():
    loose = TEXT.replace("\n\n", "\n# a remark\n\n").replace("  return", "  # another\n  return")
    assert show(parse(loose)) == TEXT


@pytest.mark.parametrize("seed", range(30))
def test_random_modules_round_trip(seed):
    module = RandomGraph(seed).build(20)
    assert parse(show(module)) == module


@pytest.mark.parametrize(
    ("old", "new", "what", "line", "shown"),
    [
        ("k3ir 1", "k3ir 2", "found '2', expected '1'", 1, "2"),
        ("level kernel", "level grid", "found 'grid', expected model or mesh or kernel", 2, "grid"),
        ("bf16[T, 7168]", "bf16[U, 7168]", "dimension U is unknown", 8, "U"),
        ("bf16[T, 7168]", "bf17[T, 7168]", "found 'bf17', expected f64 or f32", 8, "bf17"),
        ("@ (ep, -),", "@ (ep),", "1 axes for 2 dimensions", 8, "bf16[T, 7168]"),
        ("(ep, -, -)", "(dp, -, -)", "mesh axis dp is unknown", 12, "dp"),
        ("mxfp4[896,", "mxfp4[897,", "897 does not divide by mesh axis ep=8", 12, "mxfp4"),
        ("linear(%x, %w)", "linear(%x %w)", "found '%', expected ','", 13, "%w)"),
        ("linear(%x, %w)", "linear(%v, %w)", "%v is not defined", 13, "%v"),
        ("%y, %z =", "%x, %z =", "%x is defined twice", 13, "%x"),
        ("%y, %z =", "%y =", "2 types for 1 results", 13, "%y"),
        ("neg: -1", "beta: -1", "attribute beta twice", 13, "beta: -1"),
        ("return x=%y, s=%s", "return x=%y", "the head gives", 10, "-> bf16"),
        ("from \"layers.*.w13\"", "from layers", "expected a string", 12, "layers"),
        ("commit_row: -1", "commit_row: a", "a layer attribute is an integer", 19, "a, rows"),
        ("dim Q in", "dim T in", "dimension T twice", 5, "T in"),
    ],
)  # fmt: skip
def test_a_parse_error_shows_line_caret_and_what_was_expected(old, new, what, line, shown):
    with pytest.raises(ParseError) as caught:
        parse(TEXT.replace(old, new, 1), "some.k3")
    error = caught.value
    assert what in error.what
    assert error.where == f"some.k3, line {line}"
    assert error.hint
    snippet, caret = error.message.split("\n")[-2:]
    assert snippet[caret.index("^") :].startswith(shown)


def test_text_that_ends_early_says_so():
    with pytest.raises(ParseError, match="found the end of the text, expected 'return'"):
        parse(TEXT[: TEXT.index("weight")])


SHARDED = """k3ir 1
level mesh
mesh (tp=4, ep=4)
dim T in [1, 8]

graph @block(io %x: bf16[T, 32]) -> bf16[T, 12] {
  weight %w: bf16[12, 32] from "layers.*.q.weight" @ (tp*8, -), "layers.*.a.weight"
  weight %e: mxfp4[4, 8, 32] from "layers.*.experts.*.w1" @ (ep*4, -, -)
  %y = linear(%x, %w) : bf16[T, 12]
  return y=%y
}

schedule {
  block 3 {first_expert: ep*4, rows: 1}
}
"""


def test_parts_of_sources_and_attributes_of_ranks_are_printed_as_parsed():
    module = parse(SHARDED)
    assert show(module) == SHARDED
    weight, experts = module.graphs[0].weights
    assert weight.shards == (Shard("tp", 0, 8), None)
    assert experts.shards == (Shard("ep", 0, 4),)
    assert module.schedule[0].rank_attrs == {"first_expert": ("ep", 4)}
    assert module.schedule[0].at({"tp": 1, "ep": 3}) == {"first_expert": 12, "rows": 1}


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("(tp*8, -)", "(tp*8)", "1 of 2 dimensions sharded"),
        ("(tp*8, -)", "(-, -)", "0 of 2 dimensions sharded"),
        ("(tp*8, -)", "(tp*8, tp*32)", "2 of 2 dimensions sharded"),
        ("(tp*8, -)", "(dp*8, -)", "mesh axis dp is unknown"),
        ("(tp*8, -)", "(tp, -)", "found ',', expected '*'"),
        ("ep*4, rows", "dp*4, rows", "mesh axis dp is unknown"),
        ("ep*4, rows: 1", "ep*4, first_expert: 1", "attribute first_expert twice"),
    ],
)
def test_a_wrong_part_is_a_parse_error(old, new, what):
    with pytest.raises(ParseError, match=re.escape(what)):
        parse(SHARDED.replace(old, new, 1))
