"""What makes two kernels the same: the key, and the symbol made from it.

The key covers everything that the machine code depends on (ADR 0008): the text of the template and
of every module of ours that it uses, the constants, the target's arch, the tool versions and flags.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from k3c.targets.catalogue import Constant, Template
from k3c.targets.target import Target

Constants = Mapping[str, Constant]

# Its passes and options are the flags of the code generator.
_LOWERING = Path(__file__).with_name("tvm_lower.py")

_OURS = "k3c.codegen"
_SYMBOL_HEX_DIGITS = 12


@cache
def toolchain() -> Mapping[str, str]:
    """Return the versions of the tools that the machine code depends on."""
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
    """Return the source of a module and of every module of ours that its names come from."""
    texts = [Path(_file_of(name)).read_text("utf-8") for name in sorted(_closure(module_name))]
    return "\0".join(texts)


def kernel_key(template: Template, constants: Constants, target: Target) -> str:
    """Return the key of one kernel: sha256 in hex.

    Args:
        template: The template; the source of the module that defines its class is part of the key.
        constants: Its compile-time constants.
        target: The device; its CPU name and features decide the code.
    """
    parts = {
        "template": template.name,
        "source": source_text(type(template).__module__),
        "constants": dict(constants),
        "arch": [target.kind, target.arch, target.mcpu, target.lanes, *target.features],
        "lowering": _LOWERING.read_text("utf-8"),
        "toolchain": dict(toolchain()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def kernel_symbol(template_name: str, key: str) -> str:
    """Return the name of a kernel in the shared object, without the packed-call prefix."""
    return f"{template_name}_{key[:_SYMBOL_HEX_DIGITS]}"


def _closure(module_name: str) -> set[str]:
    """Return the modules of ours reachable from the names of a module, itself included."""
    found: set[str] = set()
    todo = [module_name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _used_modules(sys.modules[name])
    return found


def _used_modules(module: ModuleType) -> list[str]:
    values = list(vars(module).values())
    names = [
        v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", "") for v in values
    ]
    return [n for n in names if isinstance(n, str) and n.startswith(_OURS) and n in sys.modules]


def _file_of(module_name: str) -> str:
    path = sys.modules[module_name].__file__
    assert path is not None, f"module {module_name} has no file"
    return path
