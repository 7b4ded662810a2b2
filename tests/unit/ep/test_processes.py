"""Real ranks over gloo: their groups, and that tensor parallelism never changes a token."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dspark_lab.config import preset
from dspark_lab.runs.runner import start

GROUPS = """
import multiprocessing, sys
import torch, torch.distributed as dist
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.groups import process_groups
from dspark_lab.errors import LabError

def rank(r, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=r, world_size=4)
    for parallel in (ParallelConfig(tp_size=2, ep_size=4), ParallelConfig(tp_size=4, ep_size=2)):
        groups, tp = process_groups(parallel, "cpu"), parallel.tp_size
        assert (groups.moe.rank, groups.moe.size, groups.tp.rank, groups.tp.size) == (r, 4, r % tp, tp)
        mine, ones = list(range(r - r % tp, r - r % tp + tp)), torch.ones(2, 3)
        total = groups.tp.all_reduce(r * ones)
        assert torch.equal(total, sum(mine) * ones)
        assert torch.equal(groups.moe.all_reduce(r * ones), 6 * ones)
        rows = groups.tp.all_gather((r * ones).T)  # not contiguous
        assert torch.equal(rows, torch.stack([m * ones.T for m in mine]))
    try:
        process_groups(ParallelConfig(tp_size=2), "cpu")
    except LabError as e:
        assert "need 2 ranks, and 4 were started" in str(e)
    else:
        raise AssertionError("four ranks passed for two")
    dist.barrier()

torch.set_num_threads(1)
ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(r, sys.argv[1])) for r in range(4)]
for p in ranks:
    p.start()
for p in ranks:
    p.join(30)
sys.exit(any(p.exitcode for p in ranks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks")
def test_groups_of_real_ranks(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS, str(tmp_path / "store")], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tp_size_never_changes_a_token(tmp_path) -> None:
    base = preset("tiny", device="cpu", batch_size=3, weights="random")
    arms = [base.replace(tp_size=tp, alloc=alloc) for tp in (1, 2) for alloc in ("none", "blocking")]
    runs = start(arms, num_steps=8, profile_steps=0, warmup_steps=0, out=tmp_path / "out").wait()
    assert {r.config.parallel.world_size for r in runs} == {1, 2}
    assert len({r.outputs["digest"] for r in runs}) == 1
    assert runs[0].outputs["num_tokens"] >= 3 * 8
