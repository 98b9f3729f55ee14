"""Engines on real artifacts.

TVM is imported before any artifact is opened: a process that loads an artifact's own copy of
libtvm_ffi first aborts when it imports TVM later, as another test may do. The libraries that an
artifact carries are used by the tests that start processes.
"""

import pytest
import tvm  # noqa: F401

from tests.support.compiled import WatchedEngine, demo_golden, open_loaded


@pytest.fixture(scope="session")
def golden():
    return demo_golden()


@pytest.fixture(scope="session")
def prompts(golden):
    return [p["prompt_ids"] for p in golden["prompts"]]


@pytest.fixture(scope="session")
def greedy(golden):
    return [p["greedy_ids"] for p in golden["prompts"]]


@pytest.fixture(scope="session")
def demo_loaded(demo_f32):
    return open_loaded(demo_f32)


@pytest.fixture(scope="session")
def tiny_loaded(tiny_f32):
    return open_loaded(tiny_f32)


@pytest.fixture
def demo(demo_loaded):
    """A new engine on the demo; engines on one artifact share its memory, one runs at a time."""
    return WatchedEngine(demo_loaded)


@pytest.fixture
def tiny(tiny_loaded):
    return WatchedEngine(tiny_loaded)
