"""`LabConfig`: the frozen, hashable description of one experiment; flat in JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dspark_lab.config import rules
from dspark_lab.config.choices import alloc_name
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, EngineConfig, ModelConfig, ParallelConfig
from dspark_lab.errors import LabError, nearest


def _names(part: type) -> set[str]:
    return {f.name for f in fields(part)}


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """One experiment. Toggle names are unique over the parts, so `replace` and the JSON form are flat."""

    preset: str
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        rules.check(self)

    @property
    def needs_scalar(self) -> bool:
        """Whether the device scalar `num_token_non_padded` has a reader: `moe_ep_size > 1` and the mask compiled in."""
        return self.parallel.ep_size > 1 and self.engine.mask_padding

    @property
    def builds_scalar(self) -> bool:
        """Whether a step builds the draft batch's device scalar under this `alloc`; without drafts there is none."""
        return self.engine.speculate and self.engine.how.builds(self.parallel.ep_size > 1)

    @property
    def gamma(self) -> int:
        """Draft tokens that a step proposes for a request: `block_size`, and 0 without speculation."""
        return self.model.drafter.block_size if self.engine.speculate else 0

    def replace(self, **toggles: Any) -> LabConfig:
        """A copy with toggles changed, by their flat names (``ep_size=2, alloc="blocking"``).

        ``transfer`` and ``guard`` set `alloc` explicitly. Raises `LabError` for an unknown name or an illegal combination.
        """
        if "transfer" in toggles or "guard" in toggles:
            how = self.engine.how
            toggles["alloc"] = alloc_name(toggles.pop("transfer", how.transfer), toggles.pop("guard", how.guard))
        parts: dict[str, dict[str, Any]] = {}
        for name, value in toggles.items():
            parts.setdefault(_part_of(name), {})[name] = _frozen(value)
        model = self.model
        if "target" in parts:
            model = replace(model, target=replace(model.target, **_strip(parts["target"], "target_")))
        if "draft" in parts:
            model = replace(model, draft=replace(model.draft, **_strip(parts["draft"], "draft_")))
        if "drafter" in parts:
            model = replace(model, drafter=replace(model.drafter, **parts["drafter"]))
        if "model" in parts:
            model = replace(model, **parts["model"])
        return replace(
            self,
            model=model,
            parallel=replace(self.parallel, **parts.get("parallel", {})),
            engine=replace(self.engine, **parts.get("engine", {})),
            **parts.get("lab", {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """Flat, JSON-ready: toggles by name, the two stacks of layers with the prefixes ``target_`` and ``draft_``."""
        m = self.model
        flat = {
            "preset": self.preset,
            "seed": self.seed,
            **vars(self.parallel),
            **vars(self.engine),
            **vars(m.drafter),
            **{k: v for k, v in vars(m).items() if k in _PARTS["model"]},
            **{f"target_{k}": v for k, v in vars(m.target).items()},
            **{f"draft_{k}": v for k, v in vars(m.draft).items()},
        }
        return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> LabConfig:
        """The inverse of `to_dict`. Raises `LabError` on an unknown or missing name."""
        if not isinstance(flat, dict):
            raise LabError(
                f"a config is a dict of toggles by name, as to_dict() gives; this is a {type(flat).__name__}."
            )
        parts: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            parts.setdefault(_part_of(name), {})[name] = _frozen(value)
        try:
            model = ModelConfig(
                target=DecoderConfig(**_strip(parts.get("target", {}), "target_")),
                draft=DecoderConfig(**_strip(parts.get("draft", {}), "draft_")),
                drafter=DrafterConfig(**parts.get("drafter", {})),
                **parts.get("model", {}),
            )
            return cls(
                model=model,
                parallel=ParallelConfig(**parts.get("parallel", {})),
                engine=EngineConfig(**parts.get("engine", {})),
                **parts.get("lab", {}),
            )
        except TypeError as e:
            raise LabError(f"not a whole config: {e}") from None

    def toggle(self, name: str) -> Any:
        """The value of one toggle by its flat name."""
        flat = self.to_dict()
        if name in ("transfer", "guard"):
            return getattr(self.engine.how, name)
        if name not in flat:
            raise _unknown_toggle(name)
        return flat[name]


_PARTS: dict[str, set[str]] = {
    "lab": {"preset", "seed"},
    "parallel": _names(ParallelConfig),
    "engine": _names(EngineConfig),
    "drafter": _names(DrafterConfig),
    "model": _names(ModelConfig) - {"target", "draft", "drafter"},
    "target": {f"target_{n}" for n in _names(DecoderConfig)},
    "draft": {f"draft_{n}" for n in _names(DecoderConfig)},
}


_PART_OF: dict[str, str] = {name: part for part, names in _PARTS.items() for name in names}


def _part_of(name: str) -> str:
    if name not in _PART_OF:
        raise _unknown_toggle(name)
    return _PART_OF[name]


def toggle_names() -> list[str]:
    """Every flat name that `LabConfig.replace` takes, sorted."""
    return sorted(set().union(*_PARTS.values()) | {"transfer", "guard"})


def _unknown_toggle(name: str) -> LabError:
    toggles = sorted(
        set().union(*(_PARTS[p] for p in ("lab", "parallel", "engine", "drafter", "model"))) | {"transfer", "guard"}
    )
    return LabError(f"{name!r} is no toggle; legal: {', '.join(toggles)}.{nearest(name, toggles)}")


def _strip(part: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in part.items()}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
