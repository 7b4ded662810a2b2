"""Dispatchers on two GPUs: in graphs, on symmetric memory, under the engine."""

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

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("case", LINES)
def test_two_ranks(case: str) -> None:
    env = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(SCRIPT), case]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    print(done.stdout)
    begins, number = LINES[case]
    assert sum(line.startswith(begins) for line in done.stdout.splitlines()) == number
