"""The table of hostile inputs: each case with the outcome that stands in ``tests/data/traces/hostile_expected.json``; and random mutations."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet, open_trace, summarize

DATA = Path(__file__).parents[2] / "data" / "traces"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "hostile_expected.json").read_text())
FLAGS = {
    "truncated": "truncated",
    "num_overruns": "overruns",
    "steps_without_device_events": "steps without device events",
    "num_launches_without_device_events": "launches without device events",
    "num_incomplete_replays": "incomplete replays",
    "num_device_events_without_launch": "device events without a launch",
    "clock_jumps": "clock jumps",
}


def changed(sound: str, change: Callable[[list[dict[str, Any]]], None]) -> str:
    content = json.loads(sound)
    change(content["traceEvents"])
    return json.dumps(content)


def epoch(events: list[dict[str, Any]]) -> None:
    for e in events:
        e["ts"] = int(e["ts"]) + 1_700_000_000_000_000


def kernel_dur(dur: float) -> Callable[[list[dict[str, Any]]], None]:
    def change(events: list[dict[str, Any]]) -> None:
        next(e for e in events if e.get("cat") == "kernel")["dur"] = dur

    return change


def sync_records(events: list[dict[str, Any]]) -> None:
    for stream in (4294967295, -1):
        args = {"stream": stream, "correlation": 77, "device": 0}
        events.append(
            {
                "ph": "X",
                "cat": "cuda_sync",
                "name": "Stream Sync",
                "pid": 0,
                "tid": -1,
                "ts": 1500.0,
                "dur": 3000.0,
                "args": args,
            }
        )


#: Cases of the table that are not in the folder, made from the sound one.
MADE: dict[str, Callable[[str], str]] = {
    "epoch_us": lambda s: changed(s, epoch).replace(
        '"baseTimeNanoseconds": 1700000000000000000', '"baseTimeNanoseconds": 0'
    ),
    "ctrl": lambda s: s.replace("aten::mm", "aten\x01::mm", 1),
    "hugeint": lambda s: s.replace('"External id": 2000', f'"External id": {2**64 - 1}', 1),
    "empty": lambda s: '{"traceEvents": []}',
    "zerodur": lambda s: changed(s, kernel_dur(0.0)),
    "negdur": lambda s: changed(s, kernel_dur(-5.0)),
    "sync": lambda s: changed(s, sync_records),
    "wrongname": lambda s: s,
}


def outcome(opened: Trace | TraceSet) -> dict[str, Any]:
    trace = opened if isinstance(opened, Trace) else next(iter(opened.values()))
    report = trace.integrity
    flags = [word for field, word in FLAGS.items() if getattr(report, field)]
    flags += ["rank not told"] if report.rank_source != "distributedInfo" else []
    flags += ["steps not told"] if report.steps_source in ("whole trace", "none") else []
    return {
        "ranks": 1 if isinstance(opened, Trace) else len(opened),
        "steps": report.num_steps,
        "kernels": len(trace.kernels()),
        "repaired": report.num_repaired,
        "dropped": report.num_dropped,
        "flags": flags,
        "withheld": sorted(report.withheld),
        "step_us_p50": summarize(trace)["step_us_p50"],
    }


@pytest.mark.parametrize("case", sorted(EXPECTED))
def test_case(case: str, sound: str, write: Any) -> None:
    expected = EXPECTED[case]
    name, _, pattern = case.partition(" with step_pattern=")
    source = (
        write(MADE[name](sound), "trace.json" if name == "wrongname" else "w.1.pt.trace.json")
        if name in MADE
        else DATA / "hostile" / name
    )
    if "error" in expected:
        with pytest.raises(LabError) as err:
            open_trace(source)
        assert all(word in str(err.value) for word in expected["error"])
        return
    assert outcome(open_trace(source, step_pattern=pattern or None)) == expected


def test_the_table_is_whole() -> None:
    assert {p.name for p in (DATA / "hostile").iterdir()} | set(MADE) == {c.split(" with ")[0] for c in EXPECTED}
    assert sum("error" not in e for e in EXPECTED.values()) >= 17


MUTATIONS = 500


def test_random_mutations(sound: str, write: Any) -> None:
    """Bytes, numbers, events and halves changed at random: a clear error, or figures that are right, or marked, or withheld."""
    right = summarize(open_trace(write(sound)))
    loaded, refused = 0, []
    for seed in range(MUTATIONS):
        data, harmless = mutated(sound, random.Random(seed))
        path = write(data, "m.json")
        try:
            trace = open_trace(path)
            found = summarize(trace)
        except LabError as err:
            refused.append(str(err))
            continue
        loaded += 1
        json.dumps(found, allow_nan=False)
        assert found["num_steps"] >= 0
        if harmless:
            assert {k: found[k] for k in KEPT} == {k: right[k] for k in KEPT}, seed
        elif not found["integrity"]["problems"] and not found["integrity"]["messages"]:
            # nothing was said: then the file is a sound trace of its own, and the standard library reads the same from it
            assert plain_figures(data) == (found["num_steps"], found["kernels_per_step"]), seed
    assert loaded > 0.6 * MUTATIONS
    assert all("m.json" in text for text in refused)


KEPT = ("num_steps", "step_us_p50", "step_us_mean", "kernels_per_step", "launch_lead_us_p50", "gpu_span_us_per_step")


def mutated(sound: str, rnd: random.Random) -> tuple[bytes, bool]:
    """(a mutated file, whether the figures must be those of the sound one)."""
    kind = rnd.choice(("byte", "byte", "cut", "drop", "twice", "swap", "number", "key", "rewrite", "zip", "insert"))
    text = sound.encode()
    at = rnd.randrange(len(text))
    content = json.loads(sound)
    events = content["traceEvents"]
    if kind == "byte":
        return text[:at] + bytes([rnd.randrange(256)]) + text[at + 1 :], False
    if kind == "insert":
        return text[:at] + rnd.choice((b'"', b"{", b"}", b",", b"\\", b"\x00", b"NaN", b"]")) + text[at:], False
    if kind == "cut":
        return text[:at], False
    if kind == "drop":
        events.pop(rnd.randrange(len(events)))
    elif kind == "twice":
        events.append(dict(rnd.choice(events)))
    elif kind == "swap":
        rnd.shuffle(events)
    elif kind == "number":
        event = rnd.choice(events)
        key = rnd.choice([k for k in ("ts", "dur", "pid", "tid") if k in event])
        event[key] = rnd.choice((-1, 0, 1e300, 2**70, "x", None, 0.5, True, [], float("inf"), float("nan")))
    elif kind == "key":
        event = rnd.choice(events)
        event.pop(rnd.choice(list(event)))
    elif kind == "zip":
        zipped = gzip.compress(text)
        at = rnd.randrange(len(zipped))
        return (
            (zipped, True)
            if rnd.random() < 0.3
            else (zipped[:at] + bytes([rnd.randrange(256)]) + zipped[at + 1 :], False)
        )
    return json.dumps(content, indent=rnd.choice((None, 1))).encode(), kind in ("swap", "rewrite")


def plain_figures(data: bytes) -> tuple[int, float]:
    """(steps, kernels a step) counted by the standard library: kernels whose launch lies in a step."""
    raw = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    events = [e for e in json.loads(raw.decode("utf-8", "replace"), strict=False)["traceEvents"] if e.get("ph") == "X"]
    steps = [
        e for e in events if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith("ProfilerStep#")
    ]
    calls = {
        e["args"].get("correlation"): float(e["ts"])
        for e in reversed(events)
        if e.get("cat") == "cuda_runtime" and "args" in e
    }
    inside = 0
    for e in events:
        at = calls.get(e.get("args", {}).get("correlation")) if e.get("cat") == "kernel" else None
        inside += at is not None and any(float(s["ts"]) <= at < float(s["ts"]) + float(s["dur"]) for s in steps)
    return len(steps), round(inside / len(steps), 3)
