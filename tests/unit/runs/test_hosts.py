"""Two hosts made of network namespaces: one run over both, and a host that is lost in the middle of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError, RunFailed
from dspark_lab.runs.hosts import collect, prepare

IP = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
LIMIT_S = 6.0

hosts_can_be_made = pytest.mark.skipif(
    not (ROOT and IP), reason="network namespaces need root" if IP else "needs ip, of iproute2"
)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with 10.77.0.1 and 10.77.0.2, joined by a cable called ``cable`` on both sides."""
    names = f"lab{os.getpid()}a", f"lab{os.getpid()}b"

    def ip(*args: str) -> None:
        subprocess.run([str(IP), *args], check=True, capture_output=True, timeout=20)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for k, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run([str(IP), "netns", "del", name], check=False, capture_output=True, timeout=20)


def start(name: str, node: int, folder: Path) -> subprocess.Popen[str]:
    command = [str(IP), "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
               "--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", "29577",
               "-m", "dspark_lab.runs.worker", str(folder)]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def config(**toggles):
    return preset(
        "tiny", device="cpu", ep_size=2, attn_dp=2, dispatcher="all_to_all", batch_size=3, weights="random", **toggles
    )


@hosts_can_be_made
def test_a_run_over_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    folders = [prepare(config(), tmp_path / name, num_steps=6, repeats=1, profile_steps=0) for name in hosts]
    both = [start(name, node, folder) for node, (name, folder) in enumerate(zip(hosts, folders, strict=True))]
    try:
        for p in both:
            said, _ = p.communicate(timeout=120)
            assert p.returncode == 0, said
    finally:
        for p in both:
            p.kill()
    run = collect(folders)
    assert sorted(e["rank"] for e in run.ep) == [0, 1]
    assert sorted(e["exchange"]["node"] for e in run.ep) == [0, 1]
    assert set(run.steps["rank"]) == {0, 1}
    assert run.outputs["num_tokens"] > 0


@hosts_can_be_made
def test_a_lost_host_ends_the_run(hosts: tuple[str, str], tmp_path: Path) -> None:
    settings = {"num_steps": 100_000, "repeats": 1, "profile_steps": 0, "wait_limit_s": LIMIT_S}
    folders = [prepare(config(), tmp_path / name, **settings) for name in hosts]
    both = [start(name, node, folder) for node, (name, folder) in enumerate(zip(hosts, folders, strict=True))]
    try:
        end = time.monotonic() + 120
        while '"step": ' not in _text(folders[0] / "progress.jsonl"):
            assert time.monotonic() < end, _text(folders[0] / "rank0.log")
            assert both[0].poll() is None, both[0].stdout and both[0].stdout.read()
            time.sleep(0.1)
        subprocess.run([str(IP), "-n", hosts[1], "link", "set", "cable", "down"], check=True, timeout=20)
        cut = time.monotonic()
        errors = [folder / f"error.rank{r}.json" for r, folder in enumerate(folders)]
        while not all(e.exists() for e in errors):
            assert time.monotonic() - cut < LIMIT_S + 40, [e.name for e in errors if not e.exists()]
            time.sleep(0.1)
        messages = [json.loads(e.read_text())["message"] for e in errors]
        assert "rank 1 of 2 did not come to" in messages[0]
        assert "the host of rank 0 does not answer" in messages[1]
        with pytest.raises(RunFailed, match=r"rank \d ended at"):
            collect(folders)
        for p in both:
            p.wait(60)
            assert p.returncode != 0
    finally:
        for p in both:
            p.kill()
            p.communicate(timeout=20)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    prepare(config(), tmp_path / "job")
    with pytest.raises(LabError, match="holds other things"):
        prepare(config(), tmp_path / "job")
    with pytest.raises(LabError, match="num_step"):
        prepare(config(), tmp_path / "other", num_step=3)
    with pytest.raises(RunFailed, match="rank 0 of 2 left no result"):
        collect([tmp_path / "job"])
