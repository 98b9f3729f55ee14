"""Compiled kernels of one test run are kept in a folder of their own, not in the user's cache."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("K3C_CACHE_DIR")
    # A folder given from outside lets two runs share what they compile.
    folder = Path(before) if before else tmp_path_factory.mktemp("kernels")
    os.environ["K3C_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["K3C_CACHE_DIR"]
