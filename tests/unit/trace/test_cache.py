"""The cache of read files: the same tables, by content, safe against what half-written files and other code leave."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from dspark_lab.errors import LabError
from dspark_lab.trace import arrow, cache, open_trace, summarize
from dspark_lab.trace.cache import Cache, default_cache
from dspark_lab.trace.events import EventTable, read_events


def same(a: EventTable, b: EventTable) -> None:
    pd.testing.assert_frame_equal(a.events, b.events)
    assert (a.header, a.log, a.labels) == (b.header, b.log, b.labels)


@pytest.mark.parametrize(
    "case",
    [
        "h200/one_bs1_hw0_blocking_stack_rank0.json.gz",
        "hostile/quote",
        "hostile/trunc",
        "hostile/hugedur",
        "hostile/metaonly",
    ],
)
def test_what_is_kept_is_what_was_read(traces: Path, tmp_path: Path, case: str) -> None:
    path = traces / case
    path = path if path.is_file() else next(path.iterdir())
    kept = Cache(tmp_path / "c")
    fresh = read_events(path)
    same(kept.read(path, least_bytes=0), fresh)
    (entry,) = (tmp_path / "c").iterdir()
    same(kept.read(path, least_bytes=0), fresh)
    assert arrow.load(entry.read_bytes()) is not None


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were parsed, in order."""
    seen: list[Path] = []

    def read(path: Path, **how: bool) -> EventTable:
        seen.append(path)
        return read_events(path, **how)

    monkeypatch.setattr(cache, "read_events", read)
    return seen


def test_content_decides_not_the_name(traces: Path, tmp_path: Path, reads: list[Path]) -> None:
    path, kept = next((traces / "hostile" / "ok").iterdir()), Cache(tmp_path / "c")
    copy = tmp_path / "elsewhere.json"
    copy.write_bytes(path.read_bytes())
    for file in (path, copy, path):
        kept.read(file, least_bytes=0)
    assert reads == [path]
    copy.write_bytes(copy.read_bytes().replace(b"aten::mm", b"aten::bb"))
    assert "aten::bb" in set(kept.read(copy, least_bytes=0).events["name"])
    kept.read(path, least_bytes=0, stacks=False)
    assert reads == [path, copy, path]


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "other"])
def test_a_spoilt_entry_is_read_anew_and_replaced(traces: Path, tmp_path: Path, reads: list[Path], harm: str) -> None:
    path, kept = next((traces / "hostile" / "ok").iterdir()), Cache(tmp_path / "c")
    fresh = kept.read(path, least_bytes=0)
    (entry,) = (tmp_path / "c").iterdir()
    data = entry.read_bytes()
    middle = len(data) // 2
    entry.write_bytes(
        {
            "cut": data[:middle],
            "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "emptied": b"",
            "other": b"text",
        }[harm]
    )
    same(kept.read(path, least_bytes=0), fresh)
    assert len(reads) == 2
    assert entry.read_bytes() == data


def test_what_other_code_read_is_not_taken(
    traces: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = next((traces / "hostile" / "ok").iterdir()), Cache(tmp_path / "c")
    kept.read(path, least_bytes=0)
    monkeypatch.setattr(cache, "code_version", lambda: "later")
    kept.read(path, least_bytes=0)
    assert len(reads) == 2


def test_the_size_has_a_limit(tmp_path: Path, sound: str) -> None:
    folder = tmp_path / "c"
    files = []
    for k in range(4):
        files.append(tmp_path / f"{k}.json")
        files[-1].write_text(sound.replace("aten::mm", f"aten::{k}"))
    Cache(folder).read(files[0], least_bytes=0)
    size = next(folder.iterdir()).stat().st_size
    (folder / ".left.part").write_bytes(b"x" * 10)
    os.utime(folder / ".left.part", (1, 1))
    small = Cache(folder, limit_mb=2.5 * size / 1e6)
    for k, file in enumerate(files[1:]):
        os.utime(next(p for p in folder.glob("*.arrow")), (100 + k, 100 + k))
        small.read(file, least_bytes=0)
    left = list(folder.iterdir())
    assert sum(p.stat().st_size for p in left) <= 2.5 * size
    assert len(left) == 2
    Cache(folder, limit_mb=0).read(files[0], least_bytes=0)
    assert not (folder / "new").exists()


def test_a_folder_that_cannot_be_written_is_no_harm(traces: Path) -> None:
    path = next((traces / "hostile" / "ok").iterdir())
    assert len(Cache(Path("/proc/nothing")).read(path, least_bytes=0).events) == 30


def test_where_and_whether(tmp_path: Path) -> None:
    for off in ("off", "0", ""):
        assert default_cache({"DSPARK_LAB_CACHE": off}) is None
    own = default_cache({"DSPARK_LAB_CACHE": str(tmp_path), "DSPARK_LAB_CACHE_MB": "7"})
    assert own == Cache(tmp_path, 7.0)
    found = default_cache({"XDG_CACHE_HOME": str(tmp_path)})
    assert found is not None
    assert found.folder.name == "traces"
    with pytest.raises(LabError, match="DSPARK_LAB_CACHE_MB='much'"):
        default_cache({"DSPARK_LAB_CACHE_MB": "much"})


def test_open_trace_goes_through_it(
    traces: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_LAB_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr(Cache.read, "__kwdefaults__", {"stacks": True, "least_bytes": 0})
    path = traces / "h200" / "trace_none.json.gz"
    assert summarize(open_trace(path)) == summarize(open_trace(path)) == summarize(open_trace(path, cache=False))
    assert len(reads) == 1


def test_without_stacks(traces: Path) -> None:
    path = traces / "h200" / "one_bs1_hw0_blocking_stack_rank0.json.gz"
    whole, bare = open_trace(path), open_trace(path, stacks=False)
    assert whole.has_stacks
    assert not bare.has_stacks
    assert len(bare.events) < len(whole.events)
    assert bare.integrity.num_events == whole.integrity.num_events
    assert summarize(bare)["step_us_p50"] == summarize(whole)["step_us_p50"]
    assert not bare.waits()["site"].str.contains(r"\.py:").any()
