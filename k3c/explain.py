"""What `k3c compile --explain` says: which work is done again, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from k3c.codegen.kernel_build import why_missing
from k3c.codegen.kernel_key import KernelRequest
from k3c.targets.target import Target


def explain_kernels(requests: Sequence[KernelRequest], target: Target) -> list[str]:
    """Return lines about the kernels of a compilation: how many are kept, which are built and why.

    Args:
        requests: All kernels that the plans launch.
        target: The device.
    """
    reasons = [(r.template.name, why_missing(r, target)) for r in requests]
    missing = Counter((name, why) for name, why in reasons if why is not None)
    built = sum(missing.values())
    lines = [f"kernels: {len(requests)} needed, {len(requests) - built} kept, {built} to build"]
    for (name, why), count in sorted(missing.items(), key=str):
        lines.append(f"  {name}: {count} to build, {why}")
    return lines
