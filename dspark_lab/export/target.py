"""Where an export goes: a file that is no folder and none of what was read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet


def target_file(path: Path | str, *read: Trace | TraceSet) -> Path:
    """``path``, to be written from what was ``read``.

    Raises:
        LabError: it is no path, a folder, in no folder that there is, or a file that was read: a trace is never written over.
    """
    if not isinstance(path, (str, Path)) or not str(path):
        raise LabError(f"path={path!r} is no file name; give one, such as 'out.json.gz'.")
    path = Path(path)
    if path.is_dir():
        raise LabError(f"{path} is a folder; give the name of a file in it.")
    if not path.parent.is_dir():
        raise LabError(f"there is no folder {path.parent} to write {path.name} to; make it, or give another file.")
    for source in _files(read):
        if source.exists() and path.exists() and source.samefile(path):
            raise LabError(f"{path} is the trace that was read and would be lost; give another file.")
    return path


def _files(read: tuple[Trace | TraceSet, ...]) -> Iterator[Path]:
    for opened in read:
        for trace in [opened] if isinstance(opened, Trace) else opened.values():
            if trace.path is not None:
                yield Path(trace.path)
