"""Opens an artifact: checks it, then makes everything that a step needs. No step allocates later.

Order: read the manifest, check the machine, verify every member, check the plans, load the weights,
allocate the other spaces, open the kernels, bind the executors. Each phase is timed. The path is
the same for all devices; what differs is behind `Driver`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from k3c import artifact_dir, rank_weights
from k3c.artifact import SPACES, Manifest, Member, Plan
from k3c.artifact_dir import TOKENIZER_FOLDER, WEIGHTS_FILE, is_hashed
from k3c.artifact_ranks import plan_of_rank, rank_count
from k3c.errors import ArtifactError, ConfigError, DeviceFault
from k3c.plan_check import Finding, check, check_together
from k3c.runtime.driver.driver import (
    Collectives,
    Driver,
    Executor,
    HowToRun,
    Memory,
    Settings,
    WeightsFile,
)
from k3c.runtime.step_io import StepIo


def say_to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LoadOptions:
    """How to open an artifact.

    Attributes:
        verify: "full" hashes every member; "quick" all but very large weights.
        executor: "whole" makes a step with one call; "command" makes every launch from here.
        device: Which of the machine's devices, counted from 0.
        collectives: "local" measures one rank alone; "none" refuses plans that need other ranks.
        rank: Which rank of the artifact's mesh this process is; None: the manifest's.
        run_ahead: Start a decode step before the tokens of the one before are read, where the
            device can.
        say: Takes a line of progress; a load of seconds gives none.
    """

    verify: Literal["full", "quick"] = "full"
    executor: HowToRun = "whole"
    device: int = 0
    collectives: Collectives = "none"
    rank: int | None = None
    run_ahead: bool = True
    say: Callable[[str], None] = say_to_stderr


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
        runs_ahead: Whether a step may be started before the tokens of the one before are read.
        failed: Buckets that the device refused, and why; the others serve.
        close: Gives everything on the device back.
    """

    directory: Path
    manifest: Manifest
    buckets: Mapping[str, LoadedBucket]
    memory: Mapping[str, Memory]
    tokenizer_folder: Path | None
    timings: Mapping[str, float]
    runs_ahead: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


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
        rank = chosen_rank(manifest, options.rank)
        name, member = _weights_of(directory, manifest, rank)
        driver = open_driver(manifest, options)
        driver.check(manifest, str(directory))
    with clock.phase("verify"):
        later = (WEIGHTS_FILE,) if driver.hashes_weights and member.parts else ()
        artifact_dir.verify(directory, manifest, options.verify, later)
    with clock.phase("plans"):
        plans = [plan_of_rank(p, manifest.mesh, rank) for p in _read_plans(directory, manifest)]
        _refuse_collectives(plans, options)
    with clock.phase("memory"):
        check_parts = bool(member.parts) and is_hashed(WEIGHTS_FILE, member, options.verify)
        nbytes = manifest.space_bytes.get("weights", 0)
        file = WeightsFile(directory / name, nbytes, member, check_parts)
        memory = _make_memory(file, manifest, driver)
    with clock.phase("kernels"):
        driver.open_kernels(directory, manifest)
    with clock.phase("bind"):
        buckets, failed = _bind(plans, memory, driver, options)
    tokenizer = directory / TOKENIZER_FOLDER if manifest.model.has_tokenizer else None
    ahead = driver.runs_ahead and options.run_ahead
    seconds = clock.seconds
    return Loaded(
        directory, manifest, buckets, memory, tokenizer, seconds, ahead, failed, driver.close
    )


def chosen_rank(manifest: Manifest, rank: int | None) -> int:
    """Return the rank that a process is.

    Args:
        manifest: Of the artifact.
        rank: What the caller says; None: the manifest's.

    Raises:
        ConfigError: The artifact's mesh has no such rank.
    """
    count = rank_count(manifest.mesh)
    chosen = manifest.rank if rank is None else rank
    if not 0 <= chosen < count:
        raise ConfigError(f"rank {chosen} of {count}", "rank", f"take one of 0..{count - 1}")
    return chosen


def _weights_of(directory: Path, manifest: Manifest, rank: int) -> tuple[str, Member]:
    """Return the file that holds a rank's weights, and its size and hashes.

    Raises:
        ArtifactError: There is none, or it is damaged or of another artifact.
    """
    if manifest.model.has_weights:
        if rank != manifest.rank:
            what = f"the artifact holds the weights of rank {manifest.rank}, not of {rank}"
            raise ArtifactError(what, str(directory), "compile without --rank, then k3c pack")
        return WEIGHTS_FILE, manifest.members[WEIGHTS_FILE]
    found = rank_weights.read_rank_weights(directory, manifest, rank)
    path = rank_weights.weights_path(directory, rank)
    if not found.member.parts:
        artifact_dir.check_hash(path, path.name, found.member)
    return str(path.relative_to(directory)), found.member


def open_driver(manifest: Manifest, options: LoadOptions) -> Driver:
    """Return the driver of the artifact's kind of device; only its module is imported.

    Raises:
        DeviceFault: The device or its driver is missing.
    """
    settings = Settings(options.device, options.executor, options.collectives, options.say)
    if manifest.target.kind == "cuda":
        from k3c.runtime.driver.cuda import CudaDriver

        return CudaDriver(settings)
    if manifest.target.kind == "hip":
        from k3c.runtime.driver.hip import HipDriver

        return HipDriver(settings)
    from k3c.runtime.driver.cpu import CpuDriver

    return CpuDriver(settings)


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


def _refuse_collectives(plans: Sequence[Plan], options: LoadOptions) -> None:
    """Refuse plans that need other ranks, unless a rank is to be measured alone."""
    for plan in plans:
        for command in (c for commands in plan.commands.values() for c in commands):
            if command.kind == "collective" and options.collectives != "local":
                what = f"{command.label} is an {command.kernel} of {command.args[3].value} ranks"
                hint = "this runtime runs one rank: compile for one device"
                raise ArtifactError(what, f"plan {plan.bucket.name}", hint)


def _make_memory(file: WeightsFile, manifest: Manifest, driver: Driver) -> dict[str, Memory]:
    """Load the weights and allocate the other spaces, each with exactly its planned bytes."""
    sizes = {s: manifest.space_bytes.get(s, 0) for s in SPACES if s != "weights"}
    # The small spaces first: what does not fit is known before gigabytes are read.
    memory = {space: driver.allocate(space, nbytes) for space, nbytes in sizes.items()}
    return {"weights": driver.load_weights(file), **memory}


def _bind(
    plans: Sequence[Plan], memory: Mapping[str, Memory], driver: Driver, options: LoadOptions
) -> tuple[dict[str, LoadedBucket], dict[str, str]]:
    """Bind every bucket; one that the device refuses is left out while the device survives."""
    buckets: dict[str, LoadedBucket] = {}
    failed: dict[str, str] = {}
    for plan in plans:
        name = plan.bucket.name
        try:
            executor = driver.bind(plan, memory)
        except DeviceFault as fault:
            if not driver.survives:
                raise
            failed[name] = fault.message
            options.say(f"bucket {name} is left out: {fault.message}")
            continue
        buckets[name] = LoadedBucket(plan, StepIo(plan, executor.inputs), executor)
    return buckets, failed
