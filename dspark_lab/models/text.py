"""Text for byte-level models: prompts of DeepSpec's JSONL, the held-out text that ships, bytes to what a person reads. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from dspark_lab.config.kinds import shown
from dspark_lab.config.shipped import TEXT_KINDS, data_dir
from dspark_lab.errors import LabError, unknown


@dataclass(frozen=True, kw_only=True)
class Text:
    """One line of a JSONL file: what a person says turn by turn, and what came next where that is known."""

    turns: tuple[str, ...]
    reference: str | None = None
    kind: str | None = None

    @property
    def prompt(self) -> list[int]:
        """The bytes of the first turn, which are token ids of a byte-level model."""
        return tokens_of(self.turns[0])


def tokens_of(text: str) -> list[int]:
    """The UTF-8 bytes of ``text``: 0..255."""
    return list(text.encode("utf-8"))


def text_of(tokens: Sequence[int]) -> str:
    """``tokens`` of a byte-level model as text; a byte that is no UTF-8 stands as an escape such as ``\\xe2``, none is dropped.

    Raises `LabError` for a token that is no byte.
    """
    if isinstance(tokens, str | bytes) or not hasattr(tokens, "__iter__"):
        raise LabError(f"tokens={shown(tokens)} is no list of token ids; give one, such as `Generated.tokens`.")
    for token in tokens:
        if not isinstance(token, Integral) or not 0 <= token <= 255:
            raise LabError(
                f"token {shown(token)} is no byte, 0 to 255; these are tokens of another model than a byte-level one."
            )
    return bytes(int(t) for t in tokens).decode("utf-8", errors="backslashreplace")


def read_turns(path: str | Path) -> list[Text]:
    """The lines of a JSONL file as DeepSpec's evaluation reads it: objects with ``turns``, a list of texts.

    ``reference`` and ``kind`` are taken where there are some; other keys are left alone. Raises `LabError` that names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, TypeError) as e:
        raise LabError(
            f"{shown(path)} does not read as text: {e}; give a JSONL file with turns in every line."
        ) from None
    found = [_text(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise LabError(f'{path} has no lines; each is an object such as {{"turns": ["Question: ..."]}}.')
    return found


def held_out_texts(kind: str) -> list[Text]:
    """Shipped text of one kind that no shipped model was trained on. Raises `LabError` that names the kinds."""
    if kind not in TEXT_KINDS:
        raise unknown("kind", kind, TEXT_KINDS)
    return read_turns(data_dir() / "models" / "held_out" / f"{kind}.jsonl")


def held_out(kind: str) -> list[list[int]]:
    """Prompts for the shipped models: the bytes of each of `held_out_texts`, 96 of a kind."""
    return [text.prompt for text in held_out_texts(kind)]


def _text(line: str, where: str) -> Text:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise LabError(f"{where} is no JSON: {e}.") from None
    if not isinstance(values, dict) or "turns" not in values:
        raise LabError(f'{where} is no object with "turns": {shown(values)}.')
    turns, reference, kind = values["turns"], values.get("reference"), values.get("kind")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise LabError(f"{where} has turns={shown(turns)}; they are a list of one text or more, none of them empty.")
    if any("\ud800" <= c <= "\udfff" for t in turns for c in t):
        raise LabError(f"{where} has half of a surrogate pair in turns={shown(turns)}, which has no bytes in UTF-8.")
    for name, value in (("reference", reference), ("kind", kind)):
        if value is not None and not isinstance(value, str):
            raise LabError(f"{where} has {name}={shown(value)}, which is no text.")
    return Text(turns=tuple(turns), reference=reference, kind=kind)
