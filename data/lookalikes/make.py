"""Look-alikes of what SGLang and vLLM write, made of this package's own recordings: python data/lookalikes/make.py

The times, kernels and waits are those of `h200-moe-none` and `-blocking`, recorded on an H200; only names differ. SGLang's steps are labelled
``step[DECODE bs=1]``; vLLM's ``execute_context_0(0)_generation_1(1)``, with the names of ROCm's runtime. Files are the same byte for byte when made again.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE.parent / "recorded"
ARMS = {"before": "h200-moe-none", "after": "h200-moe-blocking"}
STEP = re.compile(r"ProfilerStep#\d+$")


def sglang(event: dict[str, Any]) -> None:
    event["name"] = STEP.sub("step[DECODE bs=1]", event["name"]).replace("dspark::", "")


def vllm(event: dict[str, Any]) -> None:
    name = STEP.sub("execute_context_0(0)_generation_1(1)", event["name"]).replace("dspark::", "")
    event["name"] = re.sub(r"^cuda(?=[A-Z])", "hip", name)
    if event.get("cat") in ("cuda_runtime", "cuda_driver"):
        event["cat"] = event["cat"].replace("cuda", "hip")


def write(engine: str, when: str, rename: Callable[[dict[str, Any]], None]) -> Path:
    source = next((RECORDED / ARMS[when] / "traces").glob("rank0*.json.gz"))
    content = json.loads(gzip.decompress(source.read_bytes()))
    for event in content["traceEvents"]:
        if isinstance(event.get("name"), str):
            rename(event)
    content["lookalike"] = f"of {engine}: the times are those of {ARMS[when]}, recorded on an H200"
    path = HERE / f"{engine}_{when}.json.gz"
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as out:
        out.write(json.dumps(content, separators=(",", ":")).encode())
    return path


if __name__ == "__main__":
    for engine, rename in (("sglang", sglang), ("vllm", vllm)):
        for when in ARMS:
            path = write(engine, when, rename)
            print(f"{path.name}: {path.stat().st_size:,} bytes")
