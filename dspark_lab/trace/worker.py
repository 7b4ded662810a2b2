"""``python -m dspark_lab.trace.worker FOLDER``: reads the files named on its standard input, one a line, and leaves each as bytes in FOLDER.

Answers a line of JSON a file: ``{"made": name}`` or ``{"error": text}``. A process of its own, since reading holds the interpreter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dspark_lab.errors import LabError
from dspark_lab.trace.arrow import dump
from dspark_lab.trace.cache import Cache, default_cache
from dspark_lab.trace.events import read_events


def main(folder: Path, *, cached: bool, stacks: bool) -> None:
    """Reads until standard input ends."""
    kept: Cache | None = default_cache() if cached else None
    for number, line in enumerate(sys.stdin):
        path = Path(json.loads(line))
        try:
            table = kept.read(path, stacks=stacks) if kept else read_events(path, stacks=stacks)
            made = folder / f"{number}-{path.name}.arrow"
            made.write_bytes(dump(table))
            answer = {"made": str(made)}
        except (LabError, OSError, ValueError) as err:
            answer = {"error": str(err)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), cached="--cached" in sys.argv, stacks="--no-stacks" not in sys.argv)
