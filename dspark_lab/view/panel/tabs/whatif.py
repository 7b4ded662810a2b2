"""The tab What-if: a trace replayed with something left out, the ten best edits, and the replay's own error beside every figure."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as W

from dspark_lab.view import figures, tables
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.picture import Picture
from dspark_lab.view.panel.select import Select
from dspark_lab.view.panel.tabs.choice import TraceChoice
from dspark_lab.view.panel.tabs.shown import Shown
from dspark_lab.view.panel.tabs.timeline import slim
from dspark_lab.view.panel.work import Work
from dspark_lab.view.theme import message

ASKED = "Choose a trace with steps on a device; it is replayed without its waits, and with single edits."
DROPS = {
    "none": "nothing",
    "sync": "synchronises and blocking copies",
    "event_wait": "waits for events",
    "all": "every wait",
}
AT = "at "


class WhatIfTab:
    """``predicted`` is the last prediction, ``best`` the one with the ten best edits of this trace."""

    name = "What-if"

    def __init__(self, guard: Guard, changed: Callable[[], Any]) -> None:
        self._own = False
        self.work = Work(guard)
        self.choice = TraceChoice("Trace", guard, lambda: None if self._own else self.load())
        self.replay = W.Button(description="Replay", layout=W.Layout(width="80px"))
        self.drop = Select(
            DROPS,
            "sync",
            say=lambda v: DROPS.get(v) or f"the wait at {v.removeprefix(AT)}",
            description="Without",
            layout=slim("300px"),
            style={"description_width": "52px"},
        )
        self.kernel = W.Text(placeholder="without kernels (regex)", continuous_update=False, layout=slim("180px"))
        self.host = W.BoundedFloatText(
            value=1.0, min=0.0, max=100.0, step=0.1, description="Host time ×", layout=slim("140px"), style={"description_width": "76px"}
        )  # fmt: skip
        self.said, self.waits, self.picture = W.HTML(), W.HTML(layout=W.Layout(width="100%")), Picture()
        self.predicted: Any = None
        self.best: Any = None
        self._state: tuple[Any, ...] = ()
        self._changed, self._made = changed, ""
        self.replay.on_click(guard(lambda _: self.load()))
        for w in (self.drop, self.kernel, self.host):
            w.observe(guard(lambda _: None if self._own else self.edit()), names="value")
        rows = [
            W.HBox([self.choice.widget, self.replay]),
            W.HBox([self.drop, self.kernel, self.host], layout=W.Layout(flex_flow="row wrap")),
        ]
        self.widget = W.VBox([*rows, self.work.widget, self.said, self.picture.widget, self.waits])

    @property
    def figure(self) -> Any:
        return self.picture.figure

    @property
    def script(self) -> str:
        return self._made or "import dspark_lab as lab\npredicted = lab.whatif('trace.json.gz', drop='sync')"

    def fill(self, width: int) -> None:
        self.picture.fill(width)

    def load(self) -> None:
        """Replays what is chosen, a large file in a thread, and tries single edits; raises `LabError` where it cannot be replayed. What was shown stays then."""
        from dspark_lab.analysis.whatif import whatif

        if (state := self.choice.state) == self._state:
            if self.work.key and self.work.key[0] != state:  # another trace
                self.work.leave()
            return
        opened, title = self.choice.opener(), f"{self.choice.title}: what single edits would gain"

        def replay() -> tuple[Any, Any]:
            best = whatif(opened(), drop="none")
            return best, figures.edits(best, title=title)

        self.work.run(state, replay, lambda made: self._show(state, *made), num_bytes=self.choice.num_bytes)

    def _show(self, state: tuple[Any, ...], best: Any, figure: Any) -> None:
        self.best, self._state = best, state
        self._offer(best)
        self.picture.show(figure)
        self.edit()

    def edit(self) -> None:
        """Predicts the step with the edit chosen."""
        from dspark_lab.analysis.whatif import whatif

        if self._state != self.choice.state:
            self.load()
            return
        asked, opened = self._asked(), self.choice.opener()
        named = "".join(f", {k}={v!r}" for k, v in asked.items())
        code = f"import dspark_lab as lab\npredicted = lab.whatif({self.choice.code}{named})\nprint(predicted.sentence)\nfigure = lab.plot.edits(predicted)"
        self.work.run(
            (self._state, named), lambda: whatif(opened(), num_edits=0, **asked), lambda made: self._say(code, made),
            num_bytes=self.choice.num_bytes,
        )  # fmt: skip

    def _say(self, code: str, predicted: Any) -> None:
        self.predicted, self._made = predicted, code
        self.said.value = _said(predicted)
        self.waits.value = tables.replayed_html(predicted.waits)
        self._changed()

    def _asked(self) -> dict[str, Any]:
        chosen = str(self.drop.value)
        asked: dict[str, Any] = {"drop_site": chosen.removeprefix(AT)} if chosen.startswith(AT) else {"drop": chosen}
        if pattern := self.kernel.value.strip():
            asked["drop_kernel"] = pattern
        if self.host.value != 1.0:
            asked["scale_host"] = float(self.host.value or 0.0)
        return asked

    def _offer(self, best: Any) -> None:
        """The sites of this trace join the groups of waits."""
        self._own = True
        try:
            drops = [*DROPS, *(f"{AT}{s}" for s in dict.fromkeys(best.waits["site"]))]
            self.drop.offer(drops, self.drop.value if self.drop.value in drops else "sync")
        finally:
            self._own = False

    def draw(self, shown: Shown) -> None:
        runs = shown.captured
        mine = self.choice.is_arm
        self._own = True
        try:
            self.choice.offer(runs)
            options = self.choice.options
            if mine and runs and self.choice.value not in options:
                self.choice.value = next((o for o in options if o.startswith("blocking")), options[0])
        finally:
            self._own = False
        if mine and runs:
            self.load()
        elif mine or self.picture.figure is None:
            self.work.leave()
            self.said.value, self.waits.value, self._state = "", "", ()
            self.picture.show(message(self.name, f"{ASKED} {shown.no_capture}"))


def _said(predicted: Any) -> str:
    """The prediction, the replay's own error beside it."""
    p = predicted
    sure = "exact" if p.exact else "a bound, not exact"
    big = f"<b>{p.predicted_us:,.0f} µs</b> a step instead of {p.measured_us:,.0f}, {-100 * p.gain_us / p.measured_us:+.1f} %".replace(
        "-", "−"
    )
    error = f"replay of the unedited trace: {p.replayed_us:,.0f} µs, off by {p.replay_error_pct:+.2f} %".replace(
        "-", "−"
    )
    notes = "; ".join(p.notes)
    return (
        f'<div style="line-height:1.4"><span style="font-size:15px">{big}</span> <span style="color:#6B7280">· {error} · {sure} · profiled capture</span>'
        f'<div style="font-size:12px;color:#6B7280">{html.escape(notes)}</div></div>'
    )
