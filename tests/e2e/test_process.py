"""A process that runs a real artifact: what it loads and starts, how its first request fares."""

import json
import os
import subprocess
import sys

from tests.support.compiled import ROOT

COMPILER = {"torch", "triton", "tvm", "tvm_ffi", "networkx", "safetensors", "onnx"}
SCRIPT = """
import json, os, sys, time
import k3c
engine = k3c.load(sys.argv[1])
def seconds():
    start = time.perf_counter()
    engine.generate([list(range(40, 80))], 8)
    return time.perf_counter() - start
times = [seconds() for _ in range(4)]
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({
    "modules": sorted({m.split(".")[0] for m in sys.modules}),
    "times": times,
    "libraries": sorted(maps),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
}))
"""


def run(artifact, env):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(artifact)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_process_that_generates_loads_no_compiler_and_uses_the_artifacts_libraries(
    demo_f32, tmp_path
):
    found = run(demo_f32, {"K3C_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)})
    assert not set(found["modules"]) & COMPILER
    tvm = [path for path in found["libraries"] if "tvm" in path]
    assert tvm
    assert all(path.startswith(str(demo_f32)) for path in tvm)
    # Nothing was compiled: no child process, and no cache that a compiler would have filled.
    assert found["children"] == []
    assert list(tmp_path.iterdir()) == []
    # The first request pays for page faults, never for a compiler, which takes seconds.
    assert found["times"][0] < 1.5 * max(found["times"][1:]) + 0.25
