"""The libraries and both executors, on kernels written in C with the compiled kernels' ABI."""

import numpy as np
import pytest

from k3c.artifact import Arg, Bucket, Buffer, Command, LayerCall, Plan
from k3c.errors import ArtifactError, DeviceFault
from k3c.runtime.driver.cpu import allocate, map_weights
from k3c.runtime.driver.cpu_executor import CommandStep, EntryStep
from k3c.runtime.driver.kernel_libraries import (
    TYPE_INT,
    TYPE_OPAQUE_POINTER,
    KernelLibraries,
    set_thread_count,
)
from tests.support.artifacts import cpu_kernel
from tests.support.c_kernels import build_kernels, tvm_library_folder

KERNELS = [cpu_kernel("scale")]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    libraries = tvm_library_folder(folder / "lib")
    return KernelLibraries(libraries, [build_kernels(folder, libraries)])


@pytest.fixture
def memory():
    sizes = {"weights": 0, "arena": 256, "kv_pages": 0, "state_slots": 0, "io": 512}
    return {space: allocate(space, nbytes) for space, nbytes in sizes.items()}


def addresses(memory):
    return {space: m.address for space, m in memory.items()}


def make_plan(kernel="scale", buffer="y"):
    args = (Arg(buffer="x"), Arg(buffer=buffer), Arg(value=5), Arg(layer_attr="add"))
    command = Command("launch", kernel, args, ("x",), ("y",), "y = scale(x)")
    buffers = (
        Buffer("x", 20, 64, "arena", "g", 0, 1, 0),
        Buffer("y", 20, 64, "io", "g", 0, 1, 128, per_layer=True),
    )
    calls = tuple(LayerCall("g", i, {"io": 64 * i}, {"add": 10 * (i + 1)}) for i in range(2))
    bucket = Bucket("decode.b1", "decode", {"T": 1, "B": 1})
    return Plan(bucket, 0, {}, 0, buffers, {"g": (command,)}, calls, (), "entry", {})


def run(executor, memory):
    memory["arena"].array[:20].view(np.float32)[:] = np.arange(5)
    memory["io"].array[:] = 0xFF
    executor.run()
    return memory["io"].array.copy()


def test_both_executors_give_equal_bits(opened, memory):
    by_entry = run(EntryStep(opened, make_plan(), addresses(memory)), memory)
    by_command = run(CommandStep(opened, make_plan(), addresses(memory), KERNELS), memory)
    assert (by_entry == by_command).all()
    for layer in range(2):
        first = 128 + 64 * layer
        result = by_entry[first : first + 20].view(np.float32)
        assert result.tolist() == [2 * i + 10 * (layer + 1) for i in range(5)]
    untouched = by_entry.copy()
    untouched[128:148] = untouched[192:212] = 0xFF
    assert (untouched == 0xFF).all()


def test_a_failing_launch_raises_with_the_kernels_own_words(opened):
    call = opened.packed_call(
        "scale", [(TYPE_INT, 1)], "prefill.t16, kda_moe layer 3, y = scale(x)"
    )
    with pytest.raises(DeviceFault, match="TypeError: scale takes x, y, rows, add") as caught:
        call()
    assert "kda_moe layer 3" in caught.value.message
    with pytest.raises(DeviceFault, match="scale takes"):
        call()


def test_a_non_zero_status_without_a_reason_raises_too(opened):
    with pytest.raises(DeviceFault, match="code 7, expected 0: no reason given"):
        opened.packed_call("silent_failure", [(TYPE_OPAQUE_POINTER, 0)], "here")()


def test_a_missing_kernel_is_named_at_load(opened, memory):
    with pytest.raises(ArtifactError, match="__tvm_ffi_nothing"):
        opened.packed_call("nothing", [], "here")
    with pytest.raises(ArtifactError, match="'other'"):
        CommandStep(opened, make_plan("other"), addresses(memory), KERNELS)
    with pytest.raises(ArtifactError, match="'z' is not in the plan"):
        CommandStep(opened, make_plan(buffer="z"), addresses(memory), KERNELS)


def test_a_library_that_is_none_is_refused_by_name(tmp_path, opened):
    libraries = tvm_library_folder(tmp_path / "lib")
    (tmp_path / "k.so").write_bytes(b"\x7fELF not")
    with pytest.raises(DeviceFault, match=r"k\.so"):
        KernelLibraries(libraries, [tmp_path / "k.so"])


@pytest.mark.parametrize("nbytes", [1, 63, 4096, 2**21 + 5])
def test_a_space_is_exactly_as_large_as_planned_and_page_aligned(nbytes):
    memory = allocate("arena", nbytes)
    assert memory.nbytes == nbytes
    assert memory.address % 4096 == 0
    assert not memory.array.any()


def test_a_space_that_cannot_be_had_names_both_sizes():
    with pytest.raises(DeviceFault, match=rf"{2**60} B for space arena, \d+ B are free"):
        allocate("arena", 2**60)


def test_weights_are_mapped_read_only_from_byte_4096(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(4096) + bytes(range(200)))
    memory = map_weights(path, 200)
    assert memory.array.tolist() == list(range(200))
    assert memory.address % 64 == 0
    assert not memory.array.flags.writeable
    with pytest.raises(ArtifactError, match="200 B of weights, the plan needs 264 B"):
        map_weights(path, 264)


def test_the_users_thread_count_is_kept_and_checked(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    assert set_thread_count() == 3
    monkeypatch.setenv("TVM_NUM_THREADS", "many")
    with pytest.raises(DeviceFault, match="'many'"):
        set_thread_count()
