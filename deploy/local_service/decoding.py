"""A continuous batch: sequences join after their prompt is computed and leave when they end."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deploy.local_service import kernels
from deploy.local_service.base_model import BaseModel
from deploy.local_service.head import unembed
from deploy.local_service.kernels import KEY_QUANTUM, QUERY_ROWS, ROW_QUANTUM, padded
from deploy.local_service.kv_cache import DecodeMemory, DecodeSlots, PrefixCache
from deploy.local_service.prefill import Prefill, Prompt
from deploy.local_service.sample_request import (
    SampledSequence,
    SampleRequest,
    SampleResult,
    StopReason,
    check_request,
)
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.scoring import Scores
from deploy.local_service.token_choice import choose, row_generator
from deploy.local_service.transformer import hidden_rows


class DecodeAttention:
    """Attention of one new token per slot over the slot's keys and values."""

    def __init__(self, slots: DecodeSlots, positions_N: Tensor) -> None:
        """Prepare a step.

        Args:
            slots: the memory; the new keys and values are written to it.
            positions_N: [N] position of the new token in slots 0 to N - 1.
        """
        self._slots = slots
        self._positions = positions_N
        self._rows = torch.arange(len(positions_N))
        self._keys = padded(int(positions_N.max()) + 1, KEY_QUANTUM)
        seen = torch.arange(self._keys) <= positions_N[:, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        self._mask = mask[:, None, None]

    def __call__(self, layer: int, q_NAD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Return the attention output of each row, [N, heads * head_dim]."""
        rows, heads, width = q_NAD.shape
        kv_heads = k_NGD.shape[1]
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        keys[self._rows, :, self._positions] = k_NGD
        values[self._rows, :, self._positions] = v_NGD
        q = q_NAD.reshape(rows, kv_heads, heads // kv_heads, width)
        per_kv = q.shape[2]
        if per_kv < QUERY_ROWS:
            q = torch.nn.functional.pad(q, (0, 0, 0, QUERY_ROWS - per_kv))
        seen = self._keys
        out = kernels.attend(q, keys[:rows, :, :seen], values[:rows, :, :seen], self._mask)
        return out[:, :, :per_kv].reshape(rows, heads * width)


class StopRule:
    """Decides whether a sequence has ended with the token just added."""

    def __init__(self, request: SampleRequest, base: BaseModel) -> None:
        stop = [request.stop] if isinstance(request.stop, str) else request.stop
        nothing = stop is not None and len(stop) == 0
        texts = [item for item in stop or () if isinstance(item, str)]
        self._ids = set() if nothing else set(base.eos_ids)
        self._ids |= {item for item in stop or () if isinstance(item, int)}
        for text in texts:
            encoded = base.encode(text)
            if len(encoded) == 1:
                self._ids.add(encoded[0])
        self._texts = tuple(texts)
        self._window = max((len(text.encode()) for text in texts), default=0)
        self._base = base

    def ends(self, tokens: list[int]) -> bool:
        """Say whether the last token is a stop token or completes a stop text.

        A text is looked for in as many last tokens as it has bytes: every token that has a part in
        it adds at least one byte, except special tokens.
        """
        if tokens[-1] in self._ids:
            return True
        if not self._texts:
            return False
        tail = self._base.decode(tokens[-self._window :])
        return any(text in tail for text in self._texts)


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence that is being sampled."""

    job: _Job
    index: int
    random: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.job.request.prompt) + len(self.tokens)

    def push(self, token: int, logprob: float, topk: tuple[tuple[int, float], ...]) -> None:
        """Add a token and see whether the sequence has ended."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.topk.append(topk)
        if self.job.stop.ends(self.tokens):
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.job.request.max_tokens:
            self.stop_reason = "length"

    def sequence(self) -> SampledSequence:
        """Return the finished sequence."""
        return SampledSequence(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            stop_reason=self.stop_reason or "length",
            topk=tuple(self.topk) if self.job.request.topk_sampled else (),
        )


@dataclass(slots=True, eq=False)
class _Job:
    """A request and what has come of it."""

    request: SampleRequest
    stop: StopRule
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    scores: Scores | None = None
    cache_hit_tokens: int = 0


class DecodeBatch:
    """Sequences of one set of weights, decoded together token by token."""

    def __init__(
        self,
        weights: SamplerWeights,
        *,
        cache: PrefixCache | None = None,
        memory: DecodeMemory | None = None,
        max_rows: int = 64,
    ) -> None:
        """Prepare an empty batch.

        Args:
            weights: what to sample from.
            cache: keys and values of earlier prompts and completions.
            memory: what the keys and values of the sequences at work may take, shared with other
                batches; one sequence is taken on whatever it needs. None for a share of its own.
            max_rows: most sequences decoded together.
        """
        self._weights = weights
        self._max_rows = max_rows
        self._slots = DecodeSlots(weights.base.shape, dtype=weights.base.dtype)
        self._memory = memory or DecodeMemory()
        self._memory.share(self)
        self._prefill = Prefill(weights, self._slots, cache)
        self._waiting: deque[_Row] = deque()
        self._live: list[_Row] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._live and not self._waiting

    @property
    def planned_bytes(self) -> int:
        """Memory that its keys and values take once every sequence has its last token."""
        if not self._live:
            return 0
        longest = max(_final_length(row) for row in self._live)
        return self._slots.bytes_for(slots=len(self._live), tokens=longest)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests.

        Raises:
            InputError: if one is not valid; none of them is queued then.
        """
        for request in requests:
            check_request(request, self._weights.base)
        for request in requests:
            job = _Job(request, StopRule(request, self._weights.base))
            for index in range(request.num_samples):
                self._waiting.append(_Row(job, index, row_generator(request.seed, index)))

    @torch.no_grad()
    def step(self) -> None:
        """Take on waiting sequences if there is room, or add one token to every live one."""
        self._drop_cancelled()
        joining = self._joining()
        if joining:
            self._admit(joining)
        elif self._live:
            self._decode()
        self._retire()

    def _drop_cancelled(self) -> None:
        gone = {id(row.job) for row in [*self._live, *self._waiting] if row.job.request.cancelled()}
        if gone:
            self._waiting = deque(row for row in self._waiting if id(row.job) not in gone)
            self._keep_live([id(row.job) not in gone for row in self._live])

    def _joining(self) -> list[_Row]:
        """Take waiting sequences off the queue, as many as there is room for."""
        joining: list[_Row] = []
        room = self._memory.left_for(self)
        needed = max((_final_length(row) for row in self._live), default=0)
        while self._waiting and len(self._live) + len(joining) < self._max_rows:
            needed = max(needed, _final_length(self._waiting[0]))
            rows = len(self._live) + len(joining) + 1
            too_much = self._slots.bytes_for(slots=rows, tokens=needed) > room
            if too_much and rows > 1:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _admit(self, joining: list[_Row]) -> None:
        """Compute the prompts of new sequences and choose their first tokens."""
        first = len(self._live)
        longest = max(row.length for row in joining)
        self._slots.reserve(slots=first + len(joining), tokens=longest + KEY_QUANTUM)
        prompts: dict[tuple[int, ...], Prompt] = {}
        scored: list[tuple[_Job, Prompt, int]] = []
        for slot, row in enumerate(joining, start=first):
            request = row.job.request
            prompt = prompts.setdefault(tuple(request.prompt), Prompt(request.prompt))
            prompt.slots.append(slot)
            if request.scoring is not None and row.index == 0:
                scored.append((row.job, prompt, len(prompt.scorings)))
                prompt.scorings.append(request.scoring)
        self._prefill.run(list(prompts.values()))
        for job, prompt, number in scored:
            job.scores = prompt.scores[number]
        for row in joining:
            row.job.cache_hit_tokens = prompts[tuple(row.job.request.prompt)].cache_hit_tokens
        self._live += joining
        self._choose(joining, self._first_logits(list(prompts.values()), first, len(joining)))

    def _first_logits(self, prompts: list[Prompt], first: int, count: int) -> Tensor:
        """Return the logits of the first new token of each joining sequence, [count, V]."""
        hidden = torch.stack([p.last_hidden for p in prompts if p.last_hidden is not None])
        source = torch.empty(count, dtype=torch.long)
        for number, prompt in enumerate(prompts):
            source[torch.tensor(prompt.slots) - first] = number
        chunks = [logits for _, logits in unembed(self._weights.head, hidden, _all_rows(hidden))]
        return torch.cat(chunks).index_select(0, source)

    def _decode(self) -> None:
        """Add one token to every live sequence."""
        count = len(self._live)
        rows = padded(count, ROW_QUANTUM)
        self._slots.reserve(slots=rows, tokens=max(row.length for row in self._live))
        tokens = torch.zeros(rows, dtype=torch.long)
        positions = torch.zeros(rows, dtype=torch.long)
        tokens[:count] = torch.tensor([row.tokens[-1] for row in self._live])
        positions[:count] = torch.tensor([row.length - 1 for row in self._live])
        attend = DecodeAttention(self._slots, positions)
        hidden = hidden_rows(self._weights, tokens, positions, attend=attend)
        logits = self._weights.head.multiply(hidden)[:count]
        self._choose(self._live, logits)

    def _choose(self, rows: Sequence[_Row], logits_NV: Tensor) -> None:
        """Choose and add the next token of each sequence that wants one."""
        wanting = [n for n, row in enumerate(rows) if row.job.request.max_tokens > 0]
        for row in rows:
            if row.job.request.max_tokens == 0:
                row.stop_reason = "length"
        if not wanting:
            return
        asked = [rows[n] for n in wanting]
        logits = logits_NV if len(asked) == len(rows) else logits_NV[wanting]
        choices = [row.job.request.choice for row in asked]
        tokens, logprobs = choose(logits, choices, [row.random.random() for row in asked])
        likely = [_most_likely(logits[n], row) for n, row in enumerate(asked)]
        for row, token, logprob, topk in zip(
            asked, tokens.tolist(), logprobs.tolist(), likely, strict=True
        ):
            row.push(token, logprob, topk)

    def _retire(self) -> None:
        """Let finished sequences go and hand out the requests they complete."""
        if all(row.stop_reason is None for row in self._live):
            return
        for slot, row in enumerate(self._live):
            if row.stop_reason is not None:
                known = [*row.job.request.prompt, *row.tokens[:-1]]
                self._prefill.remember(known, slot=slot)
                row.job.finished[row.index] = row.sequence()
        ended = [row.job for row in self._live if row.stop_reason is not None]
        self._keep_live([row.stop_reason is None for row in self._live])
        for job in {id(job): job for job in ended}.values():
            if len(job.finished) == job.request.num_samples:
                self._hand_out(job)

    def _hand_out(self, job: _Job) -> None:
        result = SampleResult(
            sequences=tuple(job.finished[n] for n in range(job.request.num_samples)),
            scores=job.scores,
            cache_hit_tokens=job.cache_hit_tokens,
        )
        job.request.on_done(result)

    def _keep_live(self, kept: list[bool]) -> None:
        """Close the gaps that leaving sequences make: the last one moves into each."""
        live = list(zip(self._live, kept, strict=True))
        slot = 0
        while slot < len(live):
            if live[slot][1]:
                slot += 1
                continue
            last = live.pop()
            if slot < len(live):
                if last[1]:
                    self._slots.move(len(live), slot, tokens=last[0].length)
                live[slot] = last
        self._live = [row for row, _ in live]
        if not self._live:
            self._slots.clear()


def _final_length(row: _Row) -> int:
    return len(row.job.request.prompt) + row.job.request.max_tokens


def _all_rows(hidden_NH: Tensor) -> Tensor:
    return torch.arange(len(hidden_NH))


def _most_likely(logits_V: Tensor, row: _Row) -> tuple[tuple[int, float], ...]:
    """Return the most likely next tokens of a sequence, if its request asks for them."""
    count = row.job.request.topk_sampled
    if count == 0:
        return ()
    values, ids = logits_V.topk(count)
    logprobs = values - kernels.log_normalizers(logits_V[None])
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
