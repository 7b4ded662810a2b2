"""`Flights`: results on their way from the device to the requests they belong to, read oldest first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.engine.arrivals import Arrival, Arrivals
from dspark_lab.engine.relay import BudgetRelay
from dspark_lab.engine.request import Request
from dspark_lab.engine.rounds import Rounds
from dspark_lab.engine.runnable import no_room
from dspark_lab.ep.control import Control


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round committed, on the host: a list entry a request that took part."""

    index: int
    """Number of the round since the last reset."""
    tokens: list[list[int]]
    accept_lengths: list[int]
    proposal_lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """Results on their way: a prefill's first token, or a round's packed rows."""

    rows: list[Request]
    host: Tensor
    event: torch.cuda.Event | None
    index: int
    """Round after which this may be read."""
    is_round: bool


class Flights:
    """What was launched and not read yet. Reading commits tokens to the requests, and tells the ``relay`` their confidence."""

    def __init__(
        self, cfg: LabConfig, rounds: Rounds, depth: int, *, control: Control | None, relay: BudgetRelay | None
    ) -> None:
        """``depth``: more than the rounds that are launched and not read. ``control``: the ranks', None where there is one."""
        self.cfg, self.rounds, self.control, self.relay = cfg, rounds, control, relay
        self._arrivals = Arrivals(rounds, depth)
        self._waiting: deque[_Flight] = deque()
        self._unconfirmed: list[list[int]] = []

    @property
    def num_rounds(self) -> int:
        """Rounds that were launched and not read yet."""
        return sum(f.is_round for f in self._waiting)

    def clear(self) -> None:
        """Forgets all of them."""
        self._waiting.clear()
        self._unconfirmed = []

    def prefilled(self, request: Request, first: Tensor, index: int) -> None:
        """``first`` [1], on the device, is the request's first token, of a prefill before round ``index``."""
        self._await([request], self._arrivals.of(first.reshape(1, 1)), index, is_round=False)

    def launched(self, rows: list[Request], index: int) -> None:
        """Round ``index`` over the requests ``rows`` has just been launched."""
        self._await(rows, self._arrivals.of_round(index, len(rows)), index, is_round=True)

    def _await(self, rows: list[Request], arrival: Arrival, index: int, *, is_round: bool) -> None:
        host, event = arrival
        self._waiting.append(_Flight(rows=list(rows), host=host, event=event, index=index, is_round=is_round))

    def due(self, index: int) -> bool:
        """Whether anything up to round ``index`` is not read yet."""
        return bool(self._waiting) and self._waiting[0].index <= index

    def read(self, index: int) -> list[Round]:
        """Waits for the results up to round ``index`` and commits them; newer ones stay on their way."""
        done: list[Round] = []
        while self.due(index):
            done += self._take(self._waiting.popleft())
        return done

    def read_all(self) -> list[Round]:
        """Waits for everything on its way and commits it."""
        return self.read(self._waiting[-1].index) if self._waiting else []

    def unconfirmed(self) -> list[list[int]]:
        """Rows read since the last call, for the ranks to agree on; none where there is one rank."""
        rows, self._unconfirmed = self._unconfirmed, []
        return rows

    def _take(self, flight: _Flight) -> list[Round]:
        if flight.event is not None:
            self._wait_for(flight.event, flight.index)
        rows = flight.host.tolist()
        if self.control is not None:
            self._unconfirmed += rows
        if not flight.is_round:
            flight.rows[0].commit(rows[0][:1])
            return []
        self._arrivals.check(flight.index, rows)
        return [self._committed(flight, rows)]

    def _committed(self, flight: _Flight, rows: list[list[int]]) -> Round:
        """The round of ``rows``, once each request has its own; `LabError` where rows were lost on the way to their experts."""
        columns, tokens, proposals = self.rounds.columns, [], []
        if self.relay is not None:
            self.relay.publish(flight.index, flight.rows, columns.confidence_of(rows))
        for request, row in zip(flight.rows, rows, strict=True):
            if columns.lost(row):
                raise no_room(columns.lost(row), flight.index, self.cfg)
            new = columns.tokens(row)
            if not new:
                continue  # it had finished when the round ran
            request.commit(new)
            request.acceptance_lengths.append(len(new))
            request.proposal_lengths.append(columns.verified(row))
            request.seq_len += len(new)
            if self.rounds.demands.keep_rounds:
                request.rounds.append(columns.detail(row))
            tokens.append(new)
            proposals.append(columns.verified(row))
        lengths = [len(t) for t in tokens]
        return Round(index=flight.index, tokens=tokens, accept_lengths=lengths, proposal_lengths=proposals)

    def _wait_for(self, event: torch.cuda.Event, index: int) -> None:
        """Until ``event`` has passed. With several ranks by polling: an event behind a collective that a rank never joins has
        no time limit of its own, and collectives in graphs are invisible to NCCL's watchdog."""
        if self.control is None:
            event.synchronize()
        elif not event.query():
            self.control.wait(event.query, f"the collectives of round {index}")
