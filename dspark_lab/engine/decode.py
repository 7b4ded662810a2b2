"""The decode loop: propose, verify, accept, commit. Greedy and eager; one object a config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.device import free_bytes, phase
from dspark_lab.engine.propose import DraftBlockProposer, RoundState
from dspark_lab.engine.request import Request
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.plan.memory import plan_memory
from dspark_lab.plan.padding import bucket_for, enable_num_token_non_padded
from dspark_lab.spec.accept import Accepted, greedy_accept, simulated_accepts

SIMULATED_STEPS = 4096
"""Simulated accept lengths drawn ahead; the loop wraps round after that many steps."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one step committed, on the host: a list entry a real request."""

    tokens: list[list[int]]
    accept_lengths: list[int]
    proposal_lengths: list[int]


def check_runnable(cfg: LabConfig) -> None:
    """Raises `LabError` for what a config may say (a recording may have it) and this version does not run live."""
    e, p = cfg.engine, cfg.parallel
    for asked, what in (
        (e.use_graph, "use_graph=True (CUDA graphs)"),
        (e.overlap, "overlap=True (the run-ahead loop)"),
        (p.tp_size > 1, f"tp_size={p.tp_size} (tensor parallelism)"),
        (p.attn_dp > 1, f"attn_dp={p.attn_dp} (attention data parallelism)"),
        (p.moe_dp > 1, f"moe_dp={p.moe_dp}"),
    ):
        if asked:
            raise LabError(
                f"{what} is not run live by this version; it can be looked at in recordings. Set it back to run here."
            )


class DecodeEngine:
    """Owns the KV caches and the device state of the batch; ``step`` runs one round over all active requests."""

    def __init__(self, cfg: LabConfig, target: Target, drafter: Drafter, device: torch.device) -> None:
        check_runnable(cfg)
        self.cfg = cfg
        self.target = target
        self.device = device
        self.gamma = cfg.model.drafter.block_size
        self._check_memory()
        self.target_cache = target.new_cache(cfg.engine.batch_size, cfg.model.context_len)
        self.draft_cache = drafter.new_cache(cfg.engine.batch_size, cfg.model.context_len)
        self.proposer = DraftBlockProposer(cfg, drafter, self.draft_cache, device)
        self.drafter = drafter
        self.active: list[Request] = []
        self.num_steps = 0
        self._state: RoundState | None = None
        self._columns = torch.arange(self.gamma + 1, device=device)
        # The verify batch always uses one persistent buffer, so that only the draft batch's strategy varies.
        self._verify_slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._predicate = enable_num_token_non_padded(cfg.parallel)
        self._simulated = self._draw_simulated()
        self.reset()

    # -- requests ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all requests; caches keep their memory. The mask is compiled in or out here: arms may share the models."""
        self.active, self._state, self.num_steps = [], None, 0
        for layer in (*self.target.model.moe_layers, *self.drafter.moe_layers):
            layer.reads_scalar = self.cfg.needs_scalar

    def join(self, request: Request) -> None:
        """Prefills ``request`` into a free slot: its first token comes from the prompt's last logits, in no round."""
        taken = {r.slot for r in self.active}
        free = [s for s in range(self.cfg.engine.batch_size) if s not in taken]
        if not free:
            raise LabError(
                f"all {self.cfg.engine.batch_size} slots are taken; raise batch_size or wait for a request to finish."
            )
        request.slot = free[0]
        with phase("dspark::prefill"):
            first = self._prefill(request.prompt, request.slot)
        request.seq_len = len(request.prompt)
        request.new_tokens.append(first)
        self.active.append(request)
        self._state = None

    def _prefill(self, prompt: list[int], slot: int) -> int:
        n = len(prompt)
        positions = torch.arange(n, device=self.device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            num_tokens_per_req=n,
            input_ids=torch.tensor(prompt, device=self.device),
            positions=positions,
            req_slots=torch.tensor([slot], device=self.device),
            key_limits=positions + 1,
            max_keys=n,
            num_token_non_padded=self._persistent_scalar(n),
            num_token_non_padded_cpu=n,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        out = self.target.forward(batch, self.target_cache, capture_layers=self.cfg.model.drafter.target_layer_ids)
        slots = batch.req_slots.expand(n)
        self.drafter.write_context(out.aux, slots, positions, self.draft_cache)
        return int(self.target.logits(out.hidden[-1:]).argmax(dim=-1).item())

    def _retire(self) -> None:
        if any(r.finished for r in self.active):
            self.active = [r for r in self.active if not r.finished]
            self._state = None

    # -- one round ---------------------------------------------------------------------------------------------

    def step(self) -> Round:
        """Propose, verify, accept, commit for every active request; finished ones leave. Needs at least one."""
        state = self.state()
        proposal, lengths = self.proposer.propose(state)
        with phase("dspark::verify"):
            batch = self.build_verify_batch(state, proposal.draft_tokens)
            out = self.target.forward(batch, self.target_cache, capture_layers=self.cfg.model.drafter.target_layer_ids)
            target_tokens = self.target.logits(out.hidden).argmax(dim=-1).view(state.bucket, self.gamma + 1)
        with phase("dspark::accept"):
            forced = (
                None if self._simulated is None else self._simulated[self.num_steps % SIMULATED_STEPS, : state.bucket]
            )
            accepted = greedy_accept(proposal.draft_tokens, target_tokens, lengths, forced=forced)
            self._commit(state, accepted, out.aux, batch.positions)
            done = self._to_host(state, accepted, lengths)
        self.num_steps += 1
        self._retire()
        return done

    def state(self) -> RoundState:
        """The device state of the batch; rebuilt where requests joined or left, else as the last round left it."""
        if self._state is None:
            bs = len(self.active)
            bucket = bucket_for(max(bs, 1), self.cfg.engine.buckets)
            pad = [0] * (bucket - bs)
            rows = [
                [r.new_tokens[-1] for r in self.active],
                [r.seq_len for r in self.active],
                [r.slot for r in self.active],
            ]
            fill = (pad, pad, [self.target_cache.dummy_slot] * len(pad))
            packed = torch.tensor([row + tail for row, tail in zip(rows, fill, strict=True)], device=self.device)
            self._state = RoundState(
                num_requests=bs, anchors=packed[0], seq_lens=packed[1], slots=packed[2], seq_lens_cpu=rows[1]
            )
        return self._state

    def build_verify_batch(self, state: RoundState, draft_tokens: Tensor) -> ForwardBatch:
        """Anchor and γ drafts a request, causal; the scalar from the persistent buffer where anybody reads it."""
        w = self.gamma + 1
        positions = (state.seq_lens[:, None] + self._columns).flatten()
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if state.num_requests else ForwardMode.IDLE,
            batch_size=state.bucket,
            num_tokens_per_req=w,
            input_ids=torch.cat([state.anchors[:, None], draft_tokens], dim=1).flatten(),
            positions=positions,
            req_slots=state.slots,
            key_limits=positions + 1,
            max_keys=max(state.seq_lens_cpu, default=0) + w,
            num_token_non_padded=self._persistent_scalar(state.num_requests * w),
            num_token_non_padded_cpu=state.num_requests * w,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def idle_step(self) -> None:
        """A round with no request: joins every collective with padded rows only, count 0, and commits nothing."""
        if self.active:
            raise LabError(f"an idle round is for a rank without requests; this one has {len(self.active)}.")
        self._state = None
        state = self.state()
        proposal, _ = self.proposer.propose(state)
        batch = self.build_verify_batch(state, proposal.draft_tokens)
        self.target.forward(batch, self.target_cache, capture_layers=self.cfg.model.drafter.target_layer_ids)
        self._state = None

    def _commit(self, state: RoundState, accepted: Accepted, aux: Tensor, positions: Tensor) -> None:
        """Draft context for the anchor and the kept drafts; rejected rows go to the dummy slot. Target KV is cut by length."""
        keep = self._columns[None] <= accepted.num_accepted[:, None]
        slots = torch.where(keep, state.slots[:, None], self.draft_cache.dummy_slot)
        self.drafter.write_context(aux, slots.flatten(), positions, self.draft_cache)
        real = state.slots != self.draft_cache.dummy_slot
        state.seq_lens = torch.where(real, state.seq_lens + accepted.num_accepted + 1, 0)
        state.anchors = torch.where(real, accepted.bonus, 0)

    def _to_host(self, state: RoundState, accepted: Accepted, lengths: Tensor) -> Round:
        """One copy to the host a round: committed tokens and both lengths."""
        bs, w = state.num_requests, self.gamma + 1
        packed = torch.cat([accepted.out_tokens, accepted.num_accepted[:, None], lengths[:, None]], dim=1)[:bs].tolist()
        tokens = [row[: row[w] + 1] for row in packed]
        for request, row, new in zip(self.active, packed, tokens, strict=True):
            request.new_tokens += new
            request.acceptance_lengths.append(len(new))
            request.proposal_lengths.append(row[w + 1])
            request.seq_len += len(new)
        state.seq_lens_cpu = [r.seq_len for r in self.active]
        return Round(
            tokens=tokens, accept_lengths=[len(t) for t in tokens], proposal_lengths=[row[w + 1] for row in packed]
        )

    # -- set-up ------------------------------------------------------------------------------------------------

    def _persistent_scalar(self, n: int) -> Tensor | None:
        return self._verify_slot.fill_(n) if self._predicate else None

    def _draw_simulated(self) -> Tensor | None:
        e = self.cfg.engine
        if e.simulated_accept_length is None:
            return None
        draws = simulated_accepts(e.simulated_accept_length, SIMULATED_STEPS, max(e.buckets), self.cfg.seed)
        return draws.to(self.device)

    def _check_memory(self) -> None:
        plan, free = plan_memory(self.cfg), free_bytes(self.device)
        need = plan.cache_bytes + plan.logits_bytes
        if need > free:
            raise LabError(
                f"batch_size={self.cfg.engine.batch_size} with context_len={self.cfg.model.context_len} needs {need / 2**30:.1f} GiB "
                f"for KV caches and activations and {free / 2**30:.1f} GiB are free on {self.device}; lower either of them."
            )
