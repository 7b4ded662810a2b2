"""Commands that write runs for other viewers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark_lab.cli.options import Json
from dspark_lab.cli.printing import show

app = typer.Typer(help="Write runs for other viewers.", no_args_is_help=True)


@app.command("tensorboard")
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
    show({"logdir": str(where), "runs": sorted(p.name for p in Path(where).iterdir() if p.is_dir())}, json_)
