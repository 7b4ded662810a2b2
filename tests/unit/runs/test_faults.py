"""Every planted fault ends in an error that names the rank, within its time limit, and no process is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dspark_lab as lab
from dspark_lab.errors import RunFailed
from tests.unit.runs import alive

LIMIT_S = 6.0  # a killed rank and one that raises are in test_job.py
FAULTS = {
    "asleep": r"rank 1 of 2 did not come to .* within \d+ s",
    "drifting": r"ranks disagree on tokens\[\d, \d\] read before step \d+: rank 0 has \d+, rank 1 has \d+",
    "forgetful": r"ranks disagree on prefill_rows at .*: rank 0 has 0, rank 1 has 16",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_an_error(fault: str, tmp_path, monkeypatch, forked_ranks) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    cfg = lab.preset("tiny", device="cpu", ep_size=2, batch_size=3, dispatcher=f"faults:{fault}", weights="random")
    with forked_ranks():
        job = lab.start([cfg], num_steps=100_000, profile_steps=0, wait_limit_s=LIMIT_S, out=tmp_path / "out")
        assert alive.begin(tmp_path)
        with pytest.raises(RunFailed, match=FAULTS[fault]) as caught:
            job.wait(90)
    assert "\n" not in str(caught.value)
    assert alive.all_end(tmp_path)
