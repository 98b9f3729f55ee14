"""Write files so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from k3c.errors import ConfigError


def umask() -> int:
    """Return the permissions that this process takes from what it makes."""
    # Linux tells only in exchange for another.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def require_folder(path: Path) -> None:
    """Check, before the work that fills it, that a file can be made at `path`.

    Raises:
        ConfigError: The folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of {path.name} does not exist", str(path.parent), "make it")


def write_text(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, then rename it into place."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; it is as public as its owner's umask says.
        Path(name).chmod(0o666 & ~umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
