"""Artifacts that several folders of tests use, each compiled once a run, whatever the workers."""

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
def artifacts(tmp_path_factory, worker_id) -> Path:
    """The folder of this run's artifacts, which parallel workers share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "artifacts"
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
