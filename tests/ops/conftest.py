"""The ops run as Triton kernels here: on the GPU where there is one, else in Triton's interpreter, on the CPU.

Triton looks at its variable when a kernel is made, so the kernels are imported under it; other tests of the same process, and
processes that they start, see none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import dspark_kernels
from dspark_kernels import backend

INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()

if INTERPRETED:
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        with suppress(ImportError):
            import_module(
                "triton.experimental.gluon"
            )  # a launch would import it later, and it looks at the variable too
        for path in sorted(Path(str(dspark_kernels.__file__)).parent.glob("*/kernel.py")):
            import_module(f"dspark_kernels.{path.parent.name}.kernel")


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    backend.interpret(INTERPRETED)
    yield
    backend.interpret(False)
