"""Small traces made for tests: a builder that writes decode steps, and variants of the sound hostile case."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "traces"


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of the recorded and the hostile traces."""
    return DATA


@pytest.fixture(scope="session")
def sound() -> str:
    """Text of the sound hostile case: three steps of four kernels, each with its own launch."""
    return (DATA / "hostile" / "ok" / "w.1700000000000.pt.trace.json").read_text()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes text, bytes or an object as a trace file and gives its path."""

    def put(content: Any, name: str = "w.1.pt.trace.json") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return put


class Made:
    """A trace in the making; times in µs."""

    def __init__(self, prefix: str = "cuda", **header: Any) -> None:
        self.prefix = prefix
        self.events: list[dict[str, Any]] = []
        self.header = {"distributedInfo": {"rank": 0, "world_size": 1}} | header
        self.correlation = 0

    def span(self, cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Made:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def mark(self, name: str, ts: float, dur: float) -> Made:
        return self.span("user_annotation", name, ts, dur)

    def call(self, name: str, ts: float, dur: float, tid: int = 1) -> int:
        self.correlation += 1
        self.span("cuda_runtime", self.prefix + name, ts, dur, tid, correlation=self.correlation)
        return self.correlation

    def device(
        self, name: str, ts: float, dur: float, correlation: int, cat: str = "kernel", stream: int = 7, **args: Any
    ) -> Made:
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur})
        self.events[-1]["args"] = {"device": 0, "stream": stream, "correlation": correlation} | args
        return self

    def content(self) -> dict[str, Any]:
        return self.header | {"traceEvents": self.events}


@pytest.fixture
def made() -> type[Made]:
    return Made
