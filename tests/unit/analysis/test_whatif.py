"""What-if: the replay against the trace it comes from, and predictions against captures that show what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dspark_lab as lab
from dspark_lab.cli import app

RECORDED = Path(__file__).parents[3] / "data" / "recorded"
H200 = (
    "trace_none", "trace_blocking", "trace_non_blocking", "one_bs4_hw0_none_rank0", "one_bs4_hw0_blocking_rank0", "one_bs4_hw0_persistent_fill_rank0",
    "one_bs1_hw0_blocking_stack_rank0", "one_bs1_hw150_two_blocking_rank0", "tp2_bs1_hw0_none_rank0", "tp2_bs1_hw0_none_rank1",
    "tp2_bs1_hw0_blocking_rank0", "tp2_bs1_hw0_blocking_rank1",
)  # fmt: skip


def recorded(name: str) -> Any:
    return lab.open_trace(lab.load_run(RECORDED / name))


@pytest.mark.parametrize("name", H200)
def test_the_unedited_replay_is_within_a_percent(h200: Path, name: str) -> None:
    found = lab.whatif(h200 / f"{name}.json.gz", num_edits=0)
    assert abs(found.replay_error_pct) < 1.0
    assert found.predicted_us == found.replayed_us
    assert found.exact == (not name.startswith("tp2"))


@pytest.mark.parametrize(
    "name",
    ["small-ep1-bs1-blocking", "seed-ep1-tp2-bs1-blocking", "qwen3-30b-a3b-ep1-bs1-blocking", "small-hostwork-ep1-bs1-hw600-blocking", "h200-tp2-blocking",
     *sorted(p.parent.name for p in RECORDED.glob("ep2-*/traces"))],
)  # fmt: skip
def test_recordings_of_other_loops_replay_within_a_percent(name: str) -> None:
    found = lab.whatif(recorded(name), num_edits=0)
    assert abs(found.replay_error_pct) < 1.0
    assert found.exact


def test_hosts_that_meet_make_it_a_bound_and_never_slower() -> None:
    found = lab.whatif(recorded("ep2-ep2-bs1-blocking"), drop="sync", num_edits=0)
    assert found.predicted_us <= found.measured_us
    assert found.exact or "the ranks meet on the host too" in found.sentence


@pytest.mark.parametrize(
    ("blocking", "non_blocking"),
    [
        ("small-ep1-bs1-blocking", "small-ep1-bs1-non_blocking"),
        ("seed-ep1-tp2-bs1-blocking", "seed-ep1-tp2-bs1-non_blocking"),
        ("tp2-ep1-tp2-bs1-blocking", "tp2-ep1-tp2-bs1-non_blocking"),
        ("small-hostwork-ep1-bs1-hw600-blocking", "small-hostwork-ep1-bs1-hw600-none"),
        ("h200-tp2-blocking", "h200-tp2-none"),
        ("h200-moe-blocking", "h200-moe-non_blocking"),
    ],
)
def test_dropping_the_synchronise_predicts_the_arm_without_it(blocking: str, non_blocking: str) -> None:
    found = lab.whatif(recorded(blocking), drop="sync", num_edits=0)
    truth = lab.whatif(recorded(non_blocking), num_edits=0).measured_us
    assert 0.9 <= (found.measured_us - found.predicted_us) / (found.measured_us - truth) <= 1.1


def test_editing_one_of_two_waits_moves_the_bill_to_the_next(h200: Path) -> None:
    path = h200 / "one_bs1_hw150_two_blocking_rank0.json.gz"
    first, both = (
        lab.whatif(path, drop_site="aten::to > aten::_to_copy > aten::copy_", num_edits=0),
        lab.whatif(path, drop="sync"),
    )
    waits = first.waits.set_index("site")
    second = "aten::to > aten::_to_copy > aten::copy_ #2"
    assert waits.loc[second, "measured_us"] < 10
    assert waits.loc[second, "predicted_us"] > 1000
    assert second in first.sentence
    assert first.gain_us < 0.3 * both.gain_us
    edits = both.edits.set_index("target")["gain_us"]
    assert edits["every synchronise and blocking copy"] == pytest.approx(both.replayed_us - both.predicted_us)
    assert len(both.edits) <= 10
    assert both.edits["gain_us"].is_monotonic_decreasing


def loop(
    path: Path,
    *,
    sync: bool,
    host: float = 60.0,
    gemm: float = 100.0,
    streams: int = 1,
    num_steps: int = 10,
    every: float = 0.0,
) -> Path:
    """A decode loop with one copy a step, with or without a synchronise after it; results are read by an event two steps later.

    ``every``: the event is looked at that often until it has passed, instead of one blocking call."""
    events: list[dict[str, Any]] = []

    def put(cat: str, what: str, ts: float, dur: float, correlation: int, stream: int = 7) -> None:
        on_device = cat in ("kernel", "gpu_memcpy")
        args = {"correlation": correlation} | ({"stream": stream, "device": 0} if on_device else {})
        events.append({"ph": "X", "cat": cat, "name": what, "pid": 0 if on_device else 1, "tid": stream if on_device else 1, "ts": ts, "dur": dur, "args": args})  # fmt: skip

    now, free, ends = 0.0, 0.0, []
    for n in range(num_steps):
        begin, c = now, 10 * (n + 1)
        if n >= 2:
            until = max(now + 5, ends[n - 2] + 4)
            at = now + 1
            while every and at + 1 < ends[n - 2]:
                put("cuda_runtime", "cudaEventQuery", at, 2, c)
                at += every
            until = at + 2 if every else until
            put("cuda_runtime", "cudaEventQuery" if every else "cudaEventSynchronize", at, until - at, c)
            now = until
        put("cuda_runtime", "cudaMemcpyAsync", now + 5, 5, c + 1)
        free = max(free + 1, now + 11)
        put("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", free, 1, c + 1)
        free += 1
        now += 10
        if sync:
            until = max(now + 3, free + 5)
            put("cuda_runtime", "cudaStreamSynchronize", now + 1, until - now - 1, c + 2)
            now = until
        now += host
        put("cuda_runtime", "cudaGraphLaunch", now, 10, c + 3)
        now += 10
        free = max(free + 1, now + 3)
        for k in range(8):
            put("kernel", "gemm" if k % 2 else "norm", free, gemm if k % 2 else 20.0, c + 3, 7 + k % streams)
            free += (gemm if k % 2 else 20.0) + 1
        free -= 1
        put("cuda_runtime", "cudaEventRecord", now + 5, 2, c + 4)
        ends.append(free)
        now += 10
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{n}",
                "pid": 1,
                "tid": 1,
                "ts": begin,
                "dur": now - begin - 0.5,
            }
        )
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize("host", [30.0, 60.0, 200.0, 400.0, 700.0])
def test_a_made_loop_is_predicted_whatever_bounds_it(tmp_path: Path, host: float) -> None:
    """From 480 µs of host time on the loop is bound by the host, and dropping the wait gains only the device's time."""
    held, free = loop(tmp_path / "a.json", sync=True, host=host), loop(tmp_path / "b.json", sync=False, host=host)
    found, truth = lab.whatif(held, drop="sync"), lab.whatif(free, num_edits=0)
    assert found.exact
    assert abs(found.replay_error_pct) < 0.2
    assert found.predicted_us == pytest.approx(truth.measured_us, rel=0.01)


@pytest.mark.parametrize("every", [20.0, 110.0])
def test_looks_at_an_event_are_one_wait_for_it(tmp_path: Path, every: float) -> None:
    free = loop(tmp_path / "a.json", sync=False, every=every)
    waits = lab.lost(free)
    held = waits[waits["dur_us"] > 30]
    assert set(held["kind"]) == {"event_wait"}
    assert set(held["age_steps"]) == {2.0}
    assert held["step"].is_unique
    assert waits["lost_us"].sum() == 0
    assert held["dur_us"].median() == pytest.approx(lab.lost(loop(tmp_path / "b.json", sync=False))["dur_us"].median(), abs=every)  # fmt: skip
    truth = lab.whatif(free, num_edits=0)
    found = lab.whatif(loop(tmp_path / "c.json", sync=True, every=every), drop="sync", num_edits=0)
    assert truth.replay_error_pct == pytest.approx(0, abs=0.1)
    assert found.predicted_us == pytest.approx(truth.measured_us, rel=0.01)
    assert lab.whatif(free, scale_kernel={"gemm": 0.5}, num_edits=0).gain_us == pytest.approx(200, abs=5)


def test_kernels_copies_and_host_time(tmp_path: Path) -> None:
    path = loop(tmp_path / "a.json", sync=True)
    plain = lab.whatif(path, num_edits=0)
    assert plain.replayed_us - lab.whatif(path, scale_kernel={"gemm": 0.5}, num_edits=0).predicted_us == pytest.approx(
        200, abs=2
    )
    assert plain.replayed_us - lab.whatif(path, drop_kernel="^gemm$", num_edits=0).predicted_us == pytest.approx(
        400, abs=8
    )
    assert plain.replayed_us - lab.whatif(path, scale_host=0.0, num_edits=0).predicted_us > 50
    assert plain.replayed_us - lab.whatif(path, launch_cost=0.5, num_edits=0).predicted_us == pytest.approx(5, abs=4)
    without = lab.whatif(path, drop_copy="HtoD", num_edits=0)
    assert 0 < plain.replayed_us - without.predicted_us < 20


def test_it_refuses_to_be_exact_over_several_streams(tmp_path: Path) -> None:
    found = lab.whatif(loop(tmp_path / "a.json", sync=True, streams=2), drop="sync", num_edits=0)
    assert not found.exact
    assert "several streams" in found.sentence


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drop": "syncs"}, "Did you mean 'sync'"),
        ({"drop_site": "nowhere"}, "drop_site='nowhere'"),
        ({"drop": ["sync"]}, "is not known"),
        ({"drop_site": 3}, "is no text"),
        ({"ranks": 3}, "no list of ranks"),
        ({"ranks": []}, "no list of ranks"),
        ({"num_edits": 2.5}, "whole number"),
        ({"scale_kernel": "gemm"}, "no table"),
        ({"launch_cost": "2"}, "no factor"),
        ({"comm_patterns": {"ours": "("}}, "no regular expression"),
        ({"comm_patterns": "ours"}, "no table of names"),
        ({"drop_kernel": "zzz"}, "matches nothing"),
        ({"drop_kernel": "("}, "no regular expression"),
        ({"scale_host": -1.0}, "no factor"),
        ({"scale_kernel": {"norm": float("nan")}}, "no factor"),
    ],
)
def test_bad_edits_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(lab.LabError, match=said.replace("(", r"\(")):
        lab.whatif(loop(tmp_path / "a.json", sync=True), **given)


def test_traces_without_device_steps_are_refused(hostile: Path) -> None:
    for case in ("metaonly", "step_collapse"):
        with pytest.raises(lab.LabError):
            lab.whatif(hostile / case, drop="sync")


def test_graphs_without_a_record_and_steps_out_of_order(tmp_path: Path) -> None:
    events = json.loads(loop(tmp_path / "a.json", sync=True).read_text())["traceEvents"]
    bare = tmp_path / "b.json"
    bare.write_text(json.dumps({"traceEvents": [e for e in events if e["cat"] != "kernel"]}))
    assert not len(lab.replays(bare).launches)
    first: dict[int, float] = {}
    for e in events:  # the device events of all steps lie at one time
        if e["cat"] in ("kernel", "gpu_memcpy"):
            e["ts"] += 50_000 - first.setdefault(e["args"]["correlation"] // 10, e["ts"])
    (tmp_path / "c.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(lab.LabError, match="not in order on the device"):
        lab.whatif(tmp_path / "c.json", num_edits=0)


def test_command_line(h200: Path, tmp_path: Path) -> None:
    path = str(h200 / "trace_blocking.json.gz")
    done = CliRunner().invoke(app, ["trace", "whatif", path, "--drop", "sync", "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert {"statistic", "measured_us", "replayed_us", "replay_error_pct", "predicted_us", "exact", "edits"} <= set(
        said
    )
    assert said["predicted_us"] == pytest.approx(3442, rel=0.01)
    site = json.loads(CliRunner().invoke(app, ["trace", "whatif", path, "--drop-site", "aten::copy_", "--json"]).stdout)
    assert site["predicted_us"] == said["predicted_us"]
    plain = CliRunner().invoke(app, ["trace", "whatif", path, "--drop", "sync"])
    assert "cudaEventSynchronize" in plain.stdout


def test_what_an_edit_brings_back_is_what_the_diff_owes_to_the_wait(h200):
    """Kernels that differ between two captures (experts hit) are in their delta and in no wait: the replay is held to the wait alone."""
    before, after = (h200 / f"one_bs4_hw0_{arm}_rank0.json.gz" for arm in ("none", "blocking"))
    kinds = lab.diff(before, after).by_kind().set_index("kind")["delta_us"]
    gain = lab.whatif(after, drop="sync", num_edits=0).gain_us
    assert 0.9 < gain / kinds["wait"] < 1.1
    assert kinds["kernel"] > 20
