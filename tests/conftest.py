"""Artifacts that several folders of tests use, each compiled once a session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> Path:
    """A folder for this session's artifacts."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="session")
def tiny_f32(artifacts) -> Path:
    """k3-tiny, float32: random weights, no tokenizer."""
    from tests.support.compiled import TINY, compile_artifact

    return compile_artifact(TINY, artifacts / "tiny-f32", "--compute", "float32")


@pytest.fixture(scope="session")
def demo_f32(artifacts) -> Path:
    """k3-demo, float32."""
    from tests.support.compiled import DEMO, compile_artifact

    return compile_artifact(DEMO, artifacts / "demo-f32", "--compute", "float32")


@pytest.fixture(scope="session")
def demo_bf16(artifacts) -> Path:
    """k3-demo in the default mode."""
    from tests.support.compiled import DEMO, compile_artifact

    return compile_artifact(DEMO, artifacts / "demo-bf16")
