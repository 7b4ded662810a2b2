"""The strategies: a checkbox each, with what cannot be ticked now and why."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as W

from dspark_lab.errors import LabError, unknown
from dspark_lab.view.panel.reasons import Choice
from dspark_lab.view.panel.toggles import CELL, SOFT
from dspark_lab.view.panel.turn import TURN


class Arms:
    """Checkboxes of the strategies, and ``also`` controls beside them. ``value`` is the list of those checked and legal, in their order; a wish outlives a disabling."""

    name = "alloc"

    def __init__(
        self, names: Iterable[str], checked: Iterable[str], *, tips: dict[str, str], also: Sequence[Any] = ()
    ) -> None:
        self._wished = set(checked)
        self.tips, self._also = tips, tuple(also)
        self.reasons: dict[str, str] = {}
        self.boxes: dict[str, Any] = {}
        self.refused: LabError | None = None
        """Why what was set last was not taken; nothing changed then."""
        self._seen: Callable[[str], Any] | None = None
        self._own = False
        self._list = W.Box(layout=W.Layout(margin="0", overflow="hidden", flex_flow="row wrap"))
        self._line = W.HTML(layout=W.Layout(margin="0", width="100%"))
        head = W.HTML('<span style="font-size:12px;font-weight:600">Allocation</span>', layout=W.Layout(margin="0"))
        self.widget = W.VBox([head, self._list, self._line], layout=W.Layout(margin="0 0 4px 0", overflow="hidden"))
        for name in names:
            self._box(name)

    def _box(self, name: str) -> Any:
        if name not in self.boxes:
            box = W.Checkbox(value=name in self._wished, description=name, indent=False,
                             layout=W.Layout(width="auto", min_width=CELL, flex="0 1 auto", margin="0 8px 0 0", height="22px"))  # fmt: skip
            box.tooltip = self.tips.get(name)
            box.observe(lambda change, n=name: self._changed(n, change["new"]), names="value")
            self.boxes[name] = box
            self._list.children = (*self.boxes.values(), *self._also)
        return self.boxes[name]

    @property
    def value(self) -> list[str]:
        return [n for n, box in self.boxes.items() if box.value and not box.disabled]

    @value.setter
    def value(self, names: Iterable[str]) -> None:
        names = [names] if isinstance(names, str) else list(names)
        with TURN:
            self.refused = self._why_not(names)
            if self.refused is None:
                self._wished = set(names)
            self._set({n: n in self._wished and not box.disabled for n, box in self.boxes.items()})
            if self._seen:
                self._seen(self.name)

    def _why_not(self, names: Sequence[str]) -> LabError | None:
        """Why ``names`` cannot be ticked now."""
        for n in names:
            if n not in self.boxes:
                return unknown("alloc", n, self.boxes)
            if self.boxes[n].disabled:
                legal = ", ".join(m for m, box in self.boxes.items() if not box.disabled)
                why = self.reasons.get(n, "it is not offered")
                return LabError(f"alloc={n!r} cannot be chosen now: {why}; legal: {legal or 'none of them'}.")
        return None

    @property
    def reason(self) -> str:
        """What the small line says."""
        groups: dict[str, list[str]] = {}
        for n, r in self.reasons.items():
            groups.setdefault(r, []).append(n)
        return "; ".join(r if names == r.split()[:1] else f"{', '.join(names)}: {r}" for r, names in groups.items())

    def observe(self, seen: Callable[[str], Any]) -> None:
        self._seen = seen

    def offer(self, choices: Iterable[Choice]) -> None:
        """Disables what has a reason and says it; what becomes legal again is checked again if it was."""
        choices = list(choices)
        self.reasons = {c.value: c.reason for c in choices if c.reason}
        legal = {c.value for c in choices if not c.reason}
        for c in choices:
            box = self._box(c.value)
            box.disabled = bool(c.reason)
            box.layout.display = ""
            box.tooltip = c.reason or self.tips.get(c.value)
        for n in self.boxes.keys() - {c.value for c in choices}:  # of recordings only, such as pinned:always
            self.boxes[n].disabled, self.boxes[n].layout.display = True, "none"
        checked = {n: n in self._wished and n in legal for n in self.boxes}
        if self._wished and not any(checked.values()):
            checked |= dict.fromkeys(legal, True)
        self._set(checked)
        self._line.value = f'<div style="{SOFT}">{html.escape(self.reason)}</div>' if self.reasons else ""

    def _changed(self, name: str, on: bool) -> None:
        if self._own:
            return
        self.refused = self._why_not([name]) if on else None  # the wish is kept even so
        (self._wished.add if on else self._wished.discard)(name)
        if not on and not self.value:  # the last one was unticked: no old wish ticks others
            self._wished.clear()
        if self._seen:
            self._seen(self.name)

    def _set(self, checked: dict[str, bool]) -> None:
        self._own = True
        try:
            for n, on in checked.items():
                self.boxes[n].value = on
        finally:
            self._own = False
