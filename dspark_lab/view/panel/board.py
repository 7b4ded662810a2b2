"""The left column: all toggles, what they say together, and which of them make sense now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ipywidgets as W
import pandas as pd

from dspark_lab.config import ALLOCS, PRESETS, LabConfig, preset
from dspark_lab.config.shipped import DRAFTERS
from dspark_lab.errors import LabError, nearest
from dspark_lab.view.panel import controls, reasons, recordings
from dspark_lab.view.panel.asked import Asked
from dspark_lab.view.panel.controls import BOXES, ITS_OWN, NAMES, RUN_OPTIONS, SHIPPED, VALUES, check_kind, listed
from dspark_lab.view.panel.following import following
from dspark_lab.view.panel.reasons import FACETS, SPREAD, WORDS, Choice
from dspark_lab.view.panel.toggles import SOFT

FIXED = "a recording keeps the settings it was made with; choose This machine"


class Board:
    """Toggles by name in ``toggles``. ``settle`` brings them into agreement after a change and says what is not possible."""

    def __init__(self, table: pd.DataFrame, *, live: bool, asked: dict[str, Any]) -> None:
        self.table = table
        _check(asked)
        named = asked.get("alloc")
        given = {n: asked[n] for n in recordings.FACETS if n in asked}
        chosen, drafter = asked.pop("preset", SHIPPED), asked.pop("drafter", ITS_OWN)
        base = preset(chosen)
        arms = asked.pop("alloc", ["none", "blocking", "non_blocking", "on_demand"])
        arms = [arms] if isinstance(arms, str) else list(arms)
        self.toggles: dict[str, Any] = controls.made(base, arms, table)
        for name, value in asked.items():
            if name in self.toggles and name not in FACETS:
                self.toggles[name].value = value
        own = (*FACETS, "alloc", "floor", "recording")
        self.asked = Asked(
            base=base,
            facets={n: given.get(n, base.toggle(n)) for n in FACETS},
            recorded=_first_recording(table, given),
            floor={True: bool(asked.get("floor", False)), False: bool(asked.get("floor", True))},
            mine={n: t.value for n, t in self.toggles.items() if n not in own},
            extra={n: v for n, v in asked.items() if n not in self.toggles},
        )
        if chosen == SHIPPED:
            self._start_from_shipped(drafter, given, text=asked.get("text"))
        self._fixed = W.HTML(layout=W.Layout(margin="0"))
        self.widget = controls.laid_out(self.toggles, self._fixed)
        self._unmet: LabError | None = None
        self.settle(live=live)
        alloc = self.toggles["alloc"]
        if live and named and not set(arms) & {n for n, box in alloc.boxes.items() if not box.disabled}:
            why = alloc.reasons.get(arms[0], "it is not offered")
            self._unmet = LabError(f"alloc={arms[0]!r} cannot be chosen now: {why}; legal: {', '.join(alloc.value)}.")

    def _start_from_shipped(self, drafter: str, given: dict[str, Any], *, text: str | None) -> None:
        self.asked.start_from(SHIPPED, drafter)
        self.asked.facets |= {n: v for n, v in given.items() if n in FACETS}
        if text is not None:  # named by the caller
            self.asked.mine["text"] = text

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
    def at(self) -> dict[str, Any]:
        """The facets and the set of the recordings chosen."""
        return {**self.asked.recorded, "set": self.asked.recording}

    @property
    def rows(self) -> pd.DataFrame:
        """The recordings chosen."""
        return recordings.chosen(self.table, self.at, self.arms, floor=self.floor)

    @property
    def options(self) -> dict[str, Any]:
        """What a sweep is asked for, beside its config."""
        return {n: self.asked.mine[n] for n in RUN_OPTIONS} | ({"floor": True} if self._floor_here() else {})

    def changes(self) -> dict[str, Any]:
        """Toggles that differ from the preset, by name, without `alloc`."""
        return self.asked.changes()

    def config(self) -> LabConfig:
        """The config of the first arm chosen. Raises `LabError` where toggles contradict each other."""
        return self.asked.config((self.arms or ["on_demand"])[0])

    def fault(self) -> LabError | None:
        """Why a live run cannot be made of the toggles as they are; None where it can."""
        return self.asked.fault((self.arms or ["on_demand"])[0]) or self._unmet

    def over_ep(self) -> dict[str, Any]:
        """What a sweep over EP sizes varies, up to the size chosen and at least to 2; empty where only one is legal.

        Strategies are those that are legal at all of them; where ``none`` is left out, the floor stands in."""
        now, cfg = self.asked.facets, self.config()
        sizes = [v for v in self.toggles["ep_size"].offered if v <= max(now["ep_size"], 2)]
        if len(sizes) < 2:
            return {}
        most = cfg.replace(alloc="on_demand", ep_size=sizes[-1], attn_dp=1)
        arms = [a for a in self.arms if not reasons.why_not(most, alloc=a)]
        axes: dict[str, Any] = {"ep_size": sizes, "dispatcher": [now["dispatcher"]], "alloc": arms or ["on_demand"]}
        if now["attn_dp"] != now["ep_size"] or now["ep_size"] == 1:
            axes["attn_dp"] = [now["attn_dp"]]
        return axes | ({"floor": True} if self.floor or len(arms) < len(self.arms) else {})

    def kept(self) -> Asked:
        """What was asked for so far, to `restore`."""
        return copy.deepcopy(self.asked)

    def restore(self, kept: Asked, *, live: bool) -> None:
        """Asks again for what was ``kept``."""
        self.asked = kept
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
        value, asked = self.toggles[turned].value, self.asked
        check_kind(turned, value)
        if turned == "floor":
            asked.floor[live] = bool(value)
        elif turned == "recording":
            asked.recording = value
        elif live and turned in FACETS:
            asked.turn(turned, value)
        elif live:
            asked.mine[turned] = value
        elif turned in recordings.FACETS:
            asked.recorded[turned] = value
        else:
            raise LabError(f"{turned}={value!r} is not taken: {FIXED}.")

    def untaken(self, name: str, asked: Any) -> LabError | None:
        """Why the toggle ``name`` does not say what a person ``asked`` of it, now that all are settled; None where it does."""
        toggle = self.toggles[name]
        if name == "alloc" or toggle.value == asked:  # strategies say themselves what they refused
            return None
        why = toggle.reason or f"with the other settings there is only {', '.join(map(str, toggle.offered))}"
        return LabError(f"{name}={asked!r} cannot be chosen now: {why}.")

    # -- among recordings --------------------------------------------------------------------------------------

    def _settle_recorded(self, turned: str | None) -> None:
        if not len(self.table):
            return
        arms = self.table[self.table["role"] == "arm"]
        at = self.asked.recorded = recordings.snapped(self.table, self.asked.recorded, turned)
        for name in recordings.FACETS:
            if name in BOXES:
                self.toggles[name].offer(reasons.switch_on_record(arms, name), at[name])
                continue
            asked = VALUES[name] if name in ("ep_size", "tp_size") else ()
            choices, only = reasons.on_record(arms, name, asked), reasons.only_one(arms, name)
            self.toggles[name].offer(choices, at[name], word=WORDS[name], why=only if name in SPREAD else "")
        sets = recordings.sets_at(self.table, at)
        if self.asked.recording not in sets:
            self.asked.recording = sets[0]
        self.toggles["recording"].offer([Choice(value=s) for s in sets], self.asked.recording)
        self.toggles["recording"].widget.layout.display = "" if len(sets) > 1 else "none"
        has_floor = bool(recordings.matching(arms, self.at)["floor"].any())
        why = (
            "" if has_floor else f"no floor recorded at EP {at['ep_size']}" if at["ep_size"] > 1 else "EP 1: none is it"
        )
        self.toggles["floor"].control.value = self.asked.floor[False] and has_floor
        self.toggles["floor"].say(why, disabled=not has_floor, aloud=False)
        self.toggles["alloc"].offer(reasons.arms_on_record(arms, self.at))
        for name in self._fixed_names():
            self.toggles[name].say(FIXED, disabled=True, aloud=False)
        self._fixed.value = f'<div style="{SOFT}">As it was recorded:</div>'

    def _fixed_names(self) -> list[str]:
        """Toggles of a live run that do not choose among recordings."""
        return [n for n in self.asked.mine if n not in recordings.FACETS]

    def show(self, cfg: LabConfig | None) -> None:
        """Puts the settings of a recording into the toggles that it fixes; "–" for what a recording does not say."""
        for name in self._fixed_names():
            value = None if cfg is None or name in (*RUN_OPTIONS, "drafter") else cfg.toggle(name)
            self.toggles[name].fix(value)

    # -- of a live run -----------------------------------------------------------------------------------------

    def _settle_live(self, turned: str | None) -> None:
        asked = self.asked
        self._fixed.value = ""
        self.toggles["recording"].widget.layout.display = "none"
        if turned in ("preset", "drafter"):
            asked.start_from(asked.mine["preset"], asked.mine["drafter"])
        if why := reasons.no_torch():
            self._grey(why)
            return
        self._settle_facets()
        self.toggles["preset"].offer([Choice(value=p) for p in PRESETS], asked.base.preset)
        no_gpu = reasons.gpu_here()
        devices = [Choice(value=d, reason=no_gpu and f"cuda: {no_gpu}" if d == "cuda" else "") for d in NAMES["device"]]
        self.toggles["device"].offer(devices, asked.mine["device"])
        self._settle_drafting()
        for name in (*RUN_OPTIONS, "host_work_us"):
            self.toggles[name].offer([Choice(value=v) for v in listed(name, asked.mine[name])], asked.mine[name])
        self._settle_switches()
        self.toggles["alloc"].offer(reasons.arms_here(asked.neutral()))

    def _settle_drafting(self) -> None:
        """Who drafts, on what text, and how much of it is verified."""
        asked, trained = self.asked, self.asked.base.preset == SHIPPED
        values = DRAFTERS if trained else (ITS_OWN,)
        why = "" if trained else f"preset {asked.base.preset} has one drafter; shipped has {len(DRAFTERS)}"
        self.toggles["drafter"].offer([Choice(value=d) for d in values], asked.mine["drafter"], why=why)
        cfg = asked.neutral().replace(confidence_threshold=0.0)
        for name in ("text", "verify", "layout"):
            self.toggles[name].offer(reasons.here(cfg, name, NAMES[name]), asked.mine[name])
        temperatures = [Choice(value=v) for v in listed("temperature", asked.mine["temperature"])]
        self.toggles["temperature"].offer(temperatures, asked.mine["temperature"])

    def _settle_facets(self) -> None:
        """Each offers what is legal with the values of those before it, as far as those are."""
        neutral = self.asked.neutral()
        alone = "at EP 1 nothing is dispatched, placed or shared out" if self.asked.facets["ep_size"] == 1 else ""
        for name in FACETS:
            value, now = self.asked.facets[name], {n: neutral.toggle(n) for n in FACETS}
            choices = [_live_choice(neutral, name, v, following(now, name, v)) for v in listed(name, value)]
            why = alone if name in SPREAD and value == preset("tiny").toggle(name) else ""
            self.toggles[name].offer(choices, value, word="TP" if name == "tp_size" else "", why=why)
            if not reasons.why_not(neutral, **{name: value}):
                neutral = neutral.replace(**{name: value})

    def _grey(self, why: str) -> None:
        """Shows what a live run would be, not to be turned; the reason stands once, under the strategies."""
        for name in (*FACETS, *self.asked.mine):
            self.toggles[name].fix(self.asked.of(name))
        for name, toggle in self.toggles.items():
            if name != "alloc":
                toggle.say(why, disabled=True, aloud=False)
        self.toggles["alloc"].offer([Choice(value=a, reason=why) for a in ALLOCS])

    def _settle_switches(self) -> None:
        threshold, mine = self.toggles["confidence_threshold"], self.asked.mine
        unread = mine["verify"] != "threshold"
        if unread:
            mine["confidence_threshold"] = 0.0
        threshold.value = mine["confidence_threshold"]
        threshold.say("read with verify threshold only" if unread else "", disabled=unread)
        no_graphs = reasons.graphs_here(mine["device"])
        mine["use_graph"] = mine["use_graph"] and not no_graphs
        for name, why in (("use_graph", no_graphs), ("mask_padding", ""), ("overlap", "")):
            self.toggles[name].offer([Choice(value=False), Choice(value=True)], mine[name], why=why)
        why = self.asked.no_floor()
        self.toggles["floor"].control.value = self._floor_here()
        self.toggles["floor"].say(why, disabled=bool(why), aloud=False)

    def _floor_here(self) -> bool:
        return self.asked.floor[True] and not self.asked.no_floor()


def _check(asked: dict[str, Any]) -> None:
    """Raises `LabError` for a start value that is none, or of no toggle."""
    for name, value in asked.items():
        check_kind(name, value)
    if "preset" in asked:
        preset(asked["preset"])
    known = {*preset("tiny").to_dict(), *RUN_OPTIONS, "floor", "drafter"}
    for name in asked:
        if name not in known:
            raise LabError(f"{name!r} is no toggle of the panel.{nearest(name, known)}")
    for name in asked.get("alloc", []) if not isinstance(asked.get("alloc"), str) else [asked["alloc"]]:
        preset("tiny", alloc="none").replace(alloc=name, use_graph=True)


def _first_recording(table: pd.DataFrame, given: dict[str, Any]) -> dict[str, Any]:
    base = preset(given.get("preset", "small"), use_graph=True)
    start = {n: base.toggle(n) for n in recordings.FACETS} | given
    return recordings.snapped(table, start, next(iter(given), None)) if len(table) else start


def _live_choice(cfg: LabConfig, name: str, value: Any, more: dict[str, Any]) -> Choice:
    change = {name: value, **more}
    return Choice(value=value, reason=reasons.why_not(cfg, **change) or reasons.not_live(cfg, **change))
