"""A Kineto or Chrome trace file, read in pieces of a MB: plain or gzip by content, object or bare array, whole or cut short."""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dspark_lab.errors import LabError
from dspark_lab.trace.decode import BETWEEN, ReadLog, decode_run, loads_header, mend
from dspark_lab.trace.progress import tell

CHUNK_BYTES = 1 << 20
#: Compressed bytes taken at a time: what they give stays in memory, a thousandfold at worst.
_PIECE_BYTES = 1 << 16
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARRAY_END = re.compile(rb'\}\s*\]\s*(?=,\s*"|\}\s*$|$)')


def open_bytes(path: Path) -> Any:
    """The uncompressed bytes of a file; gzip is recognised by its magic bytes, never by the name.

    Raises:
        LabError: the file is missing, a folder or unreadable.
    """
    try:
        with open(path, "rb") as f:
            magic = f.read(2)
        if magic != b"\x1f\x8b":
            return open(path, "rb")
    except FileNotFoundError as err:
        raise LabError(
            f"no trace at {path}: there is no such file. Give a Kineto JSON file, plain or gzip, or a folder of them."
        ) from err
    except OSError as err:
        raise LabError(f"{path} cannot be read: {err.strerror or err}") from err
    return _Gunzip(path)


def _inflater() -> tuple[Any, Any]:
    """(a decompressor of one gzip member, the errors it raises), of isal where present."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.decompressobj(wbits=31), (zlib.error,)
    return isal_zlib.decompressobj(wbits=31), (isal_zlib.error, zlib.error)


class _Gunzip:
    """The members of a gzip file, one after another; of a broken or cut one every byte that can be decoded.

    ``broken`` says why the data ends too early, "" where it does not; ``ignored`` counts bytes behind the data that are none.
    """

    def __init__(self, path: Path) -> None:
        self.broken = ""
        self.ignored = 0
        self._file = path.open("rb")
        self._inflate, self._errors = _inflater()
        self._begin = self._given = 0  # offset of the member in the file, and what it has given so far
        self._ended = False

    def __enter__(self) -> _Gunzip:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tell(self) -> int:
        """Compressed bytes taken so far."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """At least ``size`` bytes where there are as many; b"" at the end."""
        out: list[bytes] = []
        while not self._ended and size > 0:
            got = self._piece()
            out.append(got)
            size -= len(got)
        return b"".join(out)

    def _piece(self) -> bytes:
        piece = self._file.read(_PIECE_BYTES)
        if not piece:
            self._ended, self.broken = True, "it ends before its end mark"
            return b""
        try:
            got = self._inflate.decompress(piece)
        except self._errors as err:
            self._ended, self.broken = True, str(err)
            return self._rescue(self._file.tell())
        self._given += len(got)
        if self._inflate.eof:
            self._next_member(len(self._inflate.unused_data))
        return got

    def _next_member(self, unused: int) -> None:
        """Goes to the member that follows ``unused`` bytes before here; padding with zeros is passed over."""
        place = self._file.seek(-unused, io.SEEK_CUR)
        while piece := self._file.read(_PIECE_BYTES):
            rest = piece.lstrip(b"\0")
            place += len(piece) - len(rest)
            if rest:
                break
        self._file.seek(place)
        magic = self._file.read(2)
        self._file.seek(place)
        if magic != b"\x1f\x8b":
            self._ended, self.ignored = True, self._file.seek(0, io.SEEK_END) - place
        self._begin, self._given = place, 0
        self._inflate, self._errors = _inflater()

    def _rescue(self, end: int) -> bytes:
        """What the member gives beyond what was read, decoded again and byte by byte before the fault, which lies before ``end``."""
        self._file.seek(self._begin)
        inflate, skip, out = zlib.decompressobj(wbits=31), self._given, []
        while piece := self._file.read(min(_PIECE_BYTES, end - self._file.tell())):
            before = inflate.copy()
            try:
                got = inflate.decompress(piece)
            except zlib.error:
                got = _until_fault(before, piece)
                end = 0
            out.append(got[skip:])
            skip = max(0, skip - len(got))
            if not end or inflate.eof:
                break
        return b"".join(out)


def _until_fault(inflate: Any, piece: bytes) -> bytes:
    out = bytearray()
    with suppress(zlib.error):
        for i in range(len(piece)):
            out += inflate.decompress(piece[i : i + 1])
    return bytes(out)


class TraceFile:
    """The events of one file as runs of event objects, and what stands beside them.

    ``header`` holds the keys before the events while iterating and all keys afterwards. ``log`` counts repairs.
    """

    def __init__(self, path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.log = ReadLog()
        self._chunk_bytes, self._num_bytes = chunk_bytes, 1
        self._stream: Any = io.BytesIO()

    def runs(self) -> Iterator[tuple[bytes, int]]:
        """(text, byte offset) of runs of events with commas between; each about a MB."""
        with open_bytes(self.path) as self._stream:
            self._num_bytes = max(self.path.stat().st_size, 1)
            rest, offset = self._start()
            while True:
                more = self._more()
                if not more:
                    break
                rest += more
                cut = _last_between(rest)
                if cut is None:
                    continue
                yield rest[: cut.start() + 1], offset
                offset, rest = offset + cut.end(), rest[cut.end() :]
            cut = _last_between(rest)
            if cut is not None:
                yield rest[: cut.start() + 1], offset
                offset, rest = offset + cut.end(), rest[cut.end() :]
            run = self._finish(rest, offset)
            if run:
                yield run, offset

    def decode(self, text: bytes, offset: int, *, exact: bool = False) -> list[Any]:
        """Event objects of one run."""
        events = decode_run(text, offset, self.log, exact=exact)
        self.log.num_events += len(events)
        return events

    def _more(self) -> bytes:
        tell(f"reading {self.path.name}", self._stream.tell() / self._num_bytes)
        try:
            got = self._stream.read(self._chunk_bytes)
        except OSError as err:
            self.log.truncated = True
            self.log.notes.append(f"reading broke off ({err.strerror or err}); what came before it was read")
            return b""
        if self._broken_gzip and not self.log.truncated:
            self.log.truncated = True
            self.log.notes.append(f"the compressed data is broken ({self._broken_gzip}); what came before it was read")
        if ignored := getattr(self._stream, "ignored", 0):
            self.log.notes.append(f"{ignored} bytes after the compressed data are no gzip and were ignored")
        return got

    @property
    def _broken_gzip(self) -> str:
        return getattr(self._stream, "broken", "")

    def _start(self) -> tuple[bytes, int]:
        """Up to the first event: (bytes read beyond, their offset). Raises LabError where this is no trace."""
        head = self._more()
        blank = len(head) - len(head.lstrip(b"\xef\xbb\xbf \t\r\n"))
        first = head[blank : blank + 1]
        if first == b"[":
            after = head[blank + 1 :].lstrip()
            if after and after[:1] not in (b"{", b"]"):
                raise self._no_trace(head, "an array whose members are no events")
            self.log.notes.append(
                "the file is a bare array of events without a header; rank and base time are not in it"
            )
            return head[blank + 1 :], blank + 1
        if first != b"{":
            if not head.strip():
                why = f"a broken gzip that gives no text ({self._broken_gzip})" if self._broken_gzip else "it is empty"
                raise self._no_trace(head, why)
            raise self._no_trace(head, "it is no JSON object or array")
        found = _EVENTS_KEY.search(head)
        while found is None:
            more = self._more()
            if not more:
                gzip = f"a broken gzip ({self._broken_gzip}) of " if self._broken_gzip else ""
                raise self._no_trace(head, f'{gzip}a JSON object without "traceEvents"')
            head += more
            found = _EVENTS_KEY.search(head, max(0, len(head) - len(more) - 64))
        self.header = self._keys(head[: found.start()] + b'"_":0}', 0)
        return head[found.end() :], found.end()

    def _keys(self, text: bytes, offset: int) -> dict[str, Any]:
        """The keys beside the events; those that cannot be read are counted."""
        found = loads_header(text)
        if not found:
            self.log.add("keys beside the events that cannot be read left out", offset=offset)
        found.pop("_", None)
        return found

    def _no_trace(self, head: bytes, why: str) -> LabError:
        seen = head[:48].decode("utf-8", "replace").strip().splitlines()
        shown = f"; it starts with {seen[0]!r}" if seen else ""
        return LabError(
            f'{self.path} is no trace: {why}{shown}. A trace is a JSON object with "traceEvents", or an array of events.'
        )

    def _finish(self, rest: bytes, offset: int) -> bytes:
        """The last run: cuts the array's end and the keys after it off, takes note if the file stops in the middle."""
        end, tail = _array_end(rest)
        if end is not None:
            self.header |= self._keys(b'{"_":0' + tail.rstrip(), offset + end) if tail.strip(b" \t\r\n}") else {}
            return rest[:end].strip().rstrip(b",")
        whole = rest.strip().rstrip(b",").rstrip()
        try:
            json.loads(whole or b"{}")
        except (ValueError, RecursionError):
            self.log.truncated = True
            mend(whole, offset, self.log)
            return b""
        self.log.truncated = True
        return whole


def _last_between(text: bytes) -> re.Match[bytes] | None:
    """The last place between two events."""
    window = 1 << 16
    while True:
        found = list(BETWEEN.finditer(text, max(0, len(text) - window)))
        last = found[-1] if found else None
        if last is not None or window >= len(text):
            return last
        window *= 16


def _array_end(rest: bytes) -> tuple[int | None, bytes]:
    """(length of the events, what follows the array), or (None, b"") where the array does not end. ``rest`` holds one event or none."""
    text = rest.decode("utf-8", "surrogateescape")
    place = len(text) - len(text.lstrip())
    decoder = json.JSONDecoder(strict=False)
    try:
        while text[place : place + 1] not in ("]", ""):
            _, place = decoder.raw_decode(text, place)
            place = re.compile(r"[\s,]*").match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[place : place + 1] == "]":
            return len(text[:place].encode("utf-8", "surrogateescape")), text[place + 1 :].encode(
                "utf-8", "surrogateescape"
            )
        return None, b""
    except (ValueError, RecursionError):
        found = _ARRAY_END.search(rest)
        return (found.start() + 1, rest[found.end() :]) if found else (None, b"")
