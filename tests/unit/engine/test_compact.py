"""Scheduled verification and the compact layout: the same tokens and lengths as padded ones, fewer rows."""

from __future__ import annotations

import pytest
import torch

import dspark_lab as lab
from dspark_lab.config import LabConfig, preset
from dspark_lab.device import device_name
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.generate import generate, generate_plain
from dspark_lab.engine.replays import RoundGraphs
from dspark_lab.engine.request import Request
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import CostWarning
from dspark_lab.plan.padding import bucket_for
from dspark_lab.plan.tiers import tiers_of
from dspark_lab.spec.compact import compact

NEW = 24
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13]]


def with_costs(cfg: LabConfig, folder, slope: float = 1.0) -> LabConfig:
    """A made table: each verified draft costs ``slope`` of a bare step, shared by the batch."""
    gamma, loads = cfg.model.drafter.block_size, (1, cfg.engine.batch_size)
    points = [(r, r * w) for r in sorted(set(loads)) for w in range(1, gamma + 2)]
    profile = lab.SpsProfile(
        requests=tuple(r for r, _ in points), tokens=tuple(b for _, b in points),
        seconds=tuple(1.0 + slope * (b - r) / r for r, b in points), block_size=gamma,
        environment={"device_name": device_name(torch.device("cpu"))}, source="simulated",
    )  # fmt: skip
    return cfg.replace(verify="scheduled", sps_path=str(profile.save(folder / "sps.json")))


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("verify", ["static", "threshold", "scheduled"])
def test_compact_equals_padded(verify: str, temperature: float, models, tmp_path) -> None:
    toggles = {"threshold": {"verify": "threshold", "confidence_threshold": 0.6}}.get(verify, {})
    cfg = preset("tiny", device="cpu", batch_size=3, temperature=temperature, **toggles)
    cfg = with_costs(cfg, tmp_path) if verify == "scheduled" else cfg
    pair = models(cfg)
    for overlap in (True, False):  # a host that runs ahead sees later that a request is done, which changes budgets
        cfg = cfg.replace(overlap=overlap)
        padded = generate(cfg, PROMPTS, max_new_tokens=NEW, models=pair)
        assert generate(cfg.replace(layout="compact"), PROMPTS, max_new_tokens=NEW, models=pair) == padded
    if temperature == 0:
        for o, prompt in zip(padded, PROMPTS, strict=True):
            assert o.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=NEW)
    if verify != "static":
        assert len({p for o in padded for p in o.proposal_lengths}) > 1


def test_a_schedule_computes_fewer_rows_in_the_compact_layout(models, tmp_path) -> None:
    cfg = with_costs(preset("tiny", device="cpu", batch_size=6, buckets=(6,), prompt_len=4), tmp_path)
    rows = {}
    for layout in ("padded", "compact"):
        engine = DecodeEngine(cfg.replace(layout=layout), *models(cfg), torch.device("cpu"))
        for i, prompt in enumerate(PROMPTS):
            engine.join(Request(prompt=prompt, max_new_tokens=NEW, number=i))
        with torch.inference_mode():
            while engine.active:
                engine.step()
                engine.drain()
        rows[layout] = engine.num_padded_rows / engine.num_steps
    gamma = cfg.model.drafter.block_size
    assert rows["padded"] == 6 * (2 * gamma + 1)
    assert rows["compact"] < 0.9 * rows["padded"]


def test_the_first_rounds_verify_whole_blocks_and_later_ones_a_budget(models, tmp_path) -> None:
    cfg = with_costs(preset("tiny", device="cpu", batch_size=1, prompt_len=4), tmp_path, slope=100.0)
    out = generate(cfg, [[1, 2]], max_new_tokens=12, models=models(cfg))[0]
    gamma = cfg.model.drafter.block_size
    assert out.proposal_lengths[:2] == [gamma, gamma]  # nothing is known of two rounds before
    assert set(out.proposal_lengths[2:]) == {0}  # drafts never pay at such costs


def test_without_costs_nothing_is_trimmed_and_it_says_so(models) -> None:
    cfg = preset("tiny", device="cpu", verify="scheduled")
    with pytest.warns(CostWarning, match="NOTHING IS TRIMMED"):
        out = generate(cfg, [[1, 2]], max_new_tokens=12, models=models(cfg))[0]
    assert set(out.proposal_lengths) == {cfg.model.drafter.block_size}


def test_costs_of_another_shape_and_a_missing_file_are_refused(models, tmp_path) -> None:
    cfg = with_costs(preset("tiny", device="cpu", block_size=3), tmp_path)
    with pytest.raises(LabError, match="SPS profile for block_size=3, runtime 5"):
        generate(cfg.replace(block_size=5), [[1]], max_new_tokens=4)
    with pytest.raises(LabError, match=r"no_such\.json"):
        generate(cfg.replace(sps_path=str(tmp_path / "no_such.json")), [[1]], max_new_tokens=4)
    with pytest.raises(LabError, match=r"no_such\.json"):
        generate(cfg.replace(sts_path=str(tmp_path / "no_such.json")), [[1]], max_new_tokens=4)


# -- the index -----------------------------------------------------------------------------------------------------


def test_rows_and_places_by_hand() -> None:
    index = compact(torch.tensor([1, 0, 2]), torch.tensor([True, True, True]), width=3, num_rows=8)
    assert index.places.tolist() == [0, 1, 3, 6, 7, 8, 9, 9]
    assert index.rows.tolist() == [0, 1, 8, 2, 8, 8, 3, 4, 5]
    rows = index.to_rows(torch.arange(10, 19), fill=-1)
    assert rows.tolist() == [10, 11, 13, 16, 17, 18, -1, -1]
    assert index.to_places(rows, fill=-2).tolist() == [10, 11, -2, 13, -2, -2, 16, 17, 18]


def test_who_takes_no_part_has_no_row() -> None:
    index = compact(torch.tensor([2, 1, 2]), torch.tensor([False, True, False]), width=3, num_rows=4)
    assert index.places.tolist() == [3, 4, 9, 9]
    nobody = compact(torch.tensor([2, 1]), torch.tensor([False, False]), width=3, num_rows=2)
    assert nobody.places.tolist() == [6, 6]


def test_tiers() -> None:
    assert tiers_of([1, 2, 4], width=3) == [1, 2, 3, 4, 6, 8, 12]
    assert tiers_of([1, 2, 4], width=3, chunks=4) == [4, 8, 12]
    with pytest.raises(LabError, match="num_rows=7 is over the largest bucket, 6"):
        bucket_for(7, [1, 4, 6], what="num_rows")
    with pytest.raises(LabError, match="multiple of 5"):
        tiers_of([1], width=3, chunks=5)


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_rounds_as_captured_equal_eager_ones(layout: str, temperature: float, models, tmp_path) -> None:
    """The graphs' own code path, with a backend that calls the function again: buckets, tiers, static buffers, state."""
    cfg = preset("tiny", device="cpu", batch_size=3, buckets=(1, 2, 3), context_len=64, prompt_len=4, max_new_tokens=16)
    cfg = with_costs(cfg.replace(layout=layout, temperature=temperature), tmp_path)
    made = []
    for captured in (False, True):
        engine = DecodeEngine(cfg, *models(cfg), torch.device("cpu"))
        if captured:
            with torch.inference_mode():
                engine.graphs = RoundGraphs(engine.rounds, cfg, buckets=[1, 2, 3], tiers=engine.tiers)
            sizes = {g["tokens"] for g in engine.graphs.report() if g["name"] == "verify"}
            assert sizes == ({6, 12, 18} if layout == "padded" else set(tiers_of([1, 2, 3], width=6)))
        requests = [Request(prompt=p, max_new_tokens=16, number=i) for i, p in enumerate(PROMPTS)]
        waiting = iter(requests)
        with torch.inference_mode():
            engine.admit(lambda _, left=waiting: next(left, None))
            while engine.active:
                engine.step()
                engine.admit(lambda _, left=waiting: next(left, None))
            engine.drain()
        engine.close()
        made.append([(r.tokens, r.proposal_lengths) for r in requests])
    assert made[0] == made[1]
