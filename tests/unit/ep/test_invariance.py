"""Part of the invariance matrix, over real ranks; `invariance.py` beside this file runs the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_tokens_are_those_of_one_rank(world: int) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "invariance.py"), "--part", "--worlds", str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"arms equal EP 1 on all {world} ranks" in done.stdout
