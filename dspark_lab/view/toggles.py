"""One toggle: a label, a native control, a small line that says why it or some of its values cannot be chosen now."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as W

from dspark_lab.view.reasons import Choice, merged, said

LABEL, CONTROL = "92px", "116px"
SOFT = "color:var(--jp-ui-font-color2,#6B7280);font-size:11px;line-height:1.25"


class Toggle:
    """``value`` reads and sets it; ``reason`` is what its small line says; ``widget`` is the row."""

    def __init__(self, name: str, label: str, control: Any, *, tip: str = "") -> None:
        self.name, self.label, self.tip, self.control = name, label, tip, control
        self.reason = ""
        control.layout.width = control.layout.width or CONTROL
        control.tooltip = tip or None
        head = W.HTML(
            f'<span style="font-size:12px">{html.escape(label)}</span>', layout=W.Layout(width=LABEL, margin="0")
        )
        head.tooltip = tip or None
        control.layout.margin = "0"
        self._line = W.HTML(layout=W.Layout(display="none", margin="0", width="100%"))
        row = W.HBox(
            [head, control], layout=W.Layout(align_items="center", margin="0", height="30px", overflow="hidden")
        )
        self.widget = W.VBox([row, self._line], layout=W.Layout(margin="0", overflow="hidden"))

    @property
    def value(self) -> Any:
        return self.control.value

    @value.setter
    def value(self, value: Any) -> None:
        self.control.value = value

    def observe(self, seen: Callable[[str], Any]) -> None:
        """Calls ``seen(name)`` at each change of the value."""
        self.control.observe(lambda _: seen(self.name), names="value")

    def say(self, reason: str, *, disabled: bool = False, aloud: bool = True) -> None:
        """Puts ``reason`` on the small line and into the tooltip; ``disabled`` greys the control."""
        self.reason = reason
        self.control.disabled = disabled
        self.control.tooltip = reason or self.tip or None
        shown = bool(reason) and aloud
        self._line.value = f'<div style="{SOFT}">{html.escape(reason)}</div>' if shown else ""
        self._line.layout.display = "" if shown else "none"

    def fix(self, value: Any) -> None:
        """Shows ``value`` as it is in a recording, not to be turned."""
        if value is not None:
            self.control.value = value


class Pick(Toggle):
    """A toggle with a list of values, drawn as a native select. Values that cannot be chosen are left out and said."""

    def __init__(self, name: str, label: str, values: Iterable[Any], value: Any, *, tip: str = "") -> None:
        values = list(values)
        super().__init__(name, label, W.Dropdown(options=[(str(v), v) for v in values], value=value), tip=tip)

    def fix(self, value: Any) -> None:
        options = (("–", "–"),) if value is None else ((str(value), value),)
        if tuple(self.control.options) != options:
            self.control.options = options

    def offer(self, choices: Sequence[Choice], value: Any, *, word: str = "", why: str = "") -> None:
        """Lists the legal ones of ``choices``, sets ``value``, says the reasons of the rest; ``why`` disables the whole."""
        legal = [c.value for c in choices if not c.reason]
        options = tuple((str(v), v) for v in legal)
        if self.control.options != options:
            self.control.options = options
        if value in legal and self.control.value != value:
            self.control.value = value
        self.say(
            why or (merged(list(choices), word) if word else said(choices)),
            disabled=bool(why) or len(legal) < 2,
            aloud=not why,
        )


class Arms:
    """Checkboxes of the strategies. ``value`` is the list of those checked and legal, in their order; a wish outlives a disabling."""

    name = "alloc"

    def __init__(self, names: Iterable[str], checked: Iterable[str], *, tips: dict[str, str]) -> None:
        self._wished = set(checked)
        self.tips = tips
        self.reasons: dict[str, str] = {}
        self.boxes: dict[str, Any] = {}
        self._seen: Callable[[str], Any] | None = None
        self._own = False
        self._list = W.VBox(layout=W.Layout(margin="0", overflow="hidden"))
        self._line = W.HTML(layout=W.Layout(margin="0", width="100%"))
        head = W.HTML('<span style="font-size:12px;font-weight:600">Allocation</span>', layout=W.Layout(margin="0"))
        self.widget = W.VBox([head, self._list, self._line], layout=W.Layout(margin="0 0 4px 0", overflow="hidden"))
        for name in names:
            self._box(name)

    def _box(self, name: str) -> Any:
        if name not in self.boxes:
            box = W.Checkbox(value=name in self._wished, description=name, indent=False,
                             layout=W.Layout(width="200px", margin="0", height="23px"))  # fmt: skip
            box.tooltip = self.tips.get(name)
            box.observe(lambda change, n=name: self._changed(n, change["new"]), names="value")
            self.boxes[name] = box
            self._list.children = tuple(self.boxes.values())
        return self.boxes[name]

    @property
    def value(self) -> list[str]:
        return [n for n, box in self.boxes.items() if box.value and not box.disabled]

    @value.setter
    def value(self, names: Iterable[str]) -> None:
        self._wished = set(names)
        for n in self._wished:
            self._box(n)
        self._set({n: n in self._wished and not box.disabled for n, box in self.boxes.items()})
        if self._seen:
            self._seen(self.name)

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
            box.tooltip = c.reason or self.tips.get(c.value)
        checked = {n: n in self._wished and n in legal for n in self.boxes}
        if self._wished and not any(checked.values()):
            checked |= dict.fromkeys(legal, True)
        self._set(checked)
        self._line.value = f'<div style="{SOFT}">{html.escape(self.reason)}</div>' if self.reasons else ""

    def _changed(self, name: str, on: bool) -> None:
        if self._own:
            return
        (self._wished.add if on else self._wished.discard)(name)
        if self._seen:
            self._seen(self.name)

    def _set(self, checked: dict[str, bool]) -> None:
        self._own = True
        try:
            for n, on in checked.items():
                self.boxes[n].value = on
        finally:
            self._own = False
