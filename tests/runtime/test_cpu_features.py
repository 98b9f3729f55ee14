"""An artifact for another machine is refused before anything is mapped."""

import pytest

from k3c.artifact import TargetInfo
from k3c.errors import ArtifactError
from k3c.runtime.driver.cpu_features import check_machine

AVX2 = frozenset({"avx", "avx2", "fma", "f16c", "sse4_1", "abm"})


def target(arch="x86_64", features=("avx2", "fma"), kind="cpu"):
    return TargetInfo("cpu-avx512", kind, arch, features)


def test_a_machine_with_the_features_passes():
    check_machine(target(), AVX2, "x86_64")
    check_machine(target(features=("sse4.1", "lzcnt")), AVX2, "x86_64")


def test_a_missing_feature_names_what_is_needed_and_what_is_there():
    with pytest.raises(ArtifactError) as caught:
        check_machine(target(features=("avx512f", "avx2")), AVX2, "x86_64")
    assert "compiled for avx512f avx2, this CPU lacks avx512f" in caught.value.message
    assert "it has avx avx2 f16c fma" in caught.value.message
    assert "k3c compile" in caught.value.hint


def test_another_architecture_or_kind_of_device_is_named():
    with pytest.raises(ArtifactError, match="compiled for x86_64, this machine is aarch64"):
        check_machine(target(), AVX2, "aarch64")
    with pytest.raises(ArtifactError, match="compiled for cuda, this driver runs cpu"):
        check_machine(target(kind="cuda"), AVX2, "x86_64")
