"""Choices as they come from a browser: messages to the widgets, while another one is answered, from a list that is an answer old."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comm
import plotly.graph_objects as go
import pytest
from comm.base_comm import BaseComm

from dspark_lab.config import preset
from dspark_lab.runs import store
from dspark_lab.view.panel import Panel, panel
from dspark_lab.view.panel.picture import Picture
from tests.unit.view.conftest import measured


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Panel:
    """A panel on recordings at EP 1 and 2, batch 1 and 8."""
    for ep, batch in ((1, 1), (1, 8), (2, 1)):
        cfg = preset("small", alloc="blocking", ep_size=ep, batch_size=batch, use_graph=True)
        run = measured("blocking", name=f"small-ep{ep}-bs{batch}-blocking", config=cfg)
        run.save(tmp_path / "data" / "recorded" / run.name)
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path / "data")
    return panel()


def told(control: Any, **state: Any) -> None:
    """What the kernel does with a message of the browser."""
    control.comm.handle_msg({"content": {"data": {"method": "update", "state": state}}})


def place(control: Any, label: str) -> int:
    """Where the browser lists what a person chooses."""
    return list(control._options_labels).index(label)


def test_a_choice_while_another_is_answered_waits_for_its_turn(shown: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    ep, settle = shown.toggles["ep_size"].control, shown.board.settle
    inside, arrived, chosen = threading.Event(), threading.Event(), place(ep, "2")

    def slow(**how: Any) -> None:
        if how["turned"] is None:  # the source: time for the choice of EP to come
            inside.set()
            arrived.wait(5)
            second.join(0.3)
        settle(**how)

    monkeypatch.setattr(shown.board, "settle", slow)
    first = threading.Thread(target=lambda: told(shown.frame.source, index=1))
    second = threading.Thread(target=lambda: told(ep, index=chosen))
    first.start()
    inside.wait(5)
    second.start()  # cells and widgets are heard on threads of their own
    arrived.set()
    for thread in (first, second):
        thread.join(20)
    assert shown.source == "live"
    assert shown.toggles["ep_size"].value == 2
    assert shown.config.parallel.ep_size == 2
    assert not shown.errors


def test_a_choice_from_a_list_that_is_an_answer_old_means_what_it_said(shown: Panel) -> None:
    batch = shown.toggles["batch_size"].control
    eight = place(batch, "8")
    told(shown.frame.source, index=1)  # lists 1, 2, 4, 8, …
    told(batch, index=eight)
    assert shown.config.engine.batch_size == 8
    told(batch, index=place(batch, "1"))
    assert shown.config.engine.batch_size == 1


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda t: told(t["ep_size"].control, index=t["ep_size"].control.places.index(4)), "ep_size=4 cannot be chosen now: no recording at EP"),
        (lambda t: told(t["num_steps"].control, index=t["num_steps"].control.places.index(32)), "num_steps=32 is not taken: a recording keeps"),
        (lambda t: told(t["alloc"].boxes["pinned"], value=True), "alloc='pinned' cannot be chosen now: no recording at"),
        (lambda t: told(t["floor"].control, value=True), "floor=True cannot be chosen now: EP 1"),
        (lambda t: told(t["confidence_threshold"].control, value=0.5), "confidence_threshold=0.5 is not taken"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_and_shows_as_it_is(shown: Panel, choose: Callable[[Any], None], said: str) -> None:
    def state() -> list[Any]:
        return [t.value for t in shown.toggles.values()] + [b.value for b in shown.toggles["alloc"].boxes.values()]

    before = state()
    choose(shown.toggles)
    assert said in str(shown.errors[-1])
    assert said.split("'")[0] in shown.guard.widget.value
    assert state() == before
    assert len(shown.errors) == 1


def test_what_is_being_typed_is_not_wiped(shown: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message to the line where a path is typed, of whatever kind, puts its last value back."""
    sent: list[Any] = []
    for name in ("Trace file", "Diff", "What-if", "Export"):
        tab: Any = shown._tabs[name]
        for choice in [tab.before, tab.after] if name == "Diff" else [tab.choice]:
            monkeypatch.setattr(choice.box.comm, "publish_msg", lambda *a, **k: sent.append(k))
        told(shown.frame.tabs, selected_index=list(shown._tabs).index(name))
    told(shown.toggles["ep_size"].control, index=place(shown.toggles["ep_size"].control, "2"))
    assert shown.tab == "Export"
    assert sent == []


def test_what_is_typed_the_moment_it_can_be_is_not_wiped(shown: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that can be typed from now on hears so in one message, and nothing after it: a second would put 0 back."""
    told(shown.frame.source, index=1)
    threshold, sent = shown.toggles["confidence_threshold"].control, []
    verify = shown.toggles["verify"].control
    assert threshold.disabled
    monkeypatch.setattr(threshold.comm, "publish_msg", lambda *a, **k: sent.append(k["data"]["state"]))
    told(verify, index=place(verify, "threshold"))
    assert len(sent) == 1
    assert sent[0]["disabled"] is False
    batch = shown.toggles["batch_size"].control
    told(batch, index=place(batch, "8"))
    assert len(sent) == 1
    told(threshold, value=0.4)
    assert shown.config.engine.confidence_threshold == 0.4


def test_a_picture_that_the_browser_has_not_drawn_yet_is_made_anew() -> None:
    """While its script loads, plotly's widget hears no change of its data: an update then would be lost."""
    picture, first, second = Picture(), go.Figure(go.Bar(y=[1])), go.Figure(go.Bar(y=[2, 3]))
    picture.show(first)
    (loading,) = picture.widget.children
    picture.fill(640)
    picture.show(second)
    (live,) = picture.widget.children
    assert live is not loading
    assert loading.comm is None  # closed
    assert (list(live.data[0].y), live.layout.width) == ([2, 3], 640)
    picture.fill(700)
    assert live.layout.width == 640
    told(live, _js2py_layoutDelta={"layout_delta": {}, "layout_edit_id": live._last_layout_edit_id})
    assert live.layout.width == 700
    picture.show(first)
    assert picture.widget.children == (live,)
    assert list(live.data[0].y) == [1]


def test_the_browser_first_hears_of_a_picture_with_all_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that opens empty and is sent its data later stays empty where the browser draws it in between."""
    sent: list[tuple[str, dict[str, Any]]] = []

    class Heard(BaseComm):
        def publish_msg(self, msg_type: str, data: Any = None, *_: Any, **__: Any) -> None:
            sent.append((msg_type, (data or {}).get("state", {})))

    monkeypatch.setattr(comm, "create_comm", Heard)
    picture = Picture()
    picture.fill(640)
    picture.show(go.Figure(go.Bar(y=[1, 2, 3]), layout={"title": "whole"}))
    states = [state for kind, state in sent if kind == "comm_open" and "_widget_data" in state]
    assert [len(state["_widget_data"]) for state in states] == [1]
    assert (states[0]["_widget_layout"]["title"]["text"], states[0]["_widget_layout"]["width"]) == ("whole", 640)
    assert not [state for kind, state in sent if kind == "comm_msg" and {"_widget_data", "_widget_layout"} & set(state)]


def test_the_last_strategy_can_be_unticked(shown: Panel) -> None:
    shown.source = "live"
    alloc = shown.toggles["alloc"]
    shown.toggles["ep_size"].value = 2  # none is wished for still, and cannot be
    for box in [b for b in alloc.boxes.values() if b.value]:
        told(box, value=False)
    assert alloc.value == []
    assert not shown.errors


def test_what_nobody_asked_for_leaves_the_red_line(shown: Panel) -> None:
    shown.guard(lambda: 1 / 0)()
    shown.guard.aside(lambda: None)()
    assert "ZeroDivisionError" in shown.guard.widget.value
    shown.guard(lambda: None)()
    assert not shown.guard.widget.value
