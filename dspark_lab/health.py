"""What is installed and usable here, and what to do about the rest: `dspark_lab.doctor`."""

from __future__ import annotations

import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from dspark_lab.runs.store import data_dir, recorded_names

PACKAGES: dict[str, tuple[str, ...]] = {
    "": ("numpy", "pandas", "pyarrow", "msgspec", "isal", "psutil", "rich", "typer"),
    "lab": (
        "torch",
        "safetensors",
        "jupyterlab",
        "ipykernel",
        "ipywidgets",
        "anywidget",
        "plotly",
        "tensorboard",
        "torch-tb-profiler",
    ),
    "triton": ("triton",),
    "hf": ("transformers",),
}
"""Distributions by the extra that brings them; the base install has no name."""

LOSS: dict[str, str] = {
    "isal": "traces are unpacked more slowly",
    "torch": "nothing can be measured here; recorded runs and traces work",
    "safetensors": "checkpoints cannot be read",
    "jupyterlab": "notebooks cannot be opened from here",
    "ipykernel": "notebooks cannot run in this Python",
    "ipywidgets": "no panel",
    "anywidget": "figures in the panel are redrawn rather than updated",
    "plotly": "no figures",
    "tensorboard": "no scalars for TensorBoard; captures are still written",
    "torch-tb-profiler": "TensorBoard shows scalars but no profiler tab",
    "triton": "kernels run in their plain torch form",
    "transformers": "no tokenizer: prompts are given as token ids",
}
"""What goes without a package."""


class Row(NamedTuple):
    """One finding. ``status``: ``ok``, ``missing`` (something goes without it) or ``problem`` (something is broken)."""

    name: str
    status: str
    detail: str
    what_to_do: str = ""


def doctor() -> pd.DataFrame:
    """A row a finding: name, status, detail, what_to_do. Never raises, whatever is missing."""
    rows = [
        _python(),
        _this_package(),
        *(_package(name, extra) for extra, names in PACKAGES.items() for name in names),
        *_devices(),
        _renderer(),
        _profiler_plugin(),
        _recorded(),
        _work_folder(),
    ]
    return pd.DataFrame(rows, columns=list(Row._fields))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Row:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    return Row("python", "ok", detail)


def _this_package() -> Row:
    return Row("dspark-lab", "ok", _version("dspark-lab") or "source tree, not installed")


def _package(name: str, extra: str) -> Row:
    version = _version(name)
    if version:
        return Row(name, "ok", version)
    brings = f"dspark-lab[{extra}]" if extra else "dspark-lab"
    return Row(name, "missing", LOSS.get(name, "needed by the base install"), f"pip install '{brings}'")


def _devices() -> list[Row]:
    if _version("torch") is None:
        return [Row("device", "missing", "torch is not installed", "pip install 'dspark-lab[lab]'")]
    try:
        import torch

        from dspark_lab.device import device_name

        devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
        rows = [Row(f"device {d}", "ok", device_name(d)) for d in devices]
    except Exception as e:  # a broken driver or build fails in many ways, and this is the place to say so
        return [Row("device", "problem", f"torch cannot be used: {_first_line(e)}", "reinstall torch for this machine")]
    if len(devices) == 1:
        how = f"torch {torch.__version__} sees no GPU: host times only, strategies tie"
        rows.append(
            Row(
                "device cuda",
                "missing",
                how,
                "on a machine with a GPU: install torch's CUDA build; else lab.recorded()",
            )
        )
    return rows


def _renderer() -> Row:
    if _version("plotly") is None:
        return Row("plotly renderer", "missing", "plotly is not installed", "pip install 'dspark-lab[lab]'")
    try:
        import plotly.io

        default = str(plotly.io.renderers.default)
    except Exception as e:
        return Row("plotly renderer", "problem", f"plotly cannot be used: {_first_line(e)}", "reinstall plotly")
    online = [
        part for part in default.split("+") if part in ("notebook_connected", "iframe_connected", "iframe", "colab")
    ]
    if online:
        return Row(
            "plotly renderer",
            "problem",
            f"{default}: figures stay blank offline",
            "plotly.io.renderers.default = 'plotly_mimetype'",
        )
    return Row("plotly renderer", "ok", default or "none outside a notebook; figures are values all the same")


def _profiler_plugin() -> Row:
    found = [
        e.value for e in metadata.entry_points(group="tensorboard_plugins") if e.value.startswith("torch_tb_profiler")
    ]
    if found:
        return Row("TensorBoard profiler tab", "ok", f"{found[0]} is registered")
    return Row("TensorBoard profiler tab", "missing", LOSS["torch-tb-profiler"], "pip install torch-tb-profiler")


def _recorded() -> Row:
    names = recorded_names()
    if names:
        return Row("recorded runs", "ok", f"{len(names)} in {data_dir() / 'recorded'}: {', '.join(names)}")
    return Row("recorded runs", "problem", f"none in {data_dir() / 'recorded'}", "reinstall dspark-lab")


def _work_folder() -> Row:
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here):
            return Row("work folder", "ok", f"{here} can be written")
    except OSError as e:
        return Row(
            "work folder",
            "problem",
            f"{here}: {e.strerror}",
            "start in a folder of your own, or give logdir= and the like",
        )


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
