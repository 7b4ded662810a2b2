"""Calibration and schedule of a shipped drafter on text that its target wrote: the figures of docs/scheduling.md.

    python tests/bench/schedule.py                       # calibration by position; step costs measured here, then regret
    python tests/bench/schedule.py --sps sps.json           # with a table that was measured elsewhere
    python tests/bench/schedule.py --device cuda --graph    # costs of captured rounds, up to 256 requests

Temperature 1, γ as trained. Acceptance and confidence are real (teacher-forced on the text, see `train.paths`), costs are
measured, trajectories are simulated from both.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import dspark_lab as lab
from dspark_lab.config.shipped import DRAFTERS, TEXT_KINDS, data_dir, folder_of
from dspark_lab.models.checkpoint import load_weights
from dspark_lab.models.drafter import Drafter
from dspark_lab.plan.calibration import ConfidenceRounds, fit_sts
from dspark_lab.plan.rehearsal import TextPath
from dspark_lab.train.paths import text_paths
from dspark_lab.train.run import load_target

PROMPT_LEN = 96
"""Of the texts in ``samples.npz``; what comes behind was written by the target."""


def paths_of(name: str, device: torch.device, per_kind: int) -> dict[str, list[TextPath]]:
    """What the drafter would have accepted, by kind of text."""
    target, _ = load_target(folder_of("shipped:target"), device, torch.float32)
    drafter = Drafter(lab.shipped(name).model, device=device, dtype=torch.float32)
    load_weights(drafter, folder_of(f"shipped:{name}"))
    found: dict[str, list[TextPath]] = {}
    with np.load(data_dir() / "models" / "samples.npz") as samples:
        for kind in TEXT_KINDS:
            rows = torch.from_numpy(samples[f"eval.{kind}"]).long().to(device)[:per_kind]
            parts = [text_paths(target, drafter, rows[i : i + 2], PROMPT_LEN) for i in range(0, len(rows), 2)]
            found[kind] = [path for part in parts for path in part]
            print(f"{kind}: {len(found[kind])} texts", flush=True)
    return found


def rounds_of(texts: list[TextPath], seed: int) -> ConfidenceRounds:
    """Each start of each text once, its acceptance drawn."""
    rng = np.random.default_rng(seed)
    accepted = [(rng.random(len(t.survival))[:, None] < t.survival).sum(axis=1) for t in texts]
    logits = np.concatenate([t.confidence_logits for t in texts if t.confidence_logits is not None])
    return ConfidenceRounds(logits=logits, accepted=np.concatenate(accepted), temperature=1.0)


def calibration(texts: dict[str, list[TextPath]], seeds: int) -> tuple[pd.DataFrame, np.ndarray]:
    """By position, mean over ``seeds`` ways to halve the texts: fitted on one half, reported on the other."""
    tables, scales = [], []
    for seed in range(seeds):
        halves: tuple[list[TextPath], list[TextPath]] = ([], [])
        for some in texts.values():
            order = np.random.default_rng(100 + seed).permutation(len(some))
            for half, part in zip(halves, (order[: len(order) // 2], order[len(order) // 2 :]), strict=True):
                half += [some[i] for i in part]
        table = fit_sts(rounds_of(halves[0], seed))
        tables.append(lab.calibration(rounds_of(halves[1], seed), table))
        scales.append(table.scales(1.0, block_size=table.block_size))
    return pd.concat(tables).groupby("position").mean(), np.mean(scales, axis=0)


def costs_of(args: argparse.Namespace) -> lab.SpsProfile:
    if args.sps is not None:
        return lab.load_sps(args.sps)
    toggles = {"use_graph": True, "overlap": True, "buckets": tuple(args.requests)} if args.graph else {}
    cfg = lab.shipped(
        args.drafter, device=args.device, context_len=256, prompt_len=64, max_new_tokens=64,
        batch_size=max(args.requests) if args.graph else 1, **toggles,
    )  # fmt: skip
    profile = lab.profile_costs(cfg, requests=args.requests, num_steps=args.steps)
    if args.save_sps is not None:
        profile.save(args.save_sps)
    return profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=[d for d in DRAFTERS if d.startswith("dspark")], default=DRAFTERS[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graph", action="store_true", help="costs of captured rounds")
    parser.add_argument("--texts", type=int, default=64, help="of each kind")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=16, help="measured at each point of the cost table")
    parser.add_argument("--sps", type=Path, help="a cost table that was measured before")
    parser.add_argument("--save-sps", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    started = time.perf_counter()
    texts = paths_of(args.drafter, torch.device(args.device), args.texts)
    by_position, scales = calibration(texts, args.seeds)
    print(by_position.round(4).to_string(), "\nmean", by_position.mean().round(4).to_dict(), flush=True)
    profile = costs_of(args)
    costs = profile.additive() if len(set(profile.requests)) > 1 else profile.step_table()
    print(
        f"costs: {profile.environment.get('device_name')}, misfit of the table {profile.misfit(costs):.1%}", flush=True
    )
    every = [t for some in texts.values() for t in some]
    regret = lab.schedule_regret(every, costs, requests=args.requests, num_seeds=args.seeds, scales=scales)
    print(regret.round(2).to_string(), f"\n{time.perf_counter() - started:.0f} s", flush=True)
    if args.json is not None:
        made = {"drafter": args.drafter, "calibration": by_position.reset_index().to_dict("records"), "regret": regret.to_dict("records"),
                "environment": profile.environment, "points": [[*p, s] for p, s in zip(profile.points, profile.seconds, strict=True)]}  # fmt: skip
        args.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
