"""The left column: all toggles, what they say together, and which of them make sense now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as W
import pandas as pd

from dspark_lab.config import ALLOCS, PRESETS, LabConfig, preset
from dspark_lab.errors import LabError, nearest
from dspark_lab.view import reasons
from dspark_lab.view.reasons import FACETS, WORDS, Choice
from dspark_lab.view.toggles import SOFT, Arms, Pick, Toggle

VALUES: dict[str, tuple[Any, ...]] = {
    "ep_size": (1, 2, 3, 4, 8),
    "tp_size": (1, 2),
    "batch_size": (1, 2, 4, 8, 16, 32),
    "block_size": (1, 2, 3, 4, 5, 6, 7),
    "num_steps": (16, 32, 64, 128, 256),
    "repeats": (1, 2, 3, 5, 10),
    "processes": (1, 2, 3, 5),
    "profile_steps": (0, 8, 16),
}
RUN_OPTIONS = ("num_steps", "repeats", "processes", "profile_steps")
FIXED = "a recording keeps the settings it was made with; choose This machine"


class Board:
    """Toggles by name in ``toggles``. ``settle`` brings them into agreement after a change and says what is not possible."""

    def __init__(self, table: pd.DataFrame, *, live: bool, asked: dict[str, Any]) -> None:
        self.table = table
        self._check(asked)
        self.base = preset(asked.pop("preset", "tiny"))
        arms = asked.pop("alloc", ["none", "blocking", "non_blocking", "on_demand"])
        arms = [arms] if isinstance(arms, str) else list(arms)
        self.toggles: dict[str, Any] = self._make(arms)
        given = {n: asked[n] for n in FACETS if n in asked}
        start = {n: self.base.toggle(n) for n in FACETS} | given
        self._asked = {
            True: start,
            False: reasons.snapped(table, start, next(iter(given), None)) if len(table) else dict(start),
        }
        """What was asked of the facets: of a live run, and of the recordings."""
        self.extra = {n: v for n, v in asked.items() if n not in self.toggles}
        """Toggles of the config that have no control here, as given."""
        for name, value in asked.items():
            if name in self.toggles and name not in FACETS:
                self.toggles[name].value = value
        self._mine = {n: self.toggles[n].value for n in self.toggles if n not in (*FACETS, "alloc")}
        """Settings of a live run, kept while those of a recording are shown."""
        self.widget = self._laid_out()
        self.settle(live=live)

    def _check(self, asked: dict[str, Any]) -> None:
        if "preset" in asked:
            preset(asked["preset"])
        known = {*preset("tiny").to_dict(), *RUN_OPTIONS}
        for name in asked:
            if name not in known:
                raise LabError(f"{name!r} is no toggle of the panel.{nearest(name, known)}")
        for name in asked.get("alloc", []) if not isinstance(asked.get("alloc"), str) else [asked["alloc"]]:
            preset("tiny", alloc="none").replace(alloc=name, use_graph=True)

    def _make(self, arms: list[str]) -> dict[str, Any]:
        e = self.base.engine
        slim = W.Layout(width="116px")
        toggles: list[Any] = [
            Arms(ALLOCS, arms, tips={n: f"{a.transfer}, {a.guard}: {a.origin}" for n, a in ALLOCS.items()}),
            Pick("ep_size", "EP size", VALUES["ep_size"], 1, tip="ranks that share the experts of each MoE layer"),
            Pick("tp_size", "TP size", VALUES["tp_size"], 1, tip="ranks that share attention"),
            Pick("batch_size", "Batch size", VALUES["batch_size"], 4, tip="requests decoded together"),
            Pick("block_size", "Block size γ", VALUES["block_size"], 5, tip="draft tokens of a block"),
            Pick("preset", "Preset", PRESETS, self.base.preset, tip="model shapes to start from"),
            Pick("device", "Device", ("auto", "cpu", "cuda"), e.device),
            Pick("verify", "Verify", ("static", "threshold"), e.verify, tip="static verifies whole blocks"),
            Toggle("confidence_threshold", "Threshold", W.FloatSlider(value=0.0, min=0, max=1, step=0.05, continuous_update=False, readout_format=".2f", layout=slim),
                   tip="blocks are cut where the drafter's confidence falls below"),
            Toggle("mask_padding", "Mask padding", W.Checkbox(value=e.mask_padding, indent=False, layout=slim), tip="off: padded rows are computed and thrown away"),
            Pick("num_steps", "Steps", VALUES["num_steps"], 64, tip="measured steps of a block"),
            Pick("repeats", "Repeats", VALUES["repeats"], 3, tip="blocks of each strategy, interleaved"),
            Pick("processes", "Processes", VALUES["processes"], 3, tip="times the whole is started anew: the replicate of the interval"),
            Pick("profile_steps", "Profiled steps", VALUES["profile_steps"], 8, tip="captured for the timeline, never compared"),
            Toggle("use_graph", "CUDA graphs", W.Checkbox(value=e.use_graph, indent=False, layout=slim)),
            Toggle("overlap", "Overlap", W.Checkbox(value=e.overlap, indent=False, layout=slim), tip="the host runs ahead of the device"),
            Toggle("host_work_us", "Host work, µs", W.IntSlider(value=int(e.host_work_us), min=0, max=500, step=50, continuous_update=False, layout=slim),
                   tip="busy Python after the scalar's place, standing for a scheduler"),
        ]  # fmt: skip
        return {t.name: t for t in toggles}

    def _laid_out(self) -> W.VBox:
        t = {n: x.widget for n, x in self.toggles.items()}
        self._fixed = W.HTML(layout=W.Layout(margin="2px 0"))
        more_names = ("processes", "profile_steps", "use_graph", "overlap", "host_work_us")
        more = W.Accordion(
            [W.VBox([t[n] for n in more_names], layout=W.Layout(overflow="hidden"))],
            titles=("More",),
            selected_index=None,
        )
        more.layout.margin = "4px 0 0 0"
        rule = W.HTML(
            '<hr style="margin:3px 0;border:0;border-top:1px solid var(--jp-border-color2,#E5E7EB)">',
            layout=W.Layout(margin="0", height="8px"),
        )
        shared = [t[n] for n in ("alloc", *FACETS)]
        own = [
            t[n] for n in ("preset", "device", "verify", "confidence_threshold", "mask_padding", "num_steps", "repeats")
        ]
        layout = W.Layout(
            width="230px", min_width="230px", padding="0 6px 0 0", overflow="hidden auto", max_height="600px"
        )
        box = W.VBox([*shared, rule, self._fixed, *own, more], layout=layout)
        box.add_class("dspark-board")
        return box

    def observe(self, seen: Callable[[str], Any]) -> None:
        for t in self.toggles.values():
            t.observe(seen)

    # -- what they say -----------------------------------------------------------------------------------------

    @property
    def arms(self) -> list[str]:
        return self.toggles["alloc"].value

    @property
    def facets(self) -> dict[str, Any]:
        return {n: self.toggles[n].value for n in FACETS}

    @property
    def options(self) -> dict[str, int]:
        """What a sweep is asked for, beside its config."""
        return {n: self._mine[n] for n in RUN_OPTIONS}

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

    # -- what makes sense --------------------------------------------------------------------------------------

    def settle(self, *, live: bool, turned: str | None = None) -> None:
        """Offers each toggle the values that are possible now; ``turned`` is the toggle a person just changed."""
        if turned in FACETS:
            self._asked[live][str(turned)] = self.toggles[str(turned)].value
        elif live and turned in self._mine:
            self._mine[str(turned)] = self.toggles[str(turned)].value
        if live:
            self._settle_live(turned)
        else:
            self._settle_recorded(turned)

    def _settle_recorded(self, turned: str | None) -> None:
        at = self._asked[False] = reasons.snapped(self.table, self._asked[False], turned)
        for name in FACETS:
            self.toggles[name].offer(
                reasons.on_record(self.table, name, VALUES[name] if name in ("ep_size", "tp_size") else ()),
                at[name],
                word=WORDS[name],
            )
        self.toggles["alloc"].offer(reasons.arms_on_record(self.table, at))
        for name in self._mine:
            self.toggles[name].say(FIXED, disabled=True, aloud=False)
        self._fixed.value = f'<div style="{SOFT}">{FIXED}</div>'

    def show(self, cfg: LabConfig | None) -> None:
        """Puts the settings of a recording into the toggles that it fixes; "–" for what a recording does not say."""
        for name in self._mine:
            value = None if cfg is None or name in RUN_OPTIONS else cfg.toggle(name)
            self.toggles[name].fix(value)

    def _settle_live(self, turned: str | None) -> None:
        self._fixed.value = ""
        if turned == "preset":
            self.base = preset(self._mine["preset"])
            self._asked[True] = {n: self.base.toggle(n) for n in FACETS}
        neutral = self._neutral()
        for name in FACETS:
            choices = [self._live_choice(neutral, name, v) for v in VALUES[name]]
            legal = [c.value for c in choices if not c.reason]
            value = self._asked[True][name] if self._asked[True][name] in legal else legal[0]
            self.toggles[name].offer(choices, value, word="TP" if name == "tp_size" else "")
            neutral = neutral.replace(**{name: value})
        self.toggles["preset"].offer([Choice(value=p) for p in PRESETS], self.base.preset)
        self.toggles["device"].offer([_device(d) for d in ("auto", "cpu", "cuda")], self._mine["device"])
        verify = reasons.here(neutral.replace(confidence_threshold=0.0), "verify", ("static", "threshold"))
        self.toggles["verify"].offer(verify, self._mine["verify"])
        for name in RUN_OPTIONS:
            values = sorted({*VALUES[name], self._mine[name]})
            self.toggles[name].offer([Choice(value=v) for v in values], self._mine[name])
        self._settle_switches(neutral)
        self.toggles["alloc"].offer(reasons.arms_here(self._neutral()))

    def _settle_switches(self, neutral: LabConfig) -> None:
        threshold = self.toggles["confidence_threshold"]
        static = self._mine["verify"] == "static"
        if static:
            self._mine["confidence_threshold"] = 0.0
        threshold.value = self._mine["confidence_threshold"]
        threshold.say("threshold is read with verify = threshold only" if static else "", disabled=static)
        for name in ("use_graph", "overlap"):
            why = reasons.not_live(neutral, **{name: True})
            self._mine[name] = self._mine[name] and not why
            self.toggles[name].value = self._mine[name]
            self.toggles[name].say(why, disabled=bool(why))
        for name in ("mask_padding", "host_work_us"):
            self.toggles[name].value = self._mine[name]
            self.toggles[name].say("")

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


def _device(name: str) -> Choice:
    if name != "cuda":
        return Choice(value=name)
    try:
        import torch

        seen = torch.cuda.is_available()
    except ImportError:
        return Choice(value=name, reason="cuda: torch is not installed")
    return Choice(value=name, reason="" if seen else "cuda: torch sees no GPU on this machine")
