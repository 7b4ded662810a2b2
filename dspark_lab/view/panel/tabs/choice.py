"""A chooser of a trace: an arm shown, a path, or files sent from the browser."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as W

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.view.panel.select import Select
from dspark_lab.view.panel.turn import TURN
from dspark_lab.view.rows import arm_of
from dspark_lab.view.source import open_cached

PLACE = "a path: .json, .json.gz, a folder of ranks"
WAY_OUT = "type the path of a .json or .json.gz, or of a folder of ranks, or pick an arm"
MAX_LISTED = 60


class TraceChoice:
    """A line to type a path in, a list to pick from, and a button to send files. ``changed()`` is called where the choice was.

    The panel writes the line only where a person picked or sent something: whatever it wrote would wipe what is being typed.
    """

    def __init__(
        self, label: str, guard: Callable[[Callable[..., Any]], Callable[..., Any]], changed: Callable[[], Any]
    ) -> None:
        self.label = label
        self.box = W.Text(
            placeholder=PLACE, description=label, continuous_update=False, layout=W.Layout(width="310px"),
            style={"description_width": "46px"},
        )  # fmt: skip
        self.list = Select(
            [], None, say=_short, layout=W.Layout(width="116px"), tooltip="arms shown, and what a folder holds"
        )
        self.upload = W.FileUpload(
            accept=".json,.gz", multiple=True, description="", layout=W.Layout(width="62px", min_width="62px"),
            tooltip="send files of this computer, several as the ranks of one job; over some 10 MB give a path instead",
        )  # fmt: skip
        self._runs: dict[str, Run] = {}
        self._folders: list[Any] = []
        self._own, self._changed = False, changed
        self.box.observe(guard(lambda _: None if self._own else self._typed()), names="value")
        self.list.observe(guard(lambda _: None if self._own else self._picked()), names="value")
        self.upload.observe(guard(lambda change: self._take(change["new"])), names="value")
        self.widget = W.HBox([self.box, self.list, self.upload])

    def offer(self, runs: Sequence[Run]) -> None:
        """Lists the arms that have a capture."""
        self._runs = {f"{arm_of(r)}: {r.name}": r for r in runs}
        self._offer(self._runs)

    @property
    def options(self) -> list[str]:
        """What the list offers."""
        return list(self.list.offered)

    def _offer(self, options: Iterable[str]) -> None:
        options = list(options)
        self._set(self.box.value, self.list.value if self.list.value in options else None, options)

    def _set(self, text: str, picked: str | None, options: Sequence[str]) -> None:
        """Fills line and list; that is no choice of a person."""
        self._own = True
        try:
            self.box.value = text
            self.list.offer(options, picked)
        finally:
            self._own = False

    def _typed(self) -> None:
        self._set(self.box.value, None, self.options)
        self._changed()

    def _picked(self) -> None:
        picked = self.list.value
        if picked is not None:
            self.value = picked

    @property
    def value(self) -> str:
        return str(self.box.value).strip() or str(self.list.value or "")

    @value.setter
    def value(self, value: str) -> None:
        with TURN:
            arm = value in self._runs
            self._set("" if arm else value, value if arm else None, self.options)
            self._changed()

    @property
    def is_arm(self) -> bool:
        """Whether an arm shown is chosen, or nothing yet."""
        return not self.value or self.value in self._runs

    @property
    def source(self) -> Run | Path:
        """What is chosen. Raises `LabError` where nothing is, or no path."""
        text = self.value
        if not text:
            raise LabError(f"no {self.label.lower()} is chosen; {WAY_OUT}.")
        if text in self._runs:
            return self._runs[text]
        if "\0" in text:
            raise LabError(f"{text!r} is no path: it holds a NUL character; {WAY_OUT}.")
        return Path(text).expanduser()

    @property
    def title(self) -> str:
        """The choice in a few words."""
        source = self.source
        return arm_of(source) if isinstance(source, Run) else source.name

    @property
    def code(self) -> str:
        """Python for what is chosen."""
        from dspark_lab.runs.store import recorded_names

        source = self.source
        if isinstance(source, Run):
            return f"lab.load_run({source.name if source.name in recorded_names() else str(source.path)!r})"
        return repr(str(source))

    @property
    def state(self) -> tuple[Any, ...]:
        """The choice with what its files are now: equal as long as reading it again would give the same."""
        source = self.source
        paths = (
            list(source.trace_paths)
            if isinstance(source, Run)
            else [source, *(sorted(source.iterdir()) if source.is_dir() else ())]
        )
        return (self.value, *((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths if p.exists()))

    @property
    def num_bytes(self) -> int:
        """What its files hold on disk."""
        return sum(size for _, _, size in self.state[1:])

    def opener(self) -> Callable[[], Any]:
        """What opens the trace, or all its ranks, whatever is chosen by then; it raises `LabError` for what is none.

        The list then offers what a folder holds."""
        source = self.source
        if isinstance(source, Path) and source.is_dir():
            self._offer([*self._runs, *_inside(source)])
        return lambda: open_cached(source, whole=True)

    def _take(self, files: Sequence[dict[str, Any]]) -> None:
        """Files that the browser sent become a folder, one alone a path."""
        if not files:
            return
        folder = tempfile.TemporaryDirectory(prefix="dspark-sent-")
        self._folders.append(folder)  # they go with the panel
        for f in files:
            (Path(folder.name) / Path(str(f["name"])).name).write_bytes(bytes(f["content"]))
        paths = sorted(Path(folder.name).iterdir())
        self.value = str(paths[0] if len(paths) == 1 else folder.name)


def _short(choice: str) -> str:
    """An arm without its run's name, a path without its folders."""
    arm, colon, _ = choice.partition(": ")
    return arm if colon else Path(choice).name


def _inside(folder: Path) -> list[str]:
    """Folders and traces right below a folder, to pick from."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    kept = [p for p in found if (p.is_dir() or p.name.endswith((".json", ".json.gz"))) and not p.name.startswith(".")]
    return [str(p) for p in kept[:MAX_LISTED]]
