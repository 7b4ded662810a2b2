"""`Rounds`: the device side of one round as two functions, draft and verify, over the batch's state. Called eagerly or captured.

Without speculation a round is `verify` alone, over blocks of one token: its anchor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_kernels.accept import Accepted
from dspark_kernels.backend import on_triton
from dspark_kernels.rounds import Rows, accept_and_commit, block_rows, commit
from dspark_kernels.sampling import chain_accept_logits
from dspark_lab.config import LabConfig
from dspark_lab.engine.compacted import compacted
from dspark_lab.engine.demands import Demands
from dspark_lab.engine.propose import DraftBlockProposer
from dspark_lab.engine.results import Columns
from dspark_lab.engine.samplers import Samplers
from dspark_lab.engine.state import BatchState
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Proposal
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.spec.accept import proposal_lengths, simulated_accepts
from dspark_lab.spec.compact import Compact
from dspark_lab.spec.confidence import calibrated
from dspark_lab.spec.split import split_budget

SIMULATED_STEPS = 4096
"""Simulated accept lengths drawn ahead; the loop wraps round after that many rounds."""


class Rounds:
    """Owns what a round reads and writes: caches, state, drafted blocks, packed results."""

    def __init__(
        self,
        cfg: LabConfig,
        target: Target,
        drafter: AnyDrafter,
        device: torch.device,
        max_rows: int,
        *,
        num_slots: int | None = None,
        replica: int = 0,
        demands: Demands | None = None,
        scales: Sequence[float] | None = None,
        depth: int = 1,
    ) -> None:
        """``num_slots`` of the caches: by default all of the batch; ``replica``: which attention replica this is; ``demands``
        of the requests, by default what the config says; ``scales`` [γ]: temperatures that calibrate the confidences; ``depth``:
        of how many rounds `sent` holds the results."""
        self.cfg, self.target, self.drafter, self.device = cfg, target, drafter, device
        self.gamma = cfg.gamma
        self.width = self.gamma + 1
        self.query_len = cfg.model.drafter.query_len
        """Rows of a request in a forward of the drafter."""
        self.demands = demands or Demands.of(cfg)
        self.context_len = cfg.model.context_len + self.width * self.demands.at_limit
        """Positions of the caches: room behind the context for the rows of a block that reaches past its end."""
        slots = cfg.engine.batch_size if num_slots is None else num_slots
        self.target_cache = target.new_cache(slots, self.context_len)
        self.draft_cache = drafter.new_cache(slots, self.context_len)
        self.state = BatchState(max_rows, self.target_cache.dummy_slot, device)
        self.proposer = DraftBlockProposer(cfg, drafter, self.draft_cache, device)
        self.context_layers = cfg.model.drafter.target_layer_ids if self.gamma else ()
        """Target layers whose outputs are the draft context; none where nobody drafts."""
        self.drafts = torch.zeros(max_rows, self.gamma, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.packed = torch.zeros(max_rows, self.width + 2, dtype=torch.int64, device=device)
        """[rows, W + 2]: committed tokens, how many (0: the row took no part), drafts verified."""
        self._overflows = _overflows(target, drafter)
        reads_confidence = self.gamma > 0 and cfg.model.drafter.has_confidence
        self.is_scheduled = cfg.engine.verify == "scheduled" and self.gamma > 0
        sends_confidence = reads_confidence and (self.is_scheduled or self.demands.keep_rounds)
        self.with_confidence = sends_confidence or (reads_confidence and cfg.engine.confidence_threshold > 0)
        self.columns = Columns(
            gamma=self.gamma,
            overflow=bool(self._overflows),
            confidence=sends_confidence,
            drafts=self.demands.keep_rounds,
        )
        self.results = self.packed
        """[rows, columns] what the host reads: `packed`, and more where more is asked for."""
        if self.columns.num > self.columns.packed:
            self.results = torch.zeros(max_rows, self.columns.num, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(max_rows, self.gamma, dtype=torch.float32, device=device)
        """[rows, γ] of the block at hand, calibrated; zeros where nobody reads it."""
        self.budget = torch.full((1,), -1, dtype=torch.int64, device=device)
        """Drafts to verify of all requests together, with ``verify="scheduled"``; below 0: whole blocks."""
        self._scales = None if scales is None else torch.tensor(list(scales), dtype=torch.float64, device=device)
        self.samplers: Samplers | None = None
        """Where some request samples."""
        if self.demands.sampled:
            self.samplers = Samplers(
                self.state,
                seed=cfg.seed,
                cuts=self.demands.cuts,
                gamma=self.gamma,
                vocab_size=cfg.model.target.vocab_size,
            )
        stops = self.demands.stop_token_ids
        self.stop_ids = torch.tensor(stops, dtype=torch.int64, device=device) if stops else None
        self.sent: Tensor | None = None
        """[depth, rows, W + 3] on the host: `packed` and the number of the round, which its own kernel writes to entry number mod
        depth, since a copy would stand between two graphs. None where more is sent: then it is copied."""
        writes = device.type != "cuda" or on_triton(self.packed)  # plain torch on a GPU writes to no host memory
        if writes and self.results is self.packed:
            self.sent = torch.zeros(
                depth, max_rows, self.width + 3, dtype=torch.int64, pin_memory=device.type == "cuda"
            )
        self.num_rounds = torch.zeros(1, dtype=torch.int64, device=device)
        """Rounds so far: which simulated accept lengths are next."""
        self._simulated = self._draw_simulated(max_rows, replica)

    @property
    def rows_a_request(self) -> int:
        """Rows that target and drafter compute for a request in a round."""
        drafted = self.gamma if self.query_len == 1 else self.query_len
        return self.width + (drafted if self.gamma else 0)

    def draft(self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None) -> None:
        """γ draft tokens for the first ``b`` rows into `drafts` and `lengths`."""
        batch = self.proposer.build_batch(
            self.draft_rows(b),
            max_keys=max_keys,
            num_requests=num_requests,
            num_token_non_padded=num_token_non_padded,
        )
        pick = None if self.samplers is None else self.samplers.picker(b, self.target.model.vocab.gather)
        anchors = self.state.anchors[:b]
        proposal = self.proposer.propose(batch, anchors, with_confidence=self.with_confidence, pick=pick)
        self.drafts[:b].copy_(proposal.draft_tokens)
        if pick is not None and self.cfg.model.drafter.drafter_kind == "lookup":
            pick.took(proposal.draft_tokens)
        self.lengths[:b].copy_(self._proposal_lengths(b, proposal))

    def _proposal_lengths(self, b: int, proposal: Proposal) -> Tensor:
        """[b] drafts to verify."""
        if proposal.confidence is not None:
            confidence = proposal.confidence
            self.confidence[:b].copy_(confidence if self._scales is None else calibrated(confidence, self._scales))
        if proposal.lengths is not None:
            lengths = proposal.lengths
        elif self.is_scheduled:
            split = split_budget(self.confidence[:b], self.budget, is_real=self.takes_part(b))
            lengths = torch.where(self.budget < 0, self.gamma, split)
        else:
            confidence = self.confidence[:b] if self.with_confidence else None
            lengths = proposal_lengths(confidence, self.cfg.engine.confidence_threshold, b, self.gamma, self.device)
        if self.demands.at_limit:  # the last position of the context is the last that a row may have
            room = self.cfg.model.context_len - 1 - self.state.seq_lens[:b]
            lengths = torch.minimum(lengths, room.clamp(min=0))
        return lengths

    def takes_part(self, b: int) -> Tensor:
        """[b] bool: rows whose request is not finished; false for padded ones."""
        return self.state.seq_lens[:b] < self.state.limits[:b]

    def verify(
        self,
        b: int,
        *,
        max_keys: int,
        num_requests: int,
        num_token_non_padded: Tensor | None,
        compact_rows: int | None = None,
        num_real_rows: int | None = None,
    ) -> None:
        """Target forward, acceptance and commit for the first ``b`` rows; results into `results`, the state moves on.

        ``compact_rows``: the forward has that many rows instead of ``b`` whole blocks, and ``num_real_rows`` of them at most
        are real.
        """
        s = self.state
        batch = self.build_verify_batch(
            b, max_keys=max_keys, num_requests=num_requests, num_token_non_padded=num_token_non_padded
        )
        index = None
        if compact_rows is not None:
            real = compact_rows if num_real_rows is None else num_real_rows
            batch = compacted(batch, self.lengths[:b], self.takes_part(b), compact_rows, real, s.dummy_slot)
            batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
            assert batch.ragged is not None
            index = batch.ragged.index
        out = self.target.forward(batch, self.target_cache, capture_layers=self.context_layers)
        context_slots = self._accept(b, out.hidden, index)
        if index is not None:
            context_slots = index.to_rows(context_slots, s.dummy_slot)
        if self.gamma:
            # Context for the anchor and the kept drafts; rejected rows go to the dummy slot. Target K/V are cut by length.
            self.drafter.write_context(out.aux, context_slots, batch.positions, self.draft_cache, batch.input_ids)
        if self.results is not self.packed:
            lost = torch.cat(self._overflows).sum() if self._overflows else None
            self.columns.write(
                self.results[:b], self.packed[:b], lost=lost, confidence=self.confidence[:b], drafts=self.drafts[:b]
            )

    def _accept(self, b: int, hidden: Tensor, index: Compact | None) -> Tensor:
        """Acceptance and commit from ``hidden`` [T, H]; the slot of the draft context of each place [b·W], the dummy's where
        nothing is committed."""
        s = self.state
        state = (s.anchors[:b], s.seq_lens[:b], s.slots[:b], s.limits[:b], self.packed[:b])
        sent = None if self.sent is None else self.sent[:, :b]
        if self.samplers is not None:
            accepted = self._sample(b, hidden, index)
            return commit(
                accepted, self.lengths[:b], *state, self.num_rounds, dummy_slot=s.dummy_slot, results=sent,
                stop_ids=self.stop_ids,
            )  # fmt: skip
        tokens = self.target.argmax(hidden)
        # Places that are not verified hold token 0, which a draft may be too: acceptance stops at the length before it.
        target_tokens = (tokens if index is None else index.to_places(tokens)).view(b, self.width)
        return accept_and_commit(
            self.drafts[:b], self.lengths[:b], target_tokens, *state, self._simulated, self.num_rounds,
            dummy_slot=s.dummy_slot, results=sent, stop_ids=self.stop_ids,
        )  # fmt: skip

    def _sample(self, b: int, hidden: Tensor, index: Compact | None) -> Accepted:
        assert self.samplers is not None
        accept_noise, bonus_noise = self.samplers.accept_noise(b)
        return chain_accept_logits(
            self.drafts[:b], self.samplers.draft_probs[:b], self.target.logits(hidden), self.samplers.rows(b), self.lengths[:b],
            accept_noise=accept_noise, bonus_noise=bonus_noise, row_of_place=None if index is None else index.rows,
        )  # fmt: skip

    def draft_rows(self, b: int) -> Rows:
        """Anchor and the mask tokens behind it of the first ``b`` requests."""
        return self._rows(b, None, self.query_len)

    def build_verify_batch(
        self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None
    ) -> ForwardBatch:
        """Anchor and γ drafts a request, causal."""
        rows = self._rows(b, self.drafts[:b], self.width)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if num_requests else ForwardMode.IDLE,
            batch_size=b,
            num_tokens_per_req=self.width,
            input_ids=rows.input_ids,
            positions=rows.positions,
            req_slots=rows.req_slots,
            slots_by_row=rows.token_slots,
            key_limits=rows.key_limits,
            max_keys=max_keys,
            num_token_non_padded=num_token_non_padded,
            num_token_non_padded_cpu=num_requests * self.width,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def _rows(self, b: int, drafts: Tensor | None, width: int) -> Rows:
        s = self.state
        return block_rows(
            s.anchors[:b],
            s.seq_lens[:b],
            s.slots[:b],
            s.limits[:b],
            drafts,
            width=width,
            mask_token=self.cfg.model.drafter.mask_token_id,
            dummy_slot=s.dummy_slot,
        )

    def _draw_simulated(self, max_rows: int, replica: int) -> Tensor | None:
        length = self.cfg.engine.simulated_accept_length
        if length is None or not self.gamma:
            return None
        num_replicas = self.cfg.parallel.attn_dp
        drawn = simulated_accepts(length, SIMULATED_STEPS, max_rows * num_replicas, self.cfg.seed)
        return drawn[:, replica::num_replicas].contiguous().to(self.device)


def _overflows(target: Target, drafter: AnyDrafter) -> list[Tensor]:
    """Counters of the dispatchers that can lose rows."""
    layers = [*target.model.moe_layers, *drafter.moe_layers]
    counters = [getattr(layer.dispatcher, "overflow", None) for layer in layers]
    return [c for c in counters if c is not None]
