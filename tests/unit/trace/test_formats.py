"""Another format, joined in from outside: a toy of lines ``kind|name|start|length|id|queue``, in ticks of 10 ns."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError
from dspark_lab.trace import formats, open_trace, summarize
from dspark_lab.trace.formats import TraceFormat, register_trace_format, unregister_trace_format

CATEGORIES = {"range": "user_annotation", "call": "cuda_runtime", "kernel": "kernel"}


def toy_text(slow: int = 0) -> str:
    lines = ["#toy rank=3 of=4"]
    for step in range(5):
        t = 100_000 * step
        lines += [f"range|ProfilerStep#{step}|{t}|90000||", f"call|toyLaunchKernel|{t + 100}|500|{step}|"]
        lines += [f"kernel|gemm|{t + 2000}|{40_000 + slow}|{step}|7", f"call|toyStreamSynchronize|{t + 700}|60000||"]
    return "\n".join(lines)


def read_toy(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines()[1:]:
        kind, name, start, length, number, queue = line.split("|")
        yield {
            "category": CATEGORIES[kind],
            "name": name,
            "ts_ns": 10 * int(start),
            "dur_ns": 10 * int(length),
            "correlation": int(number) if number else None,
            "stream": int(queue) if queue else -1,
            "tid": 1,
        }


def toy_header(path: Path) -> dict[str, Any]:
    words = dict(w.split("=") for w in path.read_text().splitlines()[0].split()[1:])
    return {"distributedInfo": {"rank": int(words["rank"]), "world_size": int(words["of"])}}


TOY: dict[str, Any] = {
    "matches": lambda head, path: head.startswith(b"#toy"),
    "read": read_toy,
    "header": toy_header,
    "suffixes": (".toy",),
}


@pytest.fixture
def toy() -> Iterator[None]:
    lab.register_trace_format("toy", **TOY)
    yield
    unregister_trace_format("toy")


@pytest.fixture
def slow_and_quick(tmp_path: Path) -> tuple[Path, Path]:
    for name, slow in (("quick", 0), ("slow", 5000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank3.toy").write_text(toy_text(slow))
    return tmp_path / "slow" / "rank3.toy", tmp_path / "quick" / "rank3.toy"


@pytest.mark.usefixtures("toy")
def test_everything_works_on_a_foreign_format(slow_and_quick: tuple[Path, Path]) -> None:
    slow, quick = slow_and_quick
    trace = open_trace(quick)
    found = summarize(trace)
    assert (trace.rank, trace.world_size, found["num_steps"], found["step_us_p50"], found["kernels_per_step"]) == (
        3,
        4,
        5,
        1000.0,
        1.0,
    )
    assert found["launch_lead_us_p50"] == 14.0
    assert found["host_wait_us_p50"]["sync"] == 600.0
    assert found["integrity"]["problems"] == []
    assert "read by the format 'toy'" in found["integrity"]["messages"]
    diff = lab.diff(slow, quick)
    assert diff.by_kind().set_index("kind")["delta_us"]["kernel"] == pytest.approx(-50.0)
    assert lab.whatif(quick, drop="sync").predicted_us > 0
    assert list(open_trace(quick.parent)) == [3]


@pytest.mark.usefixtures("toy")
def test_kineto_is_read_as_ever(traces: Path) -> None:
    assert summarize(open_trace(traces / "h200" / "trace_none.json.gz"))["kernels_per_step"] == 588


def test_without_it_the_file_is_no_trace(slow_and_quick: tuple[Path, Path]) -> None:
    with pytest.raises(LabError, match="no trace"):
        open_trace(slow_and_quick[0])


def test_registering(tmp_path: Path) -> None:
    made = register_trace_format("mine", **TOY)
    try:
        with pytest.raises(LabError, match="'mine' already; pass replace=True"):
            register_trace_format("mine", **TOY)
        assert register_trace_format("mine", replace=True, **TOY) == made
    finally:
        unregister_trace_format("mine")
    with pytest.raises(LabError, match="read=3 is no function"):
        register_trace_format("x", matches=TOY["matches"], read=3)  # pyright: ignore[reportArgumentType]
    assert formats.formats() == []


SOUND = {"category": "kernel", "name": "k", "ts_ns": 0, "dur_ns": 5}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{k: v for k, v in SOUND.items() if k != "dur_ns"}], "lack dur_ns"),
        ([SOUND | {"colour": 3}], "have colour, which are no columns"),
        ([SOUND | {"ts_ns": 0.5}], "ts_ns of the format 'bad' is no whole number"),
        ([SOUND | {"ts_ns": None}], "no whole number"),
        ([SOUND | {"stream": "seven"}], "stream of the format"),
        ([SOUND | {"correlation": 2**70}], "64 bits"),
        (3, "could not be read as bad: TypeError"),
    ],
)
def test_a_broken_contract_is_told(write: Any, rows: Any, said: str) -> None:
    register_trace_format("bad", matches=lambda head, path: head == b"bad", read=lambda path: rows)
    try:
        with pytest.raises(LabError, match=said):
            open_trace(write("bad"))
    finally:
        unregister_trace_format("bad")


def test_tables_unsorted_and_empty(write: Any) -> None:
    rows = pd.DataFrame([SOUND | {"ts_ns": 9}, SOUND | {"ts_ns": 9, "dur_ns": 8}, SOUND | {"dur_ns": -1}])
    register_trace_format("t", matches=lambda head, path: head == b"table", read=lambda path: rows)
    register_trace_format("e", matches=lambda head, path: head == b"empty", read=lambda path: [])
    try:
        trace = open_trace(write("table"))
        assert trace.events[["ts_ns", "dur_ns"]].values.tolist() == [[0, 0], [9, 8], [9, 5]]
        assert trace.integrity.counts == {"negative duration read as zero": 1}
        assert summarize(open_trace(write("empty")))["num_steps"] == 0
    finally:
        unregister_trace_format("t")
        unregister_trace_format("e")


def test_formats_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("toy", f"{__name__}:TOY_FORMAT", formats.ENTRY_POINTS)
    bad = EntryPoint("bad", "nowhere.at.all:x", formats.ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: TOY_FORMAT if self.name == "toy" else 1 / 0)
    monkeypatch.setattr(formats, "entry_points", lambda group: [good, bad] if group == formats.ENTRY_POINTS else [])
    formats._installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match="'bad'.*is left out"):
            assert formats.formats() == [TOY_FORMAT]
    finally:
        formats._installed.cache_clear()


TOY_FORMAT = TraceFormat(name="toy", **TOY)


def test_a_format_that_breaks_keeps_no_other_file_from_being_read(h200: Path) -> None:
    def boom(head: bytes, path: Path) -> bool:
        raise RuntimeError("boom")

    lab.register_trace_format("breaks", matches=boom, read=lambda path: [])
    try:
        with pytest.warns(UserWarning, match="'breaks' is left out for .*RuntimeError: boom"):
            assert len(lab.open_trace(h200 / "trace_none.json.gz").steps()) == 8
    finally:
        unregister_trace_format("breaks")


@pytest.mark.parametrize(("given", "says"), [({"name": ""}, "is no name"), ({"suffixes": ".nsys"}, "must be several")])
def test_bad_arguments_of_a_format_are_named(given: dict, says: str) -> None:
    args = {"name": "mine", "matches": lambda head, path: False, "read": lambda path: [], **given}
    with pytest.raises(lab.LabError, match=says):
        lab.register_trace_format(args.pop("name"), **args)
