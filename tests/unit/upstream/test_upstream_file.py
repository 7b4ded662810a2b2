"""The test file offered to SGLang, run against stand-ins: it passes on the documented behaviour and fails on each way to lose it."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "docs" / "upstream" / "test_make_num_token_non_padded.py"

SCALAR = "torch.full((), num_tokens, dtype=torch.int32).to(device, non_blocking=True)"
BODIES = {
    "fixed": f"return {SCALAR} if enable_num_token_non_padded() else None",
    "always": f"return {SCALAR}",
    "never": "return None",
    "built_then_dropped": f"scalar = {SCALAR}; return scalar if enable_num_token_non_padded() else None",
    "blocking": "return torch.full((), num_tokens, dtype=torch.int32).to(device) if enable_num_token_non_padded() else None",
    "constructor": (
        "return torch.tensor(num_tokens, dtype=torch.int32, device=device) if enable_num_token_non_padded() else None"
    ),
    "int64": f"return {SCALAR.replace('32', '64')} if enable_num_token_non_padded() else None",
    "zero_is_none": f"return {SCALAR} if num_tokens and enable_num_token_non_padded() else None",
}
TESTS = {"off_returns_none", "on_returns_one_int32", "on_arrives_on_the_device", "the_switch_is_asked"}
FAILS = {
    "fixed": set(),
    "always": {"off_returns_none", "the_switch_is_asked"},
    "never": {"on_returns_one_int32", "on_arrives_on_the_device", "the_switch_is_asked"},
    "blocking": {"on_arrives_on_the_device"},
    "constructor": {"on_arrives_on_the_device"},
    "int64": {"on_returns_one_int32"},
    "built_then_dropped": {"off_returns_none"},
    "zero_is_none": {"on_returns_one_int32"},
}


def stand_in(folder: Path, body: str) -> None:
    """A package ``sglang`` with only what the file imports; the switch itself fails, as it does before parallel state is set."""
    files = {
        "srt/model_executor/forward_batch_info.py": (
            "def enable_num_token_non_padded():\n    raise RuntimeError('parallel state is not initialised')\n"
        ),
        "srt/speculative/dspark_components/dspark_draft.py": (
            "import torch\n"
            "from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded\n"
            f"def _make_num_token_non_padded(num_tokens, device):\n    {body}\n"
        ),
        "test/ci/ci_register.py": "def register_cpu_ci(**_):\n    pass\n",
        "test/test_utils.py": "from unittest import TestCase as CustomTestCase\n",
    }
    for name, text in files.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for package in path.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()


@pytest.fixture
def no_sglang(monkeypatch) -> Iterator[None]:
    """The stand-in's modules are gone after the test, and a real sglang is out of the way during it."""
    for name in [n for n in sys.modules if n.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.mark.usefixtures("no_sglang")
@pytest.mark.parametrize("kind", BODIES)
def test_the_file_tells_good_from_bad(kind: str, tmp_path: Path, monkeypatch):
    stand_in(tmp_path, BODIES[kind])
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("offered")
    exec(compile(FILE.read_text(), str(FILE), "exec"), module.__dict__)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    assert result.testsRun == len(TESTS)
    assert not result.errors, result.errors[0][1]
    said = [str(test) for test, _ in result.failures]
    failed = {t for t in TESTS if any(f"test_{t}" in name for name in said)}
    assert failed == FAILS[kind], said
