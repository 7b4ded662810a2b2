"""Guards for anybody's engine, as context managers and as pytest fixtures.

```python
from dspark_lab.testing import no_host_sync          # a context manager

pytest_plugins = ["dspark_lab.testing"]              # the fixtures, in a conftest.py at the top or in a test module
def test_step(no_host_sync): ...
```

Torch and the trace reader load when a guard is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_lab.guards import Finding, GuardError, fake_cuda, no_device_alloc, no_host_sync
    from dspark_lab.testing.profiled import max_kernels, min_launch_lead_us, same_kernels_as

try:  # the guards are of use without pytest too
    from dspark_lab.testing.fixtures import (
        cuda_or_fake as cuda_or_fake,
    )
    from dspark_lab.testing.fixtures import (
        fixture_max_kernels as fixture_max_kernels,
    )
    from dspark_lab.testing.fixtures import (
        fixture_min_launch_lead_us as fixture_min_launch_lead_us,
    )
    from dspark_lab.testing.fixtures import (
        fixture_no_device_alloc as fixture_no_device_alloc,
    )
    from dspark_lab.testing.fixtures import (
        fixture_no_host_sync as fixture_no_host_sync,
    )
    from dspark_lab.testing.fixtures import (
        fixture_same_kernels_as as fixture_same_kernels_as,
    )
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise

_NAMES = {
    "no_host_sync": "dspark_lab.guards",
    "no_device_alloc": "dspark_lab.guards",
    "fake_cuda": "dspark_lab.guards",
    "Finding": "dspark_lab.guards",
    "GuardError": "dspark_lab.guards",
    "max_kernels": "dspark_lab.testing.profiled",
    "min_launch_lead_us": "dspark_lab.testing.profiled",
    "same_kernels_as": "dspark_lab.testing.profiled",
}

__all__ = [
    "Finding",
    "GuardError",
    "fake_cuda",
    "max_kernels",
    "min_launch_lead_us",
    "no_device_alloc",
    "no_host_sync",
    "same_kernels_as",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'dspark_lab.testing' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
