"""The ops run as Triton kernels: on the GPU where there is one, else in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is first imported
