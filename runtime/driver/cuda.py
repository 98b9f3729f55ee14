"""The driver of NVIDIA GPUs."""

from __future__ import annotations

import re

from k3c.runtime.driver.cuda_api import CudaApi
from k3c.runtime.driver.gpu import GpuDriver
from k3c.runtime.driver.gpu_api import Api, version_text

COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")
TARGETS = {"sm_90": "h200", "sm_100": "b200", "sm_103": "b300"}


def runs(device: str, arch: str) -> bool:
    """Return whether a device runs binaries of an architecture.

    `sm_90a` runs on compute capability 9.0 alone; `sm_100f` and `sm_90` also on later minor
    versions of the same major one.

    Args:
        device: E.g. `sm_103`.
        arch: E.g. `sm_100f`.
    """
    here, made = ARCH.fullmatch(device), ARCH.fullmatch(arch)
    if here is None or made is None or here[1] != made[1]:
        return False
    return here[2] == made[2] if made[3] == "a" else int(here[2]) >= int(made[2])


class CudaDriver(GpuDriver):
    """One NVIDIA GPU."""

    oldest_driver = "12.4"  # cuFuncGetParamInfo

    def make_api(self) -> Api:
        """Return libcuda."""
        return CudaApi()

    def driver_version(self) -> str:
        """Return the newest CUDA version that the driver knows."""
        return version_text(self.api.integer("driver_version"), 1000, 10)

    def device_arch(self) -> str:
        """Return the compute capability as `sm_90`."""
        attributes = (COMPUTE_MAJOR, COMPUTE_MINOR)
        major, minor = (self.api.integer("device_attribute", a, self.device) for a in attributes)
        return f"sm_{major}{minor}"

    def runs(self, arch: str) -> bool:
        """Return whether the device runs binaries of an architecture."""
        return runs(self.device_arch(), arch)

    def target_name(self) -> str:
        """Return the target of the device's compute capability."""
        return TARGETS.get(self.device_arch(), self.device_arch())
