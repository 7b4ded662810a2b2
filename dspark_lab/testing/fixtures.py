"""The pytest fixtures. Each gives the guard of its name, and fails a test that asked for a guard and never entered it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture
def cuda_or_fake() -> Iterator[torch.device]:
    """The CUDA device, or a fake one where there is none."""
    import torch

    from dspark_lab.guards import fake_cuda

    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        with fake_cuda() as device:
            yield device


@pytest.fixture(name="no_host_sync")
def fixture_no_host_sync(cuda_or_fake: torch.device) -> Iterator[Callable[..., Any]]:
    """``no_host_sync``; without a GPU the test runs on a fake one."""
    from dspark_lab.guards import no_host_sync

    yield from _entered("no_host_sync", no_host_sync)


@pytest.fixture(name="no_device_alloc")
def fixture_no_device_alloc(cuda_or_fake: torch.device) -> Iterator[Callable[..., Any]]:
    """``no_device_alloc``; without a GPU the test runs on a fake one."""
    from dspark_lab.guards import no_device_alloc

    yield from _entered("no_device_alloc", no_device_alloc)


@pytest.fixture(name="max_kernels")
def fixture_max_kernels() -> Iterator[Callable[..., Any]]:
    """``max_kernels``; skips without a GPU."""
    yield from _profiled("max_kernels")


@pytest.fixture(name="min_launch_lead_us")
def fixture_min_launch_lead_us() -> Iterator[Callable[..., Any]]:
    """``min_launch_lead_us``; skips without a GPU."""
    yield from _profiled("min_launch_lead_us")


@pytest.fixture(name="same_kernels_as")
def fixture_same_kernels_as() -> Iterator[Callable[..., Any]]:
    """``same_kernels_as``; skips without a GPU."""
    yield from _profiled("same_kernels_as")


def _profiled(name: str) -> Iterator[Callable[..., Any]]:
    import torch

    from dspark_lab.testing import profiled

    if not torch.cuda.is_available():
        pytest.skip(f"{name} reads a profile of the device: needs a CUDA device")
    yield from _entered(name, getattr(profiled, name))


def _entered(name: str, guard: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(guard(*args, **kwargs))
        return made[-1]

    yield make
    if not any(g.was_entered for g in made):
        pytest.fail(f"the test asked for {name} and never entered it: with {name}(…): …", pytrace=False)
