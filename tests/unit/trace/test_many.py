"""Ranks read at once by several processes: the same as one after the other, and errors where they belong."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dspark_lab.errors import LabError
from dspark_lab.trace import many
from dspark_lab.trace.events import EventTable, read_events
from dspark_lab.trace.many import read_many


def test_as_one_after_the_other(traces: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no trace")
    paths = [*sorted((traces / "h200").glob("tp2*.gz")), broken, tmp_path / "missing.json"]
    alone = read_many(paths, read_events, cached=False, stacks=True, processes=0)
    both = read_many(paths, read_events, cached=False, stacks=True, processes=1)
    for a, b in zip(alone[:4], both[:4], strict=True):
        assert isinstance(a, EventTable)
        assert isinstance(b, EventTable)
        pd.testing.assert_frame_equal(a.events, b.events)
        assert a.log == b.log
    for out in (alone, both):
        assert [type(x) for x in out[4:]] == [LabError, LabError]
        assert "no trace" in str(out[4])


def test_a_process_that_dies_costs_nothing_but_time(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sorted((traces / "h200").glob("tp2*.gz"))
    monkeypatch.setattr(many.sys, "executable", "/bin/false")
    out = read_many(paths, read_events, cached=False, stacks=True, processes=2)
    assert all(isinstance(x, EventTable) for x in out)


def test_an_interrupt_ends_the_others(traces: Path) -> None:
    started = []
    paths = sorted((traces / "h200").glob("*.gz"))

    class Helper(many._Helper):
        def __init__(self, *args: object, **kw: object) -> None:
            super().__init__(*args, **kw)  # pyright: ignore
            started.append(self)

    def stopped(path: Path) -> EventTable:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "_Helper", Helper)
        with pytest.raises(KeyboardInterrupt):
            read_many(paths, stopped, cached=False, stacks=True, processes=1)
    assert started[0]._process.poll() is not None
    assert not started[0]._thread.is_alive()
