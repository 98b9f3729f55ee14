"""What makes two kernels the same: the key, and the symbol made from it.

The key covers everything that the machine code depends on (ADR 0008): the code of the template and
of every module of ours that it uses, the constants, the target's arch, the tool versions and flags.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from k3c.targets.catalogue import Constant, Template
from k3c.targets.target import Target

Constants = Mapping[str, Constant]

# Their passes and options are the flags of the code generators.
_LOWERING = {
    "cpu": Path(__file__).with_name("tvm_lower.py"),
    "cuda": Path(__file__).with_name("triton_aot.py"),
    "hip": Path(__file__).with_name("triton_aot.py"),
}

_OURS = "k3c.codegen"
_SYMBOL_HEX_DIGITS = 12


@cache
def toolchain(kind: str) -> Mapping[str, str]:
    """Return the versions of the tools that the machine code of a kind of target depends on."""
    if kind != "cpu":
        return {"triton": version("triton")}
    import tvm

    llvm_major = tvm.get_global_func("target.llvm_version_major")
    assert llvm_major is not None, "this build of tvm has no LLVM"
    return {
        "tvm": version("apache-tvm"),
        "tvm_ffi": version("apache-tvm-ffi"),
        "llvm": str(llvm_major()),
    }


@cache
def source_text(module_name: str) -> str:
    """Return what a module and every module of ours that it imports say to Python."""
    return "\0".join(_code(_file_of(name)) for name in sorted(_closure(module_name)))


@cache
def _code(path: Path) -> str:
    """Return the syntax tree of a file as text: a comment or a line break changes no kernel."""
    return ast.dump(_tree(path))


@dataclass(frozen=True)
class KernelRequest:
    """A kernel that a plan calls: its template, which of its stages, and the constants."""

    template: Template
    constants: Constants = field(default_factory=dict)
    stage: str = ""

    @property
    def name(self) -> str:
        """Template and stage, the start of the kernel's symbol."""
        return f"{self.template.name}_{self.stage}" if self.stage else self.template.name


def kernel_key(request: KernelRequest, target: Target) -> str:
    """Return the key of one kernel: sha256 in hex.

    Args:
        request: The kernel; the source of the module that defines its template's class is part of
            the key.
        target: The device; its CPU name and features decide the code.
    """
    parts = {
        "template": request.name,
        "source": source_text(type(request.template).__module__),
        "constants": dict(request.constants),
        "arch": [target.kind, target.arch, target.mcpu, target.lanes, *target.features],
        "lowering": _code(_LOWERING[target.kind]),
        "toolchain": dict(toolchain(target.kind)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def kernel_symbol(request: KernelRequest, target: Target) -> str:
    """Return the kernel's name, unique in an artifact."""
    return f"{request.name}_{kernel_key(request, target)[:_SYMBOL_HEX_DIGITS]}"


def _closure(module_name: str) -> set[str]:
    """Return the modules of ours that a module imports, directly or not, itself included."""
    found: set[str] = set()
    todo = [module_name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _imports(_file_of(name))
    return found


def _imports(path: Path) -> list[str]:
    """Return the modules of ours that a file names in an import."""
    nodes = [n for n in ast.walk(_tree(path)) if isinstance(n, ast.ImportFrom)]
    return [n.module for n in nodes if n.module is not None and n.module.startswith(_OURS)]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _file_of(module_name: str) -> Path:
    # A module may import another inside a function: then it need not be loaded.
    spec = find_spec(module_name)
    origin = None if spec is None else spec.origin
    assert origin is not None, f"module {module_name} has no file"
    return Path(origin)
