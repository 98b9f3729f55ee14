"""What a process loads that generates tokens."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = {"torch", "triton", "tvm", "tvm_ffi", "networkx", "onnx", "safetensors", "pickle"}


def test_a_process_that_generates_loads_no_compiler_module():
    # The driver is exercised with its libraries in test_executor; here a whole engine runs.
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.support.fake_plan import make_fake\n"
        "from k3c.runtime.engine import Engine\n"
        "engine = Engine(make_fake().loaded)\n"
        "assert len(engine.generate([[1, 2], [3]], 4)) == 2\n"
        "assert len(engine.score([[1, 2]])) == 1\n"
        "print('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    # numpy imports pickle for its own files; nothing of ours does.
    assert not loaded & (COMPILER - {"pickle"})


def test_the_runtimes_source_uses_no_format_that_runs_code():
    for path in (ROOT / "runtime").rglob("*.py"):
        text = path.read_text()
        for word in ("pickle", "marshal", "dill", "torch.load", "np.load", "eval(", "exec("):
            assert word not in text, f"{path}: {word}"
