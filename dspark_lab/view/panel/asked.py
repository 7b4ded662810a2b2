"""What was asked of the toggles so far, apart from what they show now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError
from dspark_lab.view.panel import reasons
from dspark_lab.view.panel.controls import RUN_OPTIONS, check_kind
from dspark_lab.view.panel.following import following
from dspark_lab.view.panel.reasons import FACETS

NEUTRAL = ("verify", "confidence_threshold", "mask_padding", "use_graph", "host_work_us")


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

    def turn(self, name: str, value: Any) -> None:
        """Asks for another value of a facet of a live run, and for what follows from it."""
        self.facets |= {name: value, **following(self.facets, name, value)}

    def of(self, name: str) -> Any:
        """The value of a toggle of a live run."""
        return self.facets[name] if name in self.facets else self.mine[name]

    def changes(self) -> dict[str, Any]:
        """Toggles that differ from the preset, by name, without `alloc`."""
        names = (*FACETS, "device", "verify", "confidence_threshold", "mask_padding", "use_graph", "overlap", "host_work_us")  # fmt: skip
        now = {n: self.of(n) for n in names} | self.extra
        return {n: v for n, v in now.items() if v != self.base.toggle(n)}

    def config(self, alloc: str) -> LabConfig:
        """The config of a live run. Raises `LabError` where toggles contradict each other."""
        return self.base.replace(**self.changes(), alloc=alloc)

    def fault(self, alloc: str) -> LabError | None:
        """Why a live run cannot be made of what was asked; None where it can."""
        try:
            for name in RUN_OPTIONS:
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
