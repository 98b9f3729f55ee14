"""Keys, the cache of compiled kernels, linking, entry functions, and failures of each."""

import ctypes
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tvm.script import tirx as T

from k3c.artifact import SPACES, Arg, Bucket, Buffer, Command, LayerCall, Plan
from k3c.codegen import object_cache
from k3c.codegen.kernel_build import build_kernel
from k3c.codegen.kernel_key import KernelRequest, kernel_key, kernel_symbol
from k3c.codegen.templates.tvm import CPU_TEMPLATES
from k3c.codegen.templates.tvm.grouped_gemm import GROUPED_DECODE, GROUPED_PREFILL
from k3c.codegen.templates.tvm.linear import LINEAR_DECODE
from k3c.codegen.templates.tvm.linear_gemm import LINEAR_PREFILL
from k3c.codegen.tvm_build import build_library
from k3c.errors import CodegenError, DeviceFault
from k3c.ir.graph import Node
from k3c.targets.target import Target, load_target
from tests.support.kernel_runner import AnyValue, GuardedBuffer, node, open_library

AVX2, AVX512 = load_target("cpu-avx2"), load_target("cpu-avx512")


@dataclass(frozen=True)
class Scale:
    """y = x * factor for n floats; fails where the factor is 0."""

    name: str = "scale"

    def build(self, constants: Any, target: Target) -> Any:
        n = constants["n"]

        @T.prim_func
        def kernel(x: T.handle, y: T.handle, factor: T.int64):
            T.func_attr({"tirx.noalias": True})
            source = T.decl_buffer((n,), "float32", data=x)
            result = T.decl_buffer((n,), "float32", data=y)
            assert factor != T.int64(0), "factor is 0"
            for i in range(n):
                result[i] = source[i] * T.Cast("float32", factor)

        return kernel


@dataclass(frozen=True)
class Broken(Scale):
    """A template whose function cannot be built."""

    name: str = "broken"

    def build(self, constants: Any, target: Target) -> Any:
        raise ValueError("no such intrinsic")


SCALE = KernelRequest(Scale(), {"n": 16})
SYMBOL = kernel_symbol(SCALE, AVX2)


def plan_of(factors: tuple[int, ...], entry: str = "decode_b1") -> Plan:
    """A plan: io b[l] = arena a * factor[l] for each layer l, then arena a = b[l]."""
    buffers = (
        Buffer("a", 64, 64, "arena", "g", 0, 2, 64),
        Buffer("b", 64, 64, "io", "g", 0, 2, 64, per_layer=True),
    )
    forth = Command(
        "launch", SYMBOL, (Arg("a"), Arg("b"), Arg(layer_attr="factor")), ("a",), ("b",), "forth"
    )
    back = Command("launch", SYMBOL, (Arg("b"), Arg("a"), Arg(value=1)), ("b",), ("a",), "back")
    calls = tuple(
        LayerCall("g", i, {"io": 64 * i}, {"factor": f, "unused": 1}) for i, f in enumerate(factors)
    )
    bucket = Bucket("decode.b1", "decode", {"T": 1})
    return Plan(bucket, 0, {}, 0, buffers, {"g": (forth, back)}, calls, (), entry, {})


def run_entry(library: Any, entry: str) -> tuple[int, GuardedBuffer, GuardedBuffer]:
    """Run an entry on five spaces; return its status, the arena and io."""
    spaces = {name: GuardedBuffer(512) for name in SPACES}
    spaces["arena"].data[64:128].view(np.float32)[:] = np.arange(16)
    words = [AnyValue(4, 0, spaces[name].address) for name in SPACES]
    function = getattr(library, f"__tvm_ffi_{entry}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    status = function(None, (AnyValue * 5)(*words), 5, ctypes.byref(AnyValue()))
    for name, space in spaces.items():
        space.check(name)
    return status, spaces["arena"], spaces["io"]


def test_an_entry_runs_every_command_of_every_layer_in_order(tmp_path: Path) -> None:
    build_library([SCALE], [plan_of((3, 5))], AVX2, tmp_path / "kernels.so")
    status, arena, io = run_entry(open_library(tmp_path / "kernels.so"), "decode_b1")
    assert status == 0
    assert (io.data[64:128].view(np.float32) == 3 * np.arange(16)).all()
    assert (io.data[128:192].view(np.float32) == 15 * np.arange(16)).all()
    assert (arena.data[64:128].view(np.float32) == 15 * np.arange(16)).all()


def test_a_failing_kernel_ends_the_step_with_its_status(tmp_path: Path) -> None:
    build_library([SCALE], [plan_of((3, 0, 5))], AVX2, tmp_path / "kernels.so")
    status, arena, _ = run_entry(open_library(tmp_path / "kernels.so"), "decode_b1")
    assert status != 0
    assert (arena.data[64:128].view(np.float32) == 3 * np.arange(16)).all(), "the step went on"


def test_two_buckets_stand_in_one_library(tmp_path: Path) -> None:
    plans = [plan_of((2,), "decode_b1"), plan_of((7,), "decode_b2")]
    build_library([SCALE, SCALE], plans, AVX2, tmp_path / "kernels.so")
    library = open_library(tmp_path / "kernels.so")
    for entry, factor in (("decode_b1", 2), ("decode_b2", 7)):
        _, _, io = run_entry(library, entry)
        assert (io.data[64:128].view(np.float32) == factor * np.arange(16)).all()


def test_two_builds_are_byte_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path / name))
        (tmp_path / f"at-{name}").mkdir()
        path = tmp_path / f"at-{name}" / "kernels.so"
        kernels = build_library([SCALE], [plan_of((3, 5))], AVX2, path)
        made.append((path.read_bytes(), kernels))
    assert made[0] == made[1]


def test_bf16_and_f32_of_one_kernel_have_two_keys_and_two_symbols() -> None:
    kernels = [KernelRequest(LINEAR_PREFILL, constants_of(d, AVX2)) for d in ("bf16", "f32")]
    keys, symbols = ({f(k, AVX2) for k in kernels} for f in (kernel_key, kernel_symbol))
    assert len(keys) == len(symbols) == 2
    assert all(symbol.startswith("linear_prefill_") for symbol in symbols)


def test_constants_target_and_source_are_part_of_the_key() -> None:
    constants = constants_of("bf16", AVX2)
    prefill = KernelRequest(LINEAR_PREFILL, constants)
    keys = {
        kernel_key(prefill, AVX2),
        kernel_key(prefill, AVX512),
        kernel_key(prefill, replace(AVX2, features=("avx2",))),
        kernel_key(KernelRequest(LINEAR_PREFILL, {**constants, "inner": 97}), AVX2),
        kernel_key(KernelRequest(LINEAR_DECODE, constants), AVX2),
        kernel_key(KernelRequest(GROUPED_PREFILL, constants), AVX2),
        kernel_key(KernelRequest(LINEAR_PREFILL, constants, "merge"), AVX2),
    }
    assert len(keys) == 7
    # Rates are for estimates; they do not change the code.
    assert kernel_key(prefill, replace(AVX2, bandwidth_gbs=1.0)) in keys


def test_a_damaged_cache_entry_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path))
    built = build_kernel(SCALE, AVX2)
    (entry,) = tmp_path.rglob("*.kernel")
    for damage in (b"", entry.read_bytes()[:-1], entry.read_bytes()[:-1] + b"\1"):
        entry.write_bytes(damage)
        assert object_cache.load(entry.stem) is None
        assert build_kernel(SCALE, AVX2) == built
        assert object_cache.load(entry.stem) == built


def test_a_build_killed_while_it_writes_leaves_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import os, signal
from k3c.codegen import object_cache
class Dying:
    def __init__(self, handle, mode): self.handle = handle
    def __enter__(self): return self
    def __exit__(self, *args): return False
    def write(self, data):
        os.write(self.handle, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
os.fdopen = Dying
object_cache.store("ab" * 32, b"x" * 1000)
"""
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -9
    assert object_cache.load("ab" * 32) is None
    object_cache.store("ab" * 32, b"whole")
    assert object_cache.load("ab" * 32) == b"whole"


def test_a_cache_that_cannot_be_written_does_not_stop_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path / "file"))
    assert build_kernel(SCALE, AVX2)


def test_a_template_that_does_not_compile_is_named_with_its_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path))
    with pytest.raises(CodegenError) as raised:
        build_kernel(KernelRequest(Broken(), {"n": 16}), AVX2)
    assert "template broken does not compile: no such intrinsic" in str(raised.value)
    assert "n=16" in str(raised.value)
    assert not list(tmp_path.rglob("*.kernel"))


def test_a_missing_linker_is_an_environment_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_kernel(SCALE, AVX2)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceFault) as raised:
        build_library([SCALE], [], AVX2, tmp_path / "kernels.so")
    assert "g++" in str(raised.value)
    assert "install" in raised.value.hint


def test_template_names_are_unique_and_say_their_reference() -> None:
    from k3c.export.ops import REFERENCE

    assert len({t.name for t in CPU_TEMPLATES}) == len(CPU_TEMPLATES)
    assert [t.name for t in CPU_TEMPLATES if t.reference not in REFERENCE] == []


@pytest.mark.parametrize(
    "template", [LINEAR_DECODE, LINEAR_PREFILL, GROUPED_DECODE, GROUPED_PREFILL]
)
def test_gemm_kernels_use_wide_registers_and_no_heap(template: Any, tmp_path: Path) -> None:
    n = grouped_node() if template.op == "grouped_gemm" else linear_node("bf16")
    for target, register in ((AVX2, "%ymm"), (AVX512, "%zmm")):
        request = KernelRequest(template, template.constants(n, target))
        path = tmp_path / f"{target.name}.o"
        path.write_bytes(build_kernel(request, target))
        code = subprocess.check_output(["objdump", "-d", str(path)], text=True)
        products = [line for line in code.splitlines() if "vfmadd" in line and register in line]
        assert len(products) > 8, f"{target.name}: {len(products)} FMAs on {register}"
        # A buffer that does not stay in registers becomes a call of the workspace allocator.
        assert "AllocWorkspace" not in subprocess.check_output(["nm", str(path)], text=True)


def linear_node(dtype: str) -> Node:
    stored = torch.bfloat16 if dtype == "bf16" else torch.float32
    tensors = [torch.zeros(4, 64).to(stored), torch.zeros(60, 64).to(stored)]
    results = [(dtype, 4, 20), (dtype, 4, 20)]
    return node(
        "linear", tensors, results, epilogues=("none", "situ"), beta=4.0, linear_beta="none"
    )


def grouped_node() -> Node:
    packed, scale = torch.zeros(3, 40, 32).byte(), torch.zeros(3, 40, 2).byte()
    tensors = [torch.zeros(4, 64).bfloat16(), (packed, scale)]
    tensors += [torch.zeros(4).int(), torch.zeros(4, 2).int()]
    return node("grouped_gemm", tensors, [("bf16", 4, 2, 40)], epilogue="none")


def constants_of(dtype: str, target: Target) -> dict[str, Any]:
    return dict(LINEAR_PREFILL.constants(linear_node(dtype), target))
