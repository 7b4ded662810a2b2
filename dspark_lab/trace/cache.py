"""Files that were read once, kept in the user's cache folder by their content.

``DSPARK_LAB_CACHE`` names another folder, or ``off``; ``DSPARK_LAB_CACHE_MB`` the most it may hold. An entry is written beside its place
and renamed, carries a checksum, and is of the code that reads it; whatever does not fit is read anew and replaced.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark_lab.errors import LabError
from dspark_lab.trace.arrow import code_version, dump, load
from dspark_lab.trace.events import EventTable, read_events

FOLDER_VARIABLE, LIMIT_VARIABLE = "DSPARK_LAB_CACHE", "DSPARK_LAB_CACHE_MB"
LIMIT_MB = 2048
#: Smaller files are read as fast as they would be found.
LEAST_BYTES = 1_000_000
_OFF = ("", "0", "off", "no", "false", "none")


@dataclass(frozen=True)
class Cache:
    """A folder of read files and the most it may hold, in MB."""

    folder: Path
    limit_mb: float = LIMIT_MB

    def read(self, path: Path, *, stacks: bool = True, least_bytes: int = LEAST_BYTES) -> EventTable:
        """`read_events`, from the cache where the same content was read before."""
        try:
            small = path.stat().st_size < least_bytes
        except OSError:
            small = True
        if small:
            return read_events(path, stacks=stacks)
        entry = self.folder / f"{_digest(path)}-{code_version()}{'' if stacks else '-no-stacks'}.arrow"
        found = _load(entry)
        if found is None:
            found = read_events(path, stacks=stacks)
            self._keep(entry, found)
        return found

    def _keep(self, entry: Path, table: EventTable) -> None:
        """Writes an entry if it can be written; a cache that cannot be is none."""
        try:
            data = dump(table)
            if len(data) > self.limit_mb * 1e6:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(data)
                os.replace(name, entry)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            self.shrink()
        except (OSError, ValueError):  # no room, no right; a name that has no UTF-8
            return

    def shrink(self) -> None:
        """Removes the entries that were used least recently until the rest is within the limit, and what a killed process left."""
        entries = []
        for file in [*self.folder.glob("*.arrow"), *self.folder.glob(".*.part")]:
            try:
                told = file.stat()
            except OSError:
                continue
            entries.append((told.st_mtime, told.st_size, file))
        held = sum(size for _, size, _ in entries)
        for _, size, file in sorted(entries):
            if held <= self.limit_mb * 1e6:
                return
            file.unlink(missing_ok=True)
            held -= size


def default_cache(environment: Mapping[str, str] = os.environ) -> Cache | None:
    """The cache that the environment asks for; None where it is switched off or there is no home to keep it in.

    Raises:
        LabError: a limit that is no number, a folder in the home of nobody.
    """
    told = environment.get(FOLDER_VARIABLE)
    if told is not None and told.strip().lower() in _OFF:
        return None
    limit = environment.get(LIMIT_VARIABLE, str(LIMIT_MB))
    try:
        limit_mb = float(limit)
    except ValueError:
        limit_mb = float("nan")
    if not limit_mb >= 0:
        raise LabError(f"{LIMIT_VARIABLE}={limit!r} is no number of MB; give one from 0 on, or {FOLDER_VARIABLE}=off.")
    folder = expanded(told, FOLDER_VARIABLE) if told else _user_folder(environment)
    return Cache(folder, limit_mb) if folder is not None else None


def expanded(path: str | os.PathLike[str], what: str) -> Path:
    """``path`` with a leading ``~`` or ``~name`` resolved. Raises `LabError`, which calls it ``what``, where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise LabError(
            f"{what}={os.fspath(path)!r}: there is no home folder of that name; give the path without '~'."
        ) from None


def _user_folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder for caches, by the rules of the system (XDG, else Apple's and Microsoft's)."""
    try:
        if sys.platform == "win32":
            base = Path(environment.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            given = environment.get("XDG_CACHE_HOME", "")
            base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    return base / "dspark_lab" / "traces"


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _load(entry: Path) -> EventTable | None:
    try:
        found = load(entry.read_bytes())
        if found is not None:
            os.utime(entry)
        return found
    except OSError:
        return None
