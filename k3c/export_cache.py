"""Exported models on disk, by key: importing torch and tracing takes seconds, reading text none.

An entry is IR text in the cache of compiled kernels (`K3C_CACHE_DIR`), so it is written beside its
place and renamed, and a damaged one is built again. The key covers everything that the text depends
on; nothing here imports torch unless the entry is missing.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3c.codegen import object_cache
from k3c.errors import ParseError, VerifyError
from k3c.ir.graph import Module
from k3c.ir.text import parse, show
from k3c.model.config import PAGE_TOKENS, TextConfig

if TYPE_CHECKING:
    from k3c.model.checkpoint import Checkpoint

Compute = Literal["bf16", "f32"]

KIND = "k3"  # suffix of the entries
_PACKAGE = Path(__file__).parent
# What the text is made by: the model, its tracing, and the IR's types, names and spelling.
SOURCES = ("model", "export", "ir")


def exported(
    config: TextConfig,
    compute: Compute = "bf16",
    page_tokens: int = PAGE_TOKENS,
    checkpoint: Checkpoint | None = None,
) -> Module:
    """Return the exported text model, from the cache where it is there.

    Args:
        config: The model.
        compute: Activation type.
        page_tokens: Positions of a page of the MLA cache.
        checkpoint: Gives the stored types of the weights; None: all bf16.

    Raises:
        ExportError: The model uses something that the IR cannot express.
    """
    key = export_key(config, compute, page_tokens, checkpoint)
    module = _read(object_cache.load(key, KIND))
    if module is None:
        module = _export(config, compute, page_tokens, checkpoint)
        object_cache.store(key, show(module).encode(), KIND)
    return module


def export_key(
    config: TextConfig, compute: Compute, page_tokens: int, checkpoint: Checkpoint | None = None
) -> str:
    """Return the key of an exported model: sha256 in hex of everything that its text depends on.

    Args:
        config: The model.
        compute: Activation type.
        page_tokens: Positions of a page of the MLA cache.
        checkpoint: Gives the stored types of the weights; None: all bf16.
    """
    stored: Mapping[str, str] | None = None if checkpoint is None else checkpoint.stored_types()
    parts = {
        "what": "export",
        "config": asdict(config),
        "compute": compute,
        "page_tokens": page_tokens,
        "stored": stored,
        "sources": source_digest(),
        "torch": version("torch"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def source_digest(root: Path = _PACKAGE) -> str:
    """Return the sha256 of all files of the model, the export and the IR; lines count.

    Nodes carry the line of the model that made them, so that a comment moves what errors name.
    """
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            body = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(body)}\0".encode() + body)
    return digest.hexdigest()


def _read(data: bytes | None) -> Module | None:
    """Return the module of an entry, or None where there is none that can be read."""
    if data is None:
        return None
    try:
        return parse(data.decode())
    except (ParseError, VerifyError, UnicodeDecodeError):
        return None


def _export(
    config: TextConfig, compute: Compute, page_tokens: int, checkpoint: Checkpoint | None
) -> Module:
    with _no_collection():
        from k3c.export.exporter import export_model

        stored = checkpoint.dtype if checkpoint is not None else None
        return export_model(config, compute, stored, page_tokens)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out: importing torch makes a million objects and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
