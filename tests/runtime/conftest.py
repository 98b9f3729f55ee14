"""Stubs of the GPU driver libraries."""

import pytest

from tests.support.stub_gpu import make_stub


@pytest.fixture(params=["cuda", "hip"])
def kind(request):
    """Which library."""
    return request.param


@pytest.fixture
def stub(kind, monkeypatch):
    """The library that `kind` names."""
    return make_stub(monkeypatch, kind)


@pytest.fixture
def cuda(monkeypatch):
    """libcuda."""
    return make_stub(monkeypatch, "cuda")
