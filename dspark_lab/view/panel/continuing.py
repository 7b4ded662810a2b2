"""What the tab Tokens continues: a prompt of held-out or typed text with the config of the toggles, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from dspark_lab.config import LabConfig
from dspark_lab.config.shipped import PREFIX, TEXT_KINDS
from dspark_lab.errors import LabError
from dspark_lab.models.text import held_out, tokens_of
from dspark_lab.view.panel import reasons
from dspark_lab.view.panel.board import Board
from dspark_lab.view.panel.controls import SHIPPED

HELD_OUT, TYPED = "held-out text", "typed text"
PLACES = (HELD_OUT, TYPED)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids, what they are in words, and the Python that gives them."""

    tokens: tuple[int, ...]
    name: str
    code: str


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """One generation asked for: equal where it would give the same."""

    cfg: LabConfig
    prompt: Prompt
    max_new_tokens: int

    @property
    def title(self) -> str:
        """Who drafts what, and how."""
        c, e = self.cfg, self.cfg.engine
        verify = f"threshold {e.confidence_threshold:g}" if e.verify == "threshold" else e.verify
        how = "greedy" if e.temperature == 0 else f"temperature {e.temperature:g}, seed {c.seed}"
        drafts = f"γ {c.gamma}, verify {verify}{', compact' * (e.layout == 'compact')}" if c.gamma else "no speculation"
        return f"{drafter_of(c)} continues {self.prompt.name}: {drafts}, {how}"

    @property
    def script(self) -> str:
        """Python that makes the same."""
        from dspark_lab.models.shipped import shipped

        drafter = drafter_of(self.cfg)
        was, now = shipped(drafter).to_dict(), self.cfg.to_dict()
        toggles = "".join(f", {name}={value!r}" for name, value in now.items() if value != was[name])
        return "\n".join(
            (
                "import dspark_lab as lab",
                f"cfg = lab.shipped({drafter!r}{toggles})",
                f"prompt = {self.prompt.code}",
                f"(made,) = lab.generate(cfg, [prompt], max_new_tokens={self.max_new_tokens}, keep_rounds=True)",
                "lab.inspect(made, prompt)",
            )
        )


def drafter_of(cfg: LabConfig) -> str:
    """Name of the trained drafter."""
    return str(cfg.model.drafter_path).removeprefix(PREFIX)


def measured_here(cfg: LabConfig) -> str:
    """The label of what was generated just now: source, date, device."""
    from dspark_lab.device import device_name, resolve

    return f"measured here, {datetime.now(UTC):%Y-%m-%d}, on {device_name(resolve(cfg.engine.device))}, unprofiled"


def config_of(board: Board, *, live: bool, busy: bool) -> LabConfig:
    """The config of the toggles, for one request. Raises `LabError` where it cannot continue a text in this process."""
    if not live:
        raise LabError(
            "source='recorded' has no text: recordings keep steps, not tokens; legal: live; choose This machine."
        )
    if why := reasons.no_torch():
        raise LabError(f"{why}.")
    if busy:
        raise LabError(
            "a job runs, and a generation beside it would slow what it measures; wait for it, or press Stop."
        )
    if fault := board.fault():
        raise fault
    cfg = board.config()
    check(cfg)
    return cfg.replace(batch_size=1)


def check(cfg: LabConfig) -> None:
    """Raises `LabError` for a config without text, or of several ranks."""
    m, p = cfg.model, cfg.parallel
    if cfg.preset != SHIPPED or m.weights != "checkpoint":
        raise LabError(
            f"preset={cfg.preset!r} writes no text: its weights are {m.weights}, not trained; legal: {SHIPPED}; choose it under Preset."
        )
    if p.world_size > 1:
        name, value = ("ep_size", p.ep_size) if p.ep_size > 1 else ("tp_size", p.tp_size)
        raise LabError(
            f"{name}={value} takes {p.world_size} processes, and this tab continues a text in the notebook's own; legal: "
            f"{name}=1; set it on the left, or measure with Run."
        )
    if cfg.engine.simulated_accept_length is not None:
        raise LabError(
            f"simulated_accept_length={cfg.engine.simulated_accept_length!r} accepts by lot, whatever is drafted; legal: None; "
            "leave it out of lab.panel(...)."
        )


def prompt_of(place: str, *, text: str, number: int, typed: str) -> Prompt:
    """The prompt: number ``number`` of the held-out ``text``, kinds in turn where it is mixed, or what was ``typed``. Raises `LabError`."""
    if place == TYPED:
        if not typed:
            raise LabError(
                "the typed text is empty, '', and has nothing to continue; type at least one character, or choose held-out text."
            )
        return Prompt(tokens=tuple(tokens_of(typed)), name="a typed text", code=f"list({typed!r}.encode())")
    kinds = TEXT_KINDS if text == "mixed" else (text,)
    if kinds[0] not in TEXT_KINDS:
        raise LabError(
            f"text={text!r} is no text: ids drawn at random; legal: mixed, {', '.join(TEXT_KINDS)}; choose one under Text, or type a text."
        )
    most = min(len(_held_out(kind)) for kind in kinds) * len(kinds)
    if not 0 <= number < most:
        raise LabError(
            f"prompt number {number} is none of text={text!r}; legal: 0 to {most - 1}; choose one of them, or type a text."
        )
    kind, n = kinds[number % len(kinds)], number // len(kinds)
    return Prompt(tokens=_held_out(kind)[n], name=f"held-out {kind} {n}", code=f"lab.held_out({kind!r})[{n}]")


def continuation(cfg: LabConfig, prompt: Prompt, *, max_new_tokens: int, seed: int) -> Continuation:
    """What is to be generated. Raises `LabError` for a number of tokens that is none or does not fit, or a seed that is none."""
    room = cfg.model.context_len - len(prompt.tokens)
    if room < 1:
        raise LabError(
            f"{prompt.name} has {len(prompt.tokens)} tokens (bytes), and the context holds {cfg.model.context_len} with what is new; "
            f"legal: 1 to {cfg.model.context_len - 1}; shorten it."
        )
    if not 1 <= max_new_tokens <= room:
        raise LabError(
            f"new tokens {max_new_tokens} cannot be: legal are 1 to {room}, what the context of {cfg.model.context_len} leaves behind the "
            f"prompt's {len(prompt.tokens)}; take fewer, or a shorter prompt."
        )
    return Continuation(cfg=cfg.replace(seed=seed), prompt=prompt, max_new_tokens=max_new_tokens)


@cache
def _held_out(kind: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(prompt) for prompt in held_out(kind))
