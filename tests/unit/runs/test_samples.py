"""The look-alikes that ship: what their script makes of the recordings, and what the reader makes of them."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import pytest

import dspark_lab as lab

SCRIPT = Path(__file__).parents[3] / "data" / "lookalikes" / "make.py"


def test_they_are_what_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_lookalikes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    monkeypatch.setattr(make, "HERE", tmp_path)
    shipped = lab.sample_traces()
    assert list(shipped) == ["sglang_after", "sglang_before", "vllm_after", "vllm_before"]
    for engine, rename in (("sglang", make.sglang), ("vllm", make.vllm)):
        for when in make.ARMS:
            made = make.write(engine, when, rename)
            assert gzip.decompress(made.read_bytes()) == gzip.decompress(shipped[f"{engine}_{when}"].read_bytes())


@pytest.mark.parametrize(
    ("engine", "source", "vendor", "call"),
    [
        ("sglang", "SGLang step label", "cuda", "cudaStreamSynchronize"),
        ("vllm", "vLLM execute_context label", "rocm", "hipStreamSynchronize"),
    ],
)
def test_they_read_as_the_engines_and_time_as_the_recordings(engine: str, source: str, vendor: str, call: str) -> None:
    trace = lab.open_trace(lab.sample_traces()[f"{engine}_after"])
    recorded = lab.open_trace(lab.load_run("h200-moe-blocking"))
    assert (trace.integrity.steps_source, trace.vendor) == (source, vendor)
    assert call in set(trace.waits()["name"])
    assert trace.steps()["period_us"].tolist() == recorded.steps()["period_us"].tolist()
    assert "lookalike" in trace.header
