"""Every call of the GPU driver that fails says so, and what can serve on serves on."""

from dataclasses import replace

import pytest

from k3c.errors import DeviceFault
from k3c.runtime.driver.cuda import CudaDriver
from k3c.runtime.engine import Engine
from k3c.runtime.loader import LoadOptions, load_artifact
from tests.support.fake_plan import expected_tokens
from tests.support.gpu_plans import make_plan, open_driver, twice
from tests.support.stub_gpu import write_gpu_artifact

LOAD_CALLS = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemsetD8Async",
    "cuMemHostAlloc",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuMemFreeHost",
    "cuModuleLoadData",
    "cuModuleGetFunction",
]
BIND_CALLS = [
    "cuFuncGetParamInfo",
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithParams",
    "cuGraphDestroy",
    "cuGraphUpload",
    "cuEventCreate",
]
STEP_CALLS = [
    "cuMemcpyHtoDAsync_v2",
    "cuGraphLaunch",
    "cuMemcpyDtoHAsync_v2",
    "cuEventRecord",
    "cuEventSynchronize",
]


@pytest.mark.parametrize("function", LOAD_CALLS)
def test_a_failing_call_of_the_load_fails_the_load_by_name(cuda, tmp_path, function):
    """CG07."""
    artifact = write_gpu_artifact(tmp_path)
    cuda.fail(function, 2)
    with pytest.raises(DeviceFault) as caught:
        load_artifact(artifact, LoadOptions())
    assert f"{function} failed: ERROR_OUT_OF_MEMORY (2), ERROR_OUT_OF_MEMORY" in caught.value.what
    assert "GiB are free" in caught.value.what or "does not say" in caught.value.what


@pytest.mark.parametrize("function", BIND_CALLS)
def test_a_bucket_that_the_driver_refuses_is_left_out_and_the_others_serve(
    cuda, tmp_path, function
):
    """GR11."""
    artifact, lines = write_gpu_artifact(tmp_path), []
    after = 2 if function == "cuFuncGetParamInfo" else 1
    cuda.fail(function, 2, after)
    loaded = load_artifact(artifact, LoadOptions(say=lines.append))
    ((name, why),) = loaded.failed.items()
    assert name == "decode.b1"
    assert f"{function} failed: ERROR_OUT_OF_MEMORY (2)" in why
    assert "decode.b1" in why
    assert "of 4.00 GiB are free" in why
    assert lines == [f"bucket decode.b1 is left out: {why}"]
    engine = Engine(loaded)
    assert list(engine.generate([[3]], 5)[0].token_ids) == expected_tokens([3], 5)


def test_a_refused_node_is_named_by_its_command(cuda, tmp_path):
    driver, memory = open_driver(tmp_path)
    cuda.fail("cuGraphInstantiateWithParams", 1)
    last = replace(twice("y", "z", after=(0,)), label="the last one")
    with pytest.raises(DeviceFault, match=r"decode\.b1, g layer 0, the last one"):
        driver.bind(make_plan(twice("x", "y"), last), memory)


def test_a_bucket_that_takes_the_device_with_it_fails_the_load(cuda, tmp_path):
    artifact = write_gpu_artifact(tmp_path)
    cuda.fail("cuGraphUpload", 700)
    load, real = LoadOptions(), CudaDriver.survives
    try:
        CudaDriver.survives = property(lambda self: False)  # type: ignore[assignment]
        with pytest.raises(
            DeviceFault, match=r"cuGraphUpload failed: ERROR_ILLEGAL_ADDRESS \(700\)"
        ):
            load_artifact(artifact, load)
    finally:
        CudaDriver.survives = real  # type: ignore[method-assign]


@pytest.mark.parametrize("function", STEP_CALLS)
def test_a_failing_call_of_a_step_stops_the_engine(cuda, tmp_path, function):
    """CG07: the step fails loudly, and so does every later one."""
    engine = Engine(load_artifact(write_gpu_artifact(tmp_path), LoadOptions()))
    engine.add([1, 2, 3], 20, stop_ids=())
    cuda.fail(function, 700)
    with pytest.raises(DeviceFault, match=rf"{function} failed: ERROR_ILLEGAL_ADDRESS"):
        engine.step()
    with pytest.raises(DeviceFault, match="stopped by an earlier fault"):
        engine.step()


def test_a_failing_launch_is_named_when_launches_are_made_one_by_one(cuda, tmp_path):
    options = LoadOptions(executor="command")
    engine = Engine(load_artifact(write_gpu_artifact(tmp_path), options))
    engine.add([1, 2, 3], 20, stop_ids=())
    cuda.fail("cuLaunchKernel", 1, after=2)
    with pytest.raises(DeviceFault, match=r"prefill\.t4, layer layer 1, model"):
        engine.step()


def test_a_broken_context_says_so_without_memory_figures(cuda, tmp_path):
    engine = Engine(load_artifact(write_gpu_artifact(tmp_path), LoadOptions()))
    engine.add([1, 2, 3], 20, stop_ids=())
    cuda.break_context(700)
    with pytest.raises(DeviceFault, match="does not say how much memory is free"):
        engine.step()
