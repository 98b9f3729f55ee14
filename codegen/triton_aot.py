"""From one `@triton.jit` function to a cubin or hsaco, on a machine without a GPU.

Line information is left out, so that no path of this machine gets into the binary; the FP-fusion
flag is set, not inherited. A kernel that asks for device memory of its own is refused: the planner
would not know of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3c.artifact import ALIGN_BYTES
from k3c.codegen.index_program import parse_ttir
from k3c.codegen.object_cache import cache_dir
from k3c.targets.catalogue import Constant
from k3c.targets.target import Target

BINARY = {"cuda": "cubin", "hip": "hsaco"}
# Constants that are options of the compiler or describe arguments, not constexprs of the function.
OPTIONS = ("num_warps", "num_stages", "pdl", "max_registers")
TYPES = "types"
_POINTER_FACTS = [["tt.divisibility", 16]]
assert ALIGN_BYTES % 16 == 0, "every buffer of a plan is 16-byte aligned"


@dataclass(frozen=True)
class GpuBinary:
    """A compiled kernel.

    Attributes:
        entry: Name of the function in the binary.
        threads: Threads a block.
        shared_bytes: Dynamic shared memory a block, bytes.
        pdl: Whether it waits for its predecessor itself (programmatic dependent launch).
        code: The cubin or hsaco.
        addresses: Its address arithmetic, an `IndexProgram` as JSON.
    """

    entry: str
    threads: int
    shared_bytes: int
    pdl: bool
    code: bytes
    addresses: str

    def to_bytes(self) -> bytes:
        """Return a line of JSON, then the code."""
        facts = {k: v for k, v in asdict(self).items() if k != "code"}
        return json.dumps(facts, sort_keys=True).encode() + b"\n" + self.code

    @staticmethod
    def from_bytes(data: bytes) -> GpuBinary:
        """Return what `to_bytes` wrote."""
        head, _, code = data.partition(b"\n")
        return GpuBinary(**json.loads(head), code=code)


def compile_kernel(function: Any, constants: dict[str, Constant], target: Target) -> GpuBinary:
    """Compile a function for a target.

    Args:
        function: The `@triton.jit` function.
        constants: Its constexprs by name, the options in `OPTIONS`, and under "types" the types of
            its run-time parameters in order.
        target: A GPU.
    """
    knobs.cache.dir = str(cache_dir() / "triton")
    knobs.compilation.disable_line_info = True
    gpu = GPUTarget(target.kind, _capability(target), target.lanes)
    compiled = triton.compile(_source(function, constants), gpu, _options(constants, target))
    meta = compiled.metadata
    scratch = meta.global_scratch_size + meta.profile_scratch_size
    assert scratch == 0, f"{function.__name__} wants {scratch} bytes of scratch a block"
    assert meta.shared <= target.shared_bytes, (
        f"{meta.shared} bytes of shared memory, {target.name} has {target.shared_bytes}"
    )
    threads = meta.num_warps * target.lanes
    pdl = bool(constants.get("pdl", 0))
    addresses = parse_ttir(compiled.asm["ttir"]).to_bytes().decode()
    code = compiled.asm[BINARY[target.kind]]
    return GpuBinary(meta.name, threads, meta.shared, pdl, code, addresses)


def decode(constant: Constant) -> Any:
    """Return a constexpr: what `encode` made text of is a tuple again."""
    if isinstance(constant, str) and constant.startswith("["):
        return tuple(json.loads(constant))
    return constant


def encode(value: Any) -> Constant:
    """Return a constexpr as a constant: tuples of numbers and strings become JSON text."""
    return json.dumps(value) if isinstance(value, tuple) else value


def _source(function: Any, constants: dict[str, Constant]) -> ASTSource:
    types = str(constants[TYPES]).split()
    given = {k: decode(v) for k, v in constants.items() if k != TYPES and k not in OPTIONS}
    names = list(function.arg_names)
    runtime = [name for name in names if name not in given]
    assert len(runtime) == len(types), (
        f"{function.__name__} takes {', '.join(runtime)}; the node has {' '.join(types)}"
    )
    unknown = sorted(given.keys() - set(names))
    assert not unknown, f"{function.__name__} has no constexpr {', '.join(unknown)}"
    signature = dict(zip(runtime, types, strict=True)) | dict.fromkeys(given, "constexpr")
    aligned = {
        (names.index(name),): _POINTER_FACTS
        for name, kind in zip(runtime, types, strict=True)
        if kind.startswith("*")
    }
    ordered = {name: signature[name] for name in names}
    return ASTSource(function, ordered, given, aligned)


def _options(constants: dict[str, Constant], target: Target) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_warps": int(constants["num_warps"]),
        "num_stages": int(constants["num_stages"]),
        "enable_fp_fusion": True,
        "sanitize_overflow": False,
    }
    if target.kind != "cuda":
        return options
    if constants.get("max_registers"):
        options["maxnreg"] = int(constants["max_registers"])
    return options | {"launch_pdl": bool(constants.get("pdl", 0))}


def _capability(target: Target) -> int | str:
    return int(target.mcpu) if target.kind == "cuda" else target.mcpu
