"""Refuses a plan whose kernels could compute a wrong address: 32-bit offsets at its largest sizes.

Runs on every compile for a GPU: the address arithmetic of a kernel is kept beside its code, and the
facts of all its launches are joined, so that each kernel is walked once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from k3c.artifact import Arg, Command, LayerCall, Plan
from k3c.codegen.index_program import IndexProgram
from k3c.codegen.index_ranges import Facts, Interval, overflows
from k3c.errors import CodegenError

LIMIT = 2**31 - 1


def check_overflows(plans: Sequence[Plan], programs: Mapping[str, IndexProgram]) -> None:
    """Check the address arithmetic of every kernel at all its launches.

    Args:
        plans: Of all buckets.
        programs: Address arithmetic by kernel symbol.

    Raises:
        CodegenError: An offset can pass 2^31 - 1; the message has the kernel, the expression and
            both numbers.
    """
    for symbol, facts in sorted(launch_facts(plans).items()):
        found = overflows(programs[symbol], facts)
        if found:
            first, more = found[0], len(found) - 1
            what = f"kernel {symbol}: {first.expression} can be {first.value:,} elements"
            what += f", a 32-bit offset ends at {LIMIT:,}" + (f" (and {more} more)" if more else "")
            where = f"grid {'x'.join(map(str, facts.grid))}, arguments {list(facts.scalars)}"
            hint = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len; the kernel"
            raise CodegenError(what, where, f"{hint} needs a 64-bit index there")


def launch_facts(plans: Iterable[Plan]) -> dict[str, Facts]:
    """Return what all launches of each kernel have in common, by symbol."""
    found: dict[str, Facts] = {}
    for plan in plans:
        bounds = _Bounds.of(plan)
        for graph, commands in plan.commands.items():
            calls = [call for call in plan.calls if call.graph == graph]
            for command in (c for c in commands if c.kind == "launch"):
                facts = bounds.facts(command, calls)
                known = found.get(command.kernel)
                found[command.kernel] = facts if known is None else known.joined(facts)
    return found


@dataclass(frozen=True)
class _Bounds:
    """The largest index that the elements of each buffer of a plan hold."""

    fields: Mapping[str, int]
    scratch: int
    largest: int

    @staticmethod
    def of(plan: Plan) -> _Bounds:
        """Derive the bounds from the bucket: what the runtime fills in, and what kernels make."""
        dims = plan.bucket.dims
        tokens, pages, slots = (dims.get(name, 1) for name in ("T", "P", "S"))
        positions = dims.get("M", 1) * _PAGE_TOKENS
        # What dispatch sorts are the choices of all tokens; what routing makes are experts.
        scratch = max(tokens * _groups(plan) * _CHOICES, _EXPERTS)
        fields = {
            **dict.fromkeys(("seg_start", "seg_tokens", "sample_rows"), tokens),
            **dict.fromkeys(("context", "position"), positions),
            "slots": slots,
            "page_table": pages,
        }
        attrs = (value for call in plan.calls for value in call.attrs.values())
        widest = max((size for field in plan.io for size in field.shape), default=1)
        largest = max(tokens, pages, slots, positions, scratch, widest, _VOCABULARY, *attrs)
        return _Bounds(fields, scratch, largest)

    def facts(self, command: Command, calls: Sequence[LayerCall]) -> Facts:
        """Return what is known of a launch."""
        scalars = tuple(_interval(a, calls, self.largest) for a in command.args if not a.buffer)
        buffers = (a.buffer for a in command.args if a.buffer)
        return Facts(command.grid, scalars, tuple(map(self._held, buffers)), self.largest)

    def _held(self, buffer: str) -> int:
        # Scratch is named by its graph; a carry holds no index.
        return self.scratch if "." in buffer else self.fields.get(buffer, self.largest)


# More than any model of the family has: positions of a page, experts of a token, experts, tokens
# of the vocabulary.
_PAGE_TOKENS = 64
_CHOICES = 32
_EXPERTS = 4096
_VOCABULARY = 1 << 18


def _groups(plan: Plan) -> int:
    """Return how many data-parallel ranks send their tokens to the experts of this one."""
    commands = (c for listed in plan.commands.values() for c in listed)
    return max(
        (
            c.args[3].value
            for c in commands
            if c.kernel.startswith("dispatch_tokens") and c.kind == "collective"
        ),
        default=1,
    )


def _interval(arg: Arg, calls: Sequence[LayerCall], largest: int) -> Interval:
    if not arg.layer_attr:
        return arg.value, arg.value
    # What depends on the rank is a first row or a first expert: an index like any other.
    values = [call.attrs.get(arg.layer_attr, largest) for call in calls]
    return min(values, default=0), max(values, default=largest)
