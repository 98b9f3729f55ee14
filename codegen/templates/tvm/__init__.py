"""Templates for CPUs, in order of preference within an op."""

from __future__ import annotations

from k3c.targets.catalogue import Template

CPU_TEMPLATES: tuple[Template, ...] = ()
