"""One rank's artifact on one GPU without its weights and its neighbours, to be measured.

Weights and states are random bytes made on the device; collectives are copies of the rank's own
part. What the rank computes means nothing, and takes as long as if it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy.typing as npt

from k3c import artifact_dir
from k3c.artifact import SPACES, Manifest, Plan, aligned
from k3c.artifact_ranks import plan_of_rank
from k3c.errors import ConfigError
from k3c.runtime.binding import Bound
from k3c.runtime.driver.gpu import GpuDriver
from k3c.runtime.driver.gpu_device import GpuMemory
from k3c.runtime.loader import LoadOptions, open_driver
from k3c.runtime.measuring.synthetic import draw_logits, fill_state, fill_weights

ROUTERS = ("route_topk", "route_dispatch")
ROUTING_BYTES = 1 << 28

Fill = Callable[[Mapping[str, npt.NDArray]], None]


class Standalone:
    """An opened artifact; nothing of it is left on the device after `close`."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        driver: GpuDriver,
        memory: Mapping[str, GpuMemory],
    ) -> None:
        """Use `open`."""
        self.manifest, self.driver, self.memory = manifest, driver, memory
        self._directory = directory
        self._logits: GpuMemory | None = None

    @classmethod
    def open(cls, directory: Path, say: Callable[[str], None]) -> Standalone:
        """Open an artifact; its weights, where it has any, are not read.

        Args:
            directory: The artifact.
            say: Takes a line of progress.

        Raises:
            ArtifactError: It is damaged or foreign.
            ConfigError: It is for a CPU.
            DeviceFault: The device is missing, too old or too small.
        """
        manifest = artifact_dir.read_manifest(directory)
        driver = open_driver(manifest, LoadOptions(collectives="local", say=say))
        if not isinstance(driver, GpuDriver):
            raise ConfigError(f"{manifest.target.name} is no GPU", str(directory))
        driver.check(manifest, str(directory))
        artifact_dir.verify(directory, manifest, "quick", (artifact_dir.WEIGHTS_FILE,))
        sizes = {space: manifest.space_bytes.get(space, 0) for space in SPACES}
        memory = {space: driver.allocate(space, nbytes) for space, nbytes in sizes.items()}
        fill_weights(memory["weights"], manifest.weights)
        for space in ("arena", "kv_pages", "state_slots"):
            fill_state(memory[space])
        driver.open_kernels(directory, manifest)
        return cls(directory, manifest, driver, memory)

    def plan(self, bucket: str) -> Plan:
        """Return the plan of a bucket.

        Raises:
            ArtifactError: It is damaged.
        """
        plan = artifact_dir.read_plan(self._directory, bucket)
        return plan_of_rank(plan, self.manifest.mesh, self.manifest.rank)

    def prepare(self, plan: Plan, fill: Fill) -> list[Bound]:
        """Fill a bucket's inputs, run it once, and return its commands.

        The routers read drawn logits, not what the layers computed: hidden states of random weights
        are so alike that all tokens would meet at a few experts.

        Raises:
            DeviceFault: The device fails.
        """
        executor = self.driver.bind(plan, self.memory)
        fill(executor.inputs)
        executor.start(upload=True)
        executor.finish()
        commands = self._with_drawn_routing(plan, self.driver.commands(plan, self.memory))
        step = self.driver.graph(commands)
        step.run()
        self.driver.gpu.wait(plan.bucket.name)
        step.close()
        return commands

    def _with_drawn_routing(self, plan: Plan, commands: list[Bound]) -> list[Bound]:
        """Let each layer's router read logits of its own, as far as `ROUTING_BYTES` go."""
        sizes = {b.id: b.nbytes for b in plan.buffers}
        if self._logits is None:
            self._logits = self.driver.allocate("drawn routing", ROUTING_BYTES)
            draw_logits(self._logits)
        changed: list[Bound] = []
        places: dict[str, int] = {}
        end = 0
        for bound in commands:
            if not bound.command.label.startswith(ROUTERS):
                changed.append(bound)
                continue
            # Launches of one node read the same logits.
            if bound.label not in places:
                nbytes = aligned(sizes[bound.command.args[0].buffer])
                start = end if end + nbytes <= ROUTING_BYTES else 0
                places[bound.label], end = self._logits.address + start, start + nbytes
            changed.append(replace(bound, values=(places[bound.label], *bound.values[1:])))
        return changed

    def close(self) -> None:
        """Free everything."""
        self.driver.close()

    def __enter__(self) -> Standalone:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free everything where nothing failed: a device that faulted takes no more calls."""
        if error is None:
            self.close()
