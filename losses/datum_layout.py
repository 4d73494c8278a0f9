"""How a trajectory's tokens become the service's per-token arrays.

Shape legend: T targets, one fewer than the tokens of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from losses.errors import LossInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """What was shown and what was sampled in one turn of a growing sequence."""

    observation_tokens: Sequence[int]
    """Tokens added before the turn: prompt, user or tool text."""
    action_tokens: Sequence[int]
    """Tokens as sampled, never re-encoded."""
    action_logprobs: Sequence[float]
    """Nats, one per action token, as returned with the sample."""
    trained: bool = True
    """False for a turn that is kept in the sequence but gives no gradient."""


@dataclass(frozen=True, slots=True)
class DatumArrays:
    """The aligned arrays of one datum; all have T entries."""

    input_tokens_T: tuple[int, ...]
    target_tokens_T: tuple[int, ...]
    sampling_logprobs_T: tuple[float, ...]
    advantages_T: tuple[float, ...]
    loss_mask_T: tuple[bool, ...]


def datum_arrays(turns: Sequence[SampledTurn], *, advantage: float) -> DatumArrays:
    """Lay out one trajectory: input = tokens[:-1], target = tokens[1:], the rest as the targets.

    Tokens that were not sampled get mask False, advantage 0 and log-probability 0.0. Every array
    drops the entry of the first token, which is nobody's target.

    Args:
        turns: in order; each observation extends the sequence so far.
        advantage: given to every trained token.

    Returns:
        The arrays of one datum.

    Raises:
        LossInputError: if a turn's log-probabilities do not fit its tokens, the sequence is shorter
            than two tokens, or its first token was sampled (it can be nobody's target).
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for index, turn in enumerate(turns):
        if len(turn.action_logprobs) != len(turn.action_tokens):
            message = (
                f"turn {index}: action_logprobs: {len(turn.action_logprobs)} entries; "
                f"expected {len(turn.action_tokens)}, one per sampled token"
            )
            raise LossInputError(message)
        tokens += [*turn.observation_tokens, *turn.action_tokens]
        logprobs += [0.0] * len(turn.observation_tokens) + list(turn.action_logprobs)
        mask += [False] * len(turn.observation_tokens) + [turn.trained] * len(turn.action_tokens)
    if len(tokens) < 2:
        message = f"turns: {len(tokens)} tokens in all; expected at least 2 (an input and a target)"
        raise LossInputError(message)
    if mask[0]:
        message = "turns: the first token is a sampled one; expected a prompt before it"
        raise LossInputError(message)
    return DatumArrays(
        input_tokens_T=tuple(tokens[:-1]),
        target_tokens_T=tuple(tokens[1:]),
        sampling_logprobs_T=tuple(logprobs[1:]),
        advantages_T=tuple(advantage if trained else 0.0 for trained in mask[1:]),
        loss_mask_T=tuple(mask[1:]),
    )
