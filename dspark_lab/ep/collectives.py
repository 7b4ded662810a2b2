"""``python -m dspark_lab.ep.collectives [--ranks 2] [--json PATH]``: bare collectives over their bytes, in a captured chain.

Each call waits for the one before. Bytes are those of one rank's input; of each size the maximum over ranks of every replay, and what
that is as bytes on the wire over time (a ring's 2·(n−1)/n of an all-reduce, (n−1)/n of the others' input; n−1 times that of an
all-gather). On a CPU the chain is called eagerly over gloo, which tests this file and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_lab.ep.bench import NUM_LAYERS, calls, joined, left, replays, slowest_of, torchrun
from dspark_lab.ep.groups import RankGroup

SIZES = tuple(1 << k for k in range(10, 27, 2))
"""1 KiB to 64 MiB."""


def ways(ranks: RankGroup) -> dict[str, tuple[float, Callable[[Tensor], Any]]]:
    """Name → (bytes that a rank sends for each byte of its input, the call on [n, bytes / n / 2] bfloat16)."""
    n = ranks.size
    return {
        "all_reduce": (2 * (n - 1) / n, ranks.all_reduce),
        "all_gather": (float(n - 1), ranks.all_gather),
        "reduce_scatter": ((n - 1) / n, ranks.reduce_scatter),
        "all_to_all": ((n - 1) / n, ranks.all_to_all),
    }


def rank_main(args: argparse.Namespace) -> None:
    rank, device, groups = joined(args.device)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for size in args.sizes:
            for name, (share, call) in ways(groups.moe).items():
                x = torch.zeros(groups.moe.size, size // 2 // groups.moe.size, dtype=torch.bfloat16, device=device)

                def chain(call: Callable[[Tensor], Any] = call, x: Tensor = x) -> None:
                    for _ in range(NUM_LAYERS):
                        call(x)

                took = sorted(slowest_of(replays(chain) if x.is_cuda else calls(chain), groups))
                p20, p50, p80 = (took[int(q * (len(took) - 1))] for q in (0.2, 0.5, 0.8))
                sent = share * x.nbytes
                row = {
                    "way": name,
                    "bytes": x.nbytes,
                    "p20_us": p20,
                    "p50_us": p50,
                    "p80_us": p80,
                    "gb_per_s": sent / p50 / 1e3,
                }
                rows.append(row)
                if rank == 0:
                    print(f"{name:<16}{x.nbytes:>12,} B{p50:>10.1f} us{row['gb_per_s']:>9.1f} GB/s", flush=True)
    if rank == 0 and args.json:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        args.json.write_text(json.dumps({"device": where, "ranks": groups.moe.size, "rows": rows}, indent=1) + "\n")
    left()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of a rank's input")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
    return torchrun("dspark_lab.ep.collectives", args.ranks)


if __name__ == "__main__":
    sys.exit(main())
