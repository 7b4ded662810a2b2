"""What captures and replays: CUDA graphs on a GPU; elsewhere a stand-in that calls the function again, for tests and laptops."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_lab import device as hardware


class Backend(Protocol):
    """One pool of graphs."""

    def warm_up(self, fn: Callable[[], Any]) -> None: ...

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any, Callable[[], None]]:
        """(replay, outputs, destroy)."""
        ...

    def synchronize(self) -> None: ...

    def memory(self) -> int:
        """Bytes taken from the device so far."""
        ...

    def release(self) -> None: ...


class CudaGraphs:
    """`torch.cuda.CUDAGraph` over one shared memory pool, captured on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, fn: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            fn()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # A collection in mid-capture may free another engine's events or pinned memory, which invalidates the capture.
        gc.collect()
        gc.disable()
        try:
            return self._capture(graph, fn)
        finally:
            gc.enable()

    def _capture(
        self, graph: torch.cuda.CUDAGraph, fn: Callable[[], Any]
    ) -> tuple[Callable[[], None], Any, Callable[[], None]]:
        # thread_local: NCCL's watchdog thread queries events, which a global capture would forbid.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = fn()
        return graph.replay, outputs, graph.reset

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> int:
        torch.cuda.empty_cache()  # a capture gives cached blocks back, which must not read as memory won
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def release(self) -> None:
        self._pool = None


class CallAgain:
    """No graphs: a replay calls the function once more and copies its results into the outputs of the capture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, fn: Callable[[], Any]) -> None:
        fn()

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any, Callable[[], None]]:
        outputs: list[Any] = []

        def replay() -> None:
            _copy_into(outputs[0], fn())

        outputs.append(fn())
        return replay, outputs[0], outputs.clear

    def synchronize(self) -> None:
        hardware.synchronize(self.device)

    def memory(self) -> int:
        return 0

    def release(self) -> None:
        pass


def backend_for(device: torch.device) -> Backend:
    return CudaGraphs(device) if device.type == "cuda" else CallAgain(device)


def _copy_into(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, dict):
        for k in old:
            _copy_into(old[k], new[k])
    elif isinstance(old, list | tuple):
        for a, b in zip(old, new, strict=True):
            _copy_into(a, b)
