"""Download the peers' public wheels and lay what is measured of them under one folder.

`python perf/peers/fetch.py out/peers` needs the network; the GPU machine then needs only that
folder. Nothing of it belongs into the repository. Versions are pinned: a peer's signature is part
of the measurement.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = ("vllm==0.33.0", "fla-core==0.6.0")
# What to take of a wheel: the start of its members' names, and where they go.
MEMBERS: dict[str, tuple[tuple[str, str], ...]] = {
    "fla_core": (("fla/", "py/fla/"),),
    "vllm": (
        ("vllm/third_party/triton_kernels/", "py/triton_kernels/"),
        ("vllm/models/kimi_k3/nvidia/ops/attn_res.py", "py/vllm_attn_res.py"),
        ("vllm/_C_stable_libtorch", "so/_C_stable_libtorch"),
        ("vllm/_moe_C_stable_libtorch", "so/_moe_C_stable_libtorch"),
        ("vllm/_flashkda_C", "so/_flashkda_C"),
        ("vllm/_flashmla_C", "so/_flashmla_C"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C", "so/_vllm_fa3_C"),
    ),
}


def fetch(folder: Path) -> None:
    """Fill `folder` with `py/` (Python and Triton peers) and `so/` (compiled ones)."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        subprocess.run([*command, *WHEELS], check=True)
        for wheel in sorted(Path(scratch).glob("*.whl")):
            for name, members in MEMBERS.items():
                if wheel.name.startswith(f"{name}-"):
                    take(wheel, members, folder)


def take(wheel: Path, members: tuple[tuple[str, str], ...], folder: Path) -> None:
    """Extract the members of a wheel that are asked for; each start must be there.

    Raises:
        SystemExit: A start is missing: another version lays its files elsewhere.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for start, place in members:
            found = [name for name in names if name.startswith(start)]
            if not found:
                raise SystemExit(f"{wheel.name} has no {start}*: pin the version that has it")
            for name in found:
                target = folder / destination(name, start, place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def destination(name: str, start: str, place: str) -> str:
    """Return where a member goes; a library loses its ABI tag: `_C.abi3.so` becomes `_C.so`."""
    if place.startswith("so/"):
        return f"{place}.so"
    return place + name[len(start) :]


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
