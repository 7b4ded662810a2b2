"""Pictures of a diff as SVG text, of plain numbers: steps, one step of each side on one axis, where the delta comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

#: The colours of the categories, the same as in every figure of this project.
COLOURS = {
    "compute": "#0072B2", "communication": "#CC79A7", "copy": "#E69F00", "idle": "#4B5563", "host": "#7A869A", "wait": "#D55E00", "event wait": "#F3C6A5", "graph": "#9AA5B1",
}  # fmt: skip
WIDTH = 960
_LEFT, _RIGHT = 250, 90


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One step: its trace, which step, period in µs, and boxes (start µs, duration µs, category) on the device and on the host."""

    name: str
    which: str
    period_us: float
    device: Sequence[tuple[float, float, str]]
    host: Sequence[tuple[float, float, str]]


def steps_svg(sides: Sequence[tuple[str, np.ndarray]]) -> str:
    """Every step's period as a dot, a row a side, the median as a line."""
    every = np.concatenate([us for _, us in sides])
    low, high = float(every.min()), float(every.max())
    room = max((high - low) * 0.06, high * 0.002, 1e-3)
    axis = _Axis(low - room, high + room)
    parts = [axis.ticks(len(sides) * 46 + 6)]
    for i, (name, us) in enumerate(sides):
        y = 26 + 46 * i
        parts.append(_label(name, y))
        for k, x in enumerate(us.tolist()):
            parts.append(
                f'<circle cx="{axis(x):.1f}" cy="{y + (k % 5 - 2) * 4}" r="3.2" fill="{COLOURS["compute"]}" fill-opacity=".75"/>'
            )
        m = axis(float(np.median(us)))
        parts.append(
            f'<line x1="{m:.1f}" x2="{m:.1f}" y1="{y - 17}" y2="{y + 17}" stroke="{COLOURS["wait"]}" stroke-width="2.5"/>'
        )
        parts.append(f'<text x="{m + 6:.1f}" y="{y - 10}" class="v">{float(np.median(us)):,.1f}</text>')
    return _svg(parts, len(sides) * 46 + 34, "Periods of the steps compared, in µs; the line is the median")


def strips_svg(strips: Sequence[Strip]) -> str:
    """One step of each side under one another on one axis: host over device."""
    axis = _Axis(0.0, max(s.period_us for s in strips) * 1.01)
    parts, pitch = [axis.ticks(len(strips) * 84 + 4)], 84
    for i, strip in enumerate(strips):
        y = 12 + pitch * i
        parts += [_label(strip.name, y + 22), _label(f"{strip.which}, {strip.period_us:,.1f} µs", y + 40)]
        for at, boxes, height in ((y, strip.host, 22), (y + 28, strip.device, 30)):
            parts.append(f'<rect x="{axis.left}" y="{at}" width="{axis.width}" height="{height}" class="lane"/>')
            for start, dur, category in _merged(boxes, axis.us_a_pixel * 0.4):
                a, b = axis(max(start, 0.0)), axis(min(start + dur, strip.period_us))
                if b > axis.left:
                    parts.append(
                        f'<rect x="{a:.2f}" y="{at}" width="{max(b - a, 0.35):.2f}" height="{height}" fill="{COLOURS[category]}"/>'
                    )
        end = axis(strip.period_us)
        parts.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{y - 4}" y2="{y + 62}" class="end"/>')
    return _svg(parts, len(strips) * pitch + 30, "One step of each side; above host calls, below the device")


def causes_svg(causes: Sequence[tuple[str, float, str]], delta_us: float) -> str:
    """A waterfall: each cause (words, µs, category) from where the one before ended, up to the delta."""
    ends = np.cumsum([us for _, us, _ in causes])
    axis = _Axis(min(0.0, float(ends.min()), delta_us), max(0.0, float(ends.max()), delta_us), pad=0.04)
    row, parts = 26, []
    height = row * (len(causes) + 1) + 8
    parts.append(axis.ticks(height))
    parts.append(f'<line x1="{axis(0):.1f}" x2="{axis(0):.1f}" y1="0" y2="{height}" class="zero"/>')
    for i, ((words, us, category), end) in enumerate(zip(causes, ends.tolist(), strict=True)):
        parts += _bar(axis, words, end - us, end, us, COLOURS[category], 6 + row * i)
    parts += _bar(axis, "delta of the median step", 0.0, delta_us, delta_us, "var(--ink)", 6 + row * len(causes))
    return _svg(parts, height + 28, "Where the delta comes from, µs a step")


def _bar(axis: _Axis, words: str, begin: float, end: float, us: float, colour: str, y: int) -> list[str]:
    a, b = sorted((axis(begin), axis(end)))
    return [
        _label(words, y + 9),
        f'<rect x="{a:.1f}" y="{y}" width="{max(b - a, 1):.1f}" height="17" fill="{colour}"><title>{escape(words)}: {us:+.1f} µs</title></rect>',
        f'<text x="{b + 5:.1f}" y="{y + 13}" class="v">{us:+,.1f}</text>',
    ]


class _Axis:
    """Microseconds to pixels."""

    def __init__(self, low: float, high: float, *, pad: float = 0.0) -> None:
        room = (high - low) * pad or (1e-6 if high == low else 0.0)
        self.low, self.high = low - room, high + room
        self.left, self.width = _LEFT, WIDTH - _LEFT - _RIGHT

    def __call__(self, us: float) -> float:
        return self.left + (us - self.low) / (self.high - self.low) * self.width

    @property
    def us_a_pixel(self) -> float:
        return (self.high - self.low) / self.width

    def ticks(self, height: int) -> str:
        """Grid lines at round numbers, with their values below."""
        rough = (self.high - self.low) / 6
        unit = 10.0 ** np.floor(np.log10(rough))
        step = float(next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough))
        at = np.arange(np.ceil(self.low / step) * step, self.high + step * 1e-9, step)
        digits = max(0, -int(np.floor(np.log10(step))))
        return "".join(
            f'<line x1="{self(x):.1f}" x2="{self(x):.1f}" y1="0" y2="{height}" class="grid"/>'
            f'<text x="{self(x):.1f}" y="{height + 16}" class="tick">{x + 0.0:,.{digits}f}</text>'
            for x in at.tolist()
        )


def _label(text: str, y: float) -> str:
    shown = text if len(text) <= 33 else text[:32] + "…"
    return f'<text x="{_LEFT - 10}" y="{y + 4}" class="name">{escape(shown)}<title>{escape(text)}</title></text>'


def _merged(boxes: Iterable[tuple[float, float, str]], gap_us: float) -> list[tuple[float, float, str]]:
    """Boxes of one category that are no further apart than ``gap_us``, as one."""
    out: list[tuple[float, float, str]] = []
    for start, dur, category in sorted(boxes):
        if out and out[-1][2] == category and start <= out[-1][0] + out[-1][1] + gap_us:
            begin, long, _ = out[-1]
            out[-1] = (begin, max(long, start + dur - begin), category)
        else:
            out.append((start, dur, category))
    return out


def _svg(parts: Iterable[str], height: int, about: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'
