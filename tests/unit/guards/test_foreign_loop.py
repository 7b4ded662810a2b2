"""The guards on a loop that is not ours: they fail on the planted one, with file and line, and pass on the mended one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from dspark_lab.guards import GuardError, fake_cuda, no_host_sync

LOOP = Path(__file__).parent / "foreign_loop.py"


def load():
    spec = importlib.util.spec_from_file_location("foreign_loop", LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["foreign_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def planted() -> dict[str, int]:
    found = re.finditer(r"^.*# PLANT (\w+)$", LOOP.read_text(), re.MULTILINE)
    text = LOOP.read_text()
    return {m[1]: text[: m.start()].count("\n") + 1 for m in found}


def test_it_knows_nothing_of_the_guards():
    assert "dspark" not in LOOP.read_text()


@pytest.mark.parametrize("inference", [False, True])
def test_the_planted_one_fails_with_file_and_line(inference):
    with torch.inference_mode(inference), fake_cuda() as device:
        loop = load().Planted(device)
        loop.step()
        line = planted()["scalar"]
        with (
            pytest.raises(
                GuardError, match=rf"foreign_loop.py:{line} \(Planted.make_batch\): torch.tensor\(num_tokens, "
            ),
            no_host_sync(),
        ):
            loop.step()
        with pytest.raises(GuardError) as caught, no_host_sync(at_once=False):
            loop.step()
        assert {f.line for f in caught.value.findings} == set(planted().values())
        with pytest.raises(GuardError) as caught, no_host_sync(allow=f"foreign_loop.py:{line}"):
            loop.step()
        assert caught.value.findings[0].line == planted()["item"]


@pytest.mark.parametrize("inference", [False, True])
def test_the_mended_one_passes_and_says_the_same(inference):
    with torch.inference_mode(inference), fake_cuda() as device:
        module = load()
        planted_loop, mended = module.Planted(device), module.Mended(device)
        for _ in range(30):
            planted_loop.step()
        with no_host_sync(allow_pageable_staging=False) as guard:
            for _ in range(30):
                mended.step()
        assert guard.counts() == {"event_wait": 28}
        for _ in range(2):
            mended.retire()
        said = [[r.output_ids for r in (*s.done, *s.running)] for s in (planted_loop, mended)]
        assert said[0] == said[1]
        assert len(planted_loop.done) > 3
