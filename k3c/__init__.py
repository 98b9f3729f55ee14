"""k3c: an ahead-of-time compiler and lean runtime for the Kimi K3 model family.

`import k3c; engine = k3c.load(DIR)` opens an artifact. Nothing is imported until it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from k3c.runtime.cache.prefix import PrefixOptions
    from k3c.runtime.engine import Engine

__version__ = "0.1.0"


def load(
    directory: str | Path, *, rank: int | None = None, prefix: PrefixOptions | None = None
) -> Engine:
    """Open a compiled artifact and return an engine that generates tokens from it.

    Args:
        directory: The artifact that `k3c compile` wrote.
        rank: Which rank of the artifact's mesh this process is; None: the artifact's own.
        prefix: What is kept of requests for later ones; None: pages and planned snapshots.

    Returns:
        An engine: `add` requests, then iterate over the events of `step`.

    Raises:
        ArtifactError: The artifact is damaged, foreign or newer than this runtime.
        ConfigError: It has no such rank.
        DeviceFault: This machine lacks what the artifact needs.
    """
    from k3c.runtime.engine import Engine
    from k3c.runtime.loader import LoadOptions

    return Engine.open(directory, LoadOptions(rank=rank), prefix=prefix)
