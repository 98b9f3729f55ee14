"""Tests on a GPU, of artifacts that were compiled elsewhere.

`K3C_DEVICE_ARTIFACTS` names a folder with `demo-f32` and `demo-bf16`: models/k3-demo compiled for
the device's target, with `--compute float32` and without. Without it nothing here runs.
"""

import json
import os
from pathlib import Path

import pytest

from k3c.runtime.loader import LoadOptions, load_artifact

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("K3C_DEVICE_ARTIFACTS", "")


def pytest_collection_modifyitems(items):
    if not FOLDER:
        skip = pytest.mark.skip(reason="needs a GPU: K3C_DEVICE_ARTIFACTS is not set")
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def golden():
    return json.loads((ROOT / "models/k3-demo/golden.json").read_text())


@pytest.fixture
def opened():
    """Open an artifact by name; it is closed after the test."""
    loaded = []

    def go(name, **options):
        loaded.append(load_artifact(Path(FOLDER) / name, LoadOptions(**options)))
        return loaded[-1]

    yield go
    for artifact in loaded:
        artifact.close()
