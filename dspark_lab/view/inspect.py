"""`inspect`: a generation token by token, as a page of HTML: which were drafted and accepted, which refused, which are the target's own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.models.text import text_of
from dspark_lab.view.rows import records
from dspark_lab.view.theme import COLOURS, FAINT, FONT, GRID, INK

COLUMNS = ("round", "position", "token", "text", "outcome", "confidence")
OUTCOMES: dict[str, tuple[str, str]] = {
    "prefill": (COLOURS["host"], "of the prefill, before the first round"),
    "accepted": (COLOURS["draft"], "drafted and accepted"),
    "bonus": (COLOURS["compute"], "the target's own: behind what it accepted, or in place of what it refused"),
    "rejected": (COLOURS["wait"], "drafted, verified and refused"),
    "discarded": (COLOURS["wait"], "drafted and verified, behind a refused one"),
    "unverified": (COLOURS["idle"], "drafted, and cut before verification"),
}
"""Colour of each outcome, and what it means."""
LEAST, NO_CONFIDENCE = 0.12, 0.45
"""Opacity at confidence 0, and where a drafter has no confidence."""


def inspect(
    generated: Any,
    prompt: Sequence[int],
    *,
    text: Callable[[Sequence[int]], str] = text_of,
    drafts: bool = True,
    title: str = "Token by token",
    label: str = "",
) -> Inspection:
    """``generated``: one of what `lab.generate` gives with ``keep_rounds=True`` for ``prompt``.

    ``text`` makes a token readable, by default for byte-level models; ``drafts=False`` leaves out what was refused or never
    verified. The result shows itself in a notebook, has a ``table`` and can be saved. Raises `LabError` where no rounds were kept.
    """
    tokens, rounds = (getattr(generated, name, None) for name in ("tokens", "rounds"))
    if tokens is None or rounds is None:
        raise LabError(
            f"generated={shown(generated)} is no generation; give one of what lab.generate(..., keep_rounds=True) returns, with its prompt."
        )
    ids = _ids(prompt)
    if not callable(text):
        raise LabError(f"text={shown(text)} cannot be called; give a function from token ids to text, or leave it out.")
    if not rounds:
        raise LabError(
            "this generation has no rounds to look at; generate with keep_rounds=True, and with speculation."
        )
    if list(tokens[: len(ids)]) != ids:
        raise LabError(
            "the generation does not begin with this prompt; give the prompt that it continues, as lab.generate got it."
        )
    return Inspection(_table(generated, len(ids), text), text(ids), drafts=drafts, title=title, label=label)


def _ids(prompt: Any) -> list[int]:
    try:
        ids = [operator.index(t) for t in prompt]
    except TypeError:
        ids = []
    if not ids:
        raise LabError(
            f"prompt={shown(prompt)} is not a list of token ids; list(text.encode()) is one for the models that ship."
        )
    return ids


class Inspection:
    """One generation to look at. ``table``: a row a token, drafts that came to nothing among them, in the order of writing."""

    def __init__(self, table: pd.DataFrame, prompt: str, *, drafts: bool, title: str, label: str) -> None:
        self.table, self.prompt, self.title, self.label = table, prompt, title, label
        self.shown = table if drafts else table[table["outcome"].isin(("prefill", "accepted", "bonus"))]

    @property
    def html(self) -> str:
        """A block of HTML without a script."""
        line = f'<div style="color:{FAINT};font-size:11.5px">{escape(self._said())}</div>'
        prompt = f'<span style="color:{FAINT}" title="prompt">{_readable(self.prompt[-240:])}</span>'
        cut = "… " if len(self.prompt) > 240 else ""
        tokens = "".join(_span(row) for row in records(self.shown))
        return (
            f'<div class="dspark-inspect" style="font-family:{escape(FONT)};background:white;color:{INK};padding:10px 12px;border:1px solid {GRID}">'
            f'<b style="font-size:15px">{escape(self.title)}</b>{line}{_legend(self.shown)}'
            f'<div style="font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px;line-height:1.75;white-space:pre-wrap;overflow-wrap:anywhere">'
            f"{cut}{prompt}{tokens}</div></div>"
        )

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> Path:
        """Writes a page of its own."""
        path = Path(path)
        page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title></head>'
        path.write_text(f"{page}<body>{self.html}</body></html>\n", encoding="utf-8")
        return path

    def _said(self) -> str:
        t = self.table
        rounds = int(t["round"].max())
        committed = int(t["outcome"].isin(("accepted", "bonus")).sum())
        figures = f"{committed} tokens in {rounds} rounds, accept length {committed / rounds:.2f}"
        return " · ".join(x for x in (self.label, figures, "darker: more confident" * bool(t["confidence"].notna().any())) if x)  # fmt: skip


def _table(generated: Any, prompt_len: int, text: Callable[[Sequence[int]], str]) -> pd.DataFrame:
    first = generated.tokens[prompt_len]
    rows: list[dict[str, Any]] = [_row(0, 0, first, text, "prefill", None)]
    for number, r in enumerate(generated.rounds, start=1):
        confidence = r.confidence or [None] * len(r.drafts)
        outcomes = [
            "accepted" if k < r.accepted else "unverified" if k >= r.verified else "rejected" if k == r.accepted else "discarded"
            for k in range(len(r.drafts))
        ]  # fmt: skip
        drafted = [_row(number, k + 1, token, text, outcomes[k], confidence[k]) for k, token in enumerate(r.drafts)]
        own = _row(number, r.accepted + 1, r.tokens[-1], text, "bonus", None)
        rows += [*drafted, own]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"confidence": "float64"})


def _row(number: int, position: int, token: int, text: Any, outcome: str, confidence: float | None) -> dict[str, Any]:
    return {
        "round": number,
        "position": position,
        "token": token,
        "text": text([token]),
        "outcome": outcome,
        "confidence": confidence,
    }


def _span(row: dict[str, Any]) -> str:
    outcome, confidence = row["outcome"], row["confidence"]
    colour, meaning = OUTCOMES[outcome]
    known = confidence == confidence
    told = f"round {row['round']}, position {row['position']}: {meaning}" + f"; confidence {confidence:.2f}" * known
    strength = LEAST + (1 - LEAST) * confidence * 0.75 if known else NO_CONFIDENCE
    if outcome in ("accepted", "prefill"):
        look = f"background:{_rgba(colour, strength if outcome == 'accepted' else 0.25)}"
    elif outcome == "bonus":
        look = f"border-bottom:2px solid {colour};background:{_rgba(colour, 0.14)}"
    else:
        faint = {"rejected": 1.0, "discarded": 0.55, "unverified": 0.6}[outcome]
        line = "none" if outcome == "unverified" else "line-through"
        look = f"color:{colour};opacity:{faint};font-size:9.5px;vertical-align:sub;text-decoration:{line}"
    small = outcome not in ("accepted", "prefill", "bonus")
    shown = _readable(row["text"], inline=small)
    return f'<span class="{outcome}" style="{look}" title="{escape(told, quote=True)}">{shown}</span>'


def _readable(text: str, *, inline: bool = False) -> str:
    """Escaped, line ends visible; ``inline`` keeps them from breaking the line."""
    return escape(text).replace("\n", "↵" if inline else "↵\n")


def _legend(shown: pd.DataFrame) -> str:
    there = [o for o in OUTCOMES if (shown["outcome"] == o).any()]
    items = "".join(
        f'<span style="margin-right:14px;display:inline-block"><span style="display:inline-block;width:10px;height:10px;background:{_rgba(OUTCOMES[o][0], 0.35 if o == "discarded" else 0.8)}"></span> '
        f"{o}: {escape(OUTCOMES[o][1])}</span>"
        for o in there
    )
    return f'<div style="font-size:11.5px;margin:4px 0 8px 0">{items}</div>'


def _rgba(colour: str, alpha: float) -> str:
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{alpha:.2f})"
