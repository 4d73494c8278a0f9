"""Log-probabilities of given tokens under some weights: of a prompt, of targets, the most likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.local_service import kernels
from deploy.local_service.head import Pairs, pair_logprobs, unembed
from deploy.local_service.matrices import Matrix
from deploy.local_service.packing import PackedSequence, pack, row_batches
from deploy.local_service.sampler_weights import SamplerWeights
from deploy.local_service.transformer import PackedAttention, hidden_rows

SCORE_ROWS = 1024
"""Rows computed at once; bounds the memory of activations, unless one sequence has more."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """What to score of one token sequence."""

    tokens: Sequence[int]
    targets: Tensor | None = None
    """[T] or [T, K] int64: token ids to score after each of the T tokens, -1 for none."""
    topk: int = 0
    """How many most likely next tokens to return per position."""
    next_tokens: bool = True
    """Whether to score the sequence's own tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities of what may come after each token, in nats, float32."""

    next_logprobs: Tensor | None
    """[T - 1] of the token that does come next: entry n belongs to token n + 1."""
    target_logprobs: Tensor | None
    """Like the request's targets; NaN where the target is -1."""
    topk_ids: Tensor | None
    """[T, topk] int64, most likely first."""
    topk_logprobs: Tensor | None
    """[T, topk]."""


def score(weights: SamplerWeights, requests: Sequence[ScoreRequest]) -> list[Scores]:
    """Return the scores of each request; they do not depend on which requests come together.

    Beginnings that several requests share are computed once.
    """
    sequences = [PackedSequence(request.tokens) for request in requests]
    found: dict[int, Scores] = {}
    with torch.no_grad():
        for groups in row_batches(sequences, max_rows=SCORE_ROWS):
            packing = pack(sequences, groups=groups, heads_per_kv=weights.base.shape.heads_per_kv)
            hidden = hidden_rows(
                weights, packing.tokens_N, packing.positions_N, attend=PackedAttention(packing)
            )
            members = [n for group in groups for n in group.members]
            asked = [requests[n] for n in members]
            scores = score_hidden(weights.head, hidden, asked, packing.rows_S)
            found.update(zip(members, scores, strict=True))
    return [found[n] for n in range(len(requests))]


def score_hidden(
    head_VH: Matrix, hidden_NH: Tensor, requests: Sequence[ScoreRequest], rows_S: Sequence[Tensor]
) -> list[Scores]:
    """Score requests whose hidden rows are there already.

    Args:
        head_VH: unembedding.
        hidden_NH: normalised hidden rows.
        requests: what to score.
        rows_S: per request, the row of each of its tokens.
    """
    wanted = [_wanted_pairs(request, rows) for request, rows in zip(requests, rows_S, strict=True)]
    pairs = Pairs.of(torch.cat([w[0] for w in wanted]), torch.cat([w[1] for w in wanted]))
    logprobs = pair_logprobs(head_VH, hidden_NH, pairs)[pairs.inverse]
    pieces = torch.split(logprobs, [len(w[0]) for w in wanted])
    scores = []
    for request, rows, piece in zip(requests, rows_S, pieces, strict=True):
        ids, values = _topk(head_VH, hidden_NH, rows, request.topk)
        own = len(request.tokens) - 1 if request.next_tokens else 0
        scores.append(
            Scores(
                next_logprobs=piece[:own] if request.next_tokens else None,
                target_logprobs=_spread(piece[own:], request.targets),
                topk_ids=ids,
                topk_logprobs=values,
            )
        )
    return scores


def _wanted_pairs(request: ScoreRequest, rows_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and tokens to score: first the sequence's own, then the targets in order."""
    rows, tokens = [rows_T[:0]], [rows_T[:0]]
    if request.next_tokens:
        rows.append(rows_T[:-1])
        tokens.append(torch.tensor(request.tokens[1:], dtype=torch.long))
    if request.targets is not None:
        known = request.targets >= 0
        repeated = rows_T.view(-1, *[1] * (request.targets.ndim - 1)).expand(request.targets.shape)
        rows.append(repeated[known])
        tokens.append(request.targets[known])
    return torch.cat(rows), torch.cat(tokens)


def _spread(values: Tensor, targets: Tensor | None) -> Tensor | None:
    """Return values in the places of the targets that are not -1."""
    if targets is None:
        return None
    out = torch.full(targets.shape, torch.nan)
    out[targets >= 0] = values
    return out


def _topk(
    head_VH: Matrix, hidden_NH: Tensor, rows_T: Tensor, topk: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return ids and log-probabilities of the most likely tokens after each row."""
    if topk == 0:
        return None, None
    ids, values = [], []
    for _, logits in unembed(head_VH, hidden_NH, rows_T):
        best, best_ids = logits.topk(topk, dim=-1)
        ids.append(best_ids)
        values.append(best - kernels.log_normalizers(logits)[:, None])
    return torch.cat(ids), torch.cat(values)
