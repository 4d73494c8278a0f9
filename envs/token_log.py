"""The token columns of an episode while it is being played."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenLog:
    """Grows by observed and sampled tokens; nothing in it is ever changed or re-tokenised."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    sampling_logprobs: list[float | None] = field(default_factory=list)
    turn_of_token: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def observe(self, tokens: Sequence[int], *, turn: int) -> tuple[int, int]:
        """Append tokens that the policy did not sample; return their bounds."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.loss_mask.extend([False] * len(tokens))
        self.sampling_logprobs.extend([None] * len(tokens))
        self.turn_of_token.extend([turn] * len(tokens))
        return start, len(self.tokens)

    def sample(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, turn: int
    ) -> tuple[int, int]:
        """Append sampled tokens with their log-probabilities; return their bounds."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.loss_mask.extend([True] * len(tokens))
        self.sampling_logprobs.extend(float(value) for value in logprobs)
        self.turn_of_token.extend([turn] * len(tokens))
        return start, len(self.tokens)
