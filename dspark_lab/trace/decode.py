"""One run of bytes that holds trace events, turned into event objects: fast where it is sound JSON, event by event where it is not.

Profilers have written bare ``inf``, raw control characters, unescaped quotes, bytes that are no UTF-8 and files cut short.
A run of sound events goes through msgspec (or the standard library where msgspec is missing); a run that does not parse is
split at its event starts and each event is mended alone, so that one bad name costs one event and is reported with its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_FIRST_KEYS = rb"(?:ph|name|cat|ts|dur|pid|tid|args|bp|s|tts)"
#: Between two events: an unescaped quote cannot stand inside a JSON string, so this does not match within a sound name.
BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"' + _FIRST_KEYS + rb'"\s*:)')
_BETWEEN_LOOSE = re.compile(rb'\}[\s,]*(?=\{\s*"' + _FIRST_KEYS + rb'"\s*:)')
_BARE_NUMBER = re.compile(r"(?<=[:\[,])\s*[-+]?(?:inf|infinity|nan)\b(?=\s*[,}\]])", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_LONE_BACKSLASH = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_STRING_VALUE = re.compile(
    r'("(?:name|cat|ph)"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|name)"\s*:)', re.DOTALL
)
_NAME = re.compile(r'"name"\s*:\s*"(.{0,80}?)"\s*[,}]', re.DOTALL)

ARGS = {
    "stream": "stream", "device": "device", "correlation": "correlation", "external_id": "External id", "bytes": "bytes",
    "graph_id": "graph id", "graph_node_id": "graph node id", "python_id": "Python id", "python_parent_id": "Python parent id",
}  # fmt: skip


@dataclass
class ReadLog:
    """What the reader mended, left out or took note of. Offsets are bytes of the uncompressed text."""

    counts: dict[str, int] = field(default_factory=dict)
    places: list[dict[str, Any]] = field(default_factory=list)
    num_events: int = 0
    truncated: bool = False
    notes: list[str] = field(default_factory=list)
    keep: int = 20

    def add(self, what: str, *, offset: int = -1, name: str = "", count: int = 1) -> None:
        """Count one kind of mishap; the first ``keep`` of a kind are kept with byte offset and event name."""
        seen = self.counts.get(what, 0)
        self.counts[what] = seen + count
        if seen < self.keep:
            self.places.append({"what": what, "offset": offset, "name": name})


class PlainArgs:
    """The arguments of an event that are read; −1 where the file has none."""

    __slots__ = tuple(ARGS)

    def __init__(self, given: Any = None) -> None:
        given = given if isinstance(given, dict) else {}
        for ours, theirs in ARGS.items():
            setattr(self, ours, given.get(theirs, -1))


class PlainEvent:
    """An event read by the standard library; the same attributes as the msgspec struct."""

    __slots__ = ("args", "cat", "dur", "name", "ph", "pid", "raw_args", "tid", "ts")

    def __init__(self, given: dict[str, Any]) -> None:
        self.ph, self.cat, self.name = given.get("ph", ""), given.get("cat", ""), given.get("name", "")
        self.ts, self.dur = given.get("ts"), given.get("dur")
        self.pid, self.tid = given.get("pid", -1), given.get("tid", -1)
        args = given.get("args")
        self.args = PlainArgs(args) if args else None
        self.raw_args = args


@cache
def decoder(exact: bool) -> Callable[[bytes], list[Any]]:
    """Bytes of a JSON array of events → event objects; ``exact`` reads times as decimals, for epoch microseconds with a fraction."""
    try:
        import msgspec
    except ImportError:
        import decimal

        number = decimal.Decimal if exact else float
        return lambda text: [PlainEvent(e) for e in json.loads(text, parse_float=number)]
    import decimal

    args: Any = msgspec.defstruct("Args", [(n, Any, -1) for n in ARGS], rename=ARGS, gc=False)
    time: Any = decimal.Decimal | None if exact else Any
    event = msgspec.defstruct(
        "Event",
        [
            ("ph", Any, ""),
            ("cat", Any, ""),
            ("name", Any, ""),
            ("ts", time, None),
            ("dur", time, None),
            ("pid", Any, -1),
            ("tid", Any, -1),
            ("args", args | None, None),
        ],
        gc=False,
    )
    return msgspec.json.Decoder(list[event]).decode  # pyright: ignore[reportInvalidTypeForm]


def decode_run(text: bytes, offset: int, log: ReadLog, *, exact: bool = False) -> list[Any]:
    """Events of ``text``: events with commas between and nothing around. ``offset`` is the place of its first byte in the file."""
    try:
        return decoder(exact)(b"[" + text + b"]")
    except (ValueError, RecursionError):
        return _decode_each(text, offset, log, exact)
    except Exception as err:  # msgspec's errors are no ValueError in every version
        if type(err).__module__.split(".")[0] != "msgspec":
            raise
        return _decode_each(text, offset, log, exact)


def _decode_each(text: bytes, offset: int, log: ReadLog, exact: bool) -> list[Any]:
    starts = [0, *(m.end() for m in _BETWEEN_LOOSE.finditer(text))]
    ends = [*(m.start() + 1 for m in _BETWEEN_LOOSE.finditer(text)), len(text)]
    one, out = decoder(exact), []
    for begin, end in zip(starts, ends, strict=True):
        piece = text[begin:end].strip().rstrip(b",")
        if not piece:
            continue
        try:
            out += one(b"[" + piece + b"]")
        except Exception:  # whatever the parser's own error is called
            event = mend(piece, offset + begin, log)
            if event is not None:
                out.append(event)
    return out


def mend(piece: bytes, offset: int, log: ReadLog) -> PlainEvent | None:
    """One event that does not parse, mended if it can be; else None. Either way it is counted in ``log``."""
    try:
        text = piece.decode("utf-8")
        repairs = []
    except UnicodeDecodeError:
        text, repairs = piece.decode("utf-8", "replace"), ["bytes that are no UTF-8 replaced"]
    steps = (
        ("bare inf or NaN read as none", lambda s: _BARE_NUMBER.sub(" null", s)),
        ("lone backslash escaped", lambda s: _LONE_BACKSLASH.sub(r"\\\\", s)),
        ("unescaped quote escaped", _escape_quotes),
    )
    given = _loads(text)
    for what, step in steps:
        if given is not None:
            break
        changed = step(text)
        if changed != text:
            text = changed
            repairs.append(what)
            given = _loads(text)
    found = _NAME.search(text)
    if isinstance(given, dict):
        usual = "raw control character read" if _CONTROL.search(text) else "event outside the usual form read"
        for what in repairs or [usual]:
            log.add(what, offset=offset, name=str(given.get("name", "")))
        return PlainEvent(given)
    log.add("event that cannot be read left out", offset=offset, name=found[1] if found else text[:40])
    if '"schemaVersion"' in text or '"traceEvents"' in text:
        log.notes.append("a second file's header stands among the events: several writers wrote to one path")
    return None


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _escape_quotes(text: str) -> str:
    return _STRING_VALUE.sub(lambda m: m[1] + re.sub(r'(?<!\\)"', r'\\"', m[2]) + m[3], text)


def event_offset(text: bytes, index: int, offset: int) -> int:
    """Byte offset of the ``index``-th event of a run that starts at ``offset``."""
    starts = [0, *(m.end() for m in BETWEEN.finditer(text))]
    return offset + starts[index] if index < len(starts) else -1


def loads_header(text: bytes) -> dict[str, Any]:
    """The keys of a trace beside its events; {} where they cannot be read."""
    plain = text.decode("utf-8", "replace")
    found = _loads(plain) or _loads(_BARE_NUMBER.sub(" null", _LONE_BACKSLASH.sub(r"\\\\", plain)))
    return found if isinstance(found, dict) else {}
