"""Guards over a region of anybody's code: no wait of the host, no device allocation; with a fake CUDA device to try them on.

``dspark_lab.testing`` has these and the guards that read a profile, with pytest fixtures.
"""

from dspark_lab.guards.device_alloc import DeviceAllocGuard, no_device_alloc
from dspark_lab.guards.fake import fake_cuda
from dspark_lab.guards.host_sync import HostSyncGuard, no_host_sync
from dspark_lab.guards.sites import Finding, GuardError

__all__ = [
    "DeviceAllocGuard",
    "Finding",
    "GuardError",
    "HostSyncGuard",
    "fake_cuda",
    "no_device_alloc",
    "no_host_sync",
]
