"""Top-K divergence between the sampling and the current distribution at each position.

Shape legend: T targets of one sequence, K support tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from losses.errors import LossInputError
from losses.inputs import require_shape

MASS_FLOOR = 1e-12
"""Least mass of the bucket that holds every token outside the support."""


class TopkDivergence(NamedTuple):
    """Both divergences over K tokens and one bucket for the rest."""

    kl_T: Tensor
    """[T] KL(sampling || current), nats."""
    tv_T: Tensor
    """[T] total variation: half the L1 distance."""


@torch.no_grad()
def topk_divergence(current_logprobs_TK: Tensor, sampling_logprobs_TK: Tensor) -> TopkDivergence:
    """Compare two distributions on the K tokens that the sampler listed, and on the rest.

    The rest bucket holds ``1 - sum`` of each side, floored at 1e-12, so that K tokens that hold all
    mass do not divide by zero. With K = 1 this is the binary form. No gradient flows.

    Args:
        current_logprobs_TK: [T, K] nats, the policy being trained on the listed tokens.
        sampling_logprobs_TK: [T, K] nats, the sampler's on the same tokens, the sampled one among
            them (see ``with_sampled_token``).

    Returns:
        Both divergences, in the inputs' dtype.

    Raises:
        LossInputError: if the shapes differ.

    Sources:
        arXiv:2602.04879, top-K approximation, and its released code.
    """
    require_shape("sampling_logprobs_TK", sampling_logprobs_TK, tuple(current_logprobs_TK.shape))
    p_TK, q_TK = torch.exp(current_logprobs_TK), torch.exp(sampling_logprobs_TK)
    rest_p_T = (1.0 - p_TK.sum(-1)).clamp(min=MASS_FLOOR)
    rest_q_T = (1.0 - q_TK.sum(-1)).clamp(min=MASS_FLOOR)
    listed_T = (q_TK * (sampling_logprobs_TK - current_logprobs_TK)).sum(-1)
    kl_T = listed_T + rest_q_T * (rest_q_T.log() - rest_p_T.log())
    tv_T = ((p_TK - q_TK).abs().sum(-1) + (rest_p_T - rest_q_T).abs()) / 2.0
    return TopkDivergence(kl_T, tv_T)


def gather_logprobs(logits_TV: Tensor, token_ids_TK: Tensor) -> Tensor:
    """Normalise [T, V] logits and pick the [T, K] log-probabilities of the listed tokens."""
    return torch.gather(torch.log_softmax(logits_TV, dim=-1), -1, token_ids_TK)


def with_sampled_token(
    token_ids_TK: Tensor,
    logprobs_TK: Tensor,
    *,
    sampled_T: Tensor,
    sampled_logprobs_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Put the sampled token into the last slot wherever the K listed ones lack it.

    Args:
        token_ids_TK: [T, K] ids, most probable first.
        logprobs_TK: [T, K] nats of those ids.
        sampled_T: [T] id that was sampled.
        sampled_logprobs_T: [T] nats of the sampled id.

    Returns:
        Ids and log-probabilities of the support; copies, the inputs stay as they are.

    Raises:
        LossInputError: if the shapes do not fit.
    """
    require_shape("logprobs_TK", logprobs_TK, tuple(token_ids_TK.shape))
    if token_ids_TK.dim() != 2 or token_ids_TK.shape[1] == 0:
        message = f"token_ids_TK: shape {tuple(token_ids_TK.shape)}; expected [T, K] with K >= 1"
        raise LossInputError(message)
    lacking_T = ~(token_ids_TK == sampled_T.unsqueeze(-1)).any(-1)
    ids_TK, values_TK = token_ids_TK.clone(), logprobs_TK.clone()
    ids_TK[:, -1] = torch.where(lacking_T, sampled_T, ids_TK[:, -1])
    values_TK[:, -1] = torch.where(lacking_T, sampled_logprobs_T, values_TK[:, -1])
    return ids_TK, values_TK
