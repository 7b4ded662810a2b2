"""The panel, driven as a person would: by the values of its toggles and its buttons."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError, RunFailed
from dspark_lab.runs import store
from dspark_lab.view.browse.canvas import Browse
from dspark_lab.view.panel import Panel, panel
from dspark_lab.view.panel.reasons import FACETS
from tests.unit.view.conftest import FakeJob, capture, measured


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recordings: none and blocking at TP 1, the same two at TP 2."""
    traces = {a: capture(tmp_path, blocking=a == "blocking") for a in ("none", "blocking")}
    for tp in (1, 2):
        for alloc, ms in (("none", 3.0 / tp), ("blocking", 3.3 / tp)):
            cfg = preset("small", alloc=alloc, tp_size=tp, use_graph=True, overlap=True)
            run = measured(alloc, ms=ms, traces=(traces[alloc],), name=f"rec-tp{tp}-{alloc}", config=cfg)
            run.save(tmp_path / "data" / "recorded" / run.name)
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path / "data")
    return tmp_path


@pytest.fixture
def recorded_panel(shipped: Path) -> Panel:
    return panel(strict=True)


def live_panel(jobs: list[Any], **toggles: Any) -> Panel:
    p = panel(source="live", strict=toggles.pop("strict", True), **{"preset": "tiny"} | toggles)
    p.measuring.start_job = lambda cfg, **options: jobs.append((cfg, options)) or jobs[0]
    return p


def test_recorded_opens_with_a_finding_and_a_picture(recorded_panel: Panel) -> None:
    p = recorded_panel
    assert [r.config.engine.alloc for r in p.runs] == ["none", "blocking"]
    assert "blocking: step 3.30" in p.sentence
    assert "slower than none" in p.sentence
    assert "recorded 2026-11-29 on Test GPU, unprofiled" in p.sentence
    assert p.tab == "Timeline"
    assert p.figure is not None
    assert list(p.table["alloc"]) == ["none", "blocking"]
    assert p.config.parallel.tp_size == 1
    assert not p.errors


def test_a_toggle_changes_the_picture_at_once(recorded_panel: Panel) -> None:
    p = recorded_panel
    for tp in (2, 1, 2):
        p.toggles["tp_size"].value = tp
    began = time.perf_counter()
    p.toggles["tp_size"].value = 1
    assert time.perf_counter() - began < 1.0  # 0.2 s on an idle machine
    assert p.config.parallel.tp_size == 1
    p.toggles["tp_size"].value = 2
    assert "1.65" in p.sentence
    p.toggles["alloc"].value = ["none"]
    assert len(p.runs) == 1
    assert "Choose a second strategy" in p.sentence
    p.toggles["alloc"].value = []
    assert "No strategy is chosen" in p.sentence


def test_what_has_no_recording_is_disabled_and_says_why(recorded_panel: Panel) -> None:
    t = recorded_panel.toggles
    assert "no recording at EP 2, 3, 4, 8: only EP 1" in t["ep_size"].reason
    assert t["ep_size"].control.disabled
    assert t["ep_size"].control.tooltip == t["ep_size"].reason
    assert t["alloc"].boxes["pinned"].disabled
    assert "no recording at TP 1, EP 1" in t["alloc"].reason
    assert t["num_steps"].control.disabled
    assert t["preset"].value == "small"  # the recording's own
    with pytest.raises(LabError, match="This machine"):
        recorded_panel.run()


def test_rules_of_the_config_disable_and_say_why() -> None:
    p = live_panel([])
    t = p.toggles
    assert "EP 3 does not divide" in t["ep_size"].reason
    assert "graph_slot needs CUDA graphs" in t["alloc"].reason
    assert "read with verify threshold only" in t["confidence_threshold"].reason
    t["ep_size"].value = 2
    assert t["alloc"].boxes["none"].disabled
    assert "none" not in t["alloc"].value
    t["mask_padding"].value = False
    assert not t["alloc"].boxes["none"].disabled
    assert "none" in t["alloc"].value  # what was ticked comes back
    t["verify"].value = "threshold"
    t["confidence_threshold"].value = 0.5
    assert p.config.engine.confidence_threshold == 0.5
    assert p.config.parallel.ep_size == 2
    assert not p.errors


def test_settings_of_a_live_run_survive_a_look_at_recordings(shipped: Path) -> None:
    p = panel(source="live", strict=True, batch_size=8, num_steps=32)
    p.source = "recorded"
    assert p.config.preset == "small"
    p.source = "live"
    assert p.config.engine.batch_size == 8
    assert p.toggles["num_steps"].value == 32
    assert p.toggles["preset"].value == "shipped"


def test_run_measures_outside_and_shows(runs: list[Any]) -> None:
    jobs: list[Any] = [FakeJob(runs)]
    p = live_panel(jobs, alloc=["none", "blocking"], num_steps=16)
    assert "Nothing measured here yet" in p.sentence
    p.run()
    assert p.frame.run.disabled
    assert not p.frame.stop.disabled
    assert [r.name for r in p.wait(10)] == ["tiny-none", "tiny-blocking"]
    cfg, options = jobs[1]
    assert cfg.engine.alloc == "none"
    assert options["alloc"] == ["none", "blocking"]
    assert options["num_steps"] == 16
    assert "measured" in p.sentence
    assert not p.frame.run.disabled
    assert p.frame.stop.disabled
    p.toggles["batch_size"].value = 8
    assert "measured with other settings (batch_size 4)" in p.sentence
    p.toggles["batch_size"].value = 4
    p.toggles["alloc"].value = ["none", "blocking", "pinned"]
    assert "not measured yet: pinned" in p.sentence


def test_stop_keeps_what_was_measured(runs: list[Any]) -> None:
    stopped = [measured("none", status="stopped")]
    p = live_panel([FakeJob(stopped, looks=10**9)], alloc=["none", "blocking"])
    p.run()
    time.sleep(0.3)
    assert "blocking, block 1/9, step" in p.frame.status.value
    with pytest.raises(LabError, match="runs already"):
        p.run()
    p.stop()
    p.wait(5)
    assert [r.status for r in p.runs] == ["stopped"]
    assert "stopped early" in p.sentence


def test_a_failed_job_is_red_and_the_last_picture_stays(runs: list[Any]) -> None:
    p = live_panel([FakeJob(runs)], alloc=["none", "blocking"], strict=False)
    p.run()
    p.wait(10)
    before, said = p.figure, p.sentence
    p.measuring.start_job = lambda cfg, **o: FakeJob(
        [], error=RunFailed("rank 1 ended with code 1 in draft; see rank1.log")
    )
    p.run()
    p.wait(10)
    assert "rank 1 ended" in p.guard.widget.value
    assert isinstance(p.errors[-1], RunFailed)
    assert p.figure is before
    assert p.sentence == said
    p.toggles["alloc"].value = ["none"]
    assert not p.guard.widget.value  # the next thing that works clears the line


def test_nothing_is_hidden(recorded_panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    p = recorded_panel
    before = p.figure

    def broken() -> None:
        raise RuntimeError("a <bug>")

    monkeypatch.setattr(p, "_refresh", broken)
    with pytest.raises(RuntimeError):
        p.toggles["tp_size"].value = 2
    p.guard.strict = False
    p.toggles["tp_size"].value = 1
    assert "a &lt;bug&gt;" in p.guard.widget.value
    assert "<details" in p.guard.widget.value
    assert len(p.errors) == 2
    assert p.figure is before


def test_a_broken_watch_is_red() -> None:
    class Broken(FakeJob):
        def poll(self) -> Any:
            raise OSError("progress.jsonl is gone")

    p = live_panel([Broken([])], alloc=["none"])
    p.run()
    with contextlib.suppress(OSError):  # raised by whichever looked first, this wait or the watching thread
        p.wait(5)
    assert "progress.jsonl is gone" in p.guard.widget.value
    assert isinstance(p.errors[-1], OSError)


def test_code_makes_the_same_picture(recorded_panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    p = recorded_panel
    for tab in ("Timeline", "Latency", "Compare", "Acceptance"):
        p.tab = tab
        assert len(p.code.splitlines()) == 5
        names: dict[str, Any] = {}
        exec(p.code, names)
        assert p.figure is not None
        assert names["figure"].to_plotly_json()["layout"]["title"] == p.figure.to_plotly_json()["layout"]["title"]
    live = live_panel([], alloc=["none", "blocking"], ep_size=1, batch_size=8)
    assert "lab.preset('tiny', alloc='none', batch_size=8)" in live.code
    assert "lab.sweep(cfg, alloc=['none', 'blocking'], num_steps=64" in live.code
    compile(live.code, "code", "exec")


def test_trace_file(recorded_panel: Panel, tmp_path: Path) -> None:
    p = recorded_panel
    p.tab = "Trace file"
    tab: Any = p._tabs["Trace file"]
    assert p.figure is None
    tab.choice.value = str(capture(tmp_path, blocking=True))
    assert "cudaStreamSynchronize" in tab.summary.value
    assert isinstance(p.figure, Browse)
    exec(p.code, names := {})
    assert names["trace"].name.startswith("blocking")
    drawn = p.figure
    with pytest.raises(LabError, match=r"/nowhere\.json: there is no such file"):
        tab.choice.value = "/nowhere.json"
    assert p.figure is drawn  # the last good picture stays
    assert not tab.said.value
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(LabError, match=r"notes\.json"):
        tab.choice.value = str(tmp_path / "notes.json")
    assert p.figure is drawn
    tab.choice.value = tab.choice.options[0]  # an arm shown
    assert p.figure is not drawn
    assert "lab.load_run('rec-tp1-none')" in p.code


def test_files_sent_from_the_browser(recorded_panel: Panel, tmp_path: Path) -> None:
    p = recorded_panel
    p.tab = "Trace file"
    tab: Any = p._tabs["Trace file"]
    content = capture(tmp_path).read_bytes()
    one = {
        "name": "../mine.json",
        "type": "",
        "size": len(content),
        "content": memoryview(content),
        "last_modified": datetime.now(UTC),
    }
    tab.choice.upload.value = (one,)
    assert tab.choice.value.endswith("mine.json")
    assert isinstance(p.figure, Browse)
    ranks = [{**one, "name": f"rank{r}.json"} for r in (0, 1)]
    tab.choice.upload.value = tuple(ranks)
    assert [g.name for g in p.figure.scene.groups] == ["rank 0", "rank 1"]
    broken = {**one, "name": "broken.json.gz", "content": b"nothing of the kind"}
    with pytest.raises(LabError, match=r"broken\.json\.gz"):
        tab.choice.upload.value = (broken,)
    assert len(p.figure.scene.groups) == 2


def test_steps_by_a_pattern_of_ones_own(recorded_panel: Panel, tmp_path: Path) -> None:
    p = recorded_panel
    p.tab = "Trace file"
    tab: Any = p._tabs["Trace file"]
    tab.choice.value = str(capture(tmp_path))
    with pytest.raises(LabError, match="matches no annotation"):
        tab.pattern.value = "turn"
    tab.pattern.value = "ProfilerStep#([0-9])"
    assert "step_pattern='ProfilerStep#([0-9])'" in p.code


def test_diff_of_two_arms_at_once_and_of_files(recorded_panel: Panel, tmp_path: Path, h200: Path) -> None:
    p = recorded_panel
    p.tab = "Diff"
    tab: Any = p._tabs["Diff"]
    assert (tab.before.title, tab.after.title) == ("none", "blocking")
    assert tab.text.value == tab.diff.sentence
    assert "blocking against none" in p.figure.layout.title.text
    exec(p.code, names := {})
    assert names["found"].sentence == tab.diff.sentence
    p.toggles["tp_size"].value = 2
    assert tab.before.value == "none: rec-tp2-none"
    tab.before.value, tab.after.value = (str(h200 / f"trace_{arm}.json.gz") for arm in ("none", "blocking"))
    assert "cudaStreamSynchronize" in tab.text.value or "synchronise" in tab.text.value
    drawn, said = p.figure.layout.title.text, tab.text.value
    with pytest.raises(LabError, match=r"absent\.json"):
        tab.after.value = str(tmp_path / "absent.json")
    assert (p.figure.layout.title.text, tab.text.value) == (drawn, said)
    p.toggles["tp_size"].value = 1  # what was typed stays
    assert tab.before.value.endswith("trace_none.json.gz")
    tab.after.value = str(h200 / "trace_blocking.json.gz")
    tab.fold.selected_index = 0
    assert [g.name for g in tab.stage.figure.scene.groups] == [
        "before: trace_none.json.gz",
        "after: trace_blocking.json.gz",
    ]
    p.toggles["alloc"].value = []
    assert not p.errors[1:]


def test_diff_says_what_it_needs(recorded_panel: Panel) -> None:
    p = recorded_panel
    p.toggles["alloc"].value = ["none"]
    p.tab = "Diff"
    assert "tick another" in p.figure.layout.annotations[0].text.replace("<br>", " ")
    with pytest.raises(LabError, match="no before is chosen; type the path"):
        p._tabs["Diff"].load()


def test_whatif_of_an_arm(recorded_panel: Panel, h200: Path) -> None:
    p = recorded_panel
    p.tab = "What-if"
    tab: Any = p._tabs["What-if"]
    assert tab.choice.title == "blocking"
    tab.choice.value = str(h200 / "trace_blocking.json.gz")
    assert len(tab.best.edits) == 10
    assert "off by +0.00 %" in tab.said.value
    assert round(tab.predicted.predicted_us) == 3441
    assert "what single edits would gain" in p.figure.layout.title.text
    site = next(v for v in tab.drop.offered if v.startswith("at aten::to"))
    tab.drop.value = site
    assert tab.predicted.edit.drop_site == site[3:]
    assert "cudaEventSynchronize" in tab.waits.value  # the bill moves there
    tab.host.value = 0.5
    assert "scale_host=0.5" in p.code
    exec(p.code, names := {})
    assert names["predicted"].predicted_us == tab.predicted.predicted_us
    before = tab.predicted
    with pytest.raises(LabError, match="drop_kernel"):
        tab.kernel.value = "no such kernel"
    assert tab.predicted is before
    tab.kernel.value = ""
    tab.drop.value = "none"
    assert tab.predicted is not before


def test_export(recorded_panel: Panel, tmp_path: Path) -> None:
    p = recorded_panel
    p.tab = "Export"
    export: Any = p._tabs["Export"]
    export.folder.value = str(tmp_path / "tb")
    export.write.click()
    assert list((tmp_path / "tb").rglob("*.pt.trace.json*"))
    assert "tensorboard --logdir" in export.said.value
    export.file.value = str(tmp_path / "out.json.gz")
    export.perfetto.click()
    assert (tmp_path / "out.json.gz").is_file()
    assert "ui.perfetto.dev" in export.written.value


def test_lanes_of_one_arm_and_a_step_of_ones_own(recorded_panel: Panel) -> None:
    p = recorded_panel
    tab: Any = p._tabs["Timeline"]
    assert tab.step.layout.display != "none"
    assert tab.arm.layout.display == "none"
    tab.step.value = 3
    assert "step 3" in " ".join(a.text for a in p.figure.layout.annotations)  # pyright: ignore[reportOptionalMemberAccess]
    assert p.code.endswith("step=3)")
    tab.mode.index = 1
    assert tab.arm.value == "blocking"
    assert isinstance(p.figure, Browse)
    exec(p.code, names := {})
    assert (names["figure"].lo_ns, names["figure"].hi_ns) == (p.figure.lo_ns, p.figure.hi_ns)
    tab.mode.index = 0
    assert not isinstance(p.figure, Browse)


def test_start_values_are_checked() -> None:
    with pytest.raises(LabError, match="ep_size"):
        panel(source="live", epsize=2)
    with pytest.raises(LabError, match="source"):
        panel(source="internet")
    with pytest.raises(LabError, match="blocking"):
        panel(source="live", alloc=["bloking"])


def test_without_recordings_it_opens_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path)
    p = panel(strict=True)
    assert p.source == "live"


def test_a_saved_notebook_still_shows_the_finding(recorded_panel: Panel) -> None:
    bundle = recorded_panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "slower" in bundle["text/html"]
    assert "<table" in bundle["text/html"]


def test_a_broken_watch_gives_run_and_stop_back_and_ends_the_job() -> None:
    class Broken(FakeJob):
        def poll(self) -> Any:
            raise OSError("progress.jsonl is gone")

    p = live_panel([job := Broken([])], alloc=["none"], strict=False)
    p.run()
    p.wait(5)
    assert not p.frame.run.disabled
    assert p.frame.stop.disabled
    assert "lost sight" in p.frame.status.value
    assert job.stopped
    p.measuring.start_job = lambda cfg, **o: FakeJob([measured("none")])
    p.run()
    p.wait(5)
    assert len(p.runs) == 1


def test_the_floor_is_an_arm_more_of_a_live_run() -> None:
    arms = {"blocking": 3.0, "none": 3.3}
    made = [
        measured(a, ms=ms, name=a, config=preset("tiny", alloc=a, ep_size=2, mask_padding=a != "none")) for a, ms in arms.items()
    ]  # fmt: skip
    jobs: list[Any] = [FakeJob(made)]
    p = live_panel(jobs, alloc=["blocking"], batch_size=1, ep_size=2)
    assert not p.toggles["floor"].control.disabled
    p.toggles["floor"].value = True
    p.run()
    p.wait(5)
    assert jobs[1][1]["floor"] is True
    assert "floor=True" in p.code
    assert {r.name for r in p.runs} == {"blocking", "none"}
    assert "none (mask off)" in p.sentence
    p.toggles["floor"].value = False
    assert [r.name for r in p.runs] == ["blocking"]
    p.toggles["ep_size"].value = 1
    assert p.toggles["floor"].control.disabled
    assert "at EP 1" in p.toggles["floor"].reason


def test_too_few_blocks_are_no_interval() -> None:
    few = [measured(a, ms=ms, name=a, num_processes=2) for a, ms in (("none", 3.0), ("blocking", 3.0))]
    p = live_panel([FakeJob(few)], alloc=["none", "blocking"], processes=2)
    assert "too few blocks for an interval" in p.sentence
    p.run()
    p.wait(5)
    assert "too few blocks for an interval" in p.sentence
    assert "No strategy is told apart" in p.sentence
    assert "[" not in p.sentence
    sure = [measured(a, ms=ms, name=f"sure-{a}", num_processes=2) for a, ms in (("none", 3.0), ("blocking", 3.3))]
    p.measuring.start_job = lambda cfg, **o: FakeJob(sure)
    p.run()
    p.wait(5)
    assert "slower than none" in p.sentence  # of two, an interval is wide: one that still excludes zero counts
    assert "too few" not in p.sentence


def test_what_runs_live_and_why_not() -> None:
    p = live_panel([])
    t = p.toggles
    assert t["tp_size"].offered == [1, 2]
    assert "TP 4 does not divide" in t["tp_size"].reason
    t["tp_size"].value, t["overlap"].value, t["host_work_us"].value = 2, True, 200
    assert (p.config.parallel.tp_size, p.config.engine.overlap, p.config.engine.host_work_us) == (2, True, 200)
    t["device"].value = "cpu"
    assert t["use_graph"].control.disabled
    assert "CUDA graphs need" in t["use_graph"].reason


def test_without_torch_nothing_can_be_turned_and_it_says_why(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "dspark_lab.engine.decode", raising=False)
    why = "no torch: pip install 'dspark-lab[lab]'"
    later = panel(strict=True)
    recorded = later.sentence
    later.source = "live"
    for p in (panel(source="live", strict=True), later):
        for name in (*FACETS, "num_steps", "use_graph", "device"):
            assert p.toggles[name].control.disabled
            assert p.toggles[name].reason == why
        assert all(box.disabled for box in p.toggles["alloc"].boxes.values())
        assert why in p.toggles["alloc"].reason
        assert why in p.sentence
        assert p.frame.run.disabled
        assert p.frame.run.tooltip == why
        assert not p.errors
        with pytest.raises(LabError, match="no torch"):
            p.run()
    later.source = "recorded"
    assert later.sentence == recorded
    assert not later.toggles["tp_size"].control.disabled


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("device", "cuda", "torch sees no GPU"),
        ("block_size", 0, "block_size=0"),
        ("block_size", 1000, "block_size=1000"),
        ("batch_size", -1, "batch_size=-1"),
        ("batch_size", 1000, "batch_size=1000"),
        ("num_steps", 0, "num_steps=0"),
        ("num_steps", -1, "num_steps=-1"),
        ("ep_size", "x", "ep_size='x'"),
        ("alloc", ["foo"], "alloc='foo' is not known"),
        ("alloc", ["graph_slot"], "graph_slot needs CUDA graphs"),
    ],
)
def test_what_cannot_be_is_red_at_once_and_not_taken(
    name: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    p = live_panel([], strict=False)
    toggle, before, cfg = p.toggles[name], p.toggles[name].value, p.config
    toggle.value = value
    assert isinstance(p.errors[-1], LabError)
    assert said in str(p.errors[-1])
    assert p.guard.widget.value
    assert (toggle.value, p.config) == (before, cfg)
    p.guard.strict = True
    with pytest.raises(LabError):
        toggle.value = value
    p.toggles["num_steps"].value = 1000  # not listed, but legal
    assert not p.guard.widget.value
    assert p.board.options["num_steps"] == 1000


@pytest.mark.parametrize("start", [{"ep_size": 3}, {"batch_size": float("nan")}, {"device": "cuda"}, {"block_size": 0}])
def test_start_values_that_cannot_be_are_red(start: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    name = next(iter(start))
    p = panel(source="live", **start)
    assert f"Cannot be measured: {name}=" in p.sentence
    assert isinstance(p.errors[-1], LabError)
    assert p.guard.widget.value
    p.toggles[name].value = preset("tiny").toggle(name)
    assert "Nothing measured here yet" in p.sentence
    assert not p.guard.widget.value
    with pytest.raises(LabError, match=name):
        panel(source="live", strict=True, **start)


def test_start_values_of_the_wrong_kind_are_refused() -> None:
    start: dict[str, Any]
    for start in ({"ep_size": "x"}, {"num_steps": -1}, {"repeats": 0}, {"use_graph": "yes"}, {"alloc": 3}):
        with pytest.raises(LabError, match=next(iter(start))):
            panel(source="live", **start)


def test_stopped_during_start_up() -> None:
    p = live_panel([FakeJob([measured("none", status="stopped", steps=measured("none").steps.iloc[:0])], looks=10**9)])
    p.run()
    p.stop()
    p.wait(5)
    assert "stopped before anything was measured" in p.frame.status.value
    assert not p.runs


def test_a_path_with_a_nul_is_no_bug_of_the_panel(recorded_panel: Panel) -> None:
    tab: Any = recorded_panel._tabs["Trace file"]
    with pytest.raises(LabError, match="no path"):
        tab.choice.value = "\0"
