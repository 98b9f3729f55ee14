"""What a machine must be to run a GPU artifact, checked before any weight is read."""

from dataclasses import replace

import pytest

from k3c.artifact import Arg, Command
from k3c.errors import ArtifactError, ConfigError, DeviceFault
from k3c.runtime import loader
from k3c.runtime.driver.cuda import runs
from k3c.runtime.loader import LoadOptions, load_artifact
from tests.support.stub_gpu import gpu_kernel, write_gpu_artifact


@pytest.fixture
def artifact(kind, stub, tmp_path, monkeypatch):
    monkeypatch.setattr("k3c.artifact_dir.verify", None)
    return write_gpu_artifact(tmp_path, kind)


def refused(artifact, error, match, **options):
    with pytest.raises(error, match=match) as caught:
        load_artifact(artifact, LoadOptions(**options))
    return caught.value


def test_a_device_that_is_not_there_is_refused(artifact):
    refused(artifact, ConfigError, "device 5 is asked for, this machine has 2", device=5)


def test_another_architecture_is_refused_with_both_and_the_way_out(kind, stub, artifact):
    """AR01, CG11."""
    stub.device(major=10, minor=3, arch="gfx942:xnack-", version=10**9)
    names = {"cuda": ("sm_90a", "sm_103", "b300"), "hip": ("gfx950", "gfx942", "gfx942")}
    made, here, target = names[kind]
    error = refused(artifact, ArtifactError, rf"compiled for {made} .*Stub 0\) is {here}")
    assert error.hint == f"k3c compile MODEL --target {target} -o OUTPUT"
    assert error.exit_code == 4


@pytest.mark.parametrize(
    ("device", "arch", "fits"),
    [
        ("sm_90", "sm_90a", True),
        ("sm_103", "sm_103a", True),
        ("sm_103", "sm_100a", False),
        ("sm_100", "sm_103a", False),
        ("sm_103", "sm_100f", True),
        ("sm_100", "sm_103f", False),
        ("sm_120", "sm_100f", False),
        ("sm_103", "sm_100", True),
        ("sm_90", "sm_80", False),
        ("sm_90", "gfx950", False),
    ],
)
def test_which_binaries_a_device_runs(device, arch, fits):
    assert runs(device, arch) == fits


def test_one_kernel_for_another_architecture_is_named(kind, stub, tmp_path):
    """CG12."""
    kernels = tuple(gpu_kernel(n, kind) for n in ("model", "advance"))
    other = {"cuda": "sm_86", "hip": "gfx90a"}[kind]
    artifact = write_gpu_artifact(
        tmp_path, kind, kernels=(*kernels, gpu_kernel("scores", kind, arch=other))
    )
    refused(artifact, ArtifactError, f"1 of 3 kernels are not for .*: scores for {other}")


def test_an_old_driver_is_refused_with_both_versions(kind, stub, artifact):
    stub.device(version={"cuda": 12030, "hip": 50700000}[kind])
    found, needed = {"cuda": ("12.3", "12.4"), "hip": ("5.7", "6.0")}[kind]
    refused(artifact, DeviceFault, f"knows version {found}, {needed} is needed")


def test_a_kernel_may_need_a_newer_driver(cuda, tmp_path):
    kernels = tuple(gpu_kernel(n, min_driver="13.1") for n in ("model", "advance", "scores"))
    artifact = write_gpu_artifact(tmp_path, kernels=kernels)
    refused(artifact, DeviceFault, r"knows version 13.0, 13.1 is needed")


def test_a_plan_that_does_not_fit_is_refused_with_both_sizes(kind, stub, artifact):
    stub.device(total=stub.used_bytes + 3000, version=10**9)
    pattern = r"\d+ bytes are planned \(.*state_slots.*\), 3000 of \d+ bytes are free"
    error = refused(artifact, DeviceFault, pattern)
    assert "--max-num-seqs" in error.hint


def test_a_missing_driver_library_is_named(monkeypatch, kind, artifact):
    monkeypatch.setenv({"cuda": "K3C_LIBCUDA", "hip": "K3C_LIBHIP"}[kind], "/no/such/lib.so")
    error = refused(artifact, DeviceFault, "cannot open the GPU driver")
    assert error.hint in ("install the NVIDIA driver", "install ROCm")


def test_collectives_are_refused_unless_a_rank_is_measured_alone(cuda, tmp_path, monkeypatch):
    args = (Arg("ids"), Arg("ids"), Arg(value=4), Arg(value=8), Arg(value=0))
    reduce = Command("collective", "all_reduce", args, ("ids",), ("ids",), "all_reduce %y")
    real = loader._read_plans

    def with_collective(directory, manifest):
        plans = real(directory, manifest)
        return [replace(p, commands={**p.commands, "layer": (reduce,)}) for p in plans]

    monkeypatch.setattr(loader, "_read_plans", with_collective)
    artifact = write_gpu_artifact(tmp_path)
    error = refused(artifact, ArtifactError, "all_reduce %y is an all_reduce of 8 ranks")
    assert "one rank" in error.hint
    assert load_artifact(artifact, LoadOptions(collectives="local")).failed == {}
