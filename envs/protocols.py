"""What an environment is given and what it gives back.

An environment never opens a client. It is handed a `Sampler`, asks it for completions, grades
them, and returns `Episode` values that hold the tokens exactly as they were sampled. A
single-turn task is an episode of one turn, so the code that trains on episodes has one case.

Token layout of an episode (two turns, `P` prompt, `a`/`b` sampled, `u` user or tool message)::

    tokens             P P P a a a u u b b
    loss_mask          . . . x x x . . x x        sampled by the policy, and trained
    sampling_logprobs  - - - f f f - - f f        None where loss_mask is False
    turn_of_token      0 0 0 0 0 0 1 1 1 1        the agent turn the token leads to or belongs to
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from envs.errors import EnvInputError


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion as the service returned it.

    `tokens` includes the stop token when the service returns it. `logprobs` are nats, one per
    token, under the policy that sampled. `stop_reason` is `stop` (a stop sequence was sampled) or
    `length` (cut at `max_tokens`).
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise EnvInputError(
                "logprobs", f"{len(self.logprobs)} values", f"{len(self.tokens)}, one per token"
            )
        if self.stop_reason not in ("stop", "length"):
            raise EnvInputError("stop_reason", self.stop_reason, "stop or length")


@runtime_checkable
class Sampler(Protocol):
    """Whoever can complete a prompt: a served policy, a simulator, a judge, or a test double."""

    async def sample(
        self,
        prompt_tokens: Sequence[int],
        *,
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop: Sequence[int] | Sequence[str],
    ) -> list[SampledSequence]:
        """Sample `num_samples` completions of `prompt_tokens`.

        Args:
            prompt_tokens: token ids.
            num_samples: how many; environments ask for one at a time, with a seed each.
            max_tokens: limit of new tokens.
            temperature: 0.0 means greedy.
            top_p: nucleus mass; 1.0 means off.
            top_k: -1 means off.
            seed: of this request.
            stop: stop token ids, or stop strings.

        Returns:
            `num_samples` sequences.
        """
        ...


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """How an episode is sampled. `max_tokens` counts new tokens of one turn.

    `max_turns` and `max_seq_len` bound an episode; None means no bound. What happens to one that
    does not fit `max_seq_len` is the policy's: `end_episode` ends it there, graded as unfinished,
    and `fail` makes it an error. A first prompt that leaves no room is always an error.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_turns: int | None = None
    max_seq_len: int | None = None
    max_seq_len_policy: Literal["end_episode", "fail"] = "end_episode"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise EnvInputError("max_tokens", self.max_tokens, "at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise EnvInputError("temperature", self.temperature, "a finite number of at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise EnvInputError("top_p", self.top_p, "in (0, 1]")
        if self.max_turns is not None and self.max_turns < 1:
            raise EnvInputError("max_turns", self.max_turns, "at least 1, or null")

    def refuse_cut(self, item_id: str) -> None:
        """Raise where the policy wants no episode to be cut at `max_seq_len`.

        Raises:
            EnvInputError: under the policy `fail`.
        """
        if self.max_seq_len_policy == "fail":
            raise EnvInputError(
                f"episode of task {item_id}",
                f"cut at max_seq_len {self.max_seq_len}",
                "an episode that fits, or max_seq_len_policy end_episode",
            )

    def decoding(self) -> dict[str, Any]:
        """The settings as plain data, for an evaluator's provenance."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "max_turns": self.max_turns,
            "max_seq_len": self.max_seq_len,
        }


@dataclass(frozen=True, slots=True)
class Item:
    """One task: its first prompt, and the reference that no model is ever shown."""

    item_id: str
    prompt_tokens: tuple[int, ...]
    reference: str
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of an episode, in the order in which it was said.

    `turn` is the agent turn it belongs to. `token_start` and `token_end` bound the message's
    tokens in the episode's sequence (half open). `stop_reason` is set on the policy's messages.
    """

    turn: int
    role: str
    content: str
    token_start: int
    token_end: int
    tool_name: str | None = None
    tool_args: str | None = None
    tool_error: str | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished interaction, token for token as it was sampled, with its grades.

    `reward` is what training uses; `correct` and `metrics` are what evaluation reports, so that
    a format bonus in the reward can never leak into an accuracy. `stop_reason` is `stop` or
    `length` for one turn, and one of the multi-turn outcomes of the environment otherwise.
    `truncated` says that a limit (tokens, turns, sequence length) ended it. `extracted` is the
    answer that the headline grader read from the text.
    """

    item_id: str
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    sampling_logprobs: tuple[float | None, ...]
    turn_of_token: tuple[int, ...]
    reward: float
    stop_reason: str
    truncated: bool
    text: str
    native_reward: float | None = None
    correct: bool | None = None
    format_ok: bool | None = None
    extracted: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    parse_failures: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    graded: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {
            "loss_mask": len(self.loss_mask),
            "sampling_logprobs": len(self.sampling_logprobs),
            "turn_of_token": len(self.turn_of_token),
        }
        for name, length in lengths.items():
            if length != len(self.tokens):
                raise EnvInputError(name, f"{length} values", f"{len(self.tokens)}, one per token")
        for position, (trained, logprob) in enumerate(
            zip(self.loss_mask, self.sampling_logprobs, strict=True)
        ):
            if trained != (logprob is not None):
                raise EnvInputError(
                    f"sampling_logprobs[{position}]",
                    logprob,
                    "a number exactly where loss_mask is true",
                )

    @property
    def completion_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.loss_mask)

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first sampled one (all of them if none was sampled)."""
        return self.loss_mask.index(True) if True in self.loss_mask else len(self.tokens)

    @property
    def agent_turns(self) -> int:
        """How many turns the policy took."""
        sampled = {
            turn
            for turn, trained in zip(self.turn_of_token, self.loss_mask, strict=True)
            if trained
        }
        return len(sampled)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """What the grader said about a reply that is known to be right (or known to be wrong)."""

    item_id: str
    reply: str
    metric: str
    expected: float
    value: float

    @property
    def ok(self) -> bool:
        """Whether the grader gave the expected value."""
        return self.value == self.expected


@runtime_checkable
class Environment(Protocol):
    """A source of tasks with a grader. Immutable after construction; safe to use concurrently."""

    @property
    def name(self) -> str:
        """The name under which the registry makes it."""
        ...

    @property
    def train_ids(self) -> tuple[str, ...]:
        """Ids of the tasks that may be trained on. Disjoint from `eval_ids`, which is checked."""
        ...

    @property
    def eval_ids(self) -> tuple[str, ...]:
        """Ids of the held-out tasks, in the order in which they are evaluated."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values in `Episode.metrics`; the headline metric first."""
        ...

    @property
    def data_digests(self) -> Mapping[str, str]:
        """SHA-256 of every data source, by name."""
        ...

    @property
    def data_order(self) -> Mapping[str, Any]:
        """How the training order was drawn: generator, seed, and the digest of the order."""
        ...

    def item(self, item_id: str) -> Item:
        """Return one task, of either split.

        Raises:
            EnvInputError: if there is no such id.
        """
        ...

    def train_batch(self, step: int, groups: int) -> list[str]:
        """Return the ids of the `groups` distinct tasks of rollout step `step` (from 0).

        The order depends on the seed and the data alone: it is the same for every arm, and the
        same whether earlier steps were run or not.
        """
        ...

    async def run_episode(
        self, item_id: str, sampler: Sampler, *, settings: EpisodeSettings, seed: int
    ) -> Episode:
        """Play one task with the policy behind `sampler` and grade it.

        One request per policy turn; the seed of turn t is derived from `seed` and t.

        Raises:
            EnvInputError: unknown id, or a prompt that cannot fit `max_seq_len`, or, where
                `max_seq_len_policy` is `fail`, an episode that does not.
            EnvServiceError: a served simulator or judge failed after its retries.
        """
        ...

    def canaries(self) -> list[CanaryResult]:
        """Grade replies whose right grade is known. Every one must be `ok` before an evaluation."""
        ...

    def evaluator_provenance(
        self, *, settings: EpisodeSettings, item_ids: Sequence[str]
    ) -> dict[str, Any]:
        """What determines a score, as plain JSON data: code, prompt, decoding, parser, items.

        Keys: `code_sha256` (of the grader's source), `prompt_template`, `decoding`, `parser`,
        `items` (`ids`). The evaluator's id is the digest of this value.
        """
        ...
