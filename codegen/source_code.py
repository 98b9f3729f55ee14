"""What the source files of ours say to Python: their code without comments, layout and docstrings.

A file is parsed once: its digest and its imports are kept by the hash of its bytes, on disk too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from k3c.codegen import object_cache

_OURS = "k3c.codegen"
_KIND = "source"
_SPEAKERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class SourceCode:
    """One file: sha256 of its code in hex, and every `module.name` of ours that it imports."""

    digest: str
    imports: tuple[str, ...]


@cache
def module_digest(module_name: str) -> str:
    """Return the sha256, in hex, of the code of a module and every module of ours that it uses."""
    digests = [file_code(file_of(name)).digest for name in sorted(closure(module_name))]
    return hashlib.sha256("\0".join(digests).encode()).hexdigest()


def closure(module_name: str) -> set[str]:
    """Return the modules of ours that a module imports, directly or not, itself included."""
    found: set[str] = set()
    todo = [module_name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += map(_module_of, file_code(file_of(name)).imports)
    return found


def _module_of(imported: str) -> str:
    """Return the module of an imported `module.name`: a name of a package may be a module too."""
    module, _, name = imported.rpartition(".")
    file = file_of(module)
    inside = (file.with_name(f"{name}.py"), file.with_name(name) / "__init__.py")
    is_module = file.name == "__init__.py" and any(path.exists() for path in inside)
    return imported if is_module else module


@cache
def file_code(path: Path) -> SourceCode:
    """Return the digest and the imports of a file."""
    body = path.read_bytes()
    # Syntax trees, and how they print, change with Python's version.
    key = hashlib.sha256(f"source 2 {sys.version_info[:2]}\0".encode() + body).hexdigest()
    kept = object_cache.load(key, _KIND)
    if kept is not None:
        fields = json.loads(kept)
        return SourceCode(fields["digest"], tuple(fields["imports"]))
    found = _parse(body.decode())
    object_cache.store(key, json.dumps(asdict(found)).encode(), _KIND)
    return found


@cache
def file_of(module_name: str) -> Path:
    """Return the file of a module; a module that a function imports need not be loaded."""
    spec = find_spec(module_name)
    origin = None if spec is None else spec.origin
    assert origin is not None, f"module {module_name} has no file"
    return Path(origin)


def _parse(text: str) -> SourceCode:
    tree = ast.parse(text)
    from_imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    named = {f"{n.module}.{alias.name}" for n in from_imports for alias in n.names}
    ours = sorted(name for name in named if name.startswith(f"{_OURS}."))
    _drop_docstrings(tree)
    return SourceCode(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(ours))


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, _SPEAKERS) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
