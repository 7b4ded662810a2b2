"""Where shipped data lies, and the models among it. A path of a config may be ``shipped:NAME``: the same on every machine."""

from __future__ import annotations

from pathlib import Path

from dspark_lab.errors import unknown

PREFIX = "shipped:"
TARGET = f"{PREFIX}target"
DRAFTERS = ("dspark-rnn", "dspark", "dspark-gated", "dspark-moe", "dspark-rank0", "dflash", "eagle3")
"""Trained drafters of the shipped target, the default first; `data/models/README.md` says how each was made."""
TEXT_KINDS = ("arithmetic", "code", "prose")
"""Kinds of text that the shipped target learned, and of which held-out text ships."""

PROMPT_BYTES = 128
"""The least length of a held-out prompt."""


def data_dir() -> Path:
    """The folder of shipped data: inside the wheel, or ``data/`` of a checkout."""
    packed = Path(__file__).parents[1] / "_data"
    return packed if packed.is_dir() else Path(__file__).parents[2] / "data"


def folder_of(path: str | Path) -> Path:
    """``path`` itself, or the folder that ``shipped:NAME`` stands for. Raises `LabError` for a name that does not ship."""
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    name = text.removeprefix(PREFIX)
    if name not in ("target", *DRAFTERS):
        raise unknown("shipped model", name, ("target", *DRAFTERS))
    return data_dir() / "models" / name
