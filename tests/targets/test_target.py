"""Targets load by name and `cpu` means the best that the machine can run."""

import pytest

from k3c.cpu_features import machine_features
from k3c.errors import ConfigError, DeviceFault
from k3c.targets.target import known_targets, load_target

AVX2 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


GPUS = ("b200", "b300", "gb200", "gb300", "h200", "mi355x")


@pytest.mark.parametrize("name", ["cpu-avx2", "cpu-avx512", *GPUS])
def test_an_explicit_target_loads_on_any_machine(name):
    target = load_target(name, flags=frozenset())
    assert target.name == name
    assert (target.kind == "cpu") == (name not in GPUS)
    assert (target.shared_bytes > 0) == (name in GPUS)
    assert bool(target.min_driver) == (name in GPUS)
    assert target.features == tuple(sorted(target.features))
    assert min(target.lanes, target.cores, target.memory_bytes, target.bandwidth_gbs) > 0


def test_cpu_is_avx512_where_the_machine_has_all_of_it():
    assert load_target("cpu", AVX512).name == "cpu-avx512"
    assert load_target("cpu", AVX512).lanes == 16


def test_cpu_is_avx2_where_one_avx512_feature_is_missing():
    target = load_target("cpu", AVX512 - {"avx512dq"})
    assert (target.name, target.lanes, target.mcpu) == ("cpu-avx2", 8, "x86-64-v3")


@pytest.mark.parametrize("missing", ["avx2", "fma"])
def test_a_machine_without_avx2_or_fma_is_refused_by_what_it_lacks(missing):
    with pytest.raises(DeviceFault, match=f"lacks {missing}"):
        load_target("cpu", AVX2 - {missing})


@pytest.mark.parametrize("name", ["gpu", "cpu-avx", "../cpu", "", "CPU"])
def test_an_unknown_target_lists_the_known_ones(name):
    with pytest.raises(
        ConfigError,
        match="known targets: b200, b300, cpu, cpu-avx2, cpu-avx512, gb200, gb300, h200, mi355x",
    ):
        load_target(name)


def test_every_file_is_a_target():
    assert known_targets() == ("b200", "b300", "cpu", "cpu-avx2", "cpu-avx512", *GPUS[2:])


def test_flags_come_from_the_first_processor(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nflags\t\t: x\n")
    assert machine_features(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}


def test_unreadable_flags_name_the_file(tmp_path):
    with pytest.raises(DeviceFault, match="none"):
        machine_features(tmp_path / "none")
    (tmp_path / "arm").write_text("Features : asimd\n")
    with pytest.raises(DeviceFault, match="no line of CPU flags"):
        machine_features(tmp_path / "arm")
