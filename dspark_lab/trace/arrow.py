"""A read file as bytes and back: the events as an Arrow table, what stands beside them as JSON in it, a checksum before both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pandas as pd

from dspark_lab.trace.decode import ReadLog
from dspark_lab.trace.events import EventTable

_MAGIC = b"dspark-lab events\n"
_META = b"dspark_lab"
#: The modules whose code decides what a file is read as.
_CODE = ("arrow", "columns", "decode", "events", "reader")


@cache
def code_version() -> str:
    """A digest of the code that reads files: what older code read is not taken for what this code reads."""
    digest = hashlib.blake2b(digest_size=12)
    for name in _CODE:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    digest.update(pd.__version__.encode())
    return digest.hexdigest()


def dump(table: EventTable) -> bytes:
    """The bytes of ``table``."""
    import pyarrow as pa

    beside = {"header": table.header, "log": asdict(table.log), "labels": table.labels}
    rows = pa.Table.from_pandas(table.events, preserve_index=False)
    rows = rows.replace_schema_metadata({**(rows.schema.metadata or {}), _META: json.dumps(beside).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(rows)
    body = sink.getvalue()
    return _MAGIC + hashlib.blake2b(body, digest_size=16).digest() + body.to_pybytes()


def load(data: bytes) -> EventTable | None:
    """The table of ``data``; None where it is not what `dump` wrote, whole."""
    import pyarrow as pa

    body = memoryview(data)[len(_MAGIC) + 16 :]
    if (
        not data.startswith(_MAGIC)
        or hashlib.blake2b(body, digest_size=16).digest() != data[len(_MAGIC) : len(_MAGIC) + 16]
    ):
        return None
    rows = pa.ipc.open_file(pa.py_buffer(body)).read_all()
    beside = json.loads(rows.schema.metadata[_META])
    events = rows.to_pandas(split_blocks=True, self_destruct=True)
    for column in ("category", "name"):
        names = pd.Index(events[column].cat.categories.to_numpy(dtype=object), dtype=object)
        events[column] = events[column].cat.rename_categories(names)
    labels = {int(k): v for k, v in beside["labels"].items()}
    return EventTable(events, beside["header"], ReadLog(**beside["log"]), labels)
