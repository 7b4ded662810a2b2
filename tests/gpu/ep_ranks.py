"""One rank of the tests of dispatchers on several GPUs: ``torch.distributed.run … ep_ranks.py CASE``; not a test itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from dspark_lab.config import LabConfig, preset
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.engine.generate import generate
from dspark_lab.ep import reference
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ParallelGroups, process_groups
from dspark_lab.ep.symmetric import forget_buffers
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.weights import build
from dspark_lab.plan.placement import contiguous

E, K, H, T = 8, 2, 64, 12
LAYOUTS = [(d, 1) for d in ("all_reduce", "symm_mem", "all_gather", "all_to_all")]
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [35, 8, 97], [9, 3]]


def layouts(world: int) -> list[tuple[str, int]]:
    return [*LAYOUTS, *((d, world) for d in ("symm_mem", "all_gather", "all_to_all"))]


def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
    return rows * (e + 1)


class Layer:
    """A dispatcher with the experts of `expert`, whose shapes depend on nothing: it can be captured."""

    def __init__(self, name: str, dp: int, groups: ParallelGroups, device: torch.device, **more: float) -> None:
        world = groups.moe.size
        self.placement = contiguous(E, world)
        parallel = ParallelConfig(ep_size=world, attn_dp=dp, dispatcher=name, **more)  # pyright: ignore[reportArgumentType]
        rows = groups.moe if dp == 1 else ParallelGroups().rows
        self.dispatcher = ExpertGroup.of(parallel, groups.moe, rows, fixed_sizes=True).dispatcher(
            self.placement, topk=K, hidden_size=H, dtype=torch.float32, device=device
        )
        mine = self.placement.experts_of(groups.moe.rank)
        self.factor = torch.tensor([*(e + 1.0 for e in mine), 0.0], device=device)  # −1, nobody's, is the last

    def __call__(self, x, ids, weights, count):
        handle = self.dispatcher.dispatch(x, ids, weights, count)
        factor = (self.factor[handle.local_ids] * handle.topk_weights).sum(1, keepdim=True)
        computed = (handle.local_ids >= 0).any(1, keepdim=True)
        y = torch.where(computed, handle.x * factor, 0.0)
        return self.dispatcher.combine(y, handle)


def batch(seed: int, count: int, device: torch.device):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=g)
    x[count:] = float("nan")
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    weights = torch.rand(T, K, generator=g)
    want = reference.local(x, ids, weights, count, expert)
    scalar = torch.tensor([count], dtype=torch.int32, device=device)
    return x.to(device), ids.to(device), weights.to(device), scalar, want.to(device)


def graphs(groups: ParallelGroups, device: torch.device) -> None:
    """Every dispatcher, captured once and replayed on other rows and counts, gives what the reference does."""
    rank, world = groups.moe.rank, groups.moe.size
    for name, dp in layouts(world):
        layer = Layer(name, dp, groups, device)
        static = batch(0, T, device)[:4]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                layer(*static)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer(*static)
        for step in range(12):
            seed = step * world + (rank if dp > 1 else 0)
            count = (5 * step + 3 * (rank if dp > 1 else 0)) % (T + 1)
            *new, want = batch(seed, count, device)
            for old, value in zip(static, new, strict=True):
                old.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert (out - want).abs().max() < 1e-4, (name, dp, step, rank)
            assert (out[count:] == 0).all(), (name, dp, step, rank)
        if rank == 0:
            print(f"graph {name} attn_dp={dp}: equal", flush=True)
        graph.reset()


def overflow(groups: ParallelGroups, device: torch.device) -> None:
    """Rows without room are counted on the device, by each replay."""
    layer = Layer("all_to_all", groups.moe.size, groups, device, capacity_factor=0.5)
    x, _, weights, scalar, _ = batch(0, T, device)
    ids = torch.zeros(T, K, dtype=torch.int64, device=device)
    ids[:, 1] = 1
    layer(x, ids, weights, scalar)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        layer(x, ids, weights, scalar)
    before = int(layer.dispatcher.overflow)
    graph.replay()
    assert int(layer.dispatcher.overflow) - before == T - T // 2
    graph.reset()
    if groups.moe.rank == 0:
        print("overflow: counted", flush=True)


def tokens(cfg: LabConfig, groups: ParallelGroups | None = None):
    out = generate(cfg, PROMPTS, max_new_tokens=32, groups=groups)
    return [o.tokens for o in out]


def engine(groups: ParallelGroups, device: torch.device) -> None:
    """Tokens of every dispatcher in graphs equal those of one rank, in float32."""
    del groups, device
    world = dist.get_world_size()
    for name, dp in layouts(world):
        base = preset(
            "tiny", device="cuda", batch_size=4, weights="random", use_graph=True, overlap=True, buckets=(2, 4)
        )
        cfg = base.replace(ep_size=world, attn_dp=dp, dispatcher=name)
        one = tokens(base, ParallelGroups())
        mine = process_groups(cfg.parallel, torch.device("cuda", torch.cuda.current_device()))
        got = tokens(cfg, mine)
        assert got == one, (name, dp, got, one)
        if dist.get_rank() == 0:
            print(f"engine {name} attn_dp={dp}: tokens equal", flush=True)


@torch.inference_mode()
def gap_at(cfg: LabConfig, prefix: list[int]) -> float:
    """What the best logit is ahead of the second after ``prefix``, on one rank; small where they nearly tie."""
    target, _ = build(cfg, "cuda", ParallelGroups())
    n = len(prefix)
    positions = torch.arange(n, device="cuda")
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, num_tokens_per_req=n,
        input_ids=torch.tensor(prefix, device="cuda"), positions=positions,
        req_slots=torch.zeros(1, dtype=torch.int64, device="cuda"), key_limits=positions + 1, max_keys=n,
        num_token_non_padded_cpu=n,
    )  # fmt: skip
    logits = target.logits(target(batch, target.new_cache(1, cfg.model.context_len)).hidden[-1:]).float()
    best = logits[0].topk(2).values
    return float(best[0] - best[1])


def bfloat16(groups: ParallelGroups, device: torch.device) -> None:
    """In bfloat16 the first difference from one rank is a near-tie of its logits; the gap is printed."""
    del groups
    world = dist.get_world_size()
    base = preset(
        "tiny", device="cuda", batch_size=4, weights="random", dtype="bfloat16", use_graph=True, buckets=(2, 4)
    )
    one = tokens(base, ParallelGroups())
    for name, dp in layouts(world):
        cfg = base.replace(ep_size=world, attn_dp=dp, dispatcher=name)
        got = tokens(cfg, process_groups(cfg.parallel, device))
        gaps = []
        for a, b in zip(one, got, strict=True):
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if first is not None:
                gaps.append(gap_at(base, a[:first]))
        assert all(g <= 0.1 for g in gaps), (name, dp, gaps)
        if dist.get_rank() == 0:
            said = f"first differences at gaps {[round(g, 4) for g in gaps]}" if gaps else "tokens equal"
            print(f"bfloat16 {name} attn_dp={dp}: {said}", flush=True)


def shared(groups: ParallelGroups, device: torch.device) -> None:
    """More ranks than GPUs: eager, over gloo, tokens of every dispatcher equal those of one rank, in float32."""
    del groups
    world = dist.get_world_size()
    base = preset("tiny", device="cuda", batch_size=4, weights="random", buckets=(4, 8))
    one = tokens(base, ParallelGroups())
    for name, dp in layouts(world):
        cfg = base.replace(ep_size=world, attn_dp=dp, dispatcher=name)
        got = tokens(cfg, process_groups(cfg.parallel, device))
        assert got == one, (name, dp, got, one)
        if dist.get_rank() == 0:
            print(f"shared {name} attn_dp={dp}: tokens equal", flush=True)


CASES: dict[str, Callable[[ParallelGroups, torch.device], None]] = {
    "graphs": graphs, "overflow": overflow, "engine": engine, "bfloat16": bfloat16, "shared": shared,
}  # fmt: skip


def main() -> None:
    case = sys.argv[1]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if case == "shared":  # NCCL refuses two ranks on one GPU
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=device)
    groups = process_groups(ParallelConfig(ep_size=dist.get_world_size()), device)
    with torch.inference_mode():
        CASES[case](groups, device)
    torch.cuda.synchronize()
    forget_buffers()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
