"""Every toggle of a config is an option of the commands that make one."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_lab.cli.options import merged
from dspark_lab.cli.runs import run
from dspark_lab.cli.toggles import ToggleCommand
from dspark_lab.config import EngineConfig, toggle_names
from dspark_lab.errors import LabError


def read(*args: str) -> list[str]:
    own = {"--ep-size": False, "--set": False, "--json": True, "--num-steps": False}
    return list(ToggleCommand("run", callback=run)._read(list(args), own))


@pytest.mark.parametrize(
    ("args", "become"),
    [
        (("--ep-size", "2", "--tp-size", "2", "--json"), ["--ep-size", "2", "--set", "tp_size=2", "--json"]),
        (("--tp_size=2",), ["--set", "tp_size=2"]),
        (("--use-graph",), ["--set", "use_graph=true"]),
        (("--no-mask-padding", "--json"), ["--set", "mask_padding=false", "--json"]),
        (("--host-work-us", "-1"), ["--set", "host_work_us=-1"]),
        (("--set", "a=1"), ["--set", "a=1"]),
    ],
)
def test_toggles_become_settings(args: tuple[str, ...], become: list[str]) -> None:
    assert read(*args) == become


@pytest.mark.parametrize("name", [n for n in toggle_names() if not n.startswith(("target_", "draft_"))])
def test_every_toggle_is_an_option(name: str) -> None:
    assert read(f"--{name.replace('_', '-')}", "1")[-1] == ("1" if name == "ep_size" else f"{name}=1")


@pytest.mark.parametrize(
    ("args", "said"), [(("--numsteps", "4"), "'--num-steps'"), (("--attn-dpp", "4"), "'--attn-dp'"), (("--attn-dp",), "no value")]
)  # fmt: skip
def test_what_is_none_names_the_nearest(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(LabError, match=said):
        read(*args)


def test_a_toggle_is_given_once() -> None:
    with pytest.raises(LabError, match="twice"):
        merged({}, ["tp_size=2", "tp_size=4"])


def test_lists_are_taken_where_tuples_are_kept() -> None:
    buckets: Any = [1, 2, 4]
    assert hash(EngineConfig(buckets=buckets)) == hash(EngineConfig(buckets=(1, 2, 4)))
