"""`k3c doctor`: what this machine has, what each verb needs, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from k3c import __version__
from k3c.cpu_features import machine_features
from k3c.errors import DeviceFault

RUNTIME = ("numpy", "rich", "tiktoken", "typer")
COMPILE = ("torch", "networkx", "jsonschema", "safetensors", "apache-tvm", "apache-tvm-ffi")
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")


@dataclass(frozen=True)
class Finding:
    """Something missing, what it is needed for, and how to get it."""

    missing: str
    needed_for: str
    fix: str


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_features() -> frozenset[str]:
    """Return what the CPU can do; nothing where the machine does not say."""
    try:
        return machine_features()
    except DeviceFault:
        return frozenset()


def _compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        return "not found"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else path


def _gpus() -> tuple[str, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return tuple(done.stdout.splitlines()) if done.returncode == 0 else ()


def _findings(versions: Mapping[str, str], flags: frozenset[str], compiler: str) -> list[Finding]:
    found: list[Finding] = []
    for name in RUNTIME:
        if versions[name] == "not installed":
            found.append(Finding(name, "every verb", "pip install k3c-compiler"))
    for name in COMPILE:
        if versions[name] == "not installed":
            found.append(Finding(name, "export, compile", "pip install 'k3c-compiler[cpu]'"))
    if compiler == "not found":
        found.append(Finding("g++", "compile --target cpu", "install your system's C++ compiler"))
    if not {"avx2", "fma"} <= flags:
        found.append(Finding("AVX2 and FMA", "running CPU artifacts", "use another machine"))
    return found


def run_doctor(as_json: bool) -> None:
    """Print the report, as text or as JSON.

    Args:
        as_json: Print one JSON object instead of text.
    """
    versions = {name: _version(name) for name in (*RUNTIME, *COMPILE)}
    flags, compiler = _cpu_features(), _compiler()
    findings = _findings(versions, flags, compiler)
    report = {
        "k3c": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "cpu_features": [f for f in CPU_FEATURES if f in flags],
        "packages": versions,
        "compiler": compiler,
        "gpus": list(_gpus()),
        "missing": [asdict(f) for f in findings],
    }
    if as_json:
        print(json.dumps(report, indent=1, sort_keys=True))
        return
    for key in ("k3c", "python", "system", "cores", "compiler"):
        print(f"{key:<16}{report[key]}")
    print(f"{'cpu features':<16}{' '.join(report['cpu_features'])}")
    print(f"{'gpus':<16}{'; '.join(report['gpus']) or 'none'}")
    for name, version in versions.items():
        print(f"{name:<16}{version}")
    for finding in findings:
        print(f"missing: {finding.missing}, needed for {finding.needed_for}: {finding.fix}")
    print("nothing is missing" if not findings else f"{len(findings)} missing")
