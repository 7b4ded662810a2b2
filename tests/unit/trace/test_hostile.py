"""Broken and tricky files: each is read, mended, flagged or refused as it should, none silently wrong."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet, open_trace, summarize
from dspark_lab.trace.columns import COLUMNS
from dspark_lab.trace.decode import decoder
from dspark_lab.trace.events import read_events

FIGURES = ("num_steps", "step_us_p50", "step_us_mean", "gpu_span_us_per_step", "kernels_per_step", "launch_lead_us_p50")


def only(trace) -> Trace:
    assert isinstance(trace, TraceSet)
    return next(iter(trace.values()))


def opened(traces, case: str, **how) -> Trace:
    return only(open_trace(traces / "hostile" / case, **how))


def figures(trace: Trace) -> dict:
    found = summarize(trace)
    json.dumps(found, allow_nan=False)
    return {k: found[k] for k in FIGURES}


@pytest.fixture
def ok(traces) -> dict:
    return figures(opened(traces, "ok"))


def test_ok_by_hand(ok):
    # three steps 1000 µs apart, kernels from 60 to 440 µs in each; the last step ends with its own last kernel
    expected = {"num_steps": 3, "step_us_p50": 380.0, "step_us_mean": 793.333, "gpu_span_us_per_step": 793.333}
    assert ok == expected | {"kernels_per_step": 4.0, "launch_lead_us_p50": 35.0}


@pytest.mark.parametrize(
    ("case", "count", "word"),
    [("NaN", 1, "inf or NaN"), ("inf", 1, "inf or NaN"), ("quote", 3, "quote"), ("nonutf8", 3, "UTF-8")],
)
def test_mended(traces, ok, case, count, word):
    trace = opened(traces, case)
    assert figures(trace) == ok
    report = trace.integrity
    assert (report.num_repaired, report.num_dropped, report.is_clean) == (count, 0, False)
    assert report.places[0]["offset"] == 799  # the first aten::mm begins there
    assert any(word in m for m in report.messages)
    assert len(trace.ops()) == 3


def test_quoted_name_is_kept_whole(traces):
    assert set(opened(traces, "quote").ops()["name"]) == {'{"device": "cpu"}(12): run'}


@pytest.mark.parametrize("case", ["ok_gz", "norank", "listroot", "deepep"])
def test_as_good_as_sound(traces, ok, case):
    trace = opened(traces, case)
    assert figures(trace) == ok
    assert trace.integrity.num_repaired == trace.integrity.num_dropped == 0


@pytest.mark.parametrize("case", ["norank", "listroot", "trunc"])
def test_missing_rank_is_said_aloud(traces, case):
    trace = opened(traces, case)
    assert (trace.rank, trace.integrity.rank_source) == (0, "order of files")
    assert any("does not tell its rank" in m for m in trace.integrity.messages)


def test_truncated(traces, ok):
    trace = opened(traces, "trunc")
    assert figures(trace) == ok  # only arrows were lost
    assert trace.integrity.truncated
    assert trace.integrity.places[0]["offset"] == 8183


def test_truncated_anywhere_never_crashes(sound, write):
    whole = len(read_events(write(sound)).events)
    before = -1
    for cut in range(len(sound) // 2, len(sound) - 120, 97):
        table = read_events(write(sound[:cut]))
        assert table.log.truncated
        assert before <= len(table.events) <= whole
        before = len(table.events)


@pytest.fixture(params=["isal", "zlib"])
def library(request, monkeypatch) -> str:
    """The decompressor: isal where it is installed, and the standard library in its absence."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal", None)
    return request.param


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("how", ["cut", "broken"])
def test_cut_or_broken_gzip_keeps_all_that_can_be_decoded(sound, write, how):
    whole = read_events(write(sound)).events
    zipped = gzip.compress(sound.encode())
    seen = []
    for at in range(len(zipped) // 4, len(zipped), len(zipped) // 9):
        text = zlib.decompressobj(wbits=31).decompress(zipped[:at])
        data = zipped[:at] + (b"" if how == "cut" else b"\xff" * 40 + zipped[at + 40 :])
        table = read_events(write(data, "cut.json.gz"))
        assert table.log.truncated
        assert any("compressed data is broken" in n for n in table.log.notes)
        plain = read_events(write(text, "cut.json")).events
        assert len(plain) - 1 <= len(table.events) <= len(plain) + (how == "broken") * len(whole)
        if how == "cut":
            pd.testing.assert_frame_equal(table.events, plain)
        seen.append(len(table.events))
    assert seen[-1] > 20


@pytest.mark.usefixtures("library")
def test_long_gzip_cut_short_keeps_its_last_events(write):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"op {i * i % 9973}", "pid": 1, "tid": 7, "ts": i, "dur": 1}
        for i in range(60_000)
    ]
    zipped = gzip.compress(json.dumps({"traceEvents": events}).encode(), 1)
    assert len(read_events(write(zipped)).events) == 60_000
    text = zlib.decompressobj(wbits=31).decompress(zipped[:-2000])
    assert len(read_events(write(zipped[:-2000])).events) == text.count(b"}") > 50_000
    assert len(read_events(write(zipped[:-2000] + bytes([255]) * 2000)).events) >= text.count(b"}") - 1
    wrong_sum = zipped[:-8] + b"abcd" + zipped[-4:]
    assert len(read_events(write(wrong_sum)).events) == 60_000
    assert read_events(write(wrong_sum)).log.truncated


@pytest.mark.usefixtures("library")
def test_gzip_members_padding_and_what_follows(sound, write, ok):
    half, raw = len(sound) // 2, sound.encode()
    two = gzip.compress(raw[:half]) + gzip.compress(raw[half:])
    for after, clean in ((b"", True), (b"\0" * 100_000, True), (b"\0\0garbage", False)):
        trace = open_trace(write(two + after))
        assert figures(trace) == ok
        assert not trace.integrity.truncated
        assert any("were ignored" in m for m in trace.integrity.messages) is not clean


def test_no_duration_is_left_out_and_counted(traces, ok):
    trace = opened(traces, "nodur")
    assert figures(trace) == ok
    assert trace.integrity.num_dropped == 1
    assert trace.integrity.places[0]["name"] == "nodur"
    assert "nodur" not in set(trace.events["name"].astype(str))


def test_huge_duration_is_rejected_and_figures_withheld(traces):
    trace = opened(traces, "hugedur")
    assert trace.events["dur_ns"].max() < 1_000_000_000
    found = summarize(trace)
    assert (found["kernels_per_step"], found["gpu_span_us_per_step"]) == (None, None)
    assert found["step_us_p50"] == 380.0
    assert "impossible time" in found["integrity"]["withheld"]["kernels_per_step"]


def test_overrun_reports_both_numbers(traces, ok):
    trace = opened(traces, "overrun")
    report = trace.integrity
    assert (report.num_overruns, report.busy_us, report.busy_us_without_overruns) == (1, 3380.0, 980.0)
    assert figures(trace) == ok
    kernels = trace.kernels()
    assert kernels["dur_us"].max() == 2500
    assert kernels["sound_dur_us"].max() == 100


def test_step_collapse_withholds(traces):
    trace = opened(traces, "step_collapse")
    found = summarize(trace)
    assert [found[k] for k in FIGURES] == [3, None, None, None, None, None]
    assert trace.integrity.steps_without_device_events == (6, 7)
    assert "2 of 3 steps" in trace.integrity.withheld["step_us_p50"]
    assert trace.steps()["num_kernels"].tolist() == [4, 0, 0]


def test_host_waits_are_withheld_with_the_steps(traces, sound, write, made):
    none = dict.fromkeys(("sync", "event_wait", "blocking_copy"))
    found = summarize(opened(traces, "step_collapse"))
    assert found["host_wait_us_per_step"] == found["host_wait_us_p50"] == none
    assert "2 of 3 steps" in found["integrity"]["withheld"]["host_wait_us_per_step"]
    assert summarize(opened(traces, "trunc"))["host_wait_us_per_step"]["sync"] is not None  # only arrows were lost

    trace = made()
    for step in range(8):
        trace.mark(f"ProfilerStep#{step}", step * 1000.0, 900)
    for step in range(8):
        launch = trace.call("LaunchKernel", step * 1000.0 + 10, 5)
        trace.device("k", step * 1000.0 + 30, 50, launch)
        trace.call("StreamSynchronize", step * 1000.0 + 20, 70)
    text = json.dumps(trace.content())
    assert summarize(open_trace(write(text)))["host_wait_us_per_step"]["sync"] == 70.0
    for part in (0.4, 0.6, 0.8):
        found = summarize(open_trace(write(text[: int(len(text) * part)])))
        assert found["integrity"]["truncated"]
        assert found["step_us_p50"] is None
        assert found["host_wait_us_per_step"] == none
    last = text.rindex('{"ph": "X", "cat": "kernel"')
    found = summarize(open_trace(write(text[:last])))
    assert found["host_wait_us_per_step"] == none


def test_graph_launch_owns_its_kernels(traces):
    trace = opened(traces, "graph")
    launches = trace.launches()
    assert launches["num_kernels"].tolist() == [4, 4, 4]
    assert launches["graph_id"].tolist() == [3, 3, 3]
    assert launches["lead_us"].tolist() == [30.0, 30.0, 30.0]
    assert sorted(set(trace.kernels()["graph_node_id"])) == [10, 11, 12, 13]


def test_incomplete_replay_withholds(traces, write):
    given = json.loads((traces / "hostile" / "graph" / "w.1700000000000.pt.trace.json").read_text())
    last = max(i for i, e in enumerate(given["traceEvents"]) if e.get("cat") == "kernel")
    for with_ids in (True, False):
        events = [dict(e, args=dict(e.get("args", {}))) for i, e in enumerate(given["traceEvents"]) if i != last]
        for e in events if not with_ids else ():
            e["args"].pop("graph id", None)
            e["args"].pop("graph node id", None)
        trace = open_trace(write(given | {"traceEvents": events}))
        assert trace.integrity.num_incomplete_replays == 1
        assert summarize(trace)["kernels_per_step"] is None


def test_own_step_names(traces, ok):
    trace = opened(traces, "nosteps", step_pattern="^decode_step$")
    assert figures(trace) == ok
    whole = opened(traces, "nosteps")
    assert len(whole.steps()) == 1
    assert any("step_pattern" in m for m in whole.integrity.messages)
    with pytest.raises(LabError, match=r"'nothing'.*decode_step"):
        opened(traces, "nosteps", step_pattern="nothing")
    with pytest.raises(LabError, match="no regular expression"):
        opened(traces, "nosteps", step_pattern="(")


def test_two_ranks(traces, ok):
    ranks = open_trace(traces / "hostile" / "two")
    assert list(ranks) == [0, 1]
    assert [figures(t) for t in ranks.values()] == [ok, ok]
    assert set(ranks.steps()["skew_us"]) == {0.0, 499.5}
    assert ranks.across()["slowest_rank"].tolist() == [0, 0, 0]


def test_same_rank_twice_names_both(traces):
    with pytest.raises(LabError, match=r"rank 0: .*a\.1\.pt\.trace\.json and .*b\.1\.pt\.trace\.json"):
        open_trace(traces / "hostile" / "same_rank_twice")


def test_captures_of_several_processes_in_a_run(sound, write):
    names = ("rank0_100.1.pt.trace.json", "rank0_200.2.pt.trace.json", "rank0_300.3.pt.trace.json")
    paths = tuple(write(sound, name) for name in names)
    ranks = open_trace(SimpleNamespace(trace_paths=paths))
    assert isinstance(ranks, TraceSet)
    assert list(ranks) == [0]
    assert ranks[0].path == paths[0]
    told = [m for m in ranks[0].integrity.messages if "3 captures of rank 0" in m]
    assert len(told) == 1
    assert all(name in told[0] for name in names)
    assert told[0] in ranks.messages
    assert ranks[0].integrity.is_clean
    with pytest.raises(LabError, match=r"rank 0: .*rank0_100.* and .*rank0_200"):
        open_trace(paths[0].parent)


@pytest.mark.parametrize("case", ["metaonly", "empty", "[]"])
def test_nothing_in_it(traces, write, case):
    made = {"empty": {"traceEvents": []}, "[]": []}
    trace = open_trace(write(made[case])) if case in made else opened(traces, case)
    assert list(trace.events.columns) == list(COLUMNS)
    for table in (
        trace.steps(),
        trace.waits(),
        trace.kernels(),
        trace.memcpy(),
        trace.launches(),
        trace.runtime(),
        trace.phases(),
        trace.ops(),
        trace.frames(),
        trace.device_events(),
    ):
        assert len(table) == 0
        assert len(table.columns) > 3
    assert figures(trace) == dict.fromkeys(FIGURES) | {"num_steps": 0}
    assert any("no events" in m for m in trace.integrity.messages)


def test_empty_tables_have_the_columns_of_full_ones(traces):
    full, empty = opened(traces, "ok"), opened(traces, "metaonly")
    for table in (
        "steps",
        "waits",
        "kernels",
        "memcpy",
        "launches",
        "runtime",
        "phases",
        "ops",
        "frames",
        "device_events",
    ):
        assert list(getattr(full, table)().columns) == list(getattr(empty, table)().columns), table


def test_raw_control_character(sound, write, ok):
    trace = open_trace(write(sound.replace("aten::mm", "aten\x01::mm", 1)))
    assert figures(trace) == ok
    assert trace.integrity.counts == {"raw control character read": 1}
    assert "aten\x01::mm" in set(trace.ops()["name"])


def test_lone_backslash(sound, write, ok):
    trace = open_trace(write(sound.replace("aten::mm", r"torch\cuda\__init__.py", 1)))
    assert figures(trace) == ok
    assert trace.integrity.counts == {"lone backslash escaped": 1}


def test_missing_comma(sound, write, ok):
    assert figures(open_trace(write(sound.replace('}}, {"ph": "X"', '}} {"ph": "X"', 1)))) == ok


def test_huge_integer_does_not_overflow(sound, write, ok):
    trace = open_trace(write(sound.replace('"External id": 2000', f'"External id": {2**64 - 1}', 1)))
    assert figures(trace) == ok
    assert trace.events["external_id"].max() < 10_000
    assert sum(trace.integrity.counts.values()) == 1
    assert open_trace(write(sound.replace('"stream": 7', f'"stream": {2**80}', 1))).integrity.num_repaired == 1


def test_numbers_beyond_32_bits_are_kept(sound, write):
    given = json.loads(sound)
    for k, e in enumerate(given["traceEvents"]):
        if e.get("cat") == "cpu_op":
            e["args"]["External id"] = 2**40 + k
            e["tid"] = 2**45
    trace = open_trace(write(given))
    assert trace.events["external_id"].dtype == trace.events["tid"].dtype == np.int64
    assert trace.ops()["external_id"].min() > 2**40
    assert set(trace.ops()["tid"]) == {2**45}
    assert trace.events["correlation"].dtype == np.int32


@pytest.mark.parametrize("number", ["9" * 20, "9" * 5000, "9223372036854775807"])
def test_step_numbers_beyond_64_bits_give_way_to_the_order(sound, write, ok, number):
    trace = open_trace(write(sound.replace("ProfilerStep#6", f"ProfilerStep#{number}")))
    assert figures(trace) == ok
    assert trace.steps()["step"].tolist() == [0, 1, 2]
    assert any("numbered by their order" in m for m in trace.integrity.messages)


def test_step_numbers_of_an_own_pattern_are_decimal(sound, write):
    trace = open_trace(write(sound.replace("ProfilerStep#6", "ProfilerStep#²")), step_pattern="^ProfilerStep#(.)")
    assert trace.steps()["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("tid", ["--5", "²", "9" * 5000])
def test_threads_with_odd_names(sound, write, ok, tid):
    given = json.loads(sound)
    next(e for e in given["traceEvents"] if e.get("cat") == "cpu_op")["tid"] = tid
    assert figures(open_trace(write(given))) == ok


@pytest.mark.parametrize("without", ["", "msgspec"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_refused_or_left_out(sound, write, monkeypatch, without, opening, closing, closed):
    depth = 100_000
    deep = opening * depth + ("1" + closing * depth if closed else "")
    monkeypatch.setitem(sys.modules, *((without, None) if without else ("unused", None)))
    decoder.cache_clear()
    try:
        first = '{"ph": "X", "cat": "cpu_op", "name": "deep", "pid": 1, "tid": 7, "ts": 0, "dur": 1, "args": '
        cases = [
            deep,
            f'{{"traceEvents": {deep}',
            f'{{"traceEvents": [{deep}]}}',
            f'{{"a": {deep}, "traceEvents": []}}',
        ]
        cases += [f'{{"traceEvents": [{first}{deep}}}]}}', f"[{first}{deep}}}, {first}{{}}}}]"]
        cases += [sound.rstrip().removesuffix("}") + f', "more": {deep}}}']
        for case in cases:
            try:
                trace = open_trace(write(case))
            except LabError:
                continue
            json.dumps(summarize(trace), allow_nan=False)
        if closed:
            whole = sound.replace('"traceEvents": [', f'"traceEvents": [{first}{deep}}}, ', 1)
            trace = open_trace(write(whole))
            assert len(trace.events) == 30
            assert trace.integrity.num_dropped == 1
    finally:
        decoder.cache_clear()


def test_name_and_suffix_do_not_matter(sound, write, ok):
    assert figures(open_trace(write(sound, "trace.json"))) == ok
    assert figures(open_trace(write(gzip.compress(sound.encode()), "zipped.json"))) == ok
    assert figures(open_trace(write(sound, "plain.json.gz"))) == ok


@pytest.mark.parametrize(("dur", "said"), [(0.0, 0), (-5.0, 1)])
def test_zero_and_negative_durations(sound, write, ok, dur, said):
    given = json.loads(sound)
    kernel = [e for e in given["traceEvents"] if e.get("cat") == "kernel"][1]
    kernel["dur"] = dur
    trace = open_trace(write(given))
    assert figures(trace) == ok
    assert trace.integrity.num_repaired == said
    assert trace.events["dur_ns"].min() == 0


def test_sync_records_are_no_device_work(sound, write, ok):
    given = json.loads(sound)
    for stream, name in ((4294967295, "Context Sync"), (-1, "Stream Sync")):
        args = {"stream": stream, "correlation": 77, "device": 0}
        given["traceEvents"].append(
            {
                "ph": "X",
                "cat": "cuda_sync",
                "name": name,
                "pid": 0,
                "tid": -1,
                "ts": 1500.0,
                "dur": 3000.0,
                "args": args,
            }
        )
    trace = open_trace(write(given))
    assert figures(trace) == ok
    assert len(trace.device_events()) == 12


def test_several_writers_are_told(sound, write):
    mixed = "".join(
        a + b
        for a, b in zip(*([sound[i : i + 4096] for i in range(0, len(sound), 4096)] for _ in range(2)), strict=True)
    )
    trace = open_trace(write(mixed))
    assert any("several writers" in m for m in trace.integrity.messages)
    assert trace.integrity.num_dropped > 0


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("# A project\n\nText", "# A project"),
        ('{"a": 1}', "traceEvents"),
        ("", "empty"),
        ("[1, 2]", "no events"),
        (b"\x1f\x8bnot gzip", "broken gzip"),
        (b"\x1f\x8b", "broken gzip"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:12], "broken gzip"),
        (gzip.compress(b"", mtime=0), "it is empty"),
    ],
)
def test_no_trace_is_refused(write, content, seen):
    path = write(content)
    with pytest.raises(LabError, match=path.name) as err:
        open_trace(path)
    assert seen in str(err.value)


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(LabError, match=r"nowhere\.json"):
        open_trace(tmp_path / "nowhere.json")
    with pytest.raises(LabError, match="empty"):
        open_trace(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(LabError, match=r"notes\.txt"):
        open_trace(tmp_path)
    with pytest.raises(LabError, match="int"):
        open_trace(3)
