"""The invariance matrix: tokens at every EP size, dispatcher, placement, strategy and batch equal those of one rank.

Ranks of one world size are forked once and go through all their arms in one process group (gloo, float32).
``python tests/unit/ep/invariance.py`` runs the whole matrix and prints it; the suite runs part of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dspark_lab.config import LabConfig, preset
from dspark_lab.engine.generate import generate
from dspark_lab.ep.groups import process_groups
from dspark_lab.models.weights import build
from dspark_lab.plan.load import made_load

SHARED = ("all_reduce", "all_gather", "all_to_all", "symm_mem")
APART = SHARED[1:]
PLACEMENTS = ({"placement": "contiguous"}, {"placement": "round_robin"}, {"placement": "balanced"},
              {"placement": "balanced", "num_redundant_experts": 8})  # fmt: skip
STRATEGIES = ("blocking", "non_blocking", "on_demand", "pinned", "persistent")
BATCHES = (1, 3, 8)
"""Requests at a time: with attention DP over 8 ranks most idle at 1, some at 3."""
NEW = 10
EVERY = {2: 37, 4: 97, 8: 211}
"""Of the arms, which the suite runs: every so many-th; primes, so that each value of each toggle comes up."""


def base() -> LabConfig:
    return preset("tiny", device="cpu", weights="random", buckets=(1, 2, 4, 8))


def prompts(batch_size: int) -> list[list[int]]:
    """Ragged, and two more than fit at once."""
    rng = np.random.default_rng(batch_size)
    return [rng.integers(0, 255, rng.integers(1, 12)).tolist() for _ in range(batch_size + 2)]


def arms(world: int, every: int) -> Iterator[dict[str, Any]]:
    """Toggles of every ``every``-th arm of ``world`` ranks."""
    n = 0
    layouts = [(d, 1) for d in SHARED] + [(d, world) for d in APART] + [("all_to_all", world // 2)] * (world > 2)
    for (dispatcher, dp), place, tight in itertools.product(layouts, PLACEMENTS, (False, True)):
        if tight and dispatcher != "all_to_all":
            continue
        weights = {"ep_size": world, "attn_dp": dp, "dispatcher": dispatcher, **place}
        weights |= {"capacity_factor": 0.99} if tight else {}  # room for all rows, in the shapes of graphs
        for batch_size, alloc in itertools.product(BATCHES, STRATEGIES):
            n += 1
            # Where rows are cut into chunks, buckets are multiples of the ranks that share them.
            if n % every == 0:
                yield {**weights, "batch_size": batch_size, "alloc": alloc}


def loads() -> dict[str, Any]:
    return {who: made_load("zipf", layers, 8, 2).tolist() for who, layers in (("target", 2), ("drafter", 1))}


def rank_main(rank: int, world: int, folder: str, every: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    built: dict[Any, Any] = {}
    with open(f"{folder}/{world}.{rank}.jsonl", "w") as out:
        for toggles in arms(world, every):
            cfg = base().replace(**toggles)
            key = cfg.parallel
            if key not in built:
                groups = process_groups(cfg.parallel, "cpu")
                built = {key: (groups, build(cfg, "cpu", groups, loads=loads()))}
            groups, models = built[key]
            got = generate(cfg, prompts(cfg.engine.batch_size), max_new_tokens=NEW, models=models, groups=groups)
            out.write(json.dumps([toggles, [g.tokens for g in got], [g.acceptance_lengths for g in got]]) + "\n")
    dist.barrier()


def reference() -> dict[int, Any]:
    """By batch size, what one rank gives."""
    cfg = base()
    models = build(cfg, "cpu")
    done = {b: generate(cfg.replace(batch_size=b), prompts(b), max_new_tokens=NEW, models=models) for b in BATCHES}
    return {b: [[g.tokens for g in got], [g.acceptance_lengths for g in got]] for b, got in done.items()}


def run(every: dict[int, int], folder: str, limit_s: float) -> Iterator[tuple[int, int, float]]:
    """World size, arms that were equal on every rank, and seconds. Raises AssertionError at the first difference."""
    want = reference()
    for world, step in every.items():
        start = time.monotonic()
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=rank_main, args=(r, world, folder, step)) for r in range(world)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join(max(limit_s - (time.monotonic() - start), 1))
        for p in ranks:
            p.kill()
        assert not any(p.exitcode for p in ranks), f"exit codes of {world} ranks: {[p.exitcode for p in ranks]}"
        for rank in range(world):
            lines = [json.loads(line) for line in Path(f"{folder}/{world}.{rank}.jsonl").read_text().splitlines()]
            assert len(lines) == len(list(arms(world, step)))
            for toggles, *got in lines:
                assert got == want[toggles["batch_size"]], f"rank {rank} of {world} differs with {toggles}"
        yield world, len(list(arms(world, step))), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--part", action="store_true", help="the arms that the suite runs")
    parser.add_argument("--every", type=int, default=1, help="of the arms every so many-th")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        worlds = [int(w) for w in args.worlds.split(",")]
        for world, num, seconds in run(
            {w: EVERY[w] if args.part else args.every for w in worlds}, folder, limit_s=7200
        ):
            print(f"EP {world}: {num} arms equal EP 1 on all {world} ranks, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
