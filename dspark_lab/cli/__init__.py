"""The command line ``dspark-lab``: a thin layer over the same verbs. Every command takes ``--json``; a bad value exits with 2."""

from __future__ import annotations

import signal
import sys

import typer

from dspark_lab.cli import export, runs, trace
from dspark_lab.cli.toggles import ToggleCommand
from dspark_lab.errors import LabError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dspark-lab",
    help="A lab for decode steps: DSpark drafting, expert parallelism, and the scalar that made them slower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (runs.run, runs.compare, runs.generate):
    app.command(cls=ToggleCommand)(_command)
for _command in (runs.recorded, runs.demo, runs.record, runs.doctor):
    app.command()(_command)
app.add_typer(trace.app, name="trace")
app.add_typer(export.app, name="export")


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
