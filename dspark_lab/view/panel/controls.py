"""The controls of the left column: which toggles there are, what they list, where they stand, and what is a value of one at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ipywidgets as W
import pandas as pd

from dspark_lab.config import ALLOCS, PRESETS, LabConfig, preset
from dspark_lab.config.choices import (
    DISPATCHERS,
    LAYOUTS,
    MIN_TEMPERATURE,
    PLACEMENTS,
    TEXTS,
    VERIFY,
    foreign_dispatchers,
)
from dspark_lab.config.shipped import DRAFTERS
from dspark_lab.errors import LabError
from dspark_lab.view.panel.arms import Arms
from dspark_lab.view.panel.toggles import Pick, Switch, Toggle

VALUES: dict[str, tuple[Any, ...]] = {
    "ep_size": (1, 2, 3, 4, 8),
    "tp_size": (1, 2, 4),
    "attn_dp": (1, 2, 4, 8),
    "batch_size": (1, 2, 4, 8, 16, 32),
    "block_size": (1, 2, 3, 4, 5, 6, 7),
    "host_work_us": (0, 50, 100, 200, 400, 600, 800, 1000),
    "num_steps": (16, 32, 64, 128, 256),
    "repeats": (1, 2, 3, 5, 10),
    "processes": (1, 2, 3, 5),
    "profile_steps": (0, 8, 16),
    "temperature": (0.0, 0.5, 0.8, 1.0),
}
SHIPPED = "shipped"
"""The preset that several drafters were trained for."""
ITS_OWN = "its own"
"""The drafter of a preset that has one."""
NAMES: dict[str, tuple[str, ...]] = {
    "preset": tuple(PRESETS),
    "dispatcher": DISPATCHERS,
    "placement": PLACEMENTS,
    "device": ("auto", "cpu", "cuda"),
    "verify": VERIFY,
    "layout": LAYOUTS,
    "text": TEXTS,
    "drafter": (ITS_OWN, *DRAFTERS),
}
LEAST = {"num_steps": 1, "repeats": 1, "processes": 1, "profile_steps": 0}
RUN_OPTIONS = ("num_steps", "repeats", "processes", "profile_steps")
RECORDED_ROWS = (("recording",), ("preset", "host_work_us"), ("batch_size", "block_size"), ("ep_size", "tp_size"),
                 ("dispatcher", "placement"), ("attn_dp",), ("use_graph", "mask_padding"))  # fmt: skip
"""Toggles that choose among recordings too, two a row; the rest is of live runs."""
LIVE_ROWS = (("overlap",), ("drafter", "text"), ("temperature", "device"), ("verify", "confidence_threshold"),
             ("layout", "num_steps"), ("repeats", "processes"), ("profile_steps",))  # fmt: skip
BOXES = ("use_graph", "mask_padding", "overlap")
WIDE = ("recording", "overlap")


def made(base: LabConfig, arms: Sequence[str], table: pd.DataFrame) -> dict[str, Any]:
    """The toggles by name, at the values of ``base``; ``table`` has the recordings."""
    e = base.engine
    floor = Switch("floor", "Floor", False, tip="an arm more at EP > 1: the mask compiled out and nothing built, to compare the others with")  # fmt: skip
    number = W.BoundedFloatText(value=0.0, min=0, max=1, step=0.05)

    def pick(name: str, label: str, value: Any, tip: str = "") -> Pick:
        return Pick(name, label, _places(name, table), value, tip=tip)

    toggles: list[Any] = [
        Arms(ALLOCS, arms, tips={n: f"{a.transfer}, {a.guard}: {a.origin}" for n, a in ALLOCS.items()}, also=[floor.control]),
        floor,
        Pick("recording", "Recording", sorted(set(table["set"])) or ["–"], None, tip="sets of runs that were measured with the same settings"),
        pick("preset", "Preset", base.preset, "model shapes to start from"),
        pick("host_work_us", "Host work, µs", int(e.host_work_us), "busy Python after the scalar's place, standing for a scheduler"),
        pick("ep_size", "EP size", 1, "ranks that share the experts of each MoE layer"),
        pick("tp_size", "TP size", 1, "ranks that share attention"),
        pick("dispatcher", "Dispatcher", "all_reduce", "how rows reach the ranks of their experts, and come back"),
        pick("placement", "Placement", "contiguous", "which rank holds which expert; balanced: laid out again by the load of the first steps"),
        pick("attn_dp", "Attention DP", 1, "ranks that each attend for requests of their own"),
        pick("batch_size", "Batch size", 4, "requests decoded together"),
        pick("block_size", "Block size γ", 5, "draft tokens of a block"),
        Switch("use_graph", "CUDA graphs", e.use_graph, tip="a round is launched as two graphs"),
        Switch("mask_padding", "Mask padding", e.mask_padding, tip="off: padded rows are computed and thrown away"),
        Switch("overlap", "Overlap: host runs ahead", e.overlap, tip="results are read two rounds late"),
        pick("drafter", "Drafter", ITS_OWN, "trained drafters of the shipped target: heads, backbones, baselines"),
        pick("text", "Text", e.text, "what prompts are: random ids, or held-out text of one kind or of all in turn"),
        pick("temperature", "Temperature", e.temperature, "of drafter and target; 0 is greedy"),
        pick("device", "Device", e.device),
        pick("verify", "Verify", e.verify, "static verifies whole blocks; threshold cuts at a confidence; scheduled shares out a budget"),
        pick("layout", "Layout", e.layout, "compact computes only the rows that are verified"),
        Toggle("confidence_threshold", "Threshold", number, tip="blocks are cut where the drafter's confidence falls below"),
        pick("num_steps", "Steps", 64, "measured steps of a block"),
        pick("repeats", "Repeats", 3, "blocks of each strategy, interleaved"),
        pick("processes", "Processes", 3, "times the whole is started anew: the replicate of the interval"),
        pick("profile_steps", "Profiled steps", 8, "captured for the timeline, never compared"),
    ]  # fmt: skip
    for t in toggles:
        if t.name in WIDE:
            t.control.layout.width = t.widget.layout.width = "216px"
    return {t.name: t for t in toggles}


def _places(name: str, table: pd.DataFrame) -> list[Any]:
    """The values of a toggle here and of the recordings, in order."""
    have = set(table[name]) if name in table else set()
    if name in NAMES:
        more = have | set(foreign_dispatchers()) if name == "dispatcher" else have
        return [*NAMES[name], *sorted(more - set(NAMES[name]))]
    return sorted({*VALUES[name], *have})


def laid_out(toggles: dict[str, Any], between: Any) -> W.VBox:
    """The column; ``between`` stands over what a recording fixes."""
    rule = W.HTML(
        '<div style="border-top:1px solid var(--jp-border-color2,#E5E7EB);height:1px"></div>',
        layout=W.Layout(margin="3px 0 1px 0"),
    )
    parts = [toggles["alloc"].widget]
    for names in RECORDED_ROWS:
        parts += _row(toggles, *names)
    parts += [rule, between]
    for names in LIVE_ROWS:
        parts += _row(toggles, *names)
    layout = W.Layout(width="238px", min_width="238px", padding="0 4px 0 0", overflow="hidden auto", max_height="640px")
    box = W.VBox(parts, layout=layout)
    box.add_class("dspark-board")
    return box


def _row(toggles: dict[str, Any], *names: str) -> list[Any]:
    """Toggles beside each other, and under them what their reasons say."""
    row = W.HBox([toggles[n].widget for n in names], layout=W.Layout(margin="0", overflow="hidden"))
    row.add_class("dspark-row")
    return [row, *(toggles[n].line for n in names)]


def listed(name: str, value: Any) -> list[Any]:
    """The values that a toggle lists for a live run, with the one asked for among them."""
    if name in NAMES:
        known = [*NAMES[name], *(foreign_dispatchers() if name == "dispatcher" else ())]
        return list(dict.fromkeys([*known, value]))
    return sorted(VALUES[name] if value != value else {*VALUES[name], value})


def check_kind(name: str, value: Any) -> None:
    """Raises `LabError` for a value that is of no use to the toggle ``name``, whatever the others say."""
    said = ", ".join(map(str, VALUES.get(name, ())))
    if name in LEAST and (isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]):
        raise LabError(f"{name}={value!r} is not a whole number of at least {LEAST[name]}; such as {said}.")
    if name in (*VALUES, "confidence_threshold") and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise LabError(f"{name}={value!r} is not a number; legal: {said or '0 to 1'}.")
    if name == "host_work_us" and not (value >= 0 and math.isfinite(value)):
        raise LabError(f"host_work_us={value!r} is not a time: microseconds, at least 0; such as {said}.")
    if name == "temperature" and not (value == 0 or MIN_TEMPERATURE <= value < math.inf):
        raise LabError(f"temperature={value!r} is neither 0 (greedy) nor at least {MIN_TEMPERATURE}; such as {said}.")
    if name == "confidence_threshold" and not 0 <= value <= 1:
        raise LabError(f"confidence_threshold={value!r} is not between 0 and 1.")
    if name in (*BOXES, "floor") and not isinstance(value, bool):
        raise LabError(f"{name}={value!r} is neither True nor False.")
    if name in NAMES and not isinstance(value, str):
        raise LabError(f"{name}={value!r} is not a name, such as {NAMES[name][0]}.")
    if name == "alloc" and not isinstance(value, (str, list, tuple, set)):
        raise LabError(f"alloc={value!r} is not a list of strategies; legal: {', '.join(ALLOCS)}.")
    if name == "preset":
        preset(str(value))
