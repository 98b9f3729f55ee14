"""Commands that share bytes must be in a certain order, whatever buffers they name."""

from dataclasses import replace

from k3c.artifact import Arg, Bucket, Buffer, Command, LayerCall, Plan
from k3c.plan_check import check

SIZES = {"x": (0, 64), "y": (64, 64), "z": (128, 64), "over_y": (64, 128)}


def command(reads, writes, after=(), **changes):
    args = tuple(Arg(buffer=name) for name in (*reads, *writes))
    return replace(
        Command("launch", "k", args, tuple(reads), tuple(writes), "op", after=after), **changes
    )


def findings(*commands):
    """Broken order rules of a plan of one graph; all its buffers are a step's."""
    buffers = tuple(
        Buffer(name, nbytes, 64, "arena", "", 0, len(commands), offset)
        for name, (offset, nbytes) in SIZES.items()
    )
    plan = Plan(
        Bucket("decode.b1", "decode", {}),
        0,
        {"arena": 192},
        192,
        buffers,
        {"g": commands},
        (LayerCall("g", 0, {}, {}),),
        (),
        "",
        {},
    )
    return [f.message for f in check(plan) if f.rule == "order"]


def test_a_chain_is_in_order():
    assert not findings(command("x", "y"), command("y", "z", (0,)), command("z", "x", (1,)))


def test_a_path_over_other_commands_is_an_order():
    first, middle = command("x", "y"), command("z", "x", (0,))
    assert not findings(first, middle, command("y", "z", (1,)))


def test_commands_that_only_read_the_same_bytes_need_no_order():
    assert not findings(command("x", "y"), command("x", "z"))


def test_a_reader_that_does_not_wait_for_the_writer_is_found():
    (found,) = findings(command("x", "y"), command("y", "z"))
    assert found == "g[0] op and [1] op are in no order, and share y"


def test_a_writer_that_does_not_wait_for_a_reader_or_a_writer_is_found():
    assert len(findings(command("x", "y"), command("z", "x"))) == 1
    assert len(findings(command("x", "y"), command("z", "y"))) == 1


def test_two_buffers_over_the_same_bytes_conflict():
    (found,) = findings(command("x", ["y"]), command("x", ["over_y"]))
    assert found.endswith("share byte 64 of arena (y, over_y)")


def test_the_branches_of_a_fork_are_not_ordered_by_their_join():
    root, left = command("x", "y"), command("y", "z", (0,))
    right = command("y", "z", (0,))
    assert len(findings(root, left, right, command("z", "x", (1, 2)))) == 1


def test_waiting_for_itself_a_later_or_a_missing_command_is_refused():
    for after in ((0,), (1,), (-1,), (7,)):
        (found,) = findings(command("x", "y", after), command("y", "z", (0,)))
        assert f"waits for command {after[0]}, which is not an earlier one" in found


def collective_findings(kernel, *numbers, to="over_y", source="x"):
    args = (Arg(buffer=to), Arg(buffer=source), *(Arg(value=n) for n in numbers))
    it = command(source, [to], kind="collective", kernel=kernel, args=args)
    buffers = tuple(
        Buffer(name, nbytes, 64, "arena", "", 0, 1, offset)
        for name, (offset, nbytes) in SIZES.items()
    )
    bucket = Bucket("decode.b1", "decode", {})
    calls = (LayerCall("g", 0, {}, {}),)
    plan = Plan(bucket, 0, {"arena": 192}, 192, buffers, {"g": (it,)}, calls, (), "", {})
    return [f.rule for f in check(plan) if f.rule == "collective"]


def test_a_collective_needs_a_known_name_room_and_a_rank():
    assert not collective_findings("all_gather", 64, 2, 1)
    assert not collective_findings("all_reduce", 64, 8, 0)
    assert not collective_findings("all_reduce", 64, 8, 0, to="x")
    assert not collective_findings("dispatch_tokens", 64, 2, 1)
    assert collective_findings("dispatch_tokens", 64, 4, 1), "the rows of four ranks are 256 bytes"
    assert not collective_findings("combine_tokens", 32, 2, 1)
    assert collective_findings("combine_tokens", 64, 2, 1), "the source has one rank's 64 bytes"
    assert collective_findings("all_gather", 64, 4, 1), "four parts of 64 bytes are 256"
    assert collective_findings("all_reduce", 128, 2, 1), "the source has 64 bytes"
    assert collective_findings("all_reduce", 64, 2, 2), "rank 2 of 2"
    assert collective_findings("all_swap", 64, 2, 1)
    assert collective_findings("all_reduce", 64, 2)
