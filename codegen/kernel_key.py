"""What makes two kernels the same: the key, and the symbol made from it.

The key covers everything that the machine code depends on (ADR 0008): the code of the template and
of every module of ours that it uses, the constants, the target's arch, the tool versions and flags.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

from k3c.codegen.source_code import file_code, module_digest
from k3c.targets.catalogue import Constant, Template
from k3c.targets.target import Target

Constants = Mapping[str, Constant]

# Their passes and options are the flags of the code generators.
_HERE = Path(__file__).parent
_TRITON = (_HERE / "triton_aot.py", _HERE / "index_program.py")
_LOWERING = {"cpu": (_HERE / "tvm_lower.py",), "cuda": _TRITON, "hip": _TRITON}

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
    module = type(request.template).__module__
    return _key(request.name, module, _typed(request.constants), _arch(target))


def kernel_makers(request: KernelRequest, target: Target) -> dict[str, str]:
    """Return digests of what makes a kernel's code, its constants and target aside."""
    return _makers(type(request.template).__module__, target.kind)


def kernel_identity(request: KernelRequest, target: Target) -> str:
    """Return the key of what a kernel is, whatever code and tools make it: sha256 in hex."""
    return _digest(["identity", request.name, _typed(request.constants), _arch(target)])


def _typed(constants: Constants) -> tuple[tuple[str, Constant, str], ...]:
    # 1, 1.0 and True are equal, and would share an entry of a dictionary.
    return tuple((k, v, type(v).__name__) for k, v in sorted(constants.items()))


def _arch(target: Target) -> tuple[str | int, ...]:
    return (target.kind, target.arch, target.mcpu, target.lanes, *target.features)


@cache
def _makers(module: str, kind: str) -> dict[str, str]:
    return {
        "the template's code": module_digest(module),
        "the code that calls the compiler": _digest(
            [file_code(path).digest for path in _LOWERING[kind]]
        ),
        "the compiler's version": _digest(dict(toolchain(kind))),
    }


@cache
def _key(
    name: str,
    module: str,
    constants: tuple[tuple[str, Constant, str], ...],
    arch: tuple[str | int, ...],
) -> str:
    return _digest([name, constants, arch, _makers(module, str(arch[0]))])


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def kernel_symbol(request: KernelRequest, target: Target) -> str:
    """Return the kernel's name, unique in an artifact."""
    return f"{request.name}_{kernel_key(request, target)[:_SYMBOL_HEX_DIGITS]}"
