"""What this CPU is, as Linux reports it: read by the targets, the runtime and `k3c doctor`."""

from __future__ import annotations

from pathlib import Path

from k3c.errors import DeviceFault

CPUINFO = Path("/proc/cpuinfo")


def machine_features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the feature flags that Linux reports for the first CPU.

    Raises:
        DeviceFault: The file cannot be read or has no line of flags.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError as exc:
        raise DeviceFault(f"CPU flags cannot be read: {exc.strerror}", str(cpuinfo)) from exc
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    raise DeviceFault("no line of CPU flags", str(cpuinfo), "k3c runs on x86-64 CPUs with AVX2")
