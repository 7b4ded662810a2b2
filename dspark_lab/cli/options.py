"""Options that several commands share, and how their text is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_lab.errors import LabError

Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Preset = Annotated[
    str,
    typer.Option(
        help="shipped: a trained pair on held-out text, on a CPU in seconds. tiny: a synthetic pair, the fastest. small, "
        "qwen3-30b-a3b, seed: random weights of real shapes, for a GPU."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Steps = Annotated[int, typer.Option(help="Measured steps a block.")]
ProfileSteps = Annotated[int, typer.Option(help="Steps of the profiled capture after the measured blocks; 0 for none.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the runs; default runs/<time>-<preset>.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Any other toggle, as name=value; may be given several times. --tp-size 2 is --set tp_size=2."
    ),
]


def names(text: str, what: str = "") -> list[str]:
    names = list(dict.fromkeys(x.strip() for x in text.split(",") if x.strip()))
    if what and not names:
        raise LabError(f"{what}={text!r} names nothing; give at least one value, with commas between several.")
    return names


def merged(options: dict[str, Any], pairs: list[str] | None) -> dict[str, Any]:
    """Toggles of ``--set`` beside those with an option of their own; one given both ways is refused."""
    toggles = _toggles(pairs)
    for name in toggles:
        if name in options or name == "name":
            raise LabError(f"--set {name} repeats the option --{name.replace('_', '-')}; give it once.")
    return options | toggles


def ints(name: str, text: str) -> list[int]:
    try:
        return (
            [int(x) for x in names(text, name)]
            if name != "prompt_ids"
            else [int(x) for x in text.split(",") if x.strip()]
        )
    except ValueError:
        raise LabError(f"{name}={text!r} is not a list of whole numbers with commas.") from None


def _toggles(pairs: list[str] | None) -> dict[str, Any]:
    """``--set name=value`` with the value read as JSON where it is some, else as text."""
    toggles = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise LabError(f"--set {pair!r} is not name=value.")
        if name in toggles:
            raise LabError(f"{name} is set twice; give it once.")
        try:
            toggles[name] = json.loads(value)
        except ValueError:
            toggles[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return toggles


def span(text: str) -> slice | int:
    """``3`` or ``2:5``, ``:5``, ``2:`` as a number or a slice."""
    parts = text.split(":")
    try:
        numbers = [int(x) if x.strip() else None for x in parts]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if len(numbers) == 2:
        return slice(*numbers)
    raise LabError(f"steps={text!r} is no number and no range; give 3, 2:5, :5 or 2:.")
