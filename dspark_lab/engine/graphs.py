"""`GraphRunner`: CUDA graphs of any function by bucket, with the checks that catch the faults such graphs really have.

A graph bakes in addresses, shapes and every branch taken at capture. The runner therefore owns the static inputs, fills them
in place, keys graphs by everything the geometry depends on, and refuses by name what would silently read stale memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark_lab.engine.backend import Backend, backend_for
from dspark_lab.engine.captured import (
    SCALAR,
    Captured,
    Checks,
    GraphKey,
    StaticInput,
    clones,
    fill_slot,
    poison,
    same_bits,
    tensors,
)
from dspark_lab.errors import LabError

__all__ = ["Checks", "GraphKey", "GraphRunner", "StaticInput"]

WARMUPS = 2


class GraphRunner:
    """Captures ``fn`` once a bucket, large to small over one pool, and replays the smallest that holds a batch.

    ``fn`` takes the static inputs by name, cut to the bucket (and ``num_token_non_padded`` where there is a slot for it), and
    returns a tensor or a (nested) tuple, list or dict of tensors. It may change ``state`` in place.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Mapping[str, StaticInput],
        *,
        buckets: Sequence[int],
        device: torch.device,
        width: int = 1,
        predicate: Callable[[], bool] = lambda: False,
        state: Callable[[], Mapping[str, Tensor]] = dict,
        watch: Callable[[], Mapping[str, Tensor]] = dict,
        barrier: Callable[[], None] = lambda: None,
        checks: Checks = Checks(),  # noqa: B008 - frozen
        backend: Backend | None = None,
        name: str = "graph",
    ) -> None:
        """``predicate`` decides whether graphs have a slot for the scalar; ``state`` names small tensors that ``fn`` changes
        and that warm-ups must leave as they were; ``watch`` names tensors whose addresses are baked in; ``barrier`` waits for
        the other ranks before each capture."""
        self.fn, self.inputs, self.device, self.width = fn, dict(inputs), device, width
        self.buckets = tuple(sorted(set(buckets)))
        self.predicate, self.state, self.watch, self.barrier = predicate, state, watch, barrier
        self.checks, self.name = checks, name
        self.backend = backend or backend_for(device)
        self.slot: Tensor | None = None
        self.graphs: dict[GraphKey, Captured] = {}
        self.fallbacks: Counter[str] = Counter()
        self._check_inputs()

    # -- capture -----------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Two warm-ups and a capture a bucket. Inputs and state are afterwards as they were before."""
        if self.graphs:
            raise LabError(f"{self.name} is captured already; destroy() it first.")
        with_slot = self.predicate()
        self.slot = torch.zeros(1, dtype=torch.int32, device=self.device) if with_slot else None
        kept = {n: i.buffer.clone() for n, i in self.inputs.items()}
        self._pad_everything()
        for bucket in reversed(self.buckets):
            key = self.key(bucket)
            self.graphs[key] = self._capture(bucket, key)
        for n, i in self.inputs.items():
            i.buffer.copy_(kept[n])
        self.backend.synchronize()

    def _capture(self, bucket: int, key: GraphKey) -> Captured:
        if self.slot is not None:
            self.slot.fill_(key.tokens)
        before, start = self.backend.memory(), time.perf_counter()
        views = self._views(bucket)
        state = {n: t.clone() for n, t in self.state().items()}
        for _ in range(WARMUPS):
            self.backend.warm_up(lambda: self.fn(**views))
            self._restore(state)
        self.backend.synchronize()
        self.barrier()
        replay, outputs, destroy = self.backend.capture(lambda: self.fn(**views))
        self._restore(state)
        self.backend.synchronize()
        took = time.perf_counter() - start  # before memory is read, which gives cached blocks back
        return Captured(
            key=key,
            replay=replay,
            outputs=outputs,
            addresses=self._addresses(),
            capture_ms=1e3 * took,
            memory_bytes=self.backend.memory() - before,
            destroy=destroy,
        )

    # -- admission and replay ----------------------------------------------------------------------------------

    def key(self, bucket: int) -> GraphKey:
        return GraphKey(tokens=bucket * self.width, slots=bucket, width=self.width)

    def refusal(self, num_slots: int, *, width: int | None = None) -> str | None:
        """Why a batch cannot be replayed and runs eagerly; None where it can."""
        if not self.graphs:
            return "not captured"
        if width is not None and width != self.width:
            return f"width {width} differs from the captured {self.width}"
        if num_slots > self.buckets[-1]:
            return f"{num_slots} slots are over the largest bucket, {self.buckets[-1]}"
        if num_slots < 1:
            return "no slots"
        return None

    def bucket(self, num_slots: int) -> int:
        return next(b for b in self.buckets if b >= num_slots)

    def run(
        self,
        num_slots: int,
        *,
        width: int | None = None,
        num_token_non_padded: Tensor | int | None = None,
        **values: Tensor,
    ) -> Any:
        """Replays, or calls ``fn`` eagerly and counts the reason in ``fallbacks``. Outputs are cut to the bucket, not to the batch."""
        reason = self.refusal(num_slots, width=width)
        if reason is None:
            return self.replay(num_slots, num_token_non_padded=num_token_non_padded, **values)
        self.fallbacks[reason] += 1
        scalar = {} if num_token_non_padded is None else {SCALAR: num_token_non_padded}
        return self.fn(**values, **scalar)

    def replay(self, num_slots: int, *, num_token_non_padded: Tensor | int | None = None, **values: Tensor) -> Any:
        """Fills the given inputs (real rows, then padding), the scalar's slot, and replays. Inputs not given stay as they are.

        The outputs are the graph's own buffers: the next replay overwrites them.
        """
        bucket = self.bucket(num_slots)
        graph = self.graphs[self.key(bucket)]
        self._check_scalar(num_token_non_padded)
        if self.checks.addresses:
            self._check_addresses(graph)
        self._fill(num_slots, bucket, values)
        if self.slot is not None:
            fill_slot(self.slot, num_token_non_padded)
        if self.checks.eager:
            return self._checked_replay(graph, bucket)
        graph.replay()
        graph.num_replays += 1
        return graph.outputs

    def report(self) -> list[dict[str, Any]]:
        """A dict a bucket: geometry, ``capture_ms``, ``memory_bytes``, ``num_replays``; largest first."""
        return [
            {
                "name": self.name,
                "tokens": g.key.tokens,
                "slots": g.key.slots,
                "width": g.key.width,
                "has_scalar_slot": self.slot is not None,
                "capture_ms": g.capture_ms,
                "memory_bytes": g.memory_bytes,
                "num_replays": g.num_replays,
            }
            for g in self.graphs.values()
        ]

    def destroy(self) -> None:
        """Releases graphs and pool; must come before the process group ends where graphs hold collectives."""
        self.backend.synchronize()
        for graph in self.graphs.values():
            graph.destroy()
        self.graphs.clear()
        self.backend.release()

    # -- filling -----------------------------------------------------------------------------------------------

    def _views(self, bucket: int) -> dict[str, Tensor]:
        views = {n: i.buffer[: bucket * i.rows] for n, i in self.inputs.items()}
        return views | ({SCALAR: self.slot} if self.slot is not None else {})

    def _pad_everything(self) -> None:
        for i in self.inputs.values():
            if i.pad is not None:
                i.buffer.fill_(i.pad)

    def _fill(self, num_slots: int, bucket: int, values: Mapping[str, Tensor]) -> None:
        for n, value in values.items():
            if n not in self.inputs:
                raise LabError(f"{self.name} has no input {n!r}; it has {', '.join(self.inputs)}.")
            i = self.inputs[n]
            real, rows = num_slots * i.rows, bucket * i.rows
            if tuple(value.shape) != (real, *i.buffer.shape[1:]):
                raise LabError(
                    f"{self.name}: {n} has shape {tuple(value.shape)} and must have {(real, *i.buffer.shape[1:])}."
                )
            if self.checks.poison:
                poison(i.buffer[:rows])
            i.buffer[:real].copy_(value)
            if real < rows and i.pad is not None:
                i.buffer[real:rows].fill_(i.pad)

    def _restore(self, kept: Mapping[str, Tensor]) -> None:
        for n, t in self.state().items():
            t.copy_(kept[n])

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_inputs(self) -> None:
        for n, i in self.inputs.items():
            need = self.buckets[-1] * i.rows
            if i.buffer.shape[0] < need:
                raise LabError(
                    f"{self.name}: input {n} has {i.buffer.shape[0]} rows and the largest bucket needs {need}."
                )
            if n == SCALAR:
                raise LabError(
                    f"{SCALAR} is no input of {self.name}: the runner owns its slot, where the predicate holds."
                )

    def _check_scalar(self, given: Tensor | int | None) -> None:
        has_slot = self.slot is not None
        if self.predicate() != has_slot:
            raise LabError(
                f"{self.name}: the predicate is {not has_slot} now and was {has_slot} at capture; the graphs "
                f"{'have' if has_slot else 'have no'} slot for {SCALAR}. Capture again."
            )
        if has_slot and given is None:
            raise LabError(
                f"{self.name} was captured with a slot for {SCALAR} and is replayed with None: it would keep an old count."
            )
        if not has_slot and given is not None:
            raise LabError(
                f"{self.name} was captured with {SCALAR}=None and is replayed with a value, which nothing in the graph reads."
            )

    def _addresses(self) -> dict[str, int]:
        own = {f"input {n}": i.buffer.data_ptr() for n, i in self.inputs.items()}
        return own | {n: t.data_ptr() for n, t in self.watch().items()}

    def _check_addresses(self, graph: Captured) -> None:
        now = self._addresses()
        for n, at in graph.addresses.items():
            if now.get(n) != at:
                raise LabError(
                    f"rebound buffer: {n!r} of {self.name} is not where it was at capture, so the graph reads the old memory; "
                    "copy into the old tensor instead of assigning a new one."
                )

    def _checked_replay(self, graph: Captured, bucket: int) -> Any:
        before = {n: t.clone() for n, t in self.state().items()}
        eager = clones(self.fn(**self._views(bucket)))
        after_eager = {n: t.clone() for n, t in self.state().items()}
        self._restore(before)
        graph.replay()
        graph.num_replays += 1
        pairs = [*zip(tensors(graph.outputs), tensors(eager), strict=True)]
        pairs += [(t, after_eager[n]) for n, t in self.state().items()]
        for k, (a, b) in enumerate(pairs):
            if not same_bits(a, b):
                raise LabError(
                    f"{self.name}: output {k} of the replay at bucket {bucket} differs from eager on the same inputs."
                )
        return graph.outputs
