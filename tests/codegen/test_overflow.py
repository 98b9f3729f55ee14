"""Addresses of GPU kernels: 32-bit offsets that the largest bucket would pass are refused."""

from functools import cache

import pytest

from k3c.artifact import Arg, Bucket, Buffer, Command, LayerCall, Plan
from k3c.codegen.index_program import IndexProgram, Step, parse_ttir
from k3c.codegen.index_ranges import Facts, expression, overflows
from k3c.codegen.overflow_check import LIMIT, check_overflows, launch_facts
from k3c.codegen.triton_aot import GpuBinary, compile_kernel
from k3c.errors import CodegenError
from k3c.targets.target import load_target
from tests.codegen.triton import planted

HEADS, KEY = 96, 128
WIDTH = HEADS * KEY
# 174,762 rows of 12,288 elements end at 2,147,475,456; one more row passes 2^31 - 1.
LAST = 174_762


def constant(value):
    return Step("constant", (), 32, (value,))


@cache
def program(name, types, **constexprs):
    constants = {"num_warps": 4, "num_stages": 1, "types": types, **constexprs}
    made = compile_kernel(getattr(planted, name), constants, load_target("h200"))
    kept = GpuBinary.from_bytes(made.to_bytes())
    return IndexProgram.from_bytes(kept.addresses.encode())


def facts(grid, *scalars, loaded=(0, 0), largest=1):
    return Facts((grid, 1, 1), tuple((s, s) for s in scalars), loaded, largest)


COPY = "*bf16 *bf16 i32"


@pytest.mark.parametrize(
    ("rows", "fits"), [(8192, True), (LAST, True), (LAST + 1, False), (262_144, False)]
)
def test_rows_times_heads_times_key_pass_up_to_the_last_row_that_fits(rows, fits):
    steps = program("rows_by_width", COPY, WIDTH=WIDTH, BLOCK=1 << 14)
    found = overflows(steps, facts(rows, rows))
    assert bool(found) != fits
    if not fits:
        # The first row too many passes the limit with its last columns, later ones with all.
        assert found[0].value == (rows - 1) * WIDTH + (16383 if rows == LAST + 1 else 0)
        assert f"program_id(0) * {WIDTH}" in found[0].expression


def test_a_64_bit_row_never_overflows():
    steps = program("rows_by_width_64", COPY, WIDTH=WIDTH, BLOCK=128)
    assert overflows(steps, facts(2**31 - 1, 2**31 - 1)) == []


@pytest.mark.parametrize(("stride", "fits"), [(WIDTH, True), (3 * WIDTH, False)])
def test_of_a_view_the_stride_decides_and_not_the_size(stride, fits):
    # q of a fused [T, 3 * H * K] buffer: 100,000 rows of 12,288 fit, with the fused stride not.
    steps = program("rows_by_stride", COPY + " i32", WIDTH=WIDTH, BLOCK=128)
    found = overflows(steps, facts(100_000, 100_000, stride))
    assert bool(found) != fits
    if not fits:
        assert found[0].value == 99_999 * stride


@pytest.mark.parametrize(("stride", "tokens"), [(16384, 131_071), (8192, 262_143)])
def test_a_loaded_start_times_a_stride_passes_below_the_published_limits(stride, tokens):
    steps = program("loaded_starts", "*bf16 *i32 *bf16", WIDTH=stride, BLOCK=128)
    below = facts(64, loaded=(0, tokens, 0), largest=2**40)
    above = facts(64, loaded=(0, tokens + 1, 0), largest=1)
    assert overflows(steps, below) == []
    assert overflows(steps, above)[0].value == (tokens + 1) * stride == 2**31


@pytest.mark.parametrize(("rows", "fits"), [(LAST, True), (LAST + 2, False)])
def test_the_variable_of_a_loop_runs_to_its_end(rows, fits):
    steps = program("rows_in_a_loop", "*fp32 *fp32 i32", WIDTH=WIDTH, BLOCK=128)
    assert bool(overflows(steps, facts(1, rows))) != fits


def test_an_expression_tree_gives_exact_bounds_and_reads_as_a_formula():
    row, width, column = (
        Step("program_id", (), 32, (0,)),
        constant(1000),
        Step("range", (), 32, (0, 63)),
    )
    steps = (row, width, column, Step("muli", (0, 1), 32), Step("addi", (3, 2), 32))
    tree = IndexProgram("f", steps, (4,))
    assert expression(tree, 4) == "((program_id(0) * 1000) + (0..63))"
    blocks = LIMIT // 1000 + 1  # the last one starts at 2,147,483,000
    assert overflows(tree, facts(blocks)) == []
    found = overflows(tree, facts(blocks + 1))
    assert [o.value for o in found] == [blocks * 1000, LIMIT + 63]
    assert (LIMIT // 1000) * 1000 + 63 <= LIMIT < blocks * 1000


def test_a_choice_below_a_limit_is_below_it():
    row, rows, width = (
        Step("program_id", (), 32, (0,)),
        Step("parameter", (), 32, (0,)),
        constant(2**20),
    )
    steps = (row, rows, Step("cmpi", (0, 1), 1, (), "slt"), constant(0),
             Step("select", (2, 0, 3), 32), width, Step("muli", (4, 5), 32))  # fmt: skip
    tree = IndexProgram("f", steps, (6,))
    assert overflows(tree, facts(10_000, 2048)) == []
    assert overflows(tree, facts(10_000, 2049))[0].value == 2048 * 2**20


def test_only_what_addresses_are_made_of_is_kept():
    text = """
  tt.func public @f(%x: !tt.ptr<f32> loc("x"), %n: i32 loc("n")) {
    %c7_i32 = arith.constant 7 : i32 loc(#loc)
    %0 = arith.muli %n, %n : i32 loc(#loc)
    %1 = arith.muli %n, %c7_i32 : i32 loc(#loc)
    %2 = tt.addptr %x, %1 : !tt.ptr<f32>, i32 loc(#loc)
    tt.store %2, %0 : !tt.ptr<f32>
  }
"""
    found = parse_ttir(text)
    assert [step.op for step in found.steps] == ["parameter", "constant", "muli"]
    assert found.kernel == "f"


def plan_of(rows):
    buffers = tuple(Buffer(n, 64, 64, "arena", "g", 0, 1, 0) for n in ("g.x", "g.y"))
    args = (Arg(buffer="g.x"), Arg(buffer="g.y"), Arg(value=rows))
    command = Command("launch", "k", args, ("g.x",), ("g.y",), "copy", grid=(rows, 1, 1))
    bucket = Bucket(f"prefill.t{rows}", "prefill", {"T": rows})
    calls = (LayerCall("g", 0, {}, {}),)
    return Plan(bucket, 0, {}, 0, buffers, {"g": (command,)}, calls, (), "", {})


def test_a_plan_is_refused_with_the_kernel_the_expression_and_both_numbers():
    steps = program("rows_by_width", COPY, WIDTH=WIDTH, BLOCK=128)
    check_overflows([plan_of(8192), plan_of(LAST)], {"k": steps})
    with pytest.raises(CodegenError) as caught:
        check_overflows([plan_of(8192), plan_of(262_144)], {"k": steps})
    text = caught.value.message
    for part in (
        "kernel k",
        f"program_id(0) * {WIDTH}",
        "3,221,213,184",
        "2,147,483,647",
        "64-bit",
    ):
        assert part in text, text


def test_the_facts_of_all_launches_of_a_kernel_are_joined():
    found = launch_facts([plan_of(16), plan_of(8192), plan_of(64)])["k"]
    assert found.grid == (8192, 1, 1)
    assert found.scalars == ((16, 8192),)
