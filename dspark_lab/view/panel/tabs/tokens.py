"""The tab Tokens: a prompt continued here by the trained pair that the toggles choose, and under it the text token by token."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets as W

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError
from dspark_lab.models.text import text_of
from dspark_lab.trace.progress import tell
from dspark_lab.view.inspect import Inspection, inspect
from dspark_lab.view.panel.continuing import (
    HELD_OUT,
    PLACES,
    TYPED,
    Continuation,
    continuation,
    measured_here,
    prompt_of,
)
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.select import Select
from dspark_lab.view.panel.tabs.shown import Shown
from dspark_lab.view.panel.toggles import SOFT
from dspark_lab.view.panel.work import LARGE_BYTES, Work
from dspark_lab.view.theme import FAINT, FONT, GRID, INK

ASKED = "Choose a prompt and press Continue: the pair on the left writes on, and every token says how it came about."


class TokensTab:
    """``figure`` is the last generation to look at, ``generated`` what it is of. ``config()`` gives the config of the toggles, for
    one request, or raises `LabError`; ``changed()`` is called where there is another script."""

    name, code = "Tokens", ""

    def __init__(
        self, guard: Guard, config: Callable[[], LabConfig], changed: Callable[[], Any], *, seed: int = 0
    ) -> None:
        self.work = Work(guard)
        self.figure: Inspection | None = None
        self.generated: Any = None
        self._config, self._changed = config, changed
        self._shown: Continuation | None = None
        self._label = ""
        self._models: tuple[Any, Any] = (None, None)
        self._lock = threading.Lock()
        """Of the models: a generation that was left ends its round before the next one begins."""
        self.place = Select(PLACES, HELD_OUT, layout=_cell("116px"), tooltip="what is continued")
        self.number = _number(
            2, "Number", "104px", "which held-out prompt of the kind under Text; mixed takes the kinds in turn"
        )
        self.typed = W.Textarea(placeholder="a text to continue", continuous_update=False, rows=2)
        self.typed.layout = W.Layout(width="98%", height="52px", display="none")
        self.new = _number(96, "New tokens", "128px", "tokens to add; bytes here")
        self.seed = _number(
            seed, "Seed", "84px", "names what is drawn at a temperature above 0; greedy text does not depend on it"
        )
        self.drafts = W.Checkbox(value=True, description="refused drafts", indent=False, layout=_cell("118px"))
        self.drafts.tooltip = "shows drafts that came to nothing too, small behind the place where they stood"
        self.go = W.Button(description="Continue ▸", button_style="primary", layout=W.Layout(width="104px"))
        self.said = W.HTML(layout=W.Layout(margin="0", flex="1 1 0%", min_width="0"))
        self.page = W.HTML(layout=W.Layout(width="100%", margin="0"))
        self.go.on_click(guard(lambda _: self.start()))
        self.place.observe(guard(lambda _: self._place()), names="value")
        self.drafts.observe(guard(lambda _: self._show()), names="value")
        controls = [self.place, self.number, self.new, self.seed, self.go]
        row = W.HBox(controls, layout=W.Layout(flex_flow="row wrap", align_items="center"))
        row.add_class("dspark-tokens")
        box = W.Box([self.page], layout=W.Layout(width="100%", max_height="470px", overflow="hidden auto"))
        box.add_class("dspark-scroll")
        line = W.HBox([self.drafts, self.said], layout=W.Layout(align_items="center"))
        line.add_class("dspark-tokens")
        self.widget = W.VBox([row, self.typed, line, self.work.widget, box])

    @property
    def script(self) -> str:
        """Python for what is shown."""
        return (
            self._shown.script
            if self._shown
            else "import dspark_lab as lab\ncfg = lab.shipped('dspark-rnn', batch_size=1)"
        )

    def fill(self, width: int) -> None:
        """There is no picture to fit."""

    def _place(self) -> None:
        typed = self.place.value == TYPED
        self.typed.layout.display = "" if typed else "none"
        self.number.layout.display = "none" if typed else ""

    # -- generating --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Continues the prompt chosen, in a thread; what was shown stays until then. Raises `LabError` for what cannot be continued."""
        cfg = self._config()
        prompt = prompt_of(
            str(self.place.value), text=cfg.engine.text, number=int(self.number.value), typed=str(self.typed.value)
        )
        asked = continuation(cfg, prompt, max_new_tokens=int(self.new.value), seed=int(self.seed.value))
        self.work.run(
            asked, lambda: self._generate(asked), lambda made: self._take(asked, *made), num_bytes=LARGE_BYTES
        )

    def _generate(self, asked: Continuation) -> tuple[Any, str]:
        from dspark_lab.engine.generate import generate

        with self._lock:
            tell("loading the models", 0.0)
            models = self._pair(asked.cfg)
            (made,) = generate(
                asked.cfg, [list(asked.prompt.tokens)], max_new_tokens=asked.max_new_tokens, keep_rounds=True, models=models,
                on_progress=lambda done, total: tell(f"{done} of {total} tokens", done / total),
            )  # fmt: skip
        return made, measured_here(asked.cfg)

    def _pair(self, cfg: LabConfig) -> Any:
        """The models of ``cfg``, kept for the next prompt."""
        from dspark_lab.device import resolve
        from dspark_lab.models.weights import build

        key = (cfg.model, cfg.parallel, cfg.engine.device, cfg.engine.use_graph, cfg.engine.mask_padding)
        if self._models[0] != key:
            self._models = (key, build(cfg, resolve(cfg.engine.device)))
        return self._models[1]

    # -- showing -----------------------------------------------------------------------------------------------

    def _take(self, asked: Continuation, made: Any, label: str) -> None:
        self._shown, self.generated, self._label = asked, made, label
        self._show()
        self.draw(None)
        self._changed()

    def _show(self) -> None:
        """Puts what was generated on the page, again where refused drafts come or go."""
        if self._shown is None:
            return
        asked, made = self._shown, self.generated
        prompt = list(asked.prompt.tokens)
        if not any(r.drafts for r in made.rounds):
            self.figure = None
            self.page.value = _plain(made.tokens[len(prompt) :], asked, self._label)
            return
        self.figure = inspect(made, prompt, drafts=bool(self.drafts.value), title=asked.title, label=self._label)
        self.page.value = self.figure.html

    def draw(self, shown: Shown | None) -> None:
        """Says what Continue would do now, where that is not what stands below."""
        try:
            cfg = self._config()
        except LabError as e:  # said beforehand; pressed all the same, it is the red line
            self._say(f"Nothing can be continued now: {e}")
            return
        if self._shown is None:
            self._say(ASKED)
        elif cfg.replace(seed=self._shown.cfg.seed) != self._shown.cfg:
            self._say("Written with other settings: press Continue for these.")
        else:
            self._say("")

    def _say(self, text: str) -> None:
        self.said.value = f'<div style="{SOFT};padding:2px">{html.escape(text)}</div>' if text else ""


def _number(value: int, label: str, width: str, tip: str) -> W.IntText:
    """A whole number to type; what cannot be is said when it is asked for, never changed."""
    box = W.IntText(value=value, description=label, layout=_cell(width), tooltip=tip)
    box.style.description_width = "auto"  # pyright: ignore[reportAttributeAccessIssue]
    return box


def _cell(width: str) -> W.Layout:
    return W.Layout(width=width, margin="0 8px 0 0")


def _plain(new: list[int], asked: Continuation, label: str) -> str:
    """A text of which nothing was drafted."""
    why = f"Without drafts there are no rounds to look at: each of these {len(new)} tokens is the target's own."
    prompt = html.escape(text_of(asked.prompt.tokens)[-240:])
    return (
        f'<div class="dspark-inspect" style="font-family:{html.escape(FONT)};background:white;color:{INK};padding:10px 12px;border:1px solid {GRID}"><b style="font-size:15px">'
        f'{html.escape(asked.title)}</b><div style="color:{FAINT};font-size:11.5px">{html.escape(label)} · {why}</div>'
        f'<div style="font-family:ui-monospace,monospace;font-size:13px;line-height:1.75;white-space:pre-wrap;overflow-wrap:anywhere">'
        f'<span style="color:{FAINT}">{prompt}</span>{html.escape(text_of(new))}</div></div>'
    )
