"""Whether an artifact's kernels may run on this CPU."""

from __future__ import annotations

import platform

from k3c.artifact import TargetInfo
from k3c.errors import ArtifactError

# LLVM's names on the left, the kernel's on the right, where they differ.
ALIASES = {"sse4.1": "sse4_1", "sse4.2": "sse4_2", "sse3": "pni", "lzcnt": "abm", "cx16": "cx16"}


def check_machine(target: TargetInfo, features: frozenset[str], machine: str = "") -> None:
    """Refuse a machine that cannot run the kernels, before anything is mapped.

    Args:
        target: What the artifact was compiled for.
        features: What this CPU has, from `k3c.cpu_features`.
        machine: Architecture; empty asks the system.

    Raises:
        ArtifactError: Kind, architecture or a feature does not match.
    """
    machine = machine or platform.machine()
    hint = "k3c compile MODEL --target cpu on this machine"
    if target.kind != "cpu":
        raise ArtifactError(f"compiled for {target.kind}, this driver runs cpu", target.name)
    if target.arch != machine:
        what = f"compiled for {target.arch}, this machine is {machine}"
        raise ArtifactError(what, target.name, hint)
    missing = [name for name in target.features if ALIASES.get(name, name) not in features]
    if missing:
        vector = sorted(f for f in features if f.startswith(("avx", "fma", "f16c", "asimd", "sve")))
        raise ArtifactError(
            f"compiled for {' '.join(target.features)}, this CPU lacks {' '.join(missing)} "
            f"(it has {' '.join(vector) or 'no vector features'})",
            target.name,
            hint,
        )
