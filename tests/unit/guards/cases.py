"""Lines that make the host wait for a CUDA device, and lines that do not. The fake device and PyTorch's own watch on a GPU must agree."""

from __future__ import annotations

from typing import Any

import torch

N = 24

FAIL = [
    "torch.tensor([1, 2], device=x.device)",
    "torch.as_tensor([1, 2], device=x.device)",
    "torch.tensor(1, device='cuda')",
    "x.new_tensor([1])",
    "torch.tensor(n).to('cuda')",
    "torch.tensor([1, 2]).cuda()",
    "x.sum().item()",
    "int(x[-1])",
    "float(x[0])",
    "bool(x.sum())",
    "1 if x[0] > 1 else 0",
    "x.tolist()",
    "x.cpu()",
    "x.to('cpu')",
    "list(range(10))[x[0]]",
    "x[x > 2]",
    "x.masked_select(x > 2)",
    "x.nonzero()",
    "torch.nonzero(x, as_tuple=True)",
    "torch.where(x > 2)",
    "torch.unique(x)",
    "x.repeat_interleave(x)",
    "torch.equal(x, buffer)",
    "x[[0, 1]]",
    "x[torch.tensor([0, 1])]",
    "x[:x[0]]",
    "x[x[1]]",
    "x.__setitem__(slice(0, 3), host)",
    "x.__setitem__(x > 2, buffer[:1])",
    "x.__setitem__(0, 5)",
    "x.__setitem__((..., -1), True)",
    "x.__setitem__(0, host[0])",
    "x.copy_(host)",
    "x.__setitem__(torch.arange(2, device='cuda'), 5)",
    "host.copy_(x)",
    "host.copy_(x, non_blocking=True)",
    "repr(x)",
    "f'{x}'",
    "torch.cuda.synchronize()",
    "torch.cuda.current_stream().synchronize()",
    "torch.nn.functional.one_hot(x)",
]
PASS = [
    "torch.tensor(n, dtype=torch.int32).to(x.device, non_blocking=True)",
    "buffer.fill_(n)",
    "buffer.copy_(pinned, non_blocking=True)",
    "pinned.copy_(x, non_blocking=True)",
    "x.to('cpu', non_blocking=True)",
    "x.to(x.device)",
    "torch.empty(3, device='cuda')",
    "torch.zeros_like(x)",
    "torch.arange(3, device='cuda')",
    "torch.full((3,), n, device='cuda')",
    "x[1:2] + 1",
    "x[..., None, -1]",
    "x[torch.arange(2, device='cuda')]",
    "x.__setitem__(slice(0, 1), 5)",
    "x.__setitem__(..., host[0])",
    "x.__setitem__(0, buffer[0])",
    "x[0].fill_(5)",
    "x.__setitem__(x > 2, 0)",
    "torch.equal(x, x)",
    "torch.equal(x, x[:2])",
    "x.masked_fill_(x > 2, 0)",
    "torch.where(x > 2, x, 0)",
    "torch.repeat_interleave(x, x, output_size=8)",
    "x.cumsum(0).argmax()",
    "torch.topk(x, 2)",
    "len(x), x.shape, x.dtype, x.is_cuda, x.numel()",
    "host.tolist(), int(host[0]), host[host > 1]",
    "torch.cuda.Event().synchronize()",
    "torch.cuda.Event().query()",
]


#: These wait, and PyTorch's sync debug mode does not see it.
UNSEEN_BY_TORCH = {"torch.cuda.synchronize()", "host.copy_(x, non_blocking=True)"}


def names(device: torch.device) -> dict[str, Any]:
    return {
        "torch": torch,
        "x": torch.tensor([3, 0, 5], device=device),
        "buffer": torch.zeros(3, dtype=torch.long, device=device),
        "host": torch.tensor([1, 2, 3]),
        "pinned": torch.empty(3, dtype=torch.long, pin_memory=True),
        "n": N,
    }
