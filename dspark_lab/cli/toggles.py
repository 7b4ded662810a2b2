"""Commands that take every toggle of a config: ``--tp-size 2`` is ``--set tp_size=2`` where it is no option of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from dspark_lab.config import preset, toggle_names
from dspark_lab.errors import LabError, nearest


class ToggleCommand(TyperCommand):
    """A command with ``--set`` that reads the toggles among its arguments, and names the nearest for what is none.

    A switch needs no value: ``--use-graph``, ``--no-use-graph``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            o: bool(getattr(p, "is_flag", False)) for p in self.get_params(ctx) for o in (*p.opts, *p.secondary_opts)
        }
        return super().parse_args(ctx, list(self._read(list(args), own)))

    def _read(self, args: list[str], own: dict[str, bool]) -> Iterator[str]:
        while args:
            arg = args.pop(0)
            name, equals, value = arg.partition("=")
            if arg == "--" or not arg.startswith("--"):
                yield arg
                continue
            follows = not equals and bool(args) and not args[0].startswith("--")
            if name in own:
                yield arg
                if follows and not own[name]:
                    yield args.pop(0)
                continue
            toggle = self._toggle(name, own)
            if equals or follows:
                yield from ("--set", f"{toggle.removeprefix('no_')}={value if equals else args.pop(0)}")
            elif toggle.removeprefix("no_") in _switches():
                yield from ("--set", f"{toggle.removeprefix('no_')}={'false' if toggle.startswith('no_') else 'true'}")
            else:
                raise LabError(f"{name} has no value; give one behind it, as in {name} 2.")

    def _toggle(self, name: str, own: dict[str, bool]) -> str:
        toggle, legal = name[2:].replace("-", "_"), toggle_names()
        if toggle in legal or (toggle.startswith("no_") and toggle[3:] in _switches()):
            return toggle
        near = nearest(name, [o for o in own if o.startswith("--")] + [f"--{t.replace('_', '-')}" for t in legal])
        raise LabError(
            f"{name} is no option of {self.name} and no toggle of a config.{near} "
            f"`dspark-lab {self.name} --help` lists the options; every toggle is one too."
        )


def _switches() -> set[str]:
    """Toggles that are on or off."""
    return {name for name, value in preset("tiny").to_dict().items() if isinstance(value, bool)}
