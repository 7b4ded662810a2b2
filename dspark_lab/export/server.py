"""TensorBoard as a child process, and what its profiler plugin answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import weakref
from pathlib import Path
from typing import IO, Any

from dspark_lab.errors import LabError
from dspark_lab.export.scalars import INSTALL, has_tensorboard

PLUGIN = "data/plugin/pytorch_profiler"
_URL = re.compile(r"TensorBoard \S+ at (http://\S+?/?)(?:\s|$)")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business with localhost


class Server:
    """A TensorBoard that runs until `stop`, the end of a ``with`` block, or the end of this process."""

    def __init__(self, *, url: str, logdir: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.logdir = logdir
        self.pid = process.pid
        self._end = weakref.finalize(self, _stop, process)

    def stop(self) -> None:
        self._end()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<TensorBoard of {self.logdir} at {self.url}{'' if self._end.alive else ', stopped'}>"

    def _repr_html_(self) -> str:
        if not self._end.alive:
            return f"TensorBoard of <code>{self.logdir}</code>: stopped"
        return f'TensorBoard of <code>{self.logdir}</code>: <a href="{self.url}" target="_blank">{self.url}</a>'


def serve(logdir: Path | str = "tb", *, port: int = 0, timeout_s: float = 90.0) -> Server:
    """Starts TensorBoard on ``logdir`` (port 0: a free one) and returns once it answers; also a context manager.

    Runs ``sys.executable -m tensorboard.main``, so that another TensorBoard on the path cannot take its place.
    Raises `LabError` for a ``logdir`` without events or captures, a missing tensorboard, and a server that does not come up.
    """
    logdir = Path(logdir)
    if not _holds_something(logdir):
        raise LabError(
            f"logdir={str(logdir)!r} holds no run: no event file and no capture; write one with lab.to_tensorboard."
        )
    if not has_tensorboard():
        raise LabError(f"tensorboard is not installed; {INSTALL}.")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir.resolve()), "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            url = _wait_for_url(process, log, port=port, timeout_s=timeout_s)
        except BaseException:
            _stop(process)
            raise
    return Server(url=url, logdir=logdir, process=process)


def _holds_something(logdir: Path) -> bool:
    patterns = ("*.pt.trace.json", "*.pt.trace.json.gz", "*tfevents*")
    return any(path.is_file() for pattern in patterns for path in logdir.rglob(pattern))


def _wait_for_url(process: subprocess.Popen[bytes], log: IO[bytes], *, port: int, timeout_s: float) -> str:
    end = time.monotonic() + timeout_s
    while True:
        over = process.poll() is not None or time.monotonic() > end
        said = os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace")
        if url := _URL.search(said):
            return url[1].rstrip("/") + "/"
        if over:
            last = said.strip().splitlines()[-1:] or ["it said nothing"]
            how = (
                f"ended with {process.returncode}"
                if process.poll() is not None
                else f"was silent for {timeout_s:.0f} s"
            )
            raise LabError(f"TensorBoard on port {port} {how}: {last[0]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends TensorBoard and the processes it started (its data server, the plugin's readers)."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def ask(url: str, route: str, **params: object) -> Any:
    """The JSON that TensorBoard at ``url`` answers on ``route``, such as ``data/plugin/pytorch_profiler/views``, ``run="…"``."""
    query = f"?{urllib.parse.urlencode(params)}" if params else ""
    request = urllib.request.Request(f"{url.rstrip('/')}/{route.lstrip('/')}{query}")
    with _DIRECT.open(request, timeout=60) as answer:
        body = answer.read()
        if answer.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
    return json.loads(body)


def list_runs(url: str, *, timeout_s: float = 120.0) -> list[str]:
    """Names of the runs whose captures the profiler plugin has read, once it has read them all; empty where it finds none."""
    end = time.monotonic() + timeout_s
    seen: list[str] = []
    quiet = 0
    while time.monotonic() < end:
        try:
            answer = ask(url, f"{PLUGIN}/runs")
        except urllib.error.HTTPError as e:
            raise LabError(f"{url} has no profiler plugin (HTTP {e.code}); pip install torch-tb-profiler.") from None
        except OSError as e:
            raise LabError(f"no TensorBoard answers at {url}: {e}") from None
        # "loading" is also false before the plugin has looked at the folder for the first time
        quiet = quiet + 1 if not answer["loading"] and answer["runs"] == seen else 0
        seen = answer["runs"]
        if quiet >= (2 if seen else 15):
            return seen
        time.sleep(0.2)
    raise LabError(
        f"the profiler plugin at {url} was still reading after {timeout_s:.0f} s; it has {', '.join(seen) or 'none'}."
    )
