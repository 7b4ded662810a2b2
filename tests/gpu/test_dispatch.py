"""Dispatchers on several GPUs: in graphs, on symmetric memory, under the engine; and of more ranks than there are GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "ep_ranks.py"
LINES = {"graphs": ("graph ", 7), "overflow": ("overflow:", 1), "engine": ("engine ", 7), "bfloat16": ("bfloat16 ", 7)}
"""How each case's lines begin, and how many there must be."""


def run_ranks(case: str, world: int) -> list[str]:
    """What ``world`` ranks of the script print; the environment lets ranks on one GPU share symmetric memory."""
    env = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1",
           "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={world}", str(SCRIPT), case]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    print(done.stdout)
    return done.stdout.splitlines()


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("case", LINES)
def test_a_gpu_for_each_rank(case: str, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(
            f"NCCL wants a GPU for each rank: {world}, and there are {torch.cuda.device_count()}; test_more_ranks_than_gpus runs on these"
        )
    begins, number = LINES[case]
    assert sum(line.startswith(begins) for line in run_ranks(case, world)) == number


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_than_gpus(world: int) -> None:
    assert sum(line.startswith("shared ") for line in run_ranks("shared", world)) == 7
