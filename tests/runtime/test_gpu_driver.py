"""The GPU driver on a stub: what it passes, and in which order things run."""

import ctypes
import threading
from dataclasses import replace

import numpy as np
import pytest

from k3c.artifact import Arg, Command
from k3c.errors import ArtifactError, DeviceFault
from k3c.runtime.driver.cuda_api import CopyNode, EdgeData, InstantiateParameters, KernelNode
from k3c.runtime.driver.hip import KernelNode as HipKernelNode
from k3c.runtime.engine import Engine
from k3c.runtime.loader import LoadOptions, load_artifact
from tests.support.fake_plan import expected_tokens
from tests.support.gpu_plans import SPACES, floats, make_plan, open_driver, run, twice
from tests.support.stub_gpu import write_gpu_artifact


def test_structures_have_the_sizes_of_the_headers():
    assert [ctypes.sizeof(s) for s in (KernelNode, CopyNode, EdgeData)] == [72, 200, 8]
    assert (CopyNode.to.offset, CopyNode.width_bytes.offset) == (88, 176)
    assert ctypes.sizeof(InstantiateParameters) == 32
    offsets = [f[0] for f in HipKernelNode._fields_]
    places = [getattr(HipKernelNode, name).offset for name in offsets]
    assert (ctypes.sizeof(HipKernelNode), places) == (64, [0, 16, 24, 32, 48, 56])


@pytest.mark.parametrize("executor", ["whole", "command"])
def test_arguments_arrive_and_calls_follow_each_other(kind, stub, tmp_path, executor):
    driver, memory = open_driver(tmp_path, kind, executor=executor)
    add = Arg(layer_attr="add")
    step = replace(twice("x", "y"), args=(Arg("x"), Arg("y"), Arg(value=5), add))
    back = replace(twice("y", "x", after=(0,)), args=(Arg("y"), Arg("x"), Arg(value=5), add))
    run(driver, memory, make_plan(step, back, calls=2))
    x = np.arange(5)
    for add in (10, 11):
        y = 2 * x + add
        x = 2 * y + add
    assert floats(memory, 64) == y.tolist()
    assert floats(memory, 0) == x.tolist()


def test_negative_integers_are_passed_as_32_bits(cuda, tmp_path):
    driver, memory = open_driver(tmp_path)
    run(driver, memory, make_plan(twice("x", "y", add=-7)))
    assert floats(memory, 64) == [-7, -5, -3, -1, 1]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_integer_beyond_32_bits_is_refused(cuda, tmp_path, value):
    driver, memory = open_driver(tmp_path)
    with pytest.raises(ArtifactError, match=f"argument {value} does not fit"):
        driver.bind(make_plan(twice("x", "y", add=value)), memory)


@pytest.mark.parametrize("executor", ["whole", "command"])
def test_a_step_runs_in_the_order_that_its_commands_ask_for(kind, stub, tmp_path, executor):
    """The stub runs what is ready in the latest order: each missing edge would show."""
    driver, memory = open_driver(tmp_path, kind, executor=executor)
    fork = (twice("x", "y"), twice("y", "z", after=(0,)), twice("y", "w", add=5, after=(0,)))
    join = twice("z", "x", after=(1, 2))
    run(driver, memory, make_plan(*fork, join, calls=2))
    x = np.arange(5)
    for _ in range(2):
        y = 2 * x + 1
        z, w = 2 * y + 1, 2 * y + 5
        x = 2 * z + 1
    assert [floats(memory, 64 * i) for i in range(4)] == [v.tolist() for v in (x, y, z, w)]


def test_a_kernel_that_waits_by_itself_gets_an_early_edge_after_one_kernel_only(cuda, tmp_path):
    driver, memory = open_driver(tmp_path, kernel={"pdl": True})
    chain = (twice("x", "y"), twice("y", "z", after=(0,)), twice("y", "w", after=(0,)))
    copy = Command("copy", "", (Arg("x"), Arg("z"), Arg(value=20)), ("z",), ("x",), "c", (), (1, 2))
    after_copy = twice("x", "y", after=(3,))
    run(driver, memory, make_plan(*chain, copy, after_copy, calls=2))
    # y to z and y to w in each call, and the first command of the second call.
    assert cuda.integer("stub_early_edges") == 5
    assert cuda.calls("cuGraphAddDependencies_v2") == 5
    assert floats(memory, 0)[:2] == [15.0, 31.0]


def test_without_pdl_no_edge_is_early(cuda, tmp_path):
    driver, memory = open_driver(tmp_path)
    run(driver, memory, make_plan(twice("x", "y"), twice("y", "z", after=(0,))))
    assert cuda.calls("cuGraphAddDependencies_v2") == 0


@pytest.mark.parametrize("executor", ["whole", "command"])
def test_copies_and_waits_and_collectives_of_one_rank(kind, stub, tmp_path, executor):
    driver, memory = open_driver(tmp_path, kind, executor=executor)
    numbers = (Arg(value=64), Arg(value=2), Arg(value=1))
    copy = Command("copy", "", (Arg("part"), Arg("x"), Arg(value=20)), ("x",), ("part",), "copy")
    wait = Command("wait", "", (), (), (), "wait", (), (0,))
    args = (Arg("parts"), Arg("part"), *numbers)
    gather = Command("collective", "all_gather", args, ("part",), ("parts",), "g", (), (1,))
    args = (Arg("part"), Arg("part"), *numbers)
    reduce = Command("collective", "all_reduce", args, ("part",), ("part",), "r", (), (2,))
    half = (Arg(value=8), Arg(value=2), Arg(value=1))
    combine = Command(
        "collective", "combine_tokens", (Arg("z"), Arg("x"), *half), ("x",), ("z",), "s", (), (0,)
    )
    last = twice("parts", "y", after=(3,))
    run(driver, memory, make_plan(copy, wait, gather, reduce, last, combine))
    assert floats(memory, 64) == [1, 3, 5, 7, 9]
    assert floats(memory, 128)[:2] == [2, 3], "its own half, here the second, of x"
    assert floats(memory, 256 + 64) == [0, 1, 2, 3, 4]


def test_a_graph_has_a_node_for_each_command_and_goes_to_the_drivers_stream(cuda, tmp_path):
    """GR13."""
    driver, memory = open_driver(tmp_path)
    run(driver, memory, make_plan(twice("x", "y"), twice("y", "z", after=(0,)), calls=3))
    assert cuda.calls("cuGraphAddKernelNode_v2") == 6
    assert cuda.calls("cuGraphGetNodes") == 1
    assert cuda.calls("cuLaunchKernel") == 0
    assert cuda.order == ["twice"] * 6
    driver.api.functions["graph_nodes"] = lambda *_: 0
    with pytest.raises(DeviceFault, match="the graph has 0 nodes, the plan has 1 commands"):
        driver.bind(make_plan(twice("x", "y")), memory)


def test_every_module_is_loaded_before_a_graph_is_built(cuda, tmp_path):
    """GR12: binding loads nothing; a kernel that was not opened is refused by name."""
    driver, memory = open_driver(tmp_path)
    loaded = cuda.calls("cuModuleLoadData"), cuda.calls("cuModuleGetFunction")
    run(driver, memory, make_plan(twice("x", "y")))
    assert loaded == (1, 1)
    assert (cuda.calls("cuModuleLoadData"), cuda.calls("cuModuleGetFunction")) == loaded
    with pytest.raises(ArtifactError, match="launches 'other', which is no kernel"):
        driver.bind(make_plan(replace(twice("x", "y"), kernel="other")), memory)


def test_a_kernel_with_another_calling_convention_is_refused_by_name(cuda, tmp_path):
    """AR06."""
    driver, memory = open_driver(tmp_path)
    odd = replace(twice("x", "y"), args=(Arg("x"), Arg("y"), Arg(value=5)))
    with pytest.raises(ArtifactError, match=r"\[8, 8, 4, 4, 8, 8\] bytes.*\[8, 8, 4, 8, 8\]") as e:
        driver.bind(make_plan(odd), memory)
    assert "twice" in e.value.where


def test_shared_memory_above_48_kib_is_asked_for_once(cuda, tmp_path):
    driver, memory = open_driver(tmp_path, kernel={"shared_bytes": 200 << 10})
    run(driver, memory, make_plan(twice("x", "y"), twice("y", "z", after=(0,))))
    assert cuda.calls("cuFuncSetAttribute") == 1
    driver, memory = open_driver(tmp_path, kernel={"shared_bytes": 48 << 10})
    run(driver, memory, make_plan(twice("x", "y")))
    assert cuda.calls("cuFuncSetAttribute") == 1
    driver, memory = open_driver(tmp_path, kernel={"shared_bytes": 300 << 10})
    with pytest.raises(DeviceFault, match="cuFuncSetAttribute failed"):
        driver.bind(make_plan(twice("x", "y")), memory)


def test_a_launch_without_a_grid_is_refused(kind, stub, tmp_path):
    driver, memory = open_driver(tmp_path, kind)
    for grid in ((), (1, 1), (1, 0, 1)):
        with pytest.raises(ArtifactError, match="three numbers above 0"):
            driver.bind(make_plan(replace(twice("x", "y"), grid=grid)), memory)


def test_spaces_are_one_allocation_each_of_the_planned_bytes_and_zero(kind, stub, tmp_path):
    before = stub.used_bytes
    driver, memory = open_driver(tmp_path, kind)
    assert stub.used_bytes - before == sum(SPACES.values())
    assert stub.calls({"cuda": "cuMemAlloc_v2", "hip": "hipMalloc"}[kind]) == 4
    assert [m.nbytes for m in memory.values()] == list(SPACES.values())
    assert not any(memory["arena"].read(0, 512))
    driver.bind(make_plan(twice("x", "y")), memory)
    driver.close()
    assert stub.used_bytes == before


def test_another_thread_may_run_the_steps(kind, stub, tmp_path):
    driver, memory = open_driver(tmp_path, kind)
    executor, errors = driver.bind(make_plan(twice("x", "y")), memory), []

    def work():
        try:
            executor.start(upload=True)
            executor.finish()
        except DeviceFault as fault:
            errors.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.parametrize("device", [0, 1])
def test_any_device_of_the_machine_can_be_used(kind, stub, tmp_path, device):
    """AR11."""
    artifact = write_gpu_artifact(tmp_path, kind)
    engine = Engine(load_artifact(artifact, LoadOptions(device=device)))
    assert stub.integer("stub_current_device") == device
    assert list(engine.generate([[3]], 5)[0].token_ids) == expected_tokens([3], 5)
