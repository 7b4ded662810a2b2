"""Files of several ranks read at once: this process and, for large files, some more beside it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dspark_lab.trace.arrow import load
from dspark_lab.trace.events import EventTable
from dspark_lab.trace.progress import tell

#: From this many bytes on disk on, beyond the largest file, another process is worth its start.
WORTH_BYTES = 6_000_000
_MOST = 8

Outcome = EventTable | Exception


def read_many(
    paths: Sequence[Path],
    read: Callable[[Path], EventTable],
    *,
    cached: bool,
    stacks: bool,
    processes: int | None = None,
) -> list[Outcome]:
    """What ``read`` gives or raises for each path, in their order.

    ``processes``: how many more to start; default by size, one less than the machine has cores. Only errors are returned, not interrupts:
    those end the other processes and go on.
    """
    sizes = [p.stat().st_size if p.exists() else 0 for p in paths]
    if processes is None:
        processes = min(_cores() - 1, len(paths) - 1, _MOST) if sum(sizes) - max(sizes, default=0) >= WORTH_BYTES else 0
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in sorted(range(len(paths)), key=lambda i: -sizes[i]):
        todo.put(i)
    out: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="dspark_lab_read_") as folder:
        helpers = [
            _Helper(Path(folder), k, todo, paths, out, cached=cached, stacks=stacks) for k in range(max(processes, 0))
        ]
        try:
            for i in _taken(todo):
                out[i] = _outcome(read, paths[i])
            for helper in helpers:
                helper.join()
        finally:
            for helper in helpers:
                helper.end()
        for i in range(len(paths)):  # what a process that died left
            if i not in out:
                out[i] = _outcome(read, paths[i])
    return [out[i] for i in range(len(paths))]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcome(read: Callable[[Path], EventTable], path: Path) -> Outcome:
    try:
        return read(path)
    except Exception as err:
        return err


def _taken(todo: queue.SimpleQueue[int]) -> Iterator[int]:
    with suppress(queue.Empty):
        while True:
            yield todo.get_nowait()


class _Helper:
    """A process that reads files, and the thread that hands it paths and takes what it made."""

    def __init__(
        self,
        folder: Path,
        number: int,
        todo: queue.SimpleQueue[int],
        paths: Sequence[Path],
        out: dict[int, Outcome],
        *,
        cached: bool,
        stacks: bool,
    ) -> None:
        own = folder / str(number)
        own.mkdir()
        command = [sys.executable, "-m", "dspark_lab.trace.worker", str(own)]
        command += (["--cached"] if cached else []) + ([] if stacks else ["--no-stacks"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._thread = threading.Thread(target=self._serve, args=(todo, paths, out), daemon=True)
        self._thread.start()

    def _serve(self, todo: queue.SimpleQueue[int], paths: Sequence[Path], out: dict[int, Outcome]) -> None:
        assert self._process.stdin
        assert self._process.stdout
        for i in _taken(todo):
            try:
                self._process.stdin.write(json.dumps(str(paths[i].absolute())) + "\n")
                self._process.stdin.flush()
                answer = json.loads(self._process.stdout.readline())
                made = Path(answer["made"])
                found = load(made.read_bytes())
                made.unlink()
            except (OSError, ValueError, KeyError):
                return  # it died, or the file cannot be read: read again here, where the error belongs
            if found is not None:
                out[i] = found

    def join(self) -> None:
        """Waits for what it was given."""
        while self._thread.is_alive():
            tell("reading in other processes", 1.0)
            self._thread.join(0.2)

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
