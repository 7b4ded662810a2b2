"""Small tables as JSON files: written whole or not at all, and read only where they are what they should be."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError


def write_table(path: str | Path, values: Mapping[str, Any], *, kind: str, schema: int) -> Path:
    """Writes ``values`` under a temporary name, then renames. Raises `LabError` where that cannot be, and for NaN."""
    _check_path(path, kind)
    path = Path(path)
    try:
        text = json.dumps({"schema": schema, "kind": kind, **values}, indent=1, allow_nan=False) + "\n"
    except ValueError as e:
        raise LabError(f"a {kind} holds a number that is none, so it is not written: {e}") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
            f.write(text)
        os.chmod(f.name, 0o644)
        os.replace(f.name, path)
    except OSError as e:
        raise LabError(f"cannot write {path}: {e.strerror}; choose a place that can be written.") from None
    return path


def read_table(path: str | Path, *, kind: str, schema: int) -> dict[str, Any]:
    """The values that `write_table` wrote to ``path``. Raises `LabError` for another kind or schema, and for no JSON."""
    _check_path(path, kind)
    try:
        d = json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise LabError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(d, Mapping) or d.get("kind") != kind:
        raise LabError(f"{path} is no {kind}: it says {shown(d.get('kind') if isinstance(d, Mapping) else d)}.")
    if d.get("schema") != schema:
        raise LabError(f"{path} was written with schema {shown(d.get('schema'))}; this version reads {schema}.")
    return {name: value for name, value in d.items() if name not in ("schema", "kind")}


def _check_path(path: object, kind: str) -> None:
    if not isinstance(path, str | Path):
        raise LabError(f"{shown(path)} is no path; give the name of a file that holds a {kind}.")
