"""The command line ``dspark-lab``: a thin layer over the same verbs. Every command takes ``--json``; a bad value exits with 2."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from dspark_lab.errors import LabError, unknown

app = typer.Typer(
    name="dspark-lab",
    help="A lab for decode steps: DSpark drafting, expert parallelism, and the scalar that made them slower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(help="Read profiler traces: a file, or a folder of ranks.", no_args_is_help=True)
export_app = typer.Typer(help="Write runs for other viewers.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(export_app, name="export")

Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Preset = Annotated[str, typer.Option(help="tiny (CPU, seconds) or small (GPU).")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Steps = Annotated[int, typer.Option(help="Measured steps a block.")]
ProfileSteps = Annotated[int, typer.Option(help="Steps of the profiled capture after the measured blocks; 0 for none.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the runs; default runs/<time>-<preset>.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Any other toggle, as name=value; may be given several times.")
]


@app.command()
def run(
    preset: Preset = "tiny",
    ep_size: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 1,
    alloc: Annotated[str, typer.Option(help="How num_token_non_padded reaches the device.")] = "on_demand",
    device: Device = "auto",
    num_steps: Steps = 128,
    repeats: Annotated[int, typer.Option(help="Blocks.")] = 1,
    profile_steps: ProfileSteps = 8,
    out: Out = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Measure one config: step latency, acceptance, a profiled capture."""
    import dspark_lab as lab

    cfg = lab.preset(preset, **_merged({"ep_size": ep_size, "alloc": alloc, "device": device}, set_))
    with _progress() as on_progress:
        made = lab.run(
            cfg, num_steps=num_steps, repeats=repeats, profile_steps=profile_steps, out=out, on_progress=on_progress
        )
    row = {
        "name": made.name,
        "path": str(made.path),
        "label": made.label,
        "status": made.status,
        "step_ms_p50": made.step_ms_p50,
        "accept_length": made.acceptance.accept_length if made.acceptance else None,
        "accept_by_position": made.acceptance.by_position if made.acceptance else None,
        "tokens_per_s": made.tokens_per_s,
        "digest": made.outputs.get("digest"),
        "ep": made.ep,
        "traces": [str(p) for p in made.trace_paths],
    }
    _show(row, json_)


@app.command()
def compare(
    preset: Preset = "tiny",
    ep_size: Annotated[str, typer.Option(help="One size or several, with commas.")] = "1",
    alloc: Annotated[str, typer.Option(help="Arms, with commas.")] = "none,blocking,non_blocking,on_demand",
    device: Device = "auto",
    num_steps: Steps = 64,
    repeats: Annotated[int, typer.Option(help="Blocks an arm, interleaved.")] = 5,
    processes: Annotated[int, typer.Option(help="Processes an arm; the replicate where more than one.")] = 1,
    profile_steps: ProfileSteps = 0,
    floor: Annotated[bool, typer.Option("--floor", help="Add the arm with the mask off and alloc none.")] = False,
    baseline: Annotated[
        str | None, typer.Option(help="The arm compared with; default none where present, else the first.")
    ] = None,
    out: Out = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Compare allocation strategies: interleaved arms, paired intervals, a verdict against the A/A floor."""
    import dspark_lab as lab

    allocs = _names(alloc, "alloc")
    first = allocs[0] if not floor else "on_demand"
    sizes = _ints("ep_size", ep_size)
    if baseline is not None and baseline not in [*allocs, *(["none"] if floor else [])]:
        raise unknown("baseline", baseline, allocs)
    cfg = lab.preset(preset, **_merged({"device": device, "ep_size": sizes[0], "alloc": first}, set_))
    with _progress() as on_progress:
        runs = lab.sweep(
            cfg, num_steps=num_steps, repeats=repeats, processes=processes, profile_steps=profile_steps, floor=floor, out=out,
            on_progress=on_progress, ep_size=sizes, alloc=allocs,
        )  # fmt: skip
    _show(lab.compare(runs, by="alloc", baseline=baseline), json_)


@app.command()
def generate(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target (Qwen3 or Qwen3-MoE).")],
    drafter: Annotated[Path, typer.Option(help="DeepSpec folder of the drafter.")],
    prompt_ids: Annotated[str, typer.Option(help="Token ids, with commas.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 48,
    confidence_threshold: Annotated[
        float, typer.Option(help="Cut the block before the first confidence below; 0 keeps it.")
    ] = 0.0,
    block_size: Annotated[int | None, typer.Option(help="γ; must be the checkpoint's.")] = None,
    device: Device = "cpu",
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Continue a prompt by speculative decoding from a target and a drafter on disk."""
    import dspark_lab as lab

    prompt = _ints("prompt_ids", prompt_ids)
    options: dict[str, Any] = {
        "device": device,
        "verify": "threshold" if confidence_threshold > 0 else "static",
        "confidence_threshold": confidence_threshold,
        "prompt_len": len(prompt) or 1,
        "max_new_tokens": max_new_tokens,
        "batch_size": 1,
    } | ({} if block_size is None else {"block_size": block_size})
    cfg = lab.load_pair(target, drafter, **_merged(options, set_))
    if cfg.engine.simulated_accept_length is not None:
        raise LabError("simulated_accept_length is for measuring; generate accepts what the target accepts.")
    out = lab.generate(cfg, [prompt], max_new_tokens=max_new_tokens)[0]
    lengths = {"acceptance_lengths": out.acceptance_lengths, "proposal_lengths": out.proposal_lengths}
    _show({"tokens": out.tokens, **lengths}, json_)


@trace_app.command("summary")
def trace_summary(
    path: Annotated[
        Path, typer.Argument(help="A Kineto or Chrome trace (gz or not), a folder of ranks, or a run folder.")
    ],
    step_pattern: Annotated[str | None, typer.Option(help="Regular expression for annotations that are steps.")] = None,
    json_: Json = False,
) -> None:
    """Steps, kernels, launch lead, host waits by kind and site, copies, and what undermines the figures."""
    import dspark_lab as lab

    source: Any = lab.load_run(path) if (path / "run.json").is_file() else path
    _show(lab.summarize(lab.open_trace(source, step_pattern=step_pattern)), json_)


@trace_app.command("diff")
def trace_diff(
    before: Annotated[Path, typer.Argument(help="A trace, a folder of ranks, or a run folder.")],
    after: Annotated[Path, typer.Argument(help="The one to compare with it.")],
    step_pattern: Annotated[str | None, typer.Option(help="Regular expression for annotations that are steps.")] = None,
    json_: Json = False,
) -> None:
    """Why a step became slower: the delta with its interval, and the causes that sum to it."""
    import dspark_lab as lab

    found = lab.diff(_trace(before, step_pattern), _trace(after, step_pattern))
    if json_:
        _show(found.to_dict(), True)
    else:
        _out.print(found.sentence, soft_wrap=True, highlight=False, markup=False)
        _show(found.by_kind(), False)


@trace_app.command("whatif")
def trace_whatif(
    path: Annotated[Path, typer.Argument(help="A trace, a folder of ranks, or a run folder.")],
    drop: Annotated[
        str, typer.Option(help="Waits that no longer hold the host: sync, event_wait, all or none.")
    ] = "none",
    drop_site: Annotated[str | None, typer.Option(help="Only the waits of this site.")] = None,
    drop_kernel: Annotated[str | None, typer.Option(help="Remove kernels that match.")] = None,
    drop_copy: Annotated[str | None, typer.Option(help="Remove copies that match.")] = None,
    scale_host: Annotated[float, typer.Option(help="Factor on host time between calls.")] = 1.0,
    launch_cost: Annotated[
        float, typer.Option(help="Factor on host calls: the profiler's cost, where you know it.")
    ] = 1.0,
    step_pattern: Annotated[str | None, typer.Option(help="Regular expression for annotations that are steps.")] = None,
    json_: Json = False,
) -> None:
    """Replay a trace with waits, kernels or copies left out: the predicted step beside the replay's own error."""
    import dspark_lab as lab

    found = lab.whatif(
        _trace(path, step_pattern), drop=drop, drop_site=drop_site, drop_kernel=drop_kernel, drop_copy=drop_copy, scale_host=scale_host,
        launch_cost=launch_cost,
    )  # fmt: skip
    if json_:
        _show(found.to_dict(), True)
    else:
        _out.print(found.sentence, soft_wrap=True, highlight=False, markup=False)
        _show(found.waits, False)
        _show(found.edits.assign(target=found.edits["target"].str.slice(0, 60)), False)


def _trace(path: Path, step_pattern: str | None) -> Any:
    import dspark_lab as lab

    source: Any = lab.load_run(path) if (path / "run.json").is_file() else path
    return lab.open_trace(source, step_pattern=step_pattern)


@app.command()
def recorded(json_: Json = False) -> None:
    """The runs that ship: H200 captures with their unprofiled step times."""
    import dspark_lab as lab

    _show(lab.recorded(), json_)


@export_app.command("tensorboard")
def export_tensorboard(
    runs: Annotated[list[str], typer.Argument(help="Run folders, folders of runs, or names of recorded runs.")],
    logdir: Annotated[Path, typer.Option(help="Where TensorBoard looks.")] = Path("tb"),
    json_: Json = False,
) -> None:
    """Traces under names that torch-tb-profiler accepts, and scalars of latency and acceptance; a run folder a config."""
    import dspark_lab as lab

    loaded = []
    for name in runs:
        folder = Path(name)
        inside = lab.load_runs(folder) if folder.is_dir() and not (folder / "run.json").is_file() else []
        loaded += inside or [lab.load_run(name)]
    where = lab.to_tensorboard(loaded, logdir=logdir)
    _show({"logdir": str(where), "runs": sorted(p.name for p in Path(where).iterdir() if p.is_dir())}, json_)


@app.command()
def demo(logdir: Annotated[Path, typer.Option(help="TensorBoard folder to write.")] = Path("tb")) -> None:
    """The main job without a browser: compare strategies here, beside the recorded H200s; write TensorBoard."""
    from dspark_lab.study.demo import demo as make

    with _progress() as on_progress:
        result = make(logdir=logdir, on_progress=on_progress)
    for title, table in result.tables.items():
        _out.print(f"\n[bold]{title}[/bold]")
        _print_table(table)
    _out.print(f"\nTensorBoard folder: {result.logdir} (tensorboard --logdir {result.logdir})")


@app.command()
def record(
    part: Annotated[str, typer.Argument(help="one (one GPU) or two (two GPUs).")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and the archive.")] = Path("recordings"),
    only: Annotated[str, typer.Option(help="Sheets, with commas; default all of the part.")] = "",
) -> None:
    """Measure again what ships in data/recorded; leaves one archive."""
    from dspark_lab.study.record import record as make

    with _progress() as on_progress:
        _out.print(f"archive: {make(part, out=out, only=_names(only), on_progress=on_progress)}")


@app.command()
def doctor(json_: Json = False) -> None:
    """What is installed, which devices there are, and what to do about what is missing."""
    import dspark_lab as lab

    _show(lab.doctor(), json_)


# -- printing ------------------------------------------------------------------------------------------------------

_out = Console() if sys.stdout.isatty() else Console(width=140)


def _show(value: Any, as_json: bool) -> None:
    if as_json:
        plain = value.to_dict("records") if isinstance(value, pd.DataFrame) else value
        sys.stdout.write(json.dumps(_strict(plain), default=str) + "\n")
    elif isinstance(value, pd.DataFrame):
        _print_table(value)
    else:
        _out.print_json(data=_strict(value), default=str)


def _print_table(table: pd.DataFrame) -> None:
    from rich.table import Table

    shown = _arms_table(table) if "verdict" in table.columns else _recorded_table(table)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    widths = {c: max([len(str(c)), *(len(_cell(x)) for x in shown[c])]) for c in shown.columns}
    whole = sum(min(w, _SHORT) + 2 for w in widths.values()) <= _out.width  # else every column folds: nothing is cut
    for column, width in widths.items():
        number = shown[column].dtype.kind in "fi"
        no_wrap = whole and (number or width <= _SHORT)
        grid.add_column(str(column), justify="right" if number else "left", no_wrap=no_wrap, overflow="fold")
    for row in shown.itertuples(index=False):
        grid.add_row(*(_cell(x) for x in row))
    _out.print(grid)
    if "verdict" in table.columns:
        for note in sorted(
            {*table["label"], *(f"{a}: {r}" for a, r in zip(table.iloc[:, 0], table["reason"], strict=True) if r)}
        ):
            _out.print(f"  {note}", style="dim")


_SHORT = 22
"""Cells up to this long are never folded; longer ones share what a narrow terminal leaves."""
_RECORDED = {"name": "name", "alloc": "alloc", "ep_size": "EP", "tp_size": "TP", "batch_size": "batch", "step_ms_p50": "step ms",
             "label": "label"}  # fmt: skip


def _recorded_table(table: pd.DataFrame) -> pd.DataFrame:
    """Recordings in few columns; any other table as it is."""
    return table[list(_RECORDED)].rename(columns=_RECORDED) if set(_RECORDED) <= set(table.columns) else table


def _arms_table(table: pd.DataFrame) -> pd.DataFrame:
    """A comparison in few columns: figures with their intervals beside them."""
    by = table.columns[0]
    mask = ["" if on else " (mask off)" for on in table["mask_padding"]]
    return pd.DataFrame(
        {
            by: [f"{a}{m}" for a, m in zip(table[by], mask, strict=True)],
            "EP": table["ep_size"],
            "TP": table["tp_size"],
            "step ms": [
                _with_interval(x, ci) for x, ci in zip(table["step_ms_p50"], table["step_ms_ci95"], strict=True)
            ],
            "delta %": [
                _with_interval(x, ci) for x, ci in zip(table["delta_pct"], table["delta_pct_ci95"], strict=True)
            ],
            "verdict": table["verdict"],
            "accept": table["accept_length"],
            "tokens/s": [f"{x:.0f}" if x == x else "–" for x in table["tokens_per_s"]],
            "same path as": [x or "" for x in table["same_path_as"]],
        }
    )


def _with_interval(x: float, ci: list[float] | None) -> str:
    return f"{x:.3f}" if ci is None else f"{x:.3f} [{ci[0]:.2f}, {ci[1]:.2f}]"


def _cell(x: Any) -> str:
    if isinstance(x, list):
        return "[" + ", ".join(_cell(v) for v in x) + "]"
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return "–"
    return f"{x:.3f}" if isinstance(x, float) else str(x)


def _strict(x: Any) -> Any:
    """JSON without NaN: null in its place."""
    if isinstance(x, dict):
        return {str(k): _strict(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_strict(v) for v in x]
    if hasattr(x, "item"):
        x = x.item()
    return None if isinstance(x, float) and not math.isfinite(x) else x


class _progress:
    """A progress bar on standard error while a job runs; silent where that is no terminal."""

    def __enter__(self):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.percentage:3.0f} %"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task("starting", total=1.0)
        return self._update

    def _update(self, p: Any) -> None:
        text = f"{p.arm} block {p.repeat + 1} step {p.step}/{p.num_steps}" if p.arm else p.message or p.state
        self._bar.update(self._task, completed=p.fraction, description=text)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("dspark-lab: stopped; what was measured is kept as runs marked stopped.\n")


# -- reading options -----------------------------------------------------------------------------------------------


def _names(text: str, what: str = "") -> list[str]:
    names = list(dict.fromkeys(x.strip() for x in text.split(",") if x.strip()))
    if what and not names:
        raise LabError(f"{what}={text!r} names nothing; give at least one value, with commas between several.")
    return names


def _merged(options: dict[str, Any], pairs: list[str] | None) -> dict[str, Any]:
    """Toggles of ``--set`` beside those with an option of their own; one given both ways is refused."""
    toggles = _toggles(pairs)
    for name in toggles:
        if name in options or name == "name":
            raise LabError(f"--set {name} repeats the option --{name.replace('_', '-')}; give it once.")
    return options | toggles


def _ints(name: str, text: str) -> list[int]:
    try:
        return (
            [int(x) for x in _names(text)] if name != "prompt_ids" else [int(x) for x in text.split(",") if x.strip()]
        )
    except ValueError:
        raise LabError(f"{name}={text!r} is not a list of whole numbers with commas.") from None


def _toggles(pairs: list[str] | None) -> dict[str, Any]:
    """``--set name=value`` with the value read as JSON where it is some, else as text."""
    toggles = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise LabError(f"--set {pair!r} is not name=value.")
        try:
            toggles[name] = json.loads(value)
        except ValueError:
            toggles[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return toggles


def main() -> None:
    """The entry point: a `LabError` is one line on standard error and exit code 2; Ctrl-C is 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: jobs stop, runs are kept
    try:
        app()
    except LabError as e:
        sys.stderr.write(f"dspark-lab: {e}\n")
        sys.exit(2)
    except ModuleNotFoundError as e:
        sys.stderr.write(f"dspark-lab: {e.name} is not installed; pip install 'dspark-lab[lab]' brings it.\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
