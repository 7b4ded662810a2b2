"""dspark_lab: DSpark drafting, MoE expert parallelism and the decode step, to toggle, measure and look at in notebooks.

Public names load late, so that ``import dspark_lab`` is fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES: dict[str, str] = {
    # what there is
    "LabConfig": "dspark_lab.config",
    "LabError": "dspark_lab.errors",
    "Run": "dspark_lab.runs.record",
    "preset": "dspark_lab.config",
    "load_pair": "dspark_lab.models.checkpoint",
    "shipped": "dspark_lab.models.shipped",
    "held_out": "dspark_lab.models.text",
    "read_turns": "dspark_lab.models.text",
    "text_of": "dspark_lab.models.text",
    "doctor": "dspark_lab.health",
    # runs
    "run": "dspark_lab.runs.runner",
    "sweep": "dspark_lab.runs.runner",
    "start": "dspark_lab.runs.runner",
    "generate": "dspark_lab.engine.generate",
    "matched_profile": "dspark_lab.study.matched_profile",
    "ep_table": "dspark_lab.analysis.ep",
    "byte_floor": "dspark_lab.study.floor",
    "speculation": "dspark_lab.study.speculation",
    "slot_shift": "dspark_lab.study.slot_shift",
    "evaluate": "dspark_lab.study.evaluate",
    "Evaluation": "dspark_lab.study.evaluation",
    "load_evaluation": "dspark_lab.study.evaluation",
    "train_drafter": "dspark_lab.train.run",
    "depth_table": "dspark_lab.analysis.depths",
    "load_run": "dspark_lab.runs.store",
    "load_runs": "dspark_lab.runs.store",
    "recorded": "dspark_lab.runs.store",
    "recorded_runs": "dspark_lab.runs.store",
    "sample_traces": "dspark_lab.runs.store",
    "compare": "dspark_lab.analysis.latency",
    # schedules and sampling
    "Scheduler": "dspark_lab.plan.scheduler",
    "SpsProfile": "dspark_lab.plan.sps",
    "load_sps": "dspark_lab.plan.sps",
    "recorded_costs": "dspark_lab.plan.sps",
    "profile_costs": "dspark_lab.study.profile_costs",
    "schedule_regret": "dspark_lab.study.regret",
    "Sampling": "dspark_lab.spec.sampling",
    # calibration
    "ConfidenceRounds": "dspark_lab.plan.calibration",
    "fit_sts": "dspark_lab.plan.calibration",
    "load_sts": "dspark_lab.plan.calibration",
    "calibration": "dspark_lab.analysis.calibration",
    "reliability": "dspark_lab.analysis.calibration",
    # traces
    "open_trace": "dspark_lab.trace.source",
    "register_trace_format": "dspark_lab.trace.formats",
    "summarize": "dspark_lab.trace.summary",
    "integrity": "dspark_lab.trace.summary",
    "step_parts": "dspark_lab.analysis.steps",
    "breakdown": "dspark_lab.analysis.breakdown",
    "replays": "dspark_lab.analysis.replays",
    "lost": "dspark_lab.analysis.syncs",
    "lost_by_site": "dspark_lab.analysis.syncs",
    "diff": "dspark_lab.analysis.diff",
    "whatif": "dspark_lab.analysis.whatif",
    "ranks": "dspark_lab.analysis.ranks",
    "merged": "dspark_lab.analysis.ranks",
    # out
    "to_tensorboard": "dspark_lab.export.tensorboard",
    "to_perfetto": "dspark_lab.export.perfetto",
    "to_report": "dspark_lab.export.report",
    "inspect": "dspark_lab.view.inspect",
    "panel": "dspark_lab.view.panel",
    "live_training": "dspark_lab.view.training",
    "browse": "dspark_lab.view.browse.canvas",
}

__all__ = [*_NAMES, "plot"]


def __getattr__(name: str) -> Any:
    if name == "plot":
        return import_module("dspark_lab.view.figures")
    if name not in _NAMES:
        raise AttributeError(f"module 'dspark_lab' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
