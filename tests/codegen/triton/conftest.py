"""Tests of GPU kernels at real shapes run on a device only, or are recorded for one."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if {"K3C_DEVICE_KERNELS", "K3C_RECORD_KERNELS"} & os.environ.keys():
        return
    skip = pytest.mark.skip(reason="needs a GPU: K3C_DEVICE_KERNELS is not set")
    for item in items:
        if "device" in item.keywords:
            item.add_marker(skip)
