"""Device allocations on the fake device."""

from __future__ import annotations

import pytest
import torch

from dspark_lab.errors import LabError
from dspark_lab.guards import GuardError, fake_cuda, no_device_alloc


@pytest.fixture(params=[False, True], ids=["grad", "inference"])
def x(request):
    with torch.inference_mode(request.param), fake_cuda() as device:
        yield torch.zeros(3, device=device)


@pytest.mark.parametrize(
    "code",
    [
        "torch.tensor(3, device='cuda')",
        "torch.empty(2, device='cuda')",
        "x + 1",
        "x.clone()",
        "x.sum()",
        "torch.cat([x, x])",
        "torch.tensor(3).to('cuda', non_blocking=True)",
    ],
)
def test_allocates(x, code):
    with (
        pytest.raises(GuardError, match=r"a new device tensor of [0-9]+ bytes. Way out: allocate once"),
        no_device_alloc(),
    ):
        eval(code)


@pytest.mark.parametrize(
    "code",
    [
        "x.fill_(2)",
        "x.add_(1)",
        "torch.add(x, x, out=x)",
        "x[1:]",
        "x.view(3, 1).T",
        "x.tolist()",
        "torch.empty(3)",
        "x.to('cuda')",
    ],
)
def test_allocates_nothing(x, code):
    with no_device_alloc():
        eval(code)


def test_line_bytes_and_allowance(x):
    with (
        pytest.raises(
            GuardError,
            match=r"test_allocs.py:\d+ \(test_line_bytes_and_allowance\): x \* 2: a new device tensor of 12 bytes",
        ),
        no_device_alloc(),
    ):
        x * 2
    with no_device_alloc(allow="test_line_bytes_and_allowance") as guard:
        x * 2
    assert [f.allowed for f in guard.findings] == [True]
    with pytest.raises(GuardError, match=r"^3 device allocations at 2 places:"), no_device_alloc(at_once=False):  # noqa: PT012
        for _ in range(2):
            x * 2
        x + 1


def test_needs_a_device():
    if not torch.cuda.is_available():
        with pytest.raises(LabError, match="needs a CUDA device or the fake one"), no_device_alloc():
            pass
    with (
        fake_cuda(),
        pytest.raises(LabError, match="segments_only=True needs a CUDA device"),
        no_device_alloc(segments_only=True),
    ):
        pass
