"""What was asked of the toggles so far, apart from what they show now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark_lab.config import LabConfig, preset
from dspark_lab.config.shipped import DRAFTERS
from dspark_lab.errors import LabError
from dspark_lab.view.panel import reasons
from dspark_lab.view.panel.controls import ITS_OWN, RUN_OPTIONS, SHIPPED, check_kind
from dspark_lab.view.panel.following import following
from dspark_lab.view.panel.reasons import FACETS

SETTINGS = (
    "text",
    "temperature",
    "verify",
    "confidence_threshold",
    "layout",
    "mask_padding",
    "use_graph",
    "overlap",
    "host_work_us",
)
"""Toggles of a live run that are not among the facets, in the order in which they are settled."""
NEUTRAL = tuple(name for name in SETTINGS if name != "overlap")


@dataclass
class Asked:
    """Of a live run: ``base`` (its preset), ``facets`` and ``mine`` by toggle, ``extra`` (toggles without a control). Of the
    recordings: ``recorded`` by facet, and the name of the ``recording``. ``floor`` of both, live first."""

    base: LabConfig
    facets: dict[str, Any]
    recorded: dict[str, Any]
    floor: dict[bool, bool]
    mine: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    recording: str | None = None

    def start_from(self, name: str, drafter: str) -> None:
        """Takes the preset ``name`` with ``drafter``, and its facets and text; another preset keeps its own drafter."""
        several = name == SHIPPED
        self.mine["drafter"] = (drafter if drafter in DRAFTERS else DRAFTERS[0]) if several else ITS_OWN
        self.base = _shipped(self.mine["drafter"]) if several else preset(name)
        self.facets = {n: self.base.toggle(n) for n in FACETS}
        self.mine["text"] = self.base.engine.text

    def turn(self, name: str, value: Any) -> None:
        """Asks for another value of a facet of a live run, and for what follows from it."""
        self.facets |= {name: value, **following(self.facets, name, value)}

    def of(self, name: str) -> Any:
        """The value of a toggle of a live run."""
        return self.facets[name] if name in self.facets else self.mine[name]

    def changes(self) -> dict[str, Any]:
        """Toggles that differ from the preset, by name, without `alloc`."""
        names = (*FACETS, "device", *SETTINGS)
        now = {n: self.of(n) for n in names} | self.extra
        return {n: v for n, v in now.items() if v != self.base.toggle(n)}

    def config(self, alloc: str) -> LabConfig:
        """The config of a live run. Raises `LabError` where toggles contradict each other."""
        return self.base.replace(**self.changes(), alloc=alloc)

    def fault(self, alloc: str) -> LabError | None:
        """Why a live run cannot be made of what was asked; None where it can."""
        try:
            for name in (*RUN_OPTIONS, "temperature"):
                check_kind(name, self.mine[name])
            cfg = self.config(alloc)
        except LabError as e:
            return e
        if cfg.engine.device == "cuda" and (why := reasons.gpu_here()):
            return LabError(f"device='cuda' cannot be chosen here: {why}; legal: auto, cpu.")
        for name in FACETS:
            if why := reasons.not_live(cfg, **{name: cfg.toggle(name)}):
                return LabError(f"{name}={cfg.toggle(name)!r} cannot be chosen here: {why}.")
        return None

    def neutral(self) -> LabConfig:
        """The live config with a strategy that is legal everywhere, for asking what else is."""
        cfg = self.base.replace(alloc="on_demand", **self.extra)
        for name in (*NEUTRAL, *FACETS):
            if not reasons.why_not(cfg, **{name: self.of(name)}):
                cfg = cfg.replace(**{name: self.of(name)})
        return cfg

    def no_floor(self) -> str:
        """Why a live run has no floor arm; empty where it can."""
        if self.facets["ep_size"] == 1:
            return "at EP 1 nothing reads the scalar: none is the floor"
        return "" if self.mine["mask_padding"] else "mask padding is off: none is the floor"


def _shipped(drafter: str) -> LabConfig:
    """The trained pair with ``drafter``; without torch, which reads checkpoints, the preset: nothing runs then anyway."""
    if reasons.no_torch():
        return preset(SHIPPED)
    from dspark_lab.models.shipped import shipped

    return shipped(drafter)
