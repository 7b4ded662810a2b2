"""The fake device: values are real, devices are told apart, and nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dspark_lab.errors import LabError
from dspark_lab.guards import fake_cuda, no_host_sync


def test_values_and_devices():
    with fake_cuda() as device:
        x = torch.arange(6, device="cuda").view(2, 3)
        assert (x.device, x.is_cuda, (x + 1).device) == (device, True, device)
        assert x.T.tolist() == [[0, 3], [1, 4], [2, 5]]
        x[1, 1:] = torch.tensor([7, 8])
        x[0] = 9
        x[x > 7] = 1
        assert x.cpu().tolist() == [[1, 1, 1], [3, 7, 1]]
        assert x[:, [0, 2]].tolist() == [[1, 1], [3, 1]]
        assert x[None, ..., -1].shape == (1, 2)
        assert not x.cpu().is_cuda
        assert x[0].add_(1) is not None
        assert x[0].tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.arange(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(LabError, match="open already"), fake_cuda():
            pass


def test_pinned_memory():
    with fake_cuda():
        ring = torch.empty(4, 2, pin_memory=True)
        assert (ring.is_pinned(), ring[1].is_pinned(), torch.empty(2).is_pinned()) == (True, True, False)
        assert torch.empty(2).pin_memory().is_pinned()


@pytest.mark.parametrize("inference", [False, True])
def test_a_module_moves(inference):
    with fake_cuda() as device, torch.inference_mode(inference):
        moved = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)).to("cuda")
        born = nn.Linear(8, 2, device=device)
        with torch.no_grad(), no_host_sync():
            out = born(moved(torch.ones(3, 4, device=device)))
        assert (out.shape, out.device) == ((3, 2), device)


def test_nothing_stays():
    names = ("_lazy_init", "synchronize", "Event", "Stream", "is_available", "current_stream")
    before = [getattr(torch.cuda, n) for n in names]
    with fake_cuda():
        assert torch.cuda.is_available()
    assert before == [getattr(torch.cuda, n) for n in names]
    assert not torch._C._only_lift_cpu_tensors()
    with no_host_sync(), pytest.raises(LabError, match="enter it first"), fake_cuda():
        pass
