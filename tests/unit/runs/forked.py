"""Ranks as forks of one process that has imported torch: ``python forked.py WORLD_SIZE FOLDER``, in place of torch.distributed.run.

Importing torch is most of what a rank of the tiny preset costs; here a job pays for it once. Tests of processes (Stop, kills,
signals) start ranks as users do.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

from dspark_lab.runs.spec import JobSpec
from dspark_lab.runs.worker import main


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def forked(world_size: int, folder: Path) -> int:
    """Runs the ranks of the job in ``folder``; 0 where all of them ended well."""
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if JobSpec.load(folder).profile_steps:
        importlib.import_module("torch._inductor")  # as the profiler does, for seconds, in each process that has not
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            os.environ.update(group, RANK=str(rank), LOCAL_RANK=str(rank))
            main(folder)  # never returns
        pids.append(pid)
    return int(any(os.waitpid(pid, 0)[1] for pid in pids))


if __name__ == "__main__":
    sys.exit(forked(int(sys.argv[1]), Path(sys.argv[2])))
