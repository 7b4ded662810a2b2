"""Jobs whose ranks are forks: for tests of what is measured, not of how processes start and end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from dspark_lab.runs import launch


@pytest.fixture(scope="session")
def forked_ranks() -> Callable[[], AbstractContextManager[None]]:
    """``with forked_ranks():`` starts the ranks of a job as forks of one process (`forked`), so that torch is imported once."""

    @contextmanager
    def forked() -> Iterator[None]:
        script = str(Path(__file__).with_name("forked.py"))
        with patch.object(launch, "agent_command", lambda n, folder: [sys.executable, script, str(n), str(folder)]):
            yield

    return forked
