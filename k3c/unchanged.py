"""Whether an artifact that exists was made from the same inputs: then it need not be made again.

An artifact without weights holds a digest of everything it depends on. Weights are left out on
purpose: to know that they are the same, all of them would have to be read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3c import __version__, artifact_dir
from k3c.artifact import Manifest
from k3c.artifact_dir import MANIFEST_FILE
from k3c.codegen.source_code import file_code
from k3c.errors import ConfigError
from k3c.export_cache import source_digest

INPUTS_FILE = "inputs.json"
_PACKAGE = Path(__file__).parent
# What the export cache counts line by line, the others without comments and docstrings.
_FOLDERS = ("passes", "codegen", "targets", "placement")
_DATA = ("*.toml", "*.json")
_TOOLS = ("torch", "triton", "apache-tvm", "apache-tvm-ffi", "numpy")

Inputs = Mapping[str, str]


def inputs_of(config_file: Path, options: Mapping[str, Any]) -> Inputs:
    """Return a digest of each kind of input of an artifact without weights, by name.

    Args:
        config_file: The model's config.json.
        options: What the user chose; a value that is the path of a file counts with its bytes.
    """
    folder = config_file.parent
    model = sorted(p for p in (config_file, folder / "generation_config.json") if p.is_file())
    # What is only said changes nothing.
    chosen = {k: v for k, v in _named(options).items() if k != "explain"}
    given = {k: v.read_bytes().hex() if _is_file(v) else v for k, v in chosen.items()}
    return {
        "config": _digest([folder.resolve().name, *(p.read_bytes().hex() for p in model)]),
        "options": _digest(given),
        "model sources": source_digest(),
        "compiler sources": _digest(_sources()),
        "data of targets and tuning": _digest(_data()),
        "tools": _digest({name: _version(name) for name in _TOOLS} | {"k3c": __version__}),
    }


def existing(output: Path, inputs: Inputs) -> Manifest | None:
    """Return the manifest of an artifact that these inputs made; None where there is nothing.

    Raises:
        ConfigError: Something is there that other inputs made; the message says which differ.
        ArtifactError: The artifact is damaged.
    """
    if not (output / MANIFEST_FILE).is_file() or not (output / INPUTS_FILE).is_file():
        return None
    made_from = json.loads((output / INPUTS_FILE).read_text("utf-8"))
    changed = changes(made_from, inputs)
    if changed:
        what = f"output exists, made from other {', '.join(changed)}"
        raise ConfigError(what, str(output), "remove it or name another")
    manifest = artifact_dir.read_manifest(output)
    artifact_dir.verify(output, manifest, "full")
    return manifest


def changes(before: Inputs, now: Inputs) -> list[str]:
    """Return the names of the inputs that differ, in order."""
    return [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]


def to_text(inputs: Inputs) -> str:
    """Return the member that an artifact holds."""
    return json.dumps(dict(inputs), indent=1, sort_keys=True) + "\n"


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: Path(v) if isinstance(v, str) and "/" in v else v for k, v in options.items()}


def _is_file(value: object) -> bool:
    return isinstance(value, Path) and value.is_file()


def _sources() -> list[tuple[str, str]]:
    paths = [*_PACKAGE.glob("*.py"), *(p for f in _FOLDERS for p in (_PACKAGE / f).rglob("*.py"))]
    return sorted((p.relative_to(_PACKAGE).as_posix(), file_code(p).digest) for p in paths)


def _data() -> list[tuple[str, str]]:
    paths = [p for folder in _FOLDERS for kind in _DATA for p in (_PACKAGE / folder).rglob(kind)]
    return sorted((p.relative_to(_PACKAGE).as_posix(), p.read_bytes().hex()) for p in paths)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _digest(parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
