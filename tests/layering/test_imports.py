"""What may be loaded by whom, seen in a real process."""

import subprocess
import sys


def loaded_modules(code: str) -> set[str]:
    """Run `code` in a fresh interpreter and return the top-level modules it loaded."""
    tail = "\nimport sys; print('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_k3c_loads_no_third_party_module():
    third_party = loaded_modules("import k3c") - set(sys.stdlib_module_names)
    assert {m for m in third_party if not m.startswith(("_", "sitecustomize", "k3c"))} <= {
        "site",
        "usercustomize",
    }


def test_importing_the_runtime_loads_no_compiler():
    loaded = loaded_modules("import k3c.runtime.engine")
    assert not loaded & {"torch", "triton", "tvm", "tvm_ffi", "networkx", "typer"}
