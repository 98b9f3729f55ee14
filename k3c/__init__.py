"""k3c: an ahead-of-time compiler and lean runtime for the Kimi K3 model family.

`import k3c; engine = k3c.load(DIR)` opens an artifact. Nothing is imported until it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from k3c.runtime.engine import Engine

__version__ = "0.1.0"


def load(directory: str | Path) -> Engine:
    """Open a compiled artifact and return an engine that generates tokens from it.

    Args:
        directory: The artifact that `k3c compile` wrote.

    Returns:
        An engine: `add` requests, then iterate over the events of `step`.

    Raises:
        ArtifactError: The artifact is damaged, foreign or newer than this runtime.
        DeviceFault: This machine lacks what the artifact needs.
    """
    from k3c.runtime.engine import Engine

    return Engine.open(directory)
