"""The left column: all toggles, what they say together, and which of them make sense now."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import ipywidgets as W
import pandas as pd

from dspark_lab.config import ALLOCS, PRESETS, LabConfig, preset
from dspark_lab.errors import LabError, nearest
from dspark_lab.view.panel import reasons, recordings
from dspark_lab.view.panel.arms import Arms
from dspark_lab.view.panel.reasons import FACETS, WORDS, Choice
from dspark_lab.view.panel.toggles import SOFT, Pick, Switch, Toggle

VALUES: dict[str, tuple[Any, ...]] = {
    "ep_size": (1, 2, 3, 4, 8),
    "tp_size": (1, 2, 4),
    "batch_size": (1, 2, 4, 8, 16, 32),
    "block_size": (1, 2, 3, 4, 5, 6, 7),
    "host_work_us": (0, 50, 100, 200, 400, 600, 800, 1000),
    "num_steps": (16, 32, 64, 128, 256),
    "repeats": (1, 2, 3, 5, 10),
    "processes": (1, 2, 3, 5),
    "profile_steps": (0, 8, 16),
}
LEAST = {"num_steps": 1, "repeats": 1, "processes": 1, "profile_steps": 0}
RUN_OPTIONS = ("num_steps", "repeats", "processes", "profile_steps")
FIXED = "a recording keeps the settings it was made with; choose This machine"
RECORDED_ROWS = (("recording",), ("preset", "host_work_us"), ("ep_size", "tp_size"), ("batch_size", "block_size"),
                 ("use_graph", "mask_padding"))  # fmt: skip
"""Toggles that choose among recordings too, two a row; the rest is of live runs."""
LIVE_ROWS = (("overlap",), ("device", "verify"), ("confidence_threshold", "num_steps"), ("repeats", "processes"),
             ("profile_steps",))  # fmt: skip
BOXES = ("use_graph", "mask_padding", "overlap")


class Board:
    """Toggles by name in ``toggles``. ``settle`` brings them into agreement after a change and says what is not possible."""

    def __init__(self, table: pd.DataFrame, *, live: bool, asked: dict[str, Any]) -> None:
        self.table = table
        self._check(asked)
        named = asked.get("alloc")
        given = {n: asked[n] for n in recordings.FACETS if n in asked}
        self.base = preset(asked.pop("preset", "tiny"))
        arms = asked.pop("alloc", ["none", "blocking", "non_blocking", "on_demand"])
        arms = [arms] if isinstance(arms, str) else list(arms)
        self.toggles: dict[str, Any] = self._make(arms)
        start = {n: self.base.toggle(n) for n in FACETS} | {n: given[n] for n in FACETS if n in given}
        self._asked = {True: start, False: self._first_recording(given)}
        """What was asked of the facets: of a live run, and of the recordings."""
        self._floor = {True: bool(asked.get("floor", False)), False: bool(asked.get("floor", True))}
        self._recording: str | None = None
        self.extra = {n: v for n, v in asked.items() if n not in self.toggles}
        """Toggles of the config that have no control here, as given."""
        for name, value in asked.items():
            if name in self.toggles and name not in FACETS:
                self.toggles[name].value = value
        self._mine = {n: t.value for n, t in self.toggles.items() if n not in (*FACETS, "alloc", "floor", "recording")}
        """Settings of a live run, kept while those of a recording are shown."""
        self.widget = self._laid_out()
        self._unmet: LabError | None = None
        self.settle(live=live)
        alloc = self.toggles["alloc"]
        if live and named and not set(arms) & {n for n, box in alloc.boxes.items() if not box.disabled}:
            why = alloc.reasons.get(arms[0], "it is not offered")
            self._unmet = LabError(f"alloc={arms[0]!r} cannot be chosen now: {why}; legal: {', '.join(alloc.value)}.")

    def _check(self, asked: dict[str, Any]) -> None:
        for name, value in asked.items():
            _check_kind(name, value)
        if "preset" in asked:
            preset(asked["preset"])
        known = {*preset("tiny").to_dict(), *RUN_OPTIONS, "floor"}
        for name in asked:
            if name not in known:
                raise LabError(f"{name!r} is no toggle of the panel.{nearest(name, known)}")
        for name in asked.get("alloc", []) if not isinstance(asked.get("alloc"), str) else [asked["alloc"]]:
            preset("tiny", alloc="none").replace(alloc=name, use_graph=True)

    def _first_recording(self, given: dict[str, Any]) -> dict[str, Any]:
        base = preset(given.get("preset", "small"), use_graph=True)
        start = {n: base.toggle(n) for n in recordings.FACETS} | given
        return recordings.snapped(self.table, start, next(iter(given), None)) if len(self.table) else start

    def _make(self, arms: list[str]) -> dict[str, Any]:
        e = self.base.engine
        floor = Switch(
            "floor",
            "Floor",
            False,
            tip="an arm more at EP > 1: the mask compiled out and nothing built, to compare the others with",
        )
        number = W.BoundedFloatText(value=0.0, min=0, max=1, step=0.05)
        toggles: list[Any] = [
            Arms(ALLOCS, arms, tips={n: f"{a.transfer}, {a.guard}: {a.origin}" for n, a in ALLOCS.items()}, also=[floor.control]),
            floor,
            Pick("recording", "Recording", sorted(set(self.table["set"])) or ["–"], None, tip="sets of runs that were measured with the same settings"),
            Pick("preset", "Preset", self._places("preset"), self.base.preset, tip="model shapes to start from"),
            Pick("host_work_us", "Host work, µs", self._places("host_work_us"), int(e.host_work_us), tip="busy Python after the scalar's place, standing for a scheduler"),
            Pick("ep_size", "EP size", self._places("ep_size"), 1, tip="ranks that share the experts of each MoE layer"),
            Pick("tp_size", "TP size", self._places("tp_size"), 1, tip="ranks that share attention"),
            Pick("batch_size", "Batch size", self._places("batch_size"), 4, tip="requests decoded together"),
            Pick("block_size", "Block size γ", self._places("block_size"), 5, tip="draft tokens of a block"),
            Switch("use_graph", "CUDA graphs", e.use_graph, tip="a round is launched as two graphs"),
            Switch("mask_padding", "Mask padding", e.mask_padding, tip="off: padded rows are computed and thrown away"),
            Switch("overlap", "Overlap: host runs ahead", e.overlap, tip="results are read two rounds late"),
            Pick("device", "Device", ("auto", "cpu", "cuda"), e.device),
            Pick("verify", "Verify", ("static", "threshold"), e.verify, tip="static verifies whole blocks"),
            Toggle("confidence_threshold", "Threshold", number, tip="blocks are cut where the drafter's confidence falls below"),
            Pick("num_steps", "Steps", VALUES["num_steps"], 64, tip="measured steps of a block"),
            Pick("repeats", "Repeats", VALUES["repeats"], 3, tip="blocks of each strategy, interleaved"),
            Pick("processes", "Processes", VALUES["processes"], 3, tip="times the whole is started anew: the replicate of the interval"),
            Pick("profile_steps", "Profiled steps", VALUES["profile_steps"], 8, tip="captured for the timeline, never compared"),
        ]  # fmt: skip
        return {t.name: t for t in toggles}

    def _places(self, name: str) -> list[Any]:
        """The values of a toggle here and of the recordings, in order."""
        have = set(self.table[name])
        return [*PRESETS, *sorted(have - set(PRESETS))] if name == "preset" else sorted({*VALUES[name], *have})

    def _laid_out(self) -> W.VBox:
        self._fixed = W.HTML(layout=W.Layout(margin="0"))
        rule = W.HTML(
            '<div style="border-top:1px solid var(--jp-border-color2,#E5E7EB);height:1px"></div>',
            layout=W.Layout(margin="3px 0 1px 0"),
        )
        self.toggles["overlap"].control.layout.width = "216px"
        self.toggles["recording"].control.layout.width = self.toggles["recording"].widget.layout.width = "216px"
        parts = [self.toggles["alloc"].widget]
        for names in RECORDED_ROWS:
            parts += self._row(*names)
        parts += [rule, self._fixed]
        for names in LIVE_ROWS:
            parts += self._row(*names)
        layout = W.Layout(
            width="238px", min_width="238px", padding="0 4px 0 0", overflow="hidden auto", max_height="640px"
        )
        box = W.VBox(parts, layout=layout)
        box.add_class("dspark-board")
        return box

    def _row(self, *names: str) -> list[Any]:
        """Toggles beside each other, and under them what their reasons say."""
        row = W.HBox([self.toggles[n].widget for n in names], layout=W.Layout(margin="0", overflow="hidden"))
        row.add_class("dspark-row")
        return [row, *(self.toggles[n].line for n in names)]

    def observe(self, seen: Callable[[str], Any]) -> None:
        for t in self.toggles.values():
            t.observe(seen)

    # -- what they say -----------------------------------------------------------------------------------------

    @property
    def arms(self) -> list[str]:
        return self.toggles["alloc"].value

    @property
    def floor(self) -> bool:
        """Whether the floor arm is chosen and can be."""
        return bool(self.toggles["floor"].value and not self.toggles["floor"].control.disabled)

    @property
    def facets(self) -> dict[str, Any]:
        return {n: self.toggles[n].value for n in FACETS}

    @property
    def rows(self) -> pd.DataFrame:
        """The recordings chosen."""
        at = {**self._asked[False], "set": self._recording}
        return recordings.chosen(self.table, at, self.arms, floor=self.floor)

    @property
    def options(self) -> dict[str, Any]:
        """What a sweep is asked for, beside its config."""
        return {n: self._mine[n] for n in RUN_OPTIONS} | ({"floor": True} if self._floor_here() else {})

    def changes(self) -> dict[str, Any]:
        """Toggles that differ from the preset, by name, without `alloc`."""
        names = [
            *FACETS,
            "device",
            "verify",
            "confidence_threshold",
            "mask_padding",
            "use_graph",
            "overlap",
            "host_work_us",
        ]
        now = {n: self._asked[True][n] if n in FACETS else self._mine[n] for n in names} | self.extra
        return {n: v for n, v in now.items() if v != self.base.toggle(n)}

    def config(self) -> LabConfig:
        """The config of the first arm chosen. Raises `LabError` where toggles contradict each other."""
        return self.base.replace(**self.changes(), alloc=(self.arms or ["on_demand"])[0])

    def fault(self) -> LabError | None:
        """Why a live run cannot be made of the toggles as they are; None where it can."""
        try:
            for name in RUN_OPTIONS:
                _check_kind(name, self._mine[name])
            cfg = self.config()
        except LabError as e:
            return e
        if cfg.engine.device == "cuda" and (why := reasons.gpu_here()):
            return LabError(f"device='cuda' cannot be chosen here: {why}; legal: auto, cpu.")
        for name in FACETS:
            if why := reasons.not_live(cfg, **{name: cfg.toggle(name)}):
                return LabError(f"{name}={cfg.toggle(name)!r} cannot be chosen here: {why}.")
        return self._unmet

    def kept(self) -> dict[str, Any]:
        """What was asked for so far, to `restore`."""
        names = ("base", "_asked", "_floor", "_recording", "_mine")
        return {n: copy.deepcopy(getattr(self, n)) for n in names}

    def restore(self, kept: dict[str, Any], *, live: bool) -> None:
        """Asks again for what was ``kept``."""
        for name, value in kept.items():
            setattr(self, name, value)
        self.toggles["alloc"].refused = None
        self.settle(live=live)

    # -- what makes sense --------------------------------------------------------------------------------------

    def settle(self, *, live: bool, turned: str | None = None) -> None:
        """Offers each toggle the values that are possible now; ``turned`` is the toggle a person just changed."""
        self._take(live, turned)
        if live:
            self._settle_live(turned)
        else:
            self._settle_recorded(turned)

    def _take(self, live: bool, turned: str | None) -> None:
        """Remembers what a person just asked for. Raises `LabError` for what is no value of the toggle at all."""
        if turned is None:
            return
        self._unmet = None
        if turned == "alloc":
            if self.toggles["alloc"].refused:
                raise self.toggles["alloc"].refused
            return
        _check_kind(turned, self.toggles[turned].value)
        if turned == "floor":
            self._floor[live] = bool(self.toggles["floor"].value)
        elif turned == "recording":
            self._recording = self.toggles["recording"].value
        elif turned in (FACETS if live else recordings.FACETS):
            self._asked[live][str(turned)] = self.toggles[str(turned)].value
        elif live:
            self._mine[str(turned)] = self.toggles[str(turned)].value
        else:
            raise LabError(f"{turned}={self.toggles[str(turned)].value!r} is not taken: {FIXED}.")

    def untaken(self, name: str, asked: Any) -> LabError | None:
        """Why the toggle ``name`` does not say what a person ``asked`` of it, now that all are settled; None where it does."""
        toggle = self.toggles[name]
        if name == "alloc" or toggle.value == asked:  # strategies say themselves what they refused
            return None
        why = toggle.reason or f"with the other settings there is only {', '.join(map(str, toggle.offered))}"
        return LabError(f"{name}={asked!r} cannot be chosen now: {why}.")

    def _settle_recorded(self, turned: str | None) -> None:
        if not len(self.table):
            return
        arms = self.table[self.table["role"] == "arm"]
        at = self._asked[False] = recordings.snapped(self.table, self._asked[False], turned)
        for name in recordings.FACETS:
            if name in BOXES:
                self.toggles[name].offer(reasons.switch_on_record(arms, name), at[name])
            else:
                asked = VALUES[name] if name in ("ep_size", "tp_size") else ()
                self.toggles[name].offer(reasons.on_record(arms, name, asked), at[name], word=WORDS[name])
        sets = recordings.sets_at(self.table, at)
        if self._recording not in sets:
            self._recording = sets[0]
        self.toggles["recording"].offer([Choice(value=s) for s in sets], self._recording)
        self.toggles["recording"].widget.layout.display = "" if len(sets) > 1 else "none"
        here = recordings.matching(arms, {**at, "set": self._recording})
        has_floor = bool(here["floor"].any())
        why = (
            "" if has_floor else f"no floor recorded at EP {at['ep_size']}" if at["ep_size"] > 1 else "EP 1: none is it"
        )
        self.toggles["floor"].control.value = self._floor[False] and has_floor
        self.toggles["floor"].say(why, disabled=not has_floor, aloud=False)
        self.toggles["alloc"].offer(reasons.arms_on_record(arms, {**at, "set": self._recording}))
        for name in self._fixed_names():
            self.toggles[name].say(FIXED, disabled=True, aloud=False)
        self._fixed.value = f'<div style="{SOFT}">As it was recorded:</div>'

    def _fixed_names(self) -> list[str]:
        """Toggles of a live run that do not choose among recordings."""
        return [n for n in self._mine if n not in recordings.FACETS]

    def show(self, cfg: LabConfig | None) -> None:
        """Puts the settings of a recording into the toggles that it fixes; "–" for what a recording does not say."""
        for name in self._fixed_names():
            value = None if cfg is None or name in RUN_OPTIONS else cfg.toggle(name)
            self.toggles[name].fix(value)

    def _settle_live(self, turned: str | None) -> None:
        self._fixed.value = ""
        self.toggles["recording"].widget.layout.display = "none"
        if turned == "preset":
            self.base = preset(self._mine["preset"])
            self._asked[True] = {n: self.base.toggle(n) for n in FACETS}
        if why := reasons.no_torch():
            self._grey(why)
            return
        neutral = self._neutral()
        for name in FACETS:
            choices = [self._live_choice(neutral, name, v) for v in _listed(name, self._asked[True][name])]
            value = self._asked[True][name]
            self.toggles[name].offer(choices, value, word="TP" if name == "tp_size" else "")
            if not reasons.why_not(neutral, **{name: value}):
                neutral = neutral.replace(**{name: value})
        self.toggles["preset"].offer([Choice(value=p) for p in PRESETS], self.base.preset)
        no_gpu = reasons.gpu_here()
        devices = [Choice(value=d, reason=no_gpu and f"cuda: {no_gpu}" if d == "cuda" else "") for d in ("auto", "cpu", "cuda")]  # fmt: skip
        self.toggles["device"].offer(devices, self._mine["device"])
        verify = reasons.here(neutral.replace(confidence_threshold=0.0), "verify", ("static", "threshold"))
        self.toggles["verify"].offer(verify, self._mine["verify"])
        for name in (*RUN_OPTIONS, "host_work_us"):
            values = _listed(name, self._mine[name])
            self.toggles[name].offer([Choice(value=v) for v in values], self._mine[name])
        self._settle_switches()
        self.toggles["alloc"].offer(reasons.arms_here(self._neutral()))

    def _grey(self, why: str) -> None:
        """Shows what a live run would be, not to be turned; the reason stands once, under the strategies."""
        for name in (*FACETS, *self._mine):
            self.toggles[name].fix(self._asked[True][name] if name in FACETS else self._mine[name])
        for name, toggle in self.toggles.items():
            if name != "alloc":
                toggle.say(why, disabled=True, aloud=False)
        self.toggles["alloc"].offer([Choice(value=a, reason=why) for a in ALLOCS])

    def _settle_switches(self) -> None:
        threshold = self.toggles["confidence_threshold"]
        static = self._mine["verify"] == "static"
        if static:
            self._mine["confidence_threshold"] = 0.0
        threshold.value = self._mine["confidence_threshold"]
        threshold.say("read with verify threshold only" if static else "", disabled=static)
        no_graphs = reasons.graphs_here(self._mine["device"])
        self._mine["use_graph"] = self._mine["use_graph"] and not no_graphs
        for name, why in (("use_graph", no_graphs), ("mask_padding", ""), ("overlap", "")):
            self.toggles[name].offer([Choice(value=False), Choice(value=True)], self._mine[name], why=why)
        why = self._no_floor()
        self.toggles["floor"].control.value = self._floor_here()
        self.toggles["floor"].say(why, disabled=bool(why), aloud=False)

    def _no_floor(self) -> str:
        """Why a live run has no floor arm; empty where it can."""
        if self._asked[True]["ep_size"] == 1:
            return "at EP 1 nothing reads the scalar: none is the floor"
        return "" if self._mine["mask_padding"] else "mask padding is off: none is the floor"

    def _floor_here(self) -> bool:
        return self._floor[True] and not self._no_floor()

    def _neutral(self) -> LabConfig:
        """The live config with a strategy that is legal everywhere, for asking what else is."""
        cfg = self.base.replace(alloc="on_demand", **self.extra)
        for name in ("verify", "confidence_threshold", "mask_padding", "use_graph", "host_work_us", *FACETS):
            value = self._asked[True][name] if name in FACETS else self._mine[name]
            if not reasons.why_not(cfg, **{name: value}):
                cfg = cfg.replace(**{name: value})
        return cfg

    def _live_choice(self, cfg: LabConfig, name: str, value: Any) -> Choice:
        return Choice(
            value=value, reason=reasons.why_not(cfg, **{name: value}) or reasons.not_live(cfg, **{name: value})
        )


def _listed(name: str, value: Any) -> list[Any]:
    """The values that a toggle lists, with the one asked for among them."""
    return sorted(VALUES[name] if value != value else {*VALUES[name], value})


def _check_kind(name: str, value: Any) -> None:
    """Raises `LabError` for a value that is of no use to the toggle ``name``, whatever the others say."""
    listed = ", ".join(map(str, VALUES.get(name, ())))
    if name in LEAST and (isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]):
        raise LabError(f"{name}={value!r} is not a whole number of at least {LEAST[name]}; such as {listed}.")
    if name in (*VALUES, "confidence_threshold") and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise LabError(f"{name}={value!r} is not a number; legal: {listed or '0 to 1'}.")
    if name == "host_work_us" and not (value >= 0 and math.isfinite(value)):
        raise LabError(f"host_work_us={value!r} is not a time: microseconds, at least 0; such as {listed}.")
    if name == "confidence_threshold" and not 0 <= value <= 1:
        raise LabError(f"confidence_threshold={value!r} is not between 0 and 1.")
    if name in (*BOXES, "floor") and not isinstance(value, bool):
        raise LabError(f"{name}={value!r} is neither True nor False.")
    if name in ("preset", "device", "verify") and not isinstance(value, str):
        raise LabError(
            f"{name}={value!r} is not a name, such as {'tiny' if name == 'preset' else 'auto' if name == 'device' else 'static'}."
        )
    if name == "alloc" and not isinstance(value, (str, list, tuple, set)):
        raise LabError(f"alloc={value!r} is not a list of strategies; legal: {', '.join(ALLOCS)}.")
    if name == "preset":
        preset(str(value))
