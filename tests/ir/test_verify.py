"""Every rule of the IR: what breaks it, and what the error shows."""

import pytest

from k3c.errors import VerifyError
from k3c.ir.text import parse, show
from k3c.ir.verify import layer_attrs, verify

TEXT = """k3ir 1
level model
mesh (ep=2)
dim T in [1, 64]

graph @g(
  carry %prefix: bf16[T, 32],
  carry %delta: bf16[T, 32],
  carry %bank: bf16[3, T, 32]
) -> bf16[T, 32], bf16[T, 8] {
  weight %w_res: f32[32] from "layers.*.res_norm"
  weight %w_proj: f32[1, 32] from "layers.*.res_proj"
  weight %w: bf16[8, 32] from "layers.*.w"
  %p, %y, %c = attn_res_norm(%prefix, %delta, %bank, %w_res, %w_proj, %w_res) {commit_row: -1, eps: 1e-05, res_eps: 1e-05, restart: layer.restart, rows: layer.rows} : bf16[T, 32], bf16[T, 32], bf16[3, T, 32]
  %a = linear(%y, %w) : bf16[T, 8]
  %b = add(%a, %a) : bf16[T, 8]
  return prefix=%p, b=%b
}

schedule {
  g 0 {restart: 1, rows: 0}
}
"""  # noqa: E501


def test_a_valid_module_passes_and_is_canonical_text():
    module = parse(TEXT)
    assert show(module) == TEXT
    verify(module)
    assert layer_attrs(module.graphs[0]) == ("restart", "rows")


@pytest.mark.parametrize(
    ("old", "new", "what", "line", "shown"),
    [
        ("= linear(", "= liner(", "op liner is unknown", 15, "liner"),
        ("(%y, %w) :", "(%y) :", "1 operands, expected 2 to 3: x, w, addend", 15, "linear"),
        ("(%y, %w) :", "(%y, %w) {beta: 1.0, gamma: 2.0} :", "attribute gamma is unknown", 15,
         "linear"),
        ("(%y, %w) :", "(%y, %w) {beta: 1} :", "attribute beta: 1 is not of kind float", 15,
         "linear"),
        ("eps: 1e-05, res_eps", "res_eps", "attribute eps is missing", 14, "attn_res_norm"),
        ("linear(%y, %w)", "linear(%w, %y)", "%a is bf16[T, 8], expected [8, N]", 15, ""),
        (": bf16[T, 8]\n  %b", ": bf16[T, 9]\n  %b", "weight rows", 15, "linear"),
        ("%b = add(%a, %a) : bf16[T, 8]", "%b = add(%a, %y) : bf16[T, 8]", "its shape is not", 16,
         "%y"),
        ("%w: bf16[8, 32]", "%w: bf16[8, 31]", "K is 32, not 31", 15, "%w"),
        ("%w: bf16", "%w: mxfp4", "W is a float dtype", 15, "%w"),
        ("linear(%y, %w)", "linear(%prefix, %w)", "was overwritten in place", 15, "%prefix"),
        ("(%prefix, %delta, %bank", "(%prefix, %prefix, %bank", "reads it elsewhere", 14,
         "%prefix"),
        ("%prefix: bf16[T, 32]", "%prefix: bf16[T, 32] @ (ep, -)",
         "T is sharded over ep elsewhere, over no axis here", 14, "%delta"),
    ],
)  # fmt: skip
def test_a_wrong_node_is_shown_with_a_caret(old, new, what, line, shown):
    module = parse(TEXT.replace(old, new, 1))
    with pytest.raises(VerifyError) as caught:
        verify(module)
    error = caught.value
    assert what in error.what
    assert error.where == f"graph @g, line {line}"
    snippet, caret = error.message.split("\n")[-2:]
    assert snippet.strip() == show(module).split("\n")[line - 1].strip()
    assert snippet[caret.index("^") :].startswith(shown)


@pytest.mark.parametrize(
    ("old", "new", "what", "where"),
    [
        ("[1, 64]", "[1, ?]", "dimension T is unbounded", "dim T"),
        ("[1, 64]", "[9, 3]", "dimension T has the empty range [9, 3]", "dim T"),
        ("rows: 0}", "}", "layer attribute rows of graph g is missing", "schedule entry 0: g 0"),
        ("  g 0", "  h 0", "graph h is unknown", "schedule entry 0: h 0"),
        ("b=%b", "delta=%b", "carry delta goes in as bf16[T, 32] and out as bf16[T, 8]",
         "graph @g, return delta=%b"),
        ("b=%b", "prefix=%b", "prefix is returned twice", "graph @g, return prefix=%p"),
        ("carry %delta", "state %delta", "state delta is not returned", "graph @g"),
        ("prefix=%p", "prefix=%prefix", "%prefix is overwritten",
         "graph @g, return prefix=%prefix"),
        ("%prefix: bf16[T, 32]", "%prefix: bf16[T, 32] as packed",
         "an input has layout packed", "graph @g, %prefix"),
        ("%w_res: f32[32]", "%w_res: f32[0]", "f32[0] has an empty dimension", "graph @g, %w_res"),
    ],
)  # fmt: skip
def test_a_wrong_module_is_named(old, new, what, where):
    text = TEXT.replace(old, new, 1).replace(", }", "}")
    with pytest.raises(VerifyError) as caught:
        verify(parse(text))
    assert caught.value.what == what
    assert caught.value.where == where
    assert caught.value.hint


def test_a_model_level_op_has_no_place_at_kernel_level():
    text = """k3ir 1
level kernel
dim T in [1, 8]

graph @g(io %x: bf16[T, 8]) -> f32[T, 8] {
  %y = l2_norm(%x) {eps: 1e-06, heads: 2, scale: 1.0} : f32[T, 8]
  return y=%y
}
"""
    verify(parse(text.replace("level kernel", "level model")))
    with pytest.raises(VerifyError, match="op l2_norm is not a kernel-level op"):
        verify(parse(text))


def test_a_carry_has_one_type_in_all_graphs():
    text = """k3ir 1
level model
dim T in [1, 8]

graph @prologue(io %ids: i32[T]) -> f32[T, 8] {
  weight %w: bf16[9, 8] from "embed"
  %e = embed(%ids, %w) : f32[T, 8]
  return pending=%e
}

graph @head(carry %pending: bf16[T, 8]) -> bf16[T, 8] {
  return out=%pending
}
"""
    with pytest.raises(VerifyError) as caught:
        verify(parse(text))
    assert caught.value.what == "carry pending is f32[T, 8] here and bf16[T, 8] in graph @head"
    assert caught.value.where == "graph @prologue"


SHARDED = """k3ir 1
level mesh
mesh (tp=4, ep=4)
dim T in [1, 8]

graph @block(io %x: bf16[T, 32]) -> bf16[T, 12], bf16[4, T, 12] {
  weight %w: bf16[12, 32] from "layers.*.q.weight" @ (tp*8, -), "layers.*.a.weight"
  %y = linear(%x, %w) : bf16[T, 12]
  %s = all_reduce(%y) {axis: tp} : bf16[T, 12]
  %g = all_gather(%s) {axis: tp} : bf16[4, T, 12]
  return s=%s, g=%g
}

schedule {
  block 3 {first_expert: ep*4}
}
"""


def test_a_sharded_module_passes():
    verify(parse(SHARDED))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("(tp*8, -)", "(tp*13, -)", "a part of 13 in dimension 0"),
        ("(tp*8, -)", "(-, tp*8)", "a part of 8 in dimension 1"),
        ("all_reduce(%y) {axis: tp}", "all_reduce(%y) {axis: dp}", "mesh axis dp is unknown"),
        ("all_reduce(%y) {axis: tp}", "all_reduce(%y, %y) {axis: tp}", "1 results"),
        ("bf16[4, T, 12]", "bf16[4, T, 8]", "expected [ranks, ...]"),
        ("bf16[4, T, 12]", "bf16[3, T, 12]", "gathers 4 ranks"),
    ],
)
def test_a_broken_rule_of_the_mesh_is_found(old, new, what):
    with pytest.raises(VerifyError) as caught:
        verify(parse(SHARDED.replace(old, new)))
    assert what in caught.value.what
