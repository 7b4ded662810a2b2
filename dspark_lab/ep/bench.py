"""``python -m dspark_lab.ep.bench [--ranks 2] [--json PATH]``: dispatch and combine of one MoE layer, against bare collectives.

A chain of layers in one CUDA graph, each waiting for the one before: norm, router, dispatch, a stand-in for the experts, combine.
What a way costs is that chain less the same chain without any exchange, over its layers; the maximum over ranks of each
replay. The bare collectives stand in the same chain at the same places and carry the same bytes. On a CPU (``--device cpu``)
the chain is called eagerly over gloo, which tests this file and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.router import gate_and_route
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.dispatch import Dispatched
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ParallelGroups, process_groups
from dspark_lab.ep.symmetric import forget_buffers
from dspark_lab.plan.placement import contiguous

NUM_LAYERS, REPLAYS = 16, 40
ROWS_A_REQUEST = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the layer: by default the preset ``small``."""

    hidden_size: int = 2048
    num_experts: int = 64
    topk: int = 6
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: microseconds of dispatch and combine of one layer, maximum over ranks."""

    batch_size: int
    way: str
    kind: str
    """``bare`` or ``dispatcher``."""
    rows_a_rank: int
    p20_us: float
    p50_us: float
    p80_us: float
    over_best_bare: float = float("nan")


class Layer:
    """What every chain has in common: norm and router before, a factor as the experts."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        g = torch.Generator().manual_seed(0)
        gate = torch.randn(shape.num_experts, shape.hidden_size, generator=g) * shape.hidden_size**-0.5
        self.gate = gate.to(device, shape.dtype)
        self.weight = torch.ones(shape.hidden_size, device=device, dtype=shape.dtype)

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    def route(self, x: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return gate_and_route(x, self.gate, self.shape.topk, renormalize=True, **more)

    def experts(self, x: Tensor) -> Tensor:
        return x * 0.5


Chain = Callable[[Tensor], Tensor]


def bare_ways(layer: Layer, groups: ParallelGroups) -> dict[str, tuple[bool, str, Chain]]:
    """Name → (whether rows are alike, the chain without an exchange that it is measured against, one layer of the chain).

    They carry the rows alone; a dispatcher's rows have their experts and weights with them, 1 to 2 % more bytes.
    """
    ranks, n = groups.moe, groups.moe.size

    def nothing(x: Tensor) -> Tensor:
        x = layer.norm(x)
        layer.route(x)
        return layer.experts(x)

    def all_reduce(x: Tensor) -> Tensor:
        return ranks.all_reduce(nothing(x))

    def gather_scatter(x: Tensor) -> Tensor:
        x = layer.norm(x)
        layer.route(x)
        return ranks.reduce_scatter(layer.experts(ranks.all_gather(x)))

    def nothing_repeated(x: Tensor) -> Tensor:
        """What fills an all-to-all's places, without it."""
        x = layer.norm(x)
        layer.route(x)
        return layer.experts(x.repeat(n, 1))[: x.shape[0]]

    def two_all_to_all(x: Tensor) -> Tensor:
        x = layer.norm(x)
        layer.route(x)
        y = layer.experts(ranks.all_to_all(x.repeat(n, 1)))
        return ranks.all_to_all(y)[: x.shape[0]]

    return {
        "none, rows alike": (True, "", nothing),
        "none, rows apart": (False, "", nothing),
        "none, rows repeated": (False, "", nothing_repeated),
        "all_reduce": (True, "none, rows alike", all_reduce),
        "all_gather + reduce_scatter": (False, "none, rows apart", gather_scatter),
        "2 × all_to_all": (False, "none, rows repeated", two_all_to_all),
    }


def dispatcher_ways(layer: Layer, groups: ParallelGroups, device: torch.device) -> dict[str, tuple[bool, str, Chain]]:
    """As `bare_ways`, of the dispatchers."""
    n, shape, out = groups.moe.size, layer.shape, {}
    placement = contiguous(shape.num_experts, n)
    for name, dp in (("all_reduce", 1), ("symm_mem", 1), ("all_gather", n), ("all_to_all", n), ("symm_mem", n)):
        parallel = ParallelConfig(ep_size=n, attn_dp=dp, dispatcher=name)
        rows = groups.moe if dp == 1 else ParallelGroups().rows
        made = ExpertGroup.of(parallel, groups.moe, rows, fixed_sizes=True).dispatcher(
            placement, topk=shape.topk, hidden_size=shape.hidden_size, dtype=shape.dtype, device=device
        )
        alike = dp == 1
        lie = "alike" if alike else "apart"
        out[f"{name}, rows {lie}"] = (alike, f"none, rows {lie}", _layer_of(layer, made, device))
        table = getattr(made, "local_table", None)
        if table is not None:
            routed = _layer_of(layer, made, device, table)
            out[f"{name}, rows {lie}, routed"] = (alike, f"none, rows {lie}", routed)
    return out


def _layer_of(layer: Layer, made: Any, device: torch.device, table: Tensor | None = None) -> Chain:
    count = torch.full((1,), 1 << 20, dtype=torch.int32, device=device)  # every row is real

    def forward(x: Tensor) -> Tensor:
        x = layer.norm(x)
        if table is not None:
            ids, weights = layer.route(x, count=count, physical=table)
            handle = Dispatched(x=x, local_ids=ids, topk_weights=weights)
        else:
            handle = made.dispatch(x, *layer.route(x), count)
        return made.combine(layer.experts(handle.x), handle)

    return forward


def measure(one: Chain, x: Tensor, groups: ParallelGroups) -> list[float]:
    """Microseconds of one layer in each replay of the chain, the maximum over ranks."""
    out = torch.empty_like(x)

    def chain() -> None:
        y = x
        for _ in range(NUM_LAYERS):
            y = one(y)
        out.copy_(y)

    return slowest_of(replays(chain) if x.is_cuda else calls(chain), groups)


def slowest_of(took: list[float], groups: ParallelGroups) -> list[float]:
    """Of each replay the maximum over ranks, over the layers of the chain."""
    mine = torch.tensor(took, dtype=torch.float64)
    everyone = [mine] if groups.control is None else groups.control.objects(mine)
    return (torch.stack(list(everyone)).amax(dim=0) / NUM_LAYERS).tolist()


def replays(chain: Callable[[], None]) -> list[float]:
    """Microseconds of each replay of ``chain``, captured once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            chain()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()
    took = []
    for i in range(REPLAYS + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # brings the ranks together, and is behind them when the timed one starts
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            took.append(1e3 * start.elapsed_time(end))
    graph.reset()
    return took


def calls(chain: Callable[[], None]) -> list[float]:
    """Microseconds of each eager call of ``chain``."""
    took = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        chain()
        took.append(1e6 * (time.perf_counter() - start))
    return took


def compare(batch_size: int, shape: Shape, groups: ParallelGroups, device: torch.device) -> list[Row]:
    """A row a way at ``batch_size`` requests; each rank has all of their rows, or its share."""
    layer = Layer(shape, device)
    num_rows = {True: batch_size * ROWS_A_REQUEST, False: -(-batch_size // groups.moe.size) * ROWS_A_REQUEST}
    ways = {k: ("bare", *v) for k, v in bare_ways(layer, groups).items()}
    ways |= {k: ("dispatcher", *v) for k, v in dispatcher_ways(layer, groups, device).items()}
    without: dict[str, float] = {}
    rows = []
    for name, (kind, alike, base, one) in ways.items():
        x = torch.randn(num_rows[alike], shape.hidden_size, device=device).to(shape.dtype)
        took = sorted(measure(one, x, groups))
        p20, p50, p80 = (took[int(share * (len(took) - 1))] for share in (0.2, 0.5, 0.8))
        if not base:
            without[name] = p50
            continue
        less = without[base]
        rows.append(
            Row(
                batch_size=batch_size, way=name, kind=kind, rows_a_rank=num_rows[alike],
                p20_us=p20 - less, p50_us=p50 - less, p80_us=p80 - less,
            )
        )  # fmt: skip
    best = min(r.p50_us for r in rows if r.kind == "bare")
    return [Row(**{**asdict(r), "over_best_bare": r.p50_us / best}) for r in rows]


def joined(device_kind: str) -> tuple[int, torch.device, ParallelGroups]:
    """This rank of a torchrun, its device and the group of all ranks."""
    rank, world, on_gpu = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device_kind == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return rank, device, process_groups(ParallelConfig(ep_size=world), device)


def left() -> None:
    """Ends this rank: a communicator that graphs held must not hold the process."""
    forget_buffers()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def torchrun(module: str, ranks: int) -> int:
    """``module`` with this command line, in as many ranks of this machine."""
    env = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               "-m", module, *sys.argv[1:]]  # fmt: skip
    return subprocess.call(command, env=env)


def rank_main(args: argparse.Namespace) -> None:
    rank, device, groups = joined(args.device)
    on_gpu, world = args.device == "cuda", groups.moe.size
    shape = Shape() if on_gpu else Shape(hidden_size=64, num_experts=8, topk=2, dtype=torch.float32)
    rows = []
    with torch.inference_mode():
        for batch_size in args.batch_sizes:
            rows += compare(batch_size, shape, groups, device)
            if rank == 0:
                show(rows[-len([r for r in rows if r.batch_size == batch_size]) :])
    if rank == 0 and args.json:
        about = {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__, "ranks": world,
            "shape": {**asdict(shape), "dtype": str(shape.dtype)}, "layers": NUM_LAYERS, "replays": REPLAYS,
        }  # fmt: skip
        args.json.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    left()


def show(rows: list[Row]) -> None:
    print(f"{'batch':>5} {'kind':<11} {'way':<32}{'rows':>5}{'p20':>8}{'p50':>8}{'p80':>8}{'over best bare':>16}")
    for r in rows:
        times = "".join(f"{us:>8.1f}" for us in (r.p20_us, r.p50_us, r.p80_us))
        print(
            f"{r.batch_size:>5} {r.kind:<11} {r.way:<32}{r.rows_a_rank:>5}{times}{r.over_best_bare:>16.2f}", flush=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
    return torchrun("dspark_lab.ep.bench", args.ranks)


if __name__ == "__main__":
    sys.exit(main())
