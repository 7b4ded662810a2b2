"""`Run`: what one config produced. Saved as a folder, written under a temporary name and renamed. No torch."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError

SCHEMA = 1
STEP_COLUMNS: dict[str, str] = {
    "process": "int32",
    "repeat": "int32",
    "step": "int32",
    "rank": "int32",
    "profiled": "bool",
    "step_us": "float64",
    "host_us": "float64",
    "num_requests": "int32",
    "num_committed": "int32",
}


FEW_REAL = 0.25
"""Below that share of real rows a rank's work is mostly padding."""


NO_MEDIAN = "no median: a block's first two steps do not count and none was longer (num_steps=3 or more has one)"


def real_share(part: dict[str, Any]) -> float:
    """Real rows over padded ones of one rank's forwards, from its part of `Run.ep`; NaN where they were not counted."""
    padded = part.get("padded_rows", 0)
    return part["real_rows"] / padded if padded else float("nan")


def empty_steps() -> pd.DataFrame:
    """A step table with the full schema and no rows."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in STEP_COLUMNS.items()})


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Accepted drafts, counted over all rounds. ``accepted[a]`` is the number of rounds that accepted exactly ``a`` drafts.

    Identity: accept_length = 1 + Σ_k P_k, with P_k = rounds that accepted position k over all rounds.
    """

    accepted: tuple[int, ...]
    proposed: tuple[int, ...]
    """``proposed[p]``: rounds that proposed ``p`` drafts for verification."""
    simulated: bool = False

    @classmethod
    def of_rounds(
        cls, accept_lengths: Sequence[int], proposal_lengths: Sequence[int], *, block_size: int
    ) -> Acceptance:
        """Counts rounds by ``accept_lengths`` (bonus included) and ``proposal_lengths`` (drafts verified), one of each a round.

        Raises `LabError` where a round committed more than it verified, and where the mean length is not 1 + Σ_k P_k.
        """
        for accept, proposal in zip(accept_lengths, proposal_lengths, strict=True):
            if not 1 <= accept <= proposal + 1 <= block_size + 1:
                raise LabError(
                    f"a round committed {accept} tokens of {proposal} verified drafts with block_size={block_size}; it commits "
                    "the accepted drafts and the bonus: 1 to one more than it verified."
                )
        counts = [
            np.bincount(np.asarray(x, dtype=np.int64), minlength=block_size + 1)
            for x in (np.subtract(accept_lengths, 1), proposal_lengths)
        ]
        made = cls(accepted=tuple(counts[0].tolist()), proposed=tuple(counts[1].tolist()))
        made.check_identity(float(np.mean(accept_lengths)) if len(accept_lengths) else float("nan"))
        return made

    def check_identity(self, accept_length: float) -> None:
        """Raises `LabError` unless ``accept_length``, counted in another way, is 1 + Σ_k P_k of these rounds."""
        if self.num_rounds and not math.isclose(accept_length, self.accept_length, rel_tol=1e-9):
            raise LabError(
                f"accept_length={accept_length} is not 1 + Σ P_k = {self.accept_length} over {self.num_rounds} rounds: one of the "
                "two counts leaves rounds or positions out (P_k is over all rounds, not over those that proposed k)."
            )

    @property
    def num_rounds(self) -> int:
        return sum(self.accepted)

    @property
    def by_position(self) -> list[float]:
        """P_1 … P_γ."""
        rounds = max(self.num_rounds, 1)
        tail = np.cumsum(self.accepted[::-1])[::-1]
        return [float(x) / rounds for x in tail[1:]]

    @property
    def accept_length(self) -> float:
        """Mean tokens committed a round, bonus included; NaN without a round."""
        return 1.0 + sum(self.by_position) if self.num_rounds else float("nan")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One config's measured steps, acceptance, outputs, environment and trace files."""

    name: str
    config: LabConfig
    source: str
    """``measured`` or ``simulated``; a run loaded from a folder shows as ``recorded`` (see `shown_source`)."""
    steps: pd.DataFrame
    environment: dict[str, Any]
    acceptance: Acceptance | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    """``digest`` of all committed tokens, in request order; ``num_tokens``; ``host`` (``scalar_us_p50``, ``host_work_us_mean``);
    ``clocks``: a dict a block and rank; ``graphs``: capture time and memory by graph and bucket."""
    ep: list[dict[str, Any]] = field(default_factory=list)
    """A dict a rank: ``rank``, ``rows_computed``, ``bytes_sent``, ``expert_bytes``, ``rows_by_expert`` …"""
    quoted: dict[str, Any] = field(default_factory=dict)
    """Figures known only as a summary, without their steps: ``step_ms_p50``, ``floor_pct``, ``protocol``."""
    status: str = "complete"
    role: str = "arm"
    """``arm``, or ``aa``: the baseline measured a second time, for the A/A floor."""
    same_path_as: str | None = None
    """The `alloc` of the arm whose code path this one shares and whose figures it shows."""
    trace_paths: tuple[Path, ...] = ()
    path: Path | None = None
    loaded: bool = False
    _step_us: dict[tuple[bool, int], pd.DataFrame] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``: where the steps ran."""
        return str(self.environment.get("device", self.config.engine.device))

    @property
    def device_name(self) -> str:
        return str(self.environment.get("device_name", self.device))

    @property
    def shown_source(self) -> str:
        """``measured`` (here, now), ``recorded`` (loaded) or ``simulated``."""
        return "recorded" if self.loaded and self.source == "measured" else self.source

    @property
    def label(self) -> str:
        """One line: source, device, date, profiled or not. Stands beside every figure made of this run."""
        when = str(self.environment.get("recorded_at", ""))[:10]
        kinds = set(self.steps["profiled"]) if len(self.steps) else {False}
        how = "profiled" if kinds == {True} and not self.quoted else "unprofiled"
        drawn = ", simulated acceptance" if self.acceptance_is_simulated else ""
        short = f", {NO_MEDIAN}" if self.has_no_median else ""
        return f"{self.shown_source} {when} on {self.device_name}, {how}{drawn}{short}".replace("  ", " ")

    @property
    def acceptance_is_simulated(self) -> bool:
        """Whether accept lengths were drawn; without drafts there is nothing to draw, whatever the config says."""
        return bool(self.acceptance and self.acceptance.simulated and self.config.gamma)

    @property
    def has_no_median(self) -> bool:
        """Whether steps were measured and none of them counts."""
        return math.isnan(self.step_ms_p50) and bool((~self.steps["profiled"]).any())

    @property
    def mostly_padding(self) -> str | None:
        """Which ranks computed mostly padding, in one line with the way out; None where none did."""
        few = [(d["rank"], real_share(d)) for d in self.ep if real_share(d) < FEW_REAL]
        if not few:
            return None
        ranks = ", ".join(f"rank {rank} {share:.0%}" for rank, share in few)
        return (
            f"{self.name}: real rows are under a quarter of the padded ones ({ranks}); a larger batch_size, a smaller attn_dp "
            "or closer buckets waste less."
        )

    def step_us(self, *, profiled: bool = False, skip: int = 2) -> pd.DataFrame:
        """Steps as the maximum over ranks, one row a (process, repeat, step), from the third step of each block on."""
        if (profiled, skip) not in self._step_us:
            rows = self.steps[(self.steps["profiled"] == profiled) & (self.steps["step"] >= skip)]
            p = self.config.parallel
            counted = "first" if p.attn_dp == 1 else "sum"
            by_step = rows.groupby(["process", "repeat", "step"])
            columns = {
                "step_us": by_step["step_us"].max(),
                "step_us_mean_ranks": by_step["step_us"].mean(),
                "host_us": by_step["host_us"].max(),
                "num_requests": by_step["num_requests"].agg(counted),
                "num_committed": by_step["num_committed"].agg(counted),
            }
            steps = pd.DataFrame(columns).reset_index()
            if p.attn_dp > 1:  # each of the ranks that serve the same requests has counted them
                steps[["num_requests", "num_committed"]] //= p.rows_ranks
            self._step_us[profiled, skip] = steps
        return self._step_us[profiled, skip]

    @property
    def step_ms_p50(self) -> float:
        """Median unprofiled step in ms; the quoted figure where no unprofiled steps are at hand; else NaN."""
        rows = self.step_us()
        if len(rows):
            return float(rows["step_us"].median()) / 1e3
        return float(self.quoted.get("step_ms_p50", float("nan")))

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens over unprofiled step time; NaN without unprofiled steps."""
        rows = self.step_us()
        seconds = float(rows["step_us"].sum()) / 1e6
        return float(rows["num_committed"].sum()) / seconds if seconds > 0 else float("nan")

    def to_json(self) -> dict[str, Any]:
        """What ``run.json`` holds."""
        acc = self.acceptance
        return {
            "schema": SCHEMA,
            "name": self.name,
            "source": self.source,
            "status": self.status,
            "role": self.role,
            "same_path_as": self.same_path_as,
            "seed": self.config.seed,
            "config": self.config.to_dict(),
            "environment": self.environment,
            "acceptance": acc
            and {"accepted": list(acc.accepted), "proposed": list(acc.proposed), "simulated": acc.simulated},
            "outputs": self.outputs,
            "ep": self.ep,
            "quoted": self.quoted,
            "traces": [p.name for p in self.trace_paths],
        }

    def save(self, folder: Path | str) -> Run:
        """Writes ``folder`` whole or not at all; traces are copied in. Returns the run as it now lies there."""
        folder = Path(folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            tmp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        except OSError as e:
            raise LabError(
                f"cannot write a run to {folder}: {e.strerror}; choose a folder that can be written."
            ) from None
        try:
            self.steps.to_parquet(tmp / "steps.parquet", index=False)
            if self.trace_paths:
                (tmp / "traces").mkdir()
                for p in self.trace_paths:
                    shutil.copyfile(p, tmp / "traces" / p.name)
            (tmp / "run.json").write_text(json_text(self.to_json()))
            if folder.exists():
                if not (folder / "run.json").is_file():
                    raise LabError(f"{folder} is there already and is no run; choose another folder, or remove it.")
                shutil.rmtree(folder)
            os.chmod(tmp, 0o755)
            tmp.rename(folder)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        return replace(self, path=folder, trace_paths=tuple(folder / "traces" / p.name for p in self.trace_paths))


def read_run(folder: Path | str) -> Run:
    """The run in ``folder``. Raises `LabError` where there is none, or where it is of a newer schema."""
    folder = Path(folder)
    try:
        d = json.loads((folder / "run.json").read_text())
    except FileNotFoundError:
        raise LabError(f"{folder} holds no run: run.json is missing.") from None
    except (OSError, ValueError) as e:
        raise LabError(f"{folder}/run.json cannot be read: {e}") from None
    if not isinstance(d, dict):
        raise LabError(f"{folder}/run.json is no run: it holds a {type(d).__name__}.")
    if d.get("schema") != SCHEMA:
        raise LabError(f"{folder} was written with run schema {d.get('schema')}; this version reads {SCHEMA}.")
    try:
        return _run_of(d, folder)
    except LabError as e:
        raise LabError(f"{folder}/run.json cannot be read: {e}") from None
    except Exception as e:  # whatever is wrong with a file somebody edited
        raise LabError(f"{folder} cannot be read as a run: {type(e).__name__}: {e}") from None


def _run_of(d: dict[str, Any], folder: Path) -> Run:
    acc = d["acceptance"]
    steps = folder / "steps.parquet"
    table = pd.read_parquet(steps) if steps.exists() else empty_steps()
    if missing := set(STEP_COLUMNS) - set(table.columns):
        raise LabError(f"steps.parquet lacks the columns {', '.join(sorted(missing))}.")
    return Run(
        name=d["name"],
        config=LabConfig.from_dict(d["config"]),
        source=d["source"],
        status=d["status"],
        role=d["role"],
        same_path_as=d["same_path_as"],
        steps=table,
        environment=d["environment"],
        acceptance=acc
        and Acceptance(accepted=tuple(acc["accepted"]), proposed=tuple(acc["proposed"]), simulated=acc["simulated"]),
        outputs=d["outputs"],
        ep=d["ep"],
        quoted=d["quoted"],
        trace_paths=tuple(folder / "traces" / Path(name).name for name in d["traces"]),
        path=folder,
        loaded=True,
    )


def as_runs(runs: Any) -> list[Run]:
    """A run, or several, as a list. Raises `LabError` for anything else."""
    if isinstance(runs, Run):
        return [runs]
    several: list[Any] = [runs]
    if isinstance(runs, Iterable) and not isinstance(runs, (str, bytes, Mapping)):
        several = list(runs)
    for one in several:
        if not isinstance(one, Run):
            text = repr(one)
            said = text if len(text) <= 60 and "\n" not in text else f"a {type(one).__name__}"
            raise LabError(
                f"{said} is no run; lab.run, lab.sweep, lab.load_run(name) and lab.load_runs(folder) give some."
            )
    return several


def one_run(run: Any) -> Run:
    """The run itself, or the only one of a list. Raises `LabError` for anything else."""
    runs = as_runs(run)
    if len(runs) != 1:
        raise LabError(f"this is of one run, and {len(runs)} were given; choose one of them.")
    return runs[0]


def json_text(d: dict[str, Any]) -> str:
    """JSON to look at: a key a line, and a list of plain values on one."""
    text = json.dumps(d, indent=1) + "\n"
    return re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda m: "[" + re.sub(r",\n\s+", ", ", m[1]) + "]", text)
