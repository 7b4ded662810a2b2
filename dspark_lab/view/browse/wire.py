"""What goes to the browser: the scene once, the boxes of each view as packed arrays, the outline of what was clicked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dspark_lab.view.browse.detail import Boxes
from dspark_lab.view.browse.pick import Picked
from dspark_lab.view.browse.scene import Scene
from dspark_lab.view.browse.still import LINE_COLOURS
from dspark_lab.view.browse.tracks import COLOUR_NAMES
from dspark_lab.view.lanes import short
from dspark_lab.view.rows import records

MAX_ARROWS, MAX_MARKS = 160, 240
"""More arrows, flags or step lines than these are counted, not drawn."""


def told(scene: Scene, title: str) -> dict[str, Any]:
    """What the browser is told once."""
    return {
        "title": title,
        "note": " · ".join(x for x in (scene.note, "profiled: the profiler slows host calls") if x),
        "tracks": [{"label": t.label, "kind": t.kind, "group": t.group} for t in scene.tracks],
        "groups": [{"name": g.name, "doubts": list(g.doubts), "bands": [[a, b, why] for a, b, why in g.bands[:MAX_MARKS]]} for g in scene.groups],
        "colours": [LINE_COLOURS[c] for c in COLOUR_NAMES],
        "kinds": list(COLOUR_NAMES),
        "lo": scene.lo,
        "hi": scene.hi,
        "events": scene.num_events,
    }  # fmt: skip


def view(s: Scene, boxes: Boxes, lo: int, hi: int, *, cell: int, jump: int) -> dict[str, Any]:
    """What the browser needs to draw the boxes: arrays as bytes, names once. ``jump`` counts the views it did not ask for."""
    used, name = np.unique(boxes.name, return_inverse=True)
    flags = s.flags[
        (s.flags["at"] < hi).to_numpy()
        & (s.flags["at"] + s.flags["dur"] > lo).to_numpy()
        & (s.flags["track"] >= 0).to_numpy()
    ]
    steps = s.steps[((s.steps["at"] >= lo) & (s.steps["at"] < hi)).to_numpy()]
    first, last = np.searchsorted(s.arrows[:, 0], [lo, hi])
    arrows = s.arrows[first:last] if last - first <= MAX_ARROWS else s.arrows[:0]
    return {
        "lo": lo, "hi": hi, "cell": cell, "jump": jump, "n": len(boxes),
        "row": boxes.row.astype(np.uint16).tobytes(), "start": boxes.start.astype(np.float64).tobytes(),
        "end": boxes.end.astype(np.float64).tobytes(), "colour": boxes.colour.astype(np.uint8).tobytes(),
        "name": name.astype(np.uint16).tobytes(), "names": ["" if u < 0 else short(str(s.names[u])) for u in used],
        "count": boxes.count.astype(np.uint32).tobytes(), "share": np.rint(255 * boxes.share).astype(np.uint8).tobytes(),
        "merged": boxes.merged.astype(np.uint8).tobytes(), "hit": np.minimum(boxes.hit, 255).astype(np.uint8).tobytes(),
        "flags": [[r["at"], r["dur"], r["track"], r["text"]] for r in records(flags)] if len(flags) <= MAX_MARKS else [],
        "num_flags": len(flags), "num_arrows": int(last - first), "arrows": arrows.astype(np.float64).tobytes(),
        "steps": [[r["at"], r["group"], f"step {r['step']}"] for r in records(steps)] if len(steps) <= MAX_MARKS else [],
    }  # fmt: skip


def outline(scene: Scene, picked: Picked) -> dict[str, Any]:
    row = scene.tracks[picked.track].row
    span = [int(row.start[picked.event]), int(row.end[picked.event])] if picked.event >= 0 else []
    return {"html": picked.html, "track": picked.track, "span": span, "arrow": list(picked.arrow or ())}


def num_bytes(told: dict[str, Any]) -> int:
    """How long a message is."""
    return sum(len(v) if isinstance(v, bytes) else len(json.dumps(v)) for v in told.values())
