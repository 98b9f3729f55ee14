"""Compiled kernels, and exported models as text, on disk by key.

An entry is one file, the sha256 of the object and then the object, written beside its place and
renamed: a killed build leaves no half entry, and a damaged entry is seen and built again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST_BYTES = 32


def cache_dir() -> Path:
    """Return the folder of compiled kernels; `K3C_CACHE_DIR` comes first, then the XDG cache."""
    chosen = os.environ.get("K3C_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k3c"


def load(key: str, kind: str = "kernel") -> bytes | None:
    """Return the object stored under `key`, or None when it is missing or damaged.

    Args:
        key: sha256 in hex.
        kind: What it is, the suffix of its file.
    """
    try:
        data = _entry(key, kind).read_bytes()
    except OSError:
        return None
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == digest else None


def store(key: str, body: bytes, kind: str = "kernel") -> None:
    """Store an object under `key`; a full or read-only disk only means that nothing is kept.

    Args:
        key: sha256 in hex.
        body: The object.
        kind: What it is, the suffix of its file.
    """
    path = _entry(key, kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


def _entry(key: str, kind: str) -> Path:
    return cache_dir() / key[:2] / f"{key}.{kind}"
