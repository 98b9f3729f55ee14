"""Opens an artifact: checks it, then makes everything that a step needs. No step allocates later.

Order: read the manifest, check the machine, verify every member, check the plans, map the weights,
allocate the other spaces, open the libraries, bind the executors. Each phase is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3c import artifact_dir
from k3c.artifact import SPACES, Manifest, Plan
from k3c.artifact_dir import LIBRARY_FOLDER, TOKENIZER_FOLDER
from k3c.cpu_features import machine_features
from k3c.errors import ArtifactError
from k3c.plan_check import Finding, check, check_together
from k3c.runtime.driver.cpu import LIBRARIES, CpuDriver, Memory, allocate, map_weights
from k3c.runtime.driver.cpu_features import check_machine
from k3c.runtime.executor import CommandExecutor, EntryExecutor, Executor
from k3c.runtime.step_io import StepIo


@dataclass(frozen=True)
class LoadOptions:
    """How to open an artifact.

    Attributes:
        verify: "full" hashes every member; "quick" all but very large weights.
        executor: "entry" calls one function per step; "command" makes every launch from here.
    """

    verify: Literal["full", "quick"] = "full"
    executor: Literal["entry", "command"] = "entry"


@dataclass(frozen=True)
class LoadedBucket:
    """A bucket that is ready to run."""

    plan: Plan
    io: StepIo
    executor: Executor


@dataclass(frozen=True)
class Loaded:
    """An open artifact.

    Attributes:
        directory: Where it lies.
        manifest: Its table of contents.
        buckets: By name.
        memory: Each space, exactly as large as planned.
        tokenizer_folder: Holds the tokenizer's files; None when the model has none.
        timings: Seconds by phase.
    """

    directory: Path
    manifest: Manifest
    buckets: Mapping[str, LoadedBucket]
    memory: Mapping[str, Memory]
    tokenizer_folder: Path | None
    timings: Mapping[str, float]


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start_s


def load_artifact(directory: Path, options: LoadOptions) -> Loaded:
    """Open an artifact.

    Args:
        directory: The artifact that `k3c compile` wrote.
        options: How to verify and run it.

    Raises:
        ArtifactError: It is damaged, foreign, newer than this runtime, or for another machine.
        DeviceFault: The machine lacks memory or a library does not open.
    """
    clock = _Clock()
    with clock.phase("manifest"):
        manifest = artifact_dir.read_manifest(directory)
        check_machine(manifest.target, machine_features())
    with clock.phase("verify"):
        artifact_dir.verify(directory, manifest, options.verify)
    with clock.phase("plans"):
        plans = _read_plans(directory, manifest)
    with clock.phase("memory"):
        memory = _make_memory(directory, manifest)
    with clock.phase("libraries"):
        driver = _open_driver(directory, manifest)
    with clock.phase("bind"):
        buckets = {p.bucket.name: _bind(p, memory, driver, manifest, options) for p in plans}
    tokenizer = directory / TOKENIZER_FOLDER if manifest.model.has_tokenizer else None
    return Loaded(directory, manifest, buckets, memory, tokenizer, clock.seconds)


def _read_plans(directory: Path, manifest: Manifest) -> list[Plan]:
    """Read and check every bucket's plan."""
    plans = []
    for bucket in manifest.buckets:
        plan = artifact_dir.read_plan(directory, bucket.name)
        _refuse(check(plan), f"plan {bucket.name}")
        over = [s for s in SPACES if plan.space_bytes.get(s, 0) > manifest.space_bytes.get(s, 0)]
        if plan.bucket != bucket or over:
            what = f"the manifest is too small in {over}" if over else "it plans another bucket"
            raise ArtifactError(what, f"plan {bucket.name}", "compile again")
        plans.append(plan)
    if not plans:
        raise ArtifactError("no buckets", str(directory), "compile again")
    _refuse(check_together(plans), str(directory))
    return plans


def _refuse(findings: Sequence[Finding], where: str) -> None:
    """Refuse an artifact whose plans break a rule: here a bad plan is damaged data."""
    for finding in findings:
        raise ArtifactError(f"{finding.rule}: {finding.message}", where, "compile again")


def _make_memory(directory: Path, manifest: Manifest) -> dict[str, Memory]:
    """Map the weights and allocate the other spaces, each with exactly its planned bytes."""
    sizes = {space: manifest.space_bytes.get(space, 0) for space in SPACES}
    weights = map_weights(directory / artifact_dir.WEIGHTS_FILE, sizes.pop("weights"))
    return {"weights": weights, **{space: allocate(space, n) for space, n in sizes.items()}}


def _open_driver(directory: Path, manifest: Manifest) -> CpuDriver:
    for name in LIBRARIES:
        if f"{LIBRARY_FOLDER}/{name}" not in manifest.members:
            raise ArtifactError(
                f"{LIBRARY_FOLDER}/{name} is missing", str(directory), "compile again"
            )
    binaries = sorted({kernel.binary for kernel in manifest.kernels})
    return CpuDriver(directory / LIBRARY_FOLDER, [directory / name for name in binaries])


def _bind(
    plan: Plan,
    memory: Mapping[str, Memory],
    driver: CpuDriver,
    manifest: Manifest,
    options: LoadOptions,
) -> LoadedBucket:
    """Bind a plan's launches and io fields to the memory."""
    addresses = {space: m.address for space, m in memory.items()}
    io = StepIo(plan, memory["io"].array)
    if options.executor == "command":
        executor = CommandExecutor(driver, plan, addresses, manifest.kernels)
        return LoadedBucket(plan, io, executor)
    return LoadedBucket(plan, io, EntryExecutor(driver, plan, addresses))
