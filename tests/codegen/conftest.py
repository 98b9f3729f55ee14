"""Compiled kernels of one test run are kept in a folder of their own, not in the user's cache."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


# Ends with the tests of this folder: those of other folders that run after it in the same process
# use the user's cache.
@pytest.fixture(scope="package", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("K3C_CACHE_DIR")
    # A folder given from outside lets two runs share what they compile.
    folder = Path(before) if before else tmp_path_factory.getbasetemp() / "kernels"
    os.environ["K3C_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["K3C_CACHE_DIR"]
