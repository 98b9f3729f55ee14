"""What several folders of tests use: compiled once a run, whatever the workers."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# A process that has opened an artifact's copy of TVM's library cannot import tvm any more. The
# other order is fine, so that tests of kernels and of artifacts may share a process.
# A machine that only runs recorded GPU kernels has no TVM.
if find_spec("tvm") is not None:
    import tvm  # noqa: F401
from filelock import FileLock

from tests.support.compiled import DEMO, TINY, compile_artifact


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, worker_id) -> Path:
    """The folder of this run, which parallel workers share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(run_folder) -> Iterator[Path]:
    """Keep what a run compiles in a folder of its own; `K3C_CACHE_DIR` lets two runs share it."""
    given = os.environ.get("K3C_CACHE_DIR")
    folder = Path(given) if given else run_folder / "kernels"
    os.environ["K3C_CACHE_DIR"] = str(folder)
    yield folder
    if given is None:
        del os.environ["K3C_CACHE_DIR"]


@pytest.fixture(scope="session")
def artifacts(run_folder, kernel_cache) -> Path:
    """The folder of this run's artifacts, compiled with its kernels."""
    folder = run_folder / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder


def _once(model, output, *options) -> Path:
    with FileLock(f"{output}.lock"):
        return output if output.exists() else compile_artifact(model, output, *options)


@pytest.fixture(scope="session")
def tiny_f32(artifacts) -> Path:
    """k3-tiny, float32: random weights, no tokenizer."""
    return _once(TINY, artifacts / "tiny-f32", "--compute", "float32")


@pytest.fixture(scope="session")
def demo_f32(artifacts) -> Path:
    """k3-demo, float32."""
    return _once(DEMO, artifacts / "demo-f32", "--compute", "float32")


@pytest.fixture(scope="session")
def demo_bf16(artifacts) -> Path:
    """k3-demo in the default mode."""
    return _once(DEMO, artifacts / "demo-bf16")
