"""Commands that read traces. ``--strict`` exits with 1 where the integrity report has something to say, after what was asked for is printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_lab.cli.options import Json, span
from dspark_lab.cli.printing import busy, say, show
from dspark_lab.cli.trace_tables import nothing, print_integrity, print_steps, print_summary

app = typer.Typer(help="Read profiler traces: a file, a folder of ranks, or a run folder.", no_args_is_help=True)

Path_ = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A Kineto or Chrome trace (gz or not), a folder of ranks, or a run folder."),
]
Before = Annotated[Path, typer.Argument(help="A trace, a folder of ranks, or a run folder.")]
After = Annotated[Path, typer.Argument(help="The one to compare with it.")]
Pattern = Annotated[
    str | None, typer.Option("--step-pattern", help="Regular expression for annotations that are steps.")
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Neither take large files from the user's cache folder nor keep them there.")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with 1 where the integrity report mends, leaves out, withholds or misses anything."
    ),
]


@app.command()
def summary(
    path: Path_, step_pattern: Pattern = None, no_cache: NoCache = False, strict: Strict = False, json_: Json = False
) -> None:
    """Steps, kernels, launch lead, host waits by kind and site, copies, and what undermines the figures."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    found = lab.summarize(opened)
    if json_:
        show(found, True)
    else:
        print_summary(found)
    _judge(strict, opened)


@app.command()
def integrity(
    path: Path_, step_pattern: Pattern = None, no_cache: NoCache = False, strict: Strict = False, json_: Json = False
) -> None:
    """What the trace lacks, what was mended in it, and which figures it therefore does not give."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    report = lab.integrity(opened)
    if json_:
        show(report, True)
    else:
        print_integrity(report)
    _judge(strict, opened)


@app.command()
def steps(
    path: Path_, step_pattern: Pattern = None, no_cache: NoCache = False, strict: Strict = False, json_: Json = False
) -> None:
    """A row a step of each rank: period, its parts, launch lead and host waits, in µs of profiled time."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    table = lab.step_parts(opened)
    if json_:
        show(table, True)
    elif len(table):
        print_steps(table)
    else:
        say(nothing(opened, "step"))
    _judge(strict, opened)


@app.command()
def waits(
    path: Path_,
    each: Annotated[bool, typer.Option("--each", help="A row a wait instead of a row a site.")] = False,
    step_pattern: Pattern = None,
    no_cache: NoCache = False,
    strict: Strict = False,
    json_: Json = False,
) -> None:
    """Where the host stood still, and what the device ran dry for it: by site, the greatest loss first."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    table = lab.lost(opened) if each else lab.lost_by_site(opened)
    if json_ or len(table):
        show(table, json_)
    else:
        say(nothing(opened, "wait of the host" + ("" if each else " within a step")))
    _judge(strict, opened)


@app.command()
def ranks(
    path: Path_, step_pattern: Pattern = None, no_cache: NoCache = False, strict: Strict = False, json_: Json = False
) -> None:
    """Of a folder of ranks: how far their clocks are apart, who comes last to collectives, what the others wait for it."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    found = lab.ranks(opened)
    if json_:
        show(found.to_dict(), True)
    else:
        say(found.sentence)
        show(found.ranks, False)
    _judge(strict, opened)


@app.command()
def diff(
    before: Before,
    after: After,
    step_pattern: Pattern = None,
    no_cache: NoCache = False,
    strict: Strict = False,
    json_: Json = False,
) -> None:
    """Why a step became slower: the delta with its interval, and the causes that sum to it."""
    import dspark_lab as lab

    sides = _open(before, step_pattern, no_cache), _open(after, step_pattern, no_cache)
    found = lab.diff(*sides)
    if json_:
        show(found.to_dict(), True)
    else:
        say(found.sentence)
        if len(kinds := found.by_kind()):
            show(kinds, False)
    _judge(strict, *sides)


@app.command()
def whatif(
    path: Path_,
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
    rank: Annotated[list[int] | None, typer.Option(help="Edit only this rank; may be given several times.")] = None,
    step_pattern: Pattern = None,
    no_cache: NoCache = False,
    strict: Strict = False,
    json_: Json = False,
) -> None:
    """Replay a trace with waits, kernels or copies left out: the predicted step beside the replay's own error."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    found = lab.whatif(
        opened, drop=drop, drop_site=drop_site, drop_kernel=drop_kernel, drop_copy=drop_copy, scale_host=scale_host,
        launch_cost=launch_cost, ranks=rank or None,
    )  # fmt: skip
    if json_:
        show(found.to_dict(), True)
    else:
        say(found.sentence)
        if len(found.waits):
            show(found.waits, False)
        show(found.edits.assign(target=found.edits["target"].str.slice(0, 60)), False)
    _judge(strict, opened)


@app.command()
def export(
    path: Path_,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write; gzip where it ends in .gz.")] = Path(
        "perfetto.json.gz"
    ),
    steps: Annotated[str | None, typer.Option(help="Step numbers: 3, or 2:5 for 2 to 4; default all.")] = None,
    max_mb: Annotated[
        float, typer.Option(help="Limit of the text in MB; whole steps are left out from the end.")
    ] = 200.0,
    step_pattern: Pattern = None,
    no_cache: NoCache = False,
    strict: Strict = False,
    json_: Json = False,
) -> None:
    """Write JSON for ui.perfetto.dev: no overlaps, flows from launches, ranks side by side; checked after writing."""
    import dspark_lab as lab

    opened = _open(path, step_pattern, no_cache)
    made = lab.to_perfetto(opened, out, steps=None if steps is None else span(steps), max_mb=max_mb)
    if json_:
        show(made.to_dict(), True)
    else:
        of = f", steps {made.steps[0]} to {made.steps[1]}" if made.steps else ""
        say(
            f"{made.path}: {made.num_slices} slices, {made.num_flows} flows, {made.size_mb:.1f} MB of text{of}; open it at ui.perfetto.dev"
        )
        for text in made.messages:
            say(text)
    _judge(strict, opened)


@app.command()
def report(
    before: Before,
    after: After,
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file to write.")] = Path("report.html"),
    step_pattern: Pattern = None,
    no_cache: NoCache = False,
    strict: Strict = False,
    json_: Json = False,
) -> None:
    """Write a diff as one HTML page that needs nothing else: verdict, pictures, parts, integrity."""
    import dspark_lab as lab

    sides = _open(before, step_pattern, no_cache), _open(after, step_pattern, no_cache)
    made = lab.to_report(*sides, out)
    show({"path": str(made), "size_kb": round(made.stat().st_size / 1000, 1)}, True) if json_ else say(
        f"report: {made}"
    )
    _judge(strict, *sides)


def _open(path: Path, step_pattern: str | None, no_cache: bool) -> Any:
    import dspark_lab as lab

    source: Any = lab.load_run(path) if (path / "run.json").is_file() else path
    with busy(f"reading {path}"):
        return lab.open_trace(source, step_pattern=step_pattern, cache=not no_cache)


def _judge(strict: bool, *opened: Any) -> None:
    """Under ``--strict``, what undermines the traces on standard error, and exit code 1."""
    import dspark_lab as lab

    if not strict:
        return
    said = [p for one in opened for p in lab.integrity(one)["problems"]]
    for text in said:
        sys.stderr.write(f"dspark-lab: integrity: {text}\n")
    if said:
        raise typer.Exit(1)
