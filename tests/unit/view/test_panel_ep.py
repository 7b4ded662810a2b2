"""The panel at EP above 1: how experts and requests are spread, and the sweep over EP sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError
from dspark_lab.runs import store
from dspark_lab.runs.store import recorded_runs
from dspark_lab.view.panel import Panel, panel
from tests.unit.view.conftest import FakeJob, measured


@pytest.fixture
def sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recordings of blocking and persistent at EP 1 and 2, and of blocking at EP 2 with another dispatcher."""
    for ep, alloc, ms, more in (
        (1, "blocking", 3.3, {}), (1, "none", 3.0, {}), (2, "blocking", 2.3, {}), (2, "persistent", 2.0, {}),
        (2, "blocking", 2.6, {"dispatcher": "all_to_all", "attn_dp": 2}),
    ):  # fmt: skip
        cfg = preset("small", alloc=alloc, ep_size=ep, use_graph=True, **more)
        name = f"small-ep{ep}{'-dp2-all_to_all' if more else ''}-bs1-{alloc}"
        measured(alloc, ms=ms, name=name, config=cfg).save(tmp_path / "data" / "recorded" / name)
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path / "data")
    return tmp_path


def live(**toggles: Any) -> tuple[Panel, list[dict[str, Any]]]:
    p, asked = panel(source="live", strict=True, **{"preset": "tiny"} | toggles), []

    def start(cfg: Any, **options: Any) -> FakeJob:
        asked.append(options)
        sizes = options.get("ep_size", [cfg.parallel.ep_size])
        arms = [
            cfg.replace(alloc=a, ep_size=ep, attn_dp=1, dispatcher="all_reduce")
            for ep in sizes
            for a in options["alloc"]
        ]
        return FakeJob([measured(c.engine.alloc, ms=4.0 / c.parallel.ep_size, name=f"ep{c.parallel.ep_size}-{c.engine.alloc}", config=c) for c in arms])  # fmt: skip

    p.measuring.start_job = start
    return p, asked


def spread(p: Panel) -> tuple[Any, ...]:
    return tuple(p.toggles[n].value for n in ("ep_size", "dispatcher", "placement", "attn_dp"))


def test_what_an_ep_size_or_a_dispatcher_leaves_open_follows() -> None:
    p, _ = live()
    t = p.toggles
    assert t["dispatcher"].control.disabled
    assert "at EP 1 nothing is dispatched" in t["dispatcher"].control.tooltip
    t["ep_size"].value = 2
    assert "all_to_all" in t["dispatcher"].offered
    t["dispatcher"].value = "all_to_all"
    assert spread(p) == (2, "all_to_all", "contiguous", 2)
    t["placement"].value = "balanced"
    t["ep_size"].value = 4
    assert spread(p) == (4, "all_to_all", "balanced", 4)
    assert p.config.parallel.attn_dp == 4
    assert "dispatcher='all_to_all'" in p.code
    t["attn_dp"].value = 1
    assert spread(p) == (4, "all_to_all", "balanced", 1)
    t["ep_size"].value = 1
    assert spread(p) == (1, "all_reduce", "contiguous", 1)


def test_what_is_illegal_is_not_offered_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    p, _ = live(ep_size=2)
    t = p.toggles
    assert "symm_mem needs several GPUs" in t["dispatcher"].reason
    assert t["attn_dp"].offered == [1]
    assert "attention DP needs another dispatcher" in t["attn_dp"].reason
    with pytest.raises(LabError, match="attn_dp=2"):
        t["attn_dp"].value = 2
    assert spread(p) == (2, "all_reduce", "contiguous", 1)


def test_recordings_are_chosen_by_their_dispatcher(sheets: Path) -> None:
    p = panel(strict=True)
    t = p.toggles
    assert t["placement"].control.disabled
    assert t["placement"].reason == "all recordings have placement contiguous"
    assert t["dispatcher"].offered == ["all_reduce", "all_to_all"]
    t["dispatcher"].value = "all_to_all"  # recorded at EP 2 only, so the rest follows
    assert [r.name for r in p.runs] == ["small-ep2-dp2-all_to_all-bs1-blocking"]
    assert spread(p) == (2, "all_to_all", "contiguous", 2)
    assert p.board.at["set"] == "small"
    t["ep_size"].value = 1
    assert spread(p) == (1, "all_reduce", "contiguous", 1)


def test_the_sweep_of_recordings(sheets: Path) -> None:
    p = panel(strict=True, alloc=["blocking", "persistent"], ep_size=2)
    p.tab = "EP"
    lines = {t.name: list(t.y) for t in p.figure.data}
    assert lines == {
        "blocking, all_reduce, contiguous": pytest.approx([3.3, 2.3], abs=0.01),
        "blocking, all_to_all, contiguous": pytest.approx([3.3, 2.6], abs=0.01),
        "persistent, all_reduce, contiguous": pytest.approx([3.0, 2.0], abs=0.01),  # at EP 1 it builds nothing, as none
    }
    assert all(sum(t.error_y.array) > 0 for t in p.figure.data)
    exec(p.code, made := {})
    assert [t.name for t in made["figure"].data] == list(lines)
    p.toggles["alloc"].value = ["blocking"]
    assert [t.name for t in p.figure.data] == ["all_reduce, contiguous", "all_to_all, contiguous"]
    assert p._tabs["EP"].run.layout.display == "none"


def test_a_sweep_over_ep_sizes_is_measured_and_shown() -> None:
    p, asked = live(alloc=["none", "blocking"])
    p.tab = "EP"
    button = p._tabs["EP"].run
    assert button.description == "Run at EP 1, 2 ▸"
    assert "Nothing measured here yet" in p.figure.layout.annotations[0].text
    button.click()
    assert button.disabled
    assert asked[0]["ep_size"] == [1, 2]
    assert asked[0]["alloc"] == ["blocking"]  # none is illegal at EP 2: the floor stands in
    assert asked[0]["floor"] is True
    p.wait(5)
    assert [list(t.y) for t in p.figure.data] == [pytest.approx([4.0, 2.0], abs=0.01)]
    assert not button.disabled
    p.toggles["ep_size"].value = 4
    assert button.description == "Run at EP 1, 2, 4 ▸"
    assert len(p.figure.data[0].x) == 2  # what was measured stays


def test_one_dispatcher_with_rows_alike_and_apart_is_two_lines() -> None:
    from dspark_lab.view.ep import ep_sweep

    runs = [measured("none", ms=3.0, name="one", config=preset("small", alloc="on_demand"))]
    for dp in (1, 2):
        cfg = preset("small", ep_size=2, attn_dp=dp, dispatcher="symm_mem", alloc="on_demand")
        runs.append(measured("none", ms=2.0 + dp, name=f"dp{dp}", config=cfg))
    assert [t.name for t in ep_sweep(runs).data] == ["symm_mem, contiguous", "symm_mem, contiguous, attention DP"]


def test_lines_come_by_batch_size_as_a_number() -> None:
    from dspark_lab.view.ep import ep_sweep

    runs = [r for r in recorded_runs(preset="small", alloc="blocking") if r.name.startswith("ep4-small-ep")]
    assert [t.name.rsplit(" ", 1)[1] for t in ep_sweep(runs).data] == ["1", "8", "32"]
