"""Reading: exact nanoseconds, any chunk size, with and without msgspec, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from dspark_lab.trace import decode, open_trace, summarize
from dspark_lab.trace.decode import decoder
from dspark_lab.trace.events import read_events

BASE_US = 1_700_000_000_000_000


def rewritten(sound: str, shift_us: int, base_ns: int) -> str:
    """The same events at other numbers: times moved by ``shift_us``, decimals kept to the digit."""
    given = json.loads(sound, parse_float=Decimal)
    for i, e in enumerate(given["traceEvents"]):
        if "dur" in e:
            e["ts"] = f"<{Decimal(e['ts']) + shift_us + Decimal(i % 7) / 1000:.3f}>"
            e["dur"] = float(e["dur"])
        else:
            e["ts"] = float(e["ts"])
    given["baseTimeNanoseconds"] = base_ns
    return json.dumps(given).replace('"<', "").replace('>"', "")


@pytest.mark.parametrize("shift_us", [0, 5_000_000_000_000, 9_100_000_000_000, BASE_US])
def test_the_same_nanoseconds_however_written(sound, write, shift_us):
    near = read_events(write(rewritten(sound, 0, BASE_US * 1000), "near.json")).events
    far = read_events(write(rewritten(sound, shift_us, (BASE_US - shift_us) * 1000), "far.json")).events
    pd.testing.assert_frame_equal(near, far)
    assert near["ts_ns"].dtype == np.int64
    assert (near["ts_ns"] % 1000).nunique() == 7


def test_whole_epoch_microseconds(sound, write):
    given = json.loads(sound)
    for e in given["traceEvents"]:
        e["ts"] = int(e["ts"]) + BASE_US
    given.pop("baseTimeNanoseconds")
    moved = read_events(write(given, "epoch.json")).events
    assert moved["ts_ns"].tolist() == [
        t + (BASE_US * 1000 - 1_700_000_000_000_000_000) for t in read_events(write(sound)).events["ts_ns"]
    ]


def test_base_time_after_the_events(sound, write):
    given = json.loads(sound)
    events = given.pop("traceEvents")
    late = {"traceEvents": events} | given
    pd.testing.assert_frame_equal(read_events(write(late, "late.json")).events, read_events(write(sound)).events)
    assert open_trace(write(late)).integrity.rank_source == "distributedInfo"


@pytest.mark.parametrize("chunk_bytes", [300, 777, 4096, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_chunk_size_does_not_matter(sound, write, chunk_bytes, indent):
    path = write(json.dumps(json.loads(sound), indent=indent))
    pd.testing.assert_frame_equal(read_events(path, chunk_bytes=chunk_bytes).events, read_events(path).events)
    assert len(read_events(path, chunk_bytes=chunk_bytes).events) == 30


@pytest.mark.parametrize("case", ["quote", "inf", "nonutf8", "trunc", "listroot"])
def test_chunk_size_does_not_matter_for_broken_files(traces, case):
    path = next((traces / "hostile" / case).iterdir())
    whole, pieces = read_events(path), read_events(path, chunk_bytes=500)
    pd.testing.assert_frame_equal(whole.events, pieces.events)
    assert whole.log.counts == pieces.log.counts
    assert whole.log.places == pieces.log.places
    assert whole.header == pieces.header


@pytest.mark.parametrize(
    "path", ["h200/tp2_bs1_hw0_none_rank0.json.gz", "hostile/quote", "hostile/hugedur", "hostile/trunc"]
)
def test_without_msgspec(traces, monkeypatch, path):
    file = traces / path
    file = file if file.is_file() else next(file.iterdir())
    fast = read_events(file)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    decoder.cache_clear()
    try:
        slow = read_events(file)
        assert isinstance(decode.decode_run(b'{"ph":"X"}', 0, slow.log)[0], decode.PlainEvent)
    finally:
        decoder.cache_clear()
    pd.testing.assert_frame_equal(fast.events, slow.events)
    assert fast.log.counts == slow.log.counts


def test_names_between_events_in_strings(write):
    tricky = 'foo}, {"ph": "X"'  # as a name, where its quotes are escaped
    events = [
        {"ph": "X", "cat": "cpu_op", "name": tricky, "pid": "CPU functions", "tid": "7", "ts": i, "dur": 1}
        for i in range(40)
    ]
    table = read_events(write({"traceEvents": events}), chunk_bytes=256)
    assert table.events["name"].astype(str).tolist() == [tricky] * 40
    assert table.labels[int(table.events["pid"][0])] == "CPU functions"
    assert set(table.events["tid"]) == {7}
    assert table.log.counts == {}


def test_category_not_stream_decides_the_lane(sound, write):
    given = json.loads(sound)
    next(e for e in given["traceEvents"] if e.get("cat") == "cpu_op")["args"]["stream"] = 0
    trace = open_trace(write(given))
    assert (len(trace.ops()), len(trace.device_events())) == (3, 12)


def test_light_import():
    code = "import sys, dspark_lab.trace; print([m for m in ('torch', 'plotly', 'ipywidgets', 'msgspec') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_reads_at_a_fair_pace(made, write):
    import time

    trace = made()
    for step in range(120):
        t = step * 1000.0
        trace.mark(f"ProfilerStep#{step}", t, 900)
        launch = trace.call("GraphLaunch", t + 10, 100)
        for k in range(400):
            trace.device(f"kernel_{k % 17}", t + 200 + k, 0.9, launch)
    path = write(trace.content())
    before = time.process_time()
    found = summarize(open_trace(path))
    assert found["kernels_per_step"] == 400
    assert (
        48_240 / (time.process_time() - before) > 40_000
    )  # events a second of processor time; a loop over rows would fall below
