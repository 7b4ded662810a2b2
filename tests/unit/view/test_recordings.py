"""Recordings of several sheets: toggles choose among what there is, A/A pairs are used and not listed, captures may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dspark_lab.config import preset
from dspark_lab.runs import store
from dspark_lab.runs.record import Run
from dspark_lab.view.panel import Panel, panel
from dspark_lab.view.panel.recordings import recordings
from tests.unit.view.conftest import capture

GPU: dict[str, Any] = {"device": "cuda", "device_name": "Test GPU", "recorded_at": "2026-11-30T00:00:00+00:00"}


@pytest.fixture
def sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Run]) -> Panel:
    """A panel on runs named as a recording names them: sheets of one and two GPUs, three processes, most without captures."""
    slow = {"none": 3000.0, "blocking": 3300.0}
    captures = {a: capture(tmp_path, blocking=a == "blocking") for a in slow}

    def keep(name: str, model: str = "small", *, role: str = "arm", traced: bool = False, **toggles: Any) -> None:
        cfg = preset(model, device="cuda", **{"use_graph": True, "overlap": True, **toggles})
        alloc = cfg.engine.alloc
        run = make_run(name=name, step_us=slow.get(alloc, 3000.0) * cfg.engine.batch_size**0.2, role=role, num_steps=8)
        steps = pd.concat([run.steps.assign(process=p, step_us=run.steps["step_us"] + p) for p in range(3)])
        traces = (captures[alloc],) if traced else ()
        alias = "none" if alloc == "on_demand" and cfg.parallel.ep_size == 1 else None
        run = replace(run, config=cfg, steps=steps, environment=GPU, trace_paths=traces, same_path_as=alias)
        run.save(tmp_path / "data" / "recorded" / name)

    for batch in (1, 8):
        for alloc in ("none", "blocking", "pinned:always", "on_demand"):
            traced = batch == 1 and alloc in slow
            keep(f"small-small-ep1-bs{batch}-{alloc.replace(':', '-')}", traced=traced, batch_size=batch, alloc=alloc)
        keep(f"small-small-ep1-bs{batch}-none.aa", role="aa", batch_size=batch, alloc="none")
    for us in (0.0, 600.0):
        for alloc in slow:
            keep(f"small-hostwork-ep1-bs1-hw{us:g}-{alloc}", host_work_us=us, alloc=alloc)
    for alloc in slow:
        keep(f"small-eager-small-ep1-bs1-{alloc}", use_graph=False, overlap=False, alloc=alloc)
        keep(f"tp2-small-ep1-tp2-bs1-{alloc}", tp_size=2, alloc=alloc)
        keep(f"seed-seed-ep1-tp2-bs1-{alloc}", "seed", alloc=alloc)
    keep("ep2-small-ep2-bs1-none-maskoff", ep_size=2, alloc="none", mask_padding=False)
    keep("ep2-small-ep2-bs1-none-maskoff.aa", role="aa", ep_size=2, alloc="none", mask_padding=False)
    for alloc in ("blocking", "persistent", "graph_slot"):
        keep(f"ep2-small-ep2-bs1-{alloc}", ep_size=2, alloc=alloc)
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path / "data")
    return panel(strict=True)


def names(p: Panel) -> list[str]:
    return [r.name for r in p.runs]


def test_the_table_tells_sheets_floors_and_pairs_apart(sheets: Panel) -> None:
    table = recordings().set_index("name")
    assert table.loc["small-hostwork-ep1-bs1-hw0-none", "set"] == "small-hostwork"
    assert table.loc["small-small-ep1-bs8-pinned-always", "set"] == "small"
    assert table.loc["ep2-small-ep2-bs1-none-maskoff", ["floor", "mask_padding"]].tolist() == [True, True]
    assert not table["floor"].drop(["ep2-small-ep2-bs1-none-maskoff", "ep2-small-ep2-bs1-none-maskoff.aa"]).any()


def test_it_opens_on_small_with_graphs_and_offers_what_exists(sheets: Panel) -> None:
    t = sheets.toggles
    assert (t["preset"].value, t["ep_size"].value, t["batch_size"].value, t["use_graph"].value) == ("small", 1, 1, True)
    offered = {n: t[n].offered for n in ("preset", "ep_size", "tp_size", "batch_size", "host_work_us")}
    assert offered == {
        "preset": ["small", "seed"], "ep_size": [1, 2], "tp_size": [1, 2], "batch_size": [1, 8], "host_work_us": [0.0, 600.0]
    }  # fmt: skip
    assert not t["use_graph"].control.disabled
    assert t["mask_padding"].control.disabled  # all recordings have it, or are the floor
    assert "slower than none" in sheets.sentence
    assert "interval over 3 processes" in sheets.sentence


def test_pairs_are_used_and_not_listed(sheets: Panel) -> None:
    assert "small-small-ep1-bs1-none.aa" in names(sheets)
    assert list(sheets.table["name"]) == [n for n in names(sheets) if not n.endswith(".aa")]
    assert sheets.table["floor_pct"].notna().all()
    assert [r.name for r in sheets._shown.arms] == ["small-small-ep1-bs1-none", "small-small-ep1-bs1-blocking"]
    sheets.tab = "Latency"
    assert sheets.figure is not None
    assert list(sheets.figure.layout.xaxis.ticktext) == ["none", "blocking"]


def test_every_toggle_leads_to_its_sheet(sheets: Panel) -> None:
    t = sheets.toggles
    t["batch_size"].value = 8
    assert names(sheets)[0] == "small-small-ep1-bs8-none"
    t["host_work_us"].value = 600.0  # recorded at batch 1 only, so the batch follows
    assert names(sheets)[:2] == ["small-hostwork-ep1-bs1-hw600-none", "small-hostwork-ep1-bs1-hw600-blocking"]
    assert t["batch_size"].value == 1
    t["use_graph"].value = False
    assert names(sheets) == ["small-eager-small-ep1-bs1-none", "small-eager-small-ep1-bs1-blocking"]
    assert t["overlap"].value is False
    assert t["overlap"].control.disabled
    t["preset"].value = "seed"
    assert names(sheets) == ["seed-seed-ep1-tp2-bs1-none", "seed-seed-ep1-tp2-bs1-blocking"]
    assert not sheets.errors


def test_sets_with_the_same_settings_are_chosen_by_name(sheets: Panel) -> None:
    t = sheets.toggles
    assert t["recording"].offered == ["small", "small-hostwork"]
    assert t["recording"].widget.layout.display == ""
    t["recording"].value = "small-hostwork"
    assert names(sheets) == ["small-hostwork-ep1-bs1-hw0-none", "small-hostwork-ep1-bs1-hw0-blocking"]
    t["tp_size"].value = 2
    assert t["recording"].widget.layout.display == "none"


def test_the_floor_at_ep_2(sheets: Panel) -> None:
    t = sheets.toggles
    assert t["floor"].control.disabled
    t["ep_size"].value = 2
    assert t["alloc"].boxes["none"].disabled
    assert not t["floor"].control.disabled
    t["alloc"].value = ["blocking", "persistent"]
    assert "slower than none (mask off)" in sheets.sentence
    t["floor"].value = False
    assert names(sheets) == ["ep2-small-ep2-bs1-blocking", "ep2-small-ep2-bs1-persistent"]


def test_without_captures_latency_is_drawn_and_the_timeline_says_so(sheets: Panel) -> None:
    sheets.toggles["batch_size"].value = 8
    for tab in ("Timeline", "Waits"):
        sheets.tab = tab
        assert sheets.figure is not None
        assert "No capture ships" in sheets.figure.layout.annotations[0].text
    for tab in ("Latency", "Compare"):
        sheets.tab = tab
        assert sheets.figure is not None
        assert len(sheets.figure.data)
    sheets.toggles["batch_size"].value = 1
    sheets.toggles["alloc"].value = ["none", "blocking", "pinned:always"]
    sheets.tab = "Timeline"
    assert sheets.figure is not None
    assert "no capture of: pinned:always" in sheets.figure.layout.title.text
    sheets.tab = "Waits"
    assert "cudaStreamSynchronize" in sheets._tabs["Waits"]._table.value
    exec(sheets.code, made := {})
    assert made["figure"].layout.title.text == sheets.figure.layout.title.text


def test_an_arm_alone_that_shares_a_path_is_drawn(sheets: Panel) -> None:
    sheets.toggles["alloc"].value = ["on_demand"]
    assert [r.config.engine.alloc for r in sheets._shown.arms] == ["on_demand"]


def test_recordings_of_strategies_unknown_here_leave_with_them(sheets: Panel) -> None:
    boxes = sheets.toggles["alloc"].boxes
    assert not boxes["pinned:always"].disabled
    sheets.source = "live"
    assert boxes["pinned:always"].layout.display == "none"
    assert "pinned:always" not in sheets.board.arms
