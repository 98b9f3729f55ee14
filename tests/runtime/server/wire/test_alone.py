"""Others use the wire format without the rest of k3c."""

import subprocess
import sys

PROGRAM = """
import sys
import k3c.runtime.server.wire.renderer, k3c.runtime.server.wire.streams
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("k3c", "numpy", "torch")))
"""


def test_the_wire_format_brings_in_nothing_else_of_k3c():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    others = [
        name
        for name in done.stdout.split()
        if name not in ("k3c", "k3c.errors", "k3c.runtime", "k3c.runtime.server")
        and not name.startswith("k3c.runtime.server.wire")
    ]
    assert others == []
