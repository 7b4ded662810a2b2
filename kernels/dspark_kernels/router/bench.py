"""``python -m dspark_kernels.router.bench [--json PATH]``: the router's kernels beside the same in torch calls. Needs a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.router import gate_and_route, route
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report

SHAPES = ((64, 6, 2048), (128, 8, 2048))
"""E, k, H."""
ROWS = (1, 6, 24, 48, 192)
GATES = 320
"""Gates that take turns: in a decode step the experts' weights push each layer's gate out of the L2."""


def torch_route(logits: Tensor, k: int, count: Tensor, physical: Tensor) -> tuple[Tensor, Tensor]:
    """The chain of torch calls that the kernel replaces."""
    weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    real = torch.arange(logits.shape[0], device=logits.device)[:, None] < count
    return torch.where(real, physical[ids], -1), weights


def ways(k: int, count: Tensor, physical: Tensor) -> dict[str, Callable[..., Any]]:
    """Every way, by name: first those of logits, then those of rows and gate."""

    def fused(logits: Tensor) -> Any:
        return route(logits, k, renormalize=True, count=count, physical=physical)

    def linear_fused(x: Tensor, gate: Tensor) -> Any:
        return route(F.linear(x, gate), k, renormalize=True, count=count, physical=physical)

    def all_fused(x: Tensor, gate: Tensor) -> Any:
        return gate_and_route(x, gate, k, renormalize=True, count=count, physical=physical)

    return {
        "torch chain": lambda logits: torch_route(logits, k, count, physical),
        "route": fused,
        "linear, torch chain": lambda x, gate: torch_route(F.linear(x, gate), k, count, physical),
        "linear, route": linear_fused,
        "gate_and_route": all_fused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    path = parser.parse_args().json
    bandwidth = read_bandwidth()
    table: list[Row] = []
    for num_experts, k, width in SHAPES:
        gates = torch.randn(GATES, num_experts, width, device="cuda", dtype=torch.bfloat16) / width**0.5
        physical = torch.randperm(num_experts, device="cuda")
        for rows in ROWS:
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            count = torch.tensor([rows], dtype=torch.int32, device="cuda")
            for name, fn in ways(k, count, physical).items():
                gated = "gate" in name or "linear" in name
                sets = [(x, gate) for gate in gates] if gated else [(F.linear(x, gates[0]),)]
                p20, p50, p80 = graph_us(fn, sets, calls=GATES if gated else 100, replays=10)
                num_bytes = x.nbytes + gates[0].nbytes if gated else sets[0][0].nbytes
                table.append(
                    Row(
                        op="gate and route" if gated else "route",
                        way=name,
                        shape=f"T {rows} E {num_experts} k {k}" + (f" H {width}" if gated else ""),
                        dtype="bfloat16",
                        p20_us=p20,
                        p50_us=p50,
                        p80_us=p80,
                        floor_us=num_bytes / bandwidth * 1e6,
                    )
                )
        del gates
    report(table, bandwidth, path)


if __name__ == "__main__":
    main()
