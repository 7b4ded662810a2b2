"""The view as SVG: for saved notebooks and pages without a kernel, and where anywidget is missing. Neither script nor download."""

from __future__ import annotations

import html
from collections.abc import Sequence

from dspark_lab.view.browse.detail import Boxes, Row, look
from dspark_lab.view.browse.scene import Scene
from dspark_lab.view.browse.tracks import COLOUR_NAMES
from dspark_lab.view.lanes import short
from dspark_lab.view.rows import records
from dspark_lab.view.theme import COLOURS, FAINT, FONT, INK

LINE_COLOURS: dict[str, str] = {
    **COLOURS,
    "event wait": COLOURS["wait"],
    "op": "#C3CAD6",
    "graph": "#5F6C80",
    "step": "#E5E7EB",
}
HEIGHTS = {"steps": 14, "ops": 13, "calls": 18, "graphs": 14, "stream": 22}
GUTTER, WIDTH, GAP, HEAD, TOP = 150, 980, 3, 17, 40
LIMIT = 1500
"""Boxes of a still picture: under 250 kB."""
MAX_WORDS = 120


def svg(scene: Scene, rows: Sequence[Row], lo: int, hi: int, *, title: str = "") -> str:
    """The rows between ``lo`` and ``hi`` (ns), merged boxes as high as the share of them that is busy."""
    plot = WIDTH - GUTTER - 8
    boxes, cell = look(rows, lo, hi, pixels=plot, limit=LIMIT)
    at, heads, bottom = _rows(scene)
    doubts = [f"⚠ {g.name + ': ' if len(scene.groups) > 1 else ''}{d}" for g in scene.groups for d in g.doubts][:4]
    height = bottom + 34 + 15 * len(doubts)

    def x(ns: float) -> float:
        return GUTTER + min(max((ns - lo) / (hi - lo), 0.0), 1.0) * plot

    span = f"{lo / 1e6:.3f} to {hi / 1e6:.3f} ms"
    merged = int(boxes.count[boxes.merged].sum())
    said = [
        span,
        scene.note,
        "profiled",
        f"{merged:,} events in cells of {cell / 1e3:.2f} µs, as high as they are busy" * bool(merged),
    ]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="{html.escape(FONT)}" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="15" font-size="13" font-weight="600" fill="{INK}">{html.escape(title or "Timeline")}</text>',
        f'<text x="8" y="30" fill="{FAINT}">{html.escape(" · ".join(s for s in said if s))}</text>',
    ]
    for g, y in heads.items():
        out.append(
            f'<text x="8" y="{y + 12}" fill="{INK}" font-weight="600">{html.escape(scene.groups[g].name)}</text>'
        )
    for t, (y, h) in zip(scene.tracks, at, strict=True):
        out.append(
            f'<text x="{GUTTER - 6}" y="{y + h / 2 + 4:.0f}" fill="{FAINT}" text-anchor="end" font-size="10">{html.escape(t.label[:26])}</text>'
        )
        out.append(f'<rect x="{GUTTER}" y="{y}" width="{plot}" height="{h}" fill="#F8F9FB"/>')
    out += _drawn(scene, boxes, at, x)
    out += _bands(scene, at, x, lo, hi)
    for r in records(scene.steps[((scene.steps["at"] >= lo) & (scene.steps["at"] < hi)).to_numpy()].head(40)):
        top = heads[r["group"]]
        end = max(y + h for t, (y, h) in zip(scene.tracks, at, strict=True) if t.group == r["group"])
        out.append(f'<path d="M{x(r["at"]):.1f} {top}V{end}" stroke="#9CA3AF" stroke-dasharray="2 2" fill="none"/>')
        out.append(
            f'<text x="{x(r["at"]) + 3:.1f}" y="{top + 11}" fill="{FAINT}" font-size="10">step {r["step"]}</text>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        ns, anchor = lo + share * (hi - lo), "start" if share == 0 else "end" if share == 1 else "middle"
        out.append(
            f'<text x="{x(ns):.1f}" y="{bottom + 13}" fill="{FAINT}" font-size="10" text-anchor="{anchor}">{ns / 1e6:.3f} ms</text>'
        )
    for i, text in enumerate(doubts):
        out.append(f'<text x="8" y="{bottom + 30 + 15 * i}" fill="#B34700">{html.escape(text[:150])}</text>')
    return "".join([*out, "</svg>"])


def _rows(scene: Scene) -> tuple[list[tuple[int, int]], dict[int, int], int]:
    """(y, height) of each track, y of each group's head, y of the bottom."""
    y, at, heads = TOP, [], {}
    for t in scene.tracks:
        if t.group not in heads:
            heads[t.group] = y
            y += HEAD
        at.append((y, HEIGHTS[t.kind]))
        y += HEIGHTS[t.kind] + GAP
    return at, heads, y


def _drawn(scene: Scene, boxes: Boxes, at: list[tuple[int, int]], x) -> list[str]:
    """Boxes by colour as one path each, so that a box costs some twenty characters; the widest with their names."""
    paths: dict[tuple[int, bool], list[str]] = {}
    words: list[tuple[float, str]] = []
    for i in range(len(boxes)):
        y, h = at[boxes.row[i]]
        a, b = x(float(boxes.start[i])), x(float(boxes.end[i]))
        merged = bool(boxes.merged[i])
        up = max(h * float(boxes.share[i]), 1.5) if merged else h
        paths.setdefault((int(boxes.colour[i]), merged), []).append(
            f"M{a:.1f} {y + h - up:.1f}h{max(b - a, 0.5):.1f}v{up:.1f}H{a:.1f}z"
        )
        if not merged and b - a > 34:
            words.append(
                (
                    b - a,
                    f'<text x="{a + 3:.1f}" y="{y + h / 2 + 3.5:.1f}" font-size="9" fill="{_ink(int(boxes.colour[i]))}">{_fit(scene, boxes, i, b - a)}</text>',
                )
            )
    out = []
    for (colour, merged), found in sorted(paths.items(), key=lambda p: not p[0][1]):
        name = COLOUR_NAMES[colour]
        look = f'fill="{LINE_COLOURS[name]}"'
        if name in ("wait", "event wait"):
            look = f'fill="{LINE_COLOURS[name]}" fill-opacity="{0.75 if name == "wait" else 0.25}" stroke="{LINE_COLOURS[name]}"'
        out.append(f'<path d="{"".join(found)}" {look} opacity="{0.8 if merged else 1}"/>')
    words.sort(key=lambda w: -w[0])
    return [*out, *(w for _, w in words[:MAX_WORDS])]


def _ink(colour: int) -> str:
    return "white" if COLOUR_NAMES[colour] in ("compute", "host", "draft", "wait", "graph", "communication") else INK


def _fit(scene: Scene, boxes: Boxes, i: int, width: float) -> str:
    return html.escape(short(str(scene.names[int(boxes.name[i])]))[: int((width - 6) / 5)])


def _bands(scene: Scene, at: list[tuple[int, int]], x, lo: int, hi: int) -> list[str]:
    """Steps without a whole record on the device, hatched over the rows of the device."""
    out = []
    for g, group in enumerate(scene.groups):
        rows = [at[i] for i, t in enumerate(scene.tracks) if t.group == g and t.kind in ("stream", "graphs")]
        rows = rows or [at[i] for i, t in enumerate(scene.tracks) if t.group == g][-1:]
        for a, b, why in group.bands:
            if b > lo and a < hi and rows:
                y, end = rows[0][0], rows[-1][0] + rows[-1][1]
                out.append(
                    f'<rect x="{x(a):.1f}" y="{y}" width="{max(x(b) - x(a), 1):.1f}" height="{end - y}" fill="#B34700" fill-opacity="0.14" stroke="#B34700" stroke-dasharray="3 2">'
                    f"<title>{html.escape(why)}</title></rect>"
                )
    return out[:200]
