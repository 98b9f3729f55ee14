"""One device that kernels are compiled for, read from a toml file beside this module."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from k3c.cpu_features import machine_features
from k3c.errors import ConfigError, DeviceFault

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Target:
    """A device: what its kernels may use, and its rates for estimates.

    Attributes:
        name: Name of its toml file.
        kind: Which driver runs it.
        arch: Machine architecture as `platform.machine()` spells it; sm_90a, gfx950.
        mcpu: CPU name for the code generator; a GPU's compute capability or arch.
        lanes: f32 elements of a vector register; threads of a warp.
        features: CPU flags that the kernels need, as /proc/cpuinfo spells them, sorted.
        cores: Cores that the rates below are for; multiprocessors.
        bandwidth_gbs: Memory read bandwidth, GB/s.
        peak_gflops: Peak of matrix products, GFLOP/s: float32 on a CPU, dense bfloat16 on a GPU.
        memory_bytes: Memory that a plan may use, bytes.
        shared_bytes: Shared memory that a block may use, bytes; 0 on a CPU.
        min_driver: Oldest driver that loads the kernels; empty on a CPU.
        variant: Which candidate configuration every kernel takes, counted round; None: the best
            that is known.
    """

    name: str
    kind: Literal["cpu", "cuda", "hip"]
    arch: str
    mcpu: str
    lanes: int
    features: tuple[str, ...]
    cores: int
    bandwidth_gbs: float
    peak_gflops: float
    memory_bytes: int
    shared_bytes: int = 0
    min_driver: str = ""
    variant: int | None = None


def known_targets() -> tuple[str, ...]:
    """Return the names that `load_target` takes, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_target(name: str, flags: Set[str] | None = None) -> Target:
    """Read a target.

    Args:
        name: A target's name; `cpu` means the best that this machine can run, with its memory.
        flags: CPU feature flags of this machine; read from /proc/cpuinfo when None.

    Raises:
        ConfigError: The name is unknown; the message lists the known ones.
        DeviceFault: `cpu` on a machine without AVX2 and FMA, or whose flags cannot be read.
    """
    if name not in known_targets():
        known = ", ".join(known_targets())
        raise ConfigError(f"unknown target {name!r}", "--target", f"known targets: {known}")
    data = _read(name)
    if "one_of" not in data:
        return _target(name, data)
    return _best_of(data["one_of"], machine_features() if flags is None else flags)


def physical_memory_bytes() -> int:
    """Return the memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _best_of(names: list[str], flags: Set[str]) -> Target:
    candidates = [_target(name, _read(name)) for name in names]
    for target in candidates:
        if flags >= set(target.features):
            return replace(target, memory_bytes=physical_memory_bytes())
    missing = ", ".join(f for f in candidates[-1].features if f not in flags)
    what = f"this CPU lacks {missing}, which {candidates[-1].name} needs"
    raise DeviceFault(what, "--target cpu", "use a CPU with AVX2 and FMA, or name a target")


def _read(name: str) -> dict[str, Any]:
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def _target(name: str, data: dict[str, Any]) -> Target:
    known = {f.name for f in fields(Target)} - {"name", "variant"}
    needed = known - ({"shared_bytes", "min_driver"} if data["kind"] == "cpu" else set[str]())
    assert needed <= data.keys() <= known, f"{name}.toml: keys {sorted(data)}, need {sorted(known)}"
    values: dict[str, Any] = {**data, "name": name, "features": tuple(sorted(data["features"]))}
    return Target(**values)
