"""Logit-level losses as a training step sees them: the support's columns, then the sampled token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from losses.inputs import LossInputs, LossOutput, TokenLoss
from losses.registry import make_loss
from losses.sdpo_logit import SdpoLogit


@dataclass(frozen=True, slots=True)
class SupportThenSampled:
    """A logit-level loss on [T, K + 1] targets, whose last column is the sampled token.

    The last column is always there, so that the update's record holds the sampled token's own
    log-probability. It gets no gradient.
    """

    inner: SdpoLogit

    def __call__(self, target_logprobs_T: Tensor, inputs: LossInputs) -> LossOutput:
        """Sum the loss over the trained positions of one sequence; the target is [T, K + 1]."""
        weighted = self.inner.is_clip is not None
        return self.inner(target_logprobs_T if weighted else target_logprobs_T[:, :-1], inputs)


def step_loss(config: Mapping[str, Any]) -> TokenLoss:
    """Build a registered loss for the targets that a training step has.

    Raises:
        LossConfigError: as `losses.registry.make_loss`.
    """
    made = make_loss(config)
    return SupportThenSampled(made) if isinstance(made, SdpoLogit) else made
