"""What-if: a trace replayed as host calls and device events that wait for each other, with something left out.

Nothing in the model is fitted to a period. From the trace it takes, each by itself, host calls, the host's time between them, kernels, and the
release of events that the device stood dry for; and, pooled over all their like, how long after its predecessor an event starts on a busy
device, how long after the awaited work a wait returns, when events that did not wait were released. The replay of the unedited trace
tests what is reckoned from these: what waits for what, and when; its error stands beside every prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dspark_lab.analysis.edits import DROPS, Edit, check_edit
from dspark_lab.analysis.job_replay import EDIT_COLUMNS, JobReplay
from dspark_lab.errors import unknown
from dspark_lab.trace import open_trace

#: A replay of the unedited trace that is further off than this is no basis for an exact prediction, percent.
EXACT_PCT = 1.0
#: A device that still waits that share of a step for its host is bound by it, percent.
DRY_PCT = 5.0
#: Predictions lay so near to captures of what was predicted (docs/traces.md, where kernels were alike), percent of the step; less is not told from nothing.
RESOLVED_PCT = 0.5


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A prediction. All times are of the profiled capture, µs; medians over the third step and later, over ranks the maximum.

    measured_us: the trace's step. replayed_us: the model on the unedited trace; replay_error_pct between them. predicted_us: the replay
    with the edit. exact: False where the trace does not show what waits for what or the replay error is 1 % or more; ``notes`` say why, and what was assumed. waits: wait of the host a step by site: measured, replayed, predicted; an edit that moves the bill to the
    next wait shows there. edits: the best single edits by predicted gain.
    """

    edit: Edit
    measured_us: float
    replayed_us: float
    predicted_us: float
    exact: bool
    notes: tuple[str, ...]
    waits: pd.DataFrame
    edits: pd.DataFrame
    profiled: bool = True

    @property
    def replay_error_pct(self) -> float:
        return 100.0 * (self.replayed_us / self.measured_us - 1.0)

    @property
    def gain_us(self) -> float:
        """Measured minus predicted; the replay's own error is in it."""
        return self.measured_us - self.predicted_us

    @property
    def resolution_us(self) -> float:
        """A gain below this is not told from none."""
        return max(abs(self.replayed_us - self.measured_us), self.measured_us * RESOLVED_PCT / 100.0)

    @property
    def sentence(self) -> str:
        """The prediction in words."""
        pct = 100.0 * self.gain_us / self.measured_us
        moved = self.waits[(self.waits["predicted_us"] - self.waits["replayed_us"]).to_numpy() > 20.0]
        moved = ", ".join(
            f"{s} ({p - r:+.0f} µs)"
            for s, p, r in zip(moved["site"], moved["predicted_us"], moved["replayed_us"], strict=True)
        )
        return (
            f"{self.edit}: {self.predicted_us:.0f} µs a step instead of {self.measured_us:.0f} ({round(-pct, 1) + 0.0:+.1f} %), in this profiled capture; "
            f"the replay of the unedited trace is off by {round(self.replay_error_pct, 2) + 0.0:+.2f} %"
            + (
                f"; less than is resolved ({self.resolution_us:.0f} µs)"
                if 0 < abs(self.predicted_us - self.replayed_us) < self.resolution_us
                else ""
            )
            + (f"; the host then waits at {moved}" if moved else "")
            + ("" if self.exact else "; a bound, not exact: " + "; ".join(self.notes))
            + "."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "statistic": "step_us_p50",
            "profiled": self.profiled,
            "edit": str(self.edit),
            "measured_us": self.measured_us,
            "replayed_us": self.replayed_us,
            "replay_error_pct": self.replay_error_pct,
            "predicted_us": self.predicted_us,
            "gain_us": self.gain_us,
            "resolution_us": self.resolution_us,
            "exact": self.exact,
            "notes": list(self.notes),
            "waits": self.waits.to_dict("records"),
            "edits": self.edits.to_dict("records"),
            "text": self.sentence,
        }

    def _repr_html_(self) -> str:
        def table(x: pd.DataFrame) -> str:
            return x.to_html(index=False, float_format=lambda v: f"{v:.1f}")

        return f"<p>{self.sentence}</p>{table(self.waits)}{table(self.edits)}"


def whatif(
    source: Any,
    *,
    drop: str = "none",
    drop_site: str | None = None,
    drop_kernel: str | None = None,
    drop_copy: str | None = None,
    scale_kernel: Mapping[str, float] | None = None,
    scale_host: float = 1.0,
    launch_cost: float = 1.0,
    ranks: Sequence[int] | None = None,
    num_edits: int = 10,
    comm_patterns: Mapping[str, str] | None = None,
) -> WhatIf:
    """Predict the step of a trace with waits, kernels, copies or host time changed.

    Args:
        source: a trace, a folder of ranks (replayed together, collectives across them), or what `open_trace` takes.
        drop: ``sync`` (synchronises and blocking copies), ``event_wait``, ``all``, ``none``: waits that no longer hold the host. The copy itself stays.
        drop_site: only waits of this site, as ``Trace.waits`` names it (or a part of the name that fits one site).
        drop_kernel, drop_copy: remove kernels or copies whose name matches this regular expression.
        scale_kernel: ``{regular expression: factor}`` on durations.
        scale_host, launch_cost: factors on the host's time between calls, and on calls (the profiler's cost, if you know it).
        ranks: edit only these ranks, such as the straggler that `ranks` names; what the others then wait less for it is in the prediction.
        num_edits: how many single edits to try and rank; 0 for none.

    Raises:
        LabError: an edit that matches nothing, or a trace without steps on a device.
    """
    if not isinstance(drop, str) or drop not in DROPS:
        raise unknown("drop", drop, DROPS)
    check_edit(
        texts={"drop_site": drop_site, "drop_kernel": drop_kernel, "drop_copy": drop_copy}, scale_kernel=scale_kernel,
        factors={"scale_host": scale_host, "launch_cost": launch_cost}, ranks=ranks, num_edits=num_edits,
    )  # fmt: skip
    model = JobReplay(open_trace(source), comm_patterns)
    for rank in ranks if ranks is not None else ():
        if rank not in model.ranks:
            raise unknown("ranks", rank, model.ranks)
    edit = Edit(
        drop=DROPS[drop],
        drop_site=model.site(drop_site) if drop_site is not None else None,
        drop_kernel=model.pattern("drop_kernel", drop_kernel, ("kernel",)),
        drop_copy=model.pattern("drop_copy", drop_copy, ("gpu_memcpy", "gpu_memset")),
        scale_kernel=dict(scale_kernel or {}),
        scale_host=scale_host,
        launch_cost=launch_cost,
        ranks=tuple(ranks) if ranks is not None else None,
    )
    for p in edit.scale_kernel:
        model.pattern("scale_kernel", p, ("kernel",))
    plain, changed = model.run(Edit()), model.run(edit)
    error = 100.0 * (plain.step_us / model.measured_us - 1.0)
    if not abs(error) < EXACT_PCT:
        model.notes.append(
            f"the replay of the unedited trace is off by {error:+.1f} %, so the model does not hold here"
        )
    if (
        len(model.ranks) > 1
        and model.host_meetings
        and changed.step_us != plain.step_us
        and changed.dry_us > DRY_PCT / 100.0 * changed.step_us
    ):
        model.notes.append(
            f"the ranks meet on the host too ({', '.join(model.host_meetings)}), and what they wait for each other there is taken as their own time, "
            "so a gain may be larger"
        )
    if model.ranks_shift(plain, changed):
        model.notes.append(
            "with this edit the ranks shift against each other from step to step, so that the change is that of the mean step"
        )
    return WhatIf(
        edit=edit,
        measured_us=model.measured_us,
        replayed_us=plain.step_us,
        predicted_us=model.predicted_us(plain, changed),
        exact=not model.notes,
        notes=(*model.notes, *model.remarks),
        waits=model.wait_table(plain, changed),
        edits=model.best(plain, num_edits) if num_edits > 0 else pd.DataFrame(columns=list(EDIT_COLUMNS)),
    )
