"""Which log-probabilities a trust region is measured against."""

from typing import Literal, TypeAlias

from torch import Tensor

from losses.errors import LossConfigError
from losses.inputs import LossInputs, require_field

Anchor: TypeAlias = Literal["sampling", "recompute"]
"""``sampling``: as returned with the sample. ``recompute``: the trainer's own value for them."""

ANCHORS: tuple[Anchor, ...] = ("sampling", "recompute")


def anchor_logprobs(inputs: LossInputs, anchor: str) -> Tensor:
    """Return the [T] log-probabilities that ``anchor`` names.

    Raises:
        LossConfigError: if the anchor is unknown.
        LossInputError: if it is ``recompute`` and ``anchor_logprobs_T`` was not given.
    """
    if anchor == "sampling":
        return inputs.sampling_logprobs_T
    if anchor == "recompute":
        return require_field(
            "anchor_logprobs_T", inputs.anchor_logprobs_T, purpose='needed by anchor "recompute"'
        )
    message = f"anchor: {anchor!r}; expected one of {list(ANCHORS)}"
    raise LossConfigError(message)
