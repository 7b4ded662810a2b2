"""Misuse of the verbs on drafting, costs and calibration: each fault is one line that names the value, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_lab as lab
from dspark_lab.config.shipped import data_dir
from dspark_lab.plan.rehearsal import TextPath
from dspark_lab.spec.sampling import sampling_rows

NAN = float("nan")
HALVES = np.full((9, 7), 0.5)
TEXT = TextPath(survival=HALVES, confidence_logits=HALVES)


def rounds(seed: int = 0, **changes: Any) -> lab.ConfidenceRounds:
    rng = np.random.default_rng(seed)
    values = {"logits": rng.normal(size=(8, 7)), "accepted": rng.integers(0, 8, 8), "temperature": 0.0}
    return lab.ConfidenceRounds(**values | changes)


def evaluate(**changes: Any) -> Any:
    return lab.evaluate(**{"kinds": "prose", "num_prompts": 1, "device": "cpu"} | changes)


def regret(texts: Any = (TEXT,), costs: Any = None, **changes: Any) -> Any:
    costs = lab.recorded_costs("shipped").additive() if costs is None else costs
    return lab.schedule_regret(texts, costs, **{"requests": [1], "num_steps": 3, "num_seeds": 2} | changes)


def tiny(**toggles: Any) -> lab.LabConfig:
    return lab.preset("tiny").replace(device="cpu", **toggles)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "temperatures": (lambda: evaluate(temperatures=0.5), "temperatures=0.5"),
    "none": (lambda: evaluate(temperatures=[]), r"temperatures=\[\]"),
    "block_sizes": (lambda: evaluate(block_sizes=3), "block_sizes=3"),
    "thresholds": (lambda: evaluate(thresholds=None), "thresholds=None"),
    "drafters": (lambda: evaluate(drafters=lab.shipped()), "drafters=LabConfig"),
    "kinds": (lambda: evaluate(kinds=3), "kinds=3"),
    "prompts": (lambda: evaluate(kinds={"a": 3}), "prompts=3"),
    "a later prompt": (lambda: evaluate(kinds={"a": [[1]], "b": [[999]]}, on_progress=pytest.fail), "prompt id 999"),
    "requests": (lambda: regret(requests=3), "requests=3"),
    "steps": (lambda: regret(num_steps=0), "num_steps=0"),
    "a profile": (lambda: regret(costs=lab.recorded_costs("shipped")), r"additive\(\)"),
    "no texts": (lambda: regret([[1, 2]]), r"texts=\[\[1, 2\]\]"),
    "survival": (lambda: regret([TextPath(survival=HALVES + 5)]), "not within 0 to 1"),
    "no starts": (lambda: regret([TextPath(survival=HALVES[:0])]), "one start at least"),
    "negative scales": (lambda: regret(scales=-np.ones(7)), "finite numbers above 0"),
    "profile of": (lambda: lab.profile_costs("tiny", requests=[1]), "cfg='tiny'"),  # pyright: ignore[reportArgumentType]
    "profile at": (lambda: lab.profile_costs(tiny(), requests=1), "requests=1"),  # pyright: ignore[reportArgumentType]
    "no path": (lambda: lab.load_sps(None), "None is no path"),  # pyright: ignore[reportArgumentType]
    "fit of": (lambda: lab.fit_sts(None), "rounds=None"),  # pyright: ignore[reportArgumentType]
    "grid": (lambda: lab.fit_sts(rounds(), grid=np.array([-1.0])), "grid="),
    "bins": (lambda: lab.fit_sts(rounds(), num_bins=0), "num_bins=0"),
    "halves": (lambda: rounds(accepted=np.full(8, 0.7)), "not whole"),
    "words": (lambda: rounds(logits=[["a"]]), "no array of numbers"),
    "verified": (lambda: rounds(verified=np.ones(3)), "one a round"),
    "no table": (lambda: lab.calibration(rounds(1), None), "table=None"),  # pyright: ignore[reportArgumentType]
    "swapped": (lambda: lab.calibration(lab.fit_sts(rounds()), rounds(1)), "no STS table|no lab.ConfidenceRounds"),  # pyright: ignore[reportArgumentType]
    "cfg": (lambda: lab.generate({}, [[1]]), r"cfg=\{\}"),  # pyright: ignore[reportArgumentType]
    "one sampling": (lambda: lab.generate(tiny(), [[1]], sampling=lab.Sampling()), "is no list of lab.Sampling"),  # pyright: ignore[reportArgumentType]
    "shift of": (lambda: lab.slot_shift(None, [[1]]), "cfg=None"),  # pyright: ignore[reportArgumentType]
    "shift on": (lambda: lab.slot_shift(lab.shipped(), [1, 2]), r"prompts=\[1, 2\]"),  # pyright: ignore[reportArgumentType]
    "text of": (lambda: lab.text_of(["a"]), "token 'a'"),  # pyright: ignore[reportArgumentType]
    "notes": (lambda: lab.depth_table({"a@depth1": {"text": {}}}), "no num_layers"),
    "no notes": (lambda: lab.depth_table([1]), r"report=\[1\]"),  # pyright: ignore[reportArgumentType]
    "no report": (lambda: lab.depth_table(data_dir() / "models" / "target" / "model.safetensors"), "is no JSON"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_one_line(name: str) -> None:
    call, said = CASES[name]
    with pytest.raises(lab.LabError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ['{"turns": ["\\ud800"]}', "[" * 100_000], ids=["surrogate", "deep"])
def test_a_line_that_is_no_text_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(line)
    with pytest.raises(lab.LabError, match="line 1"):
        lab.read_turns(tmp_path / "turns.jsonl")


def test_a_profile_of_other_values_is_named(tmp_path: Path) -> None:
    path = lab.recorded_costs("shipped").save(tmp_path / "sps.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": "x"}))
    with pytest.raises(lab.LabError, match="config='x'"):
        lab.load_sps(path)


def test_a_table_of_one_temperature_is_not_read_at_another(tmp_path: Path) -> None:
    cfg = tiny(
        verify="threshold", confidence_threshold=0.5, sts_path=str(lab.fit_sts(rounds()).save(tmp_path / "sts.json"))
    )
    with pytest.raises(lab.LabError, match=r"sampling has temperature=1\.0"):
        lab.generate(cfg, [[1]], sampling=[lab.Sampling(temperature=1.0)])


def test_a_top_k_over_every_vocabulary_keeps_all() -> None:
    huge, none = sampling_rows([lab.Sampling(top_k=10**30), lab.Sampling()]).top_k.tolist()
    assert huge == none
    out = lab.generate(tiny(temperature=1.0, top_k=10**30), [[1]], max_new_tokens=4)[0]
    assert out.tokens == lab.generate(tiny(temperature=1.0), [[1]], max_new_tokens=4)[0].tokens
