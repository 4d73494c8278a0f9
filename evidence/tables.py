"""Every table of a run as plain data: names, types, what may be missing, and the sort order.

A table is either *content* (what was sampled, computed and decided: nothing in it depends on the
time, a path, a service id or how often the run was interrupted) or *journal* (how the run went).
A run that was killed any number of times ends with the same bytes in every content table.

One file of a table holds the rows of one value of its ``partition`` columns, sorted by ``key``,
which identifies a row. Types: ``int64``, ``float64``, ``float32``, ``bool`` and ``string``. A
number may be NaN or infinite only in columns marked ``nonfinite``; a value may be null only in
columns marked ``nullable``. Adding, removing or changing a column needs a new ``version``.

Units: log-probabilities are in nats, durations in seconds, rewards in the environment's units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from evidence.errors import InputError

ColumnType = Literal["int64", "float64", "float32", "bool", "string"]
TableKind = Literal["content", "journal"]

PROBABILITY_BINS = 6
"""Bins of the sampling probability: 0, 0.01, 0.1, 0.5, 0.9, 0.99, 1; lower edges inclusive."""

PHASES = (
    "probe",
    "preflight",
    "pilot",
    "calibration-1",
    "calibration-2",
    "train",
    "eval",
    "diagnostic",
)
"""Parts of a run. ``calibration-N`` is a pilot again, with the Nth registered fallback."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: the same name wherever the value appears in the program.
        type: storage type.
        doc: what it means, with its unit.
        nullable: whether it may be null.
        nonfinite: whether NaN and the infinities may be stored.
        one_of: the allowed texts, if the column is an enumeration.
    """

    name: str
    type: ColumnType
    doc: str
    nullable: bool = False
    nonfinite: bool = False
    one_of: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One table.

    Attributes:
        name: the table's name and folder.
        version: of this list of columns.
        kind: ``content`` or ``journal``.
        partition: the key columns whose values name a file.
        key: all columns that identify a row, in sort order; starts with ``partition``.
        columns: all columns in storage order.
        doc: what one row is.
    """

    name: str
    version: int
    kind: TableKind
    partition: tuple[str, ...]
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    doc: str

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise InputError(f"{self.name}.columns", names, "distinct names")
        if tuple(names[: len(self.key)]) != self.key:
            raise InputError(f"{self.name}.key", self.key, "the first columns, in order")
        if self.key[: len(self.partition)] != self.partition:
            raise InputError(f"{self.name}.partition", self.partition, "a prefix of the key")

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of all columns in storage order."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        """Return the column of that name.

        Raises:
            InputError: if the table has none.
        """
        for column in self.columns:
            if column.name == name:
                return column
        expected = f"a column of table {self.name}: {', '.join(self.column_names)}"
        raise InputError("column", name, expected)


def _string(name: str, doc: str, *, nullable: bool = False) -> Column:
    return Column(name, "string", doc, nullable=nullable)


def _integer(name: str, doc: str, *, nullable: bool = False) -> Column:
    return Column(name, "int64", doc, nullable=nullable)


def _flag(name: str, doc: str, *, nullable: bool = False) -> Column:
    return Column(name, "bool", doc, nullable=nullable)


def _number(name: str, doc: str, *, nullable: bool = False, nonfinite: bool = False) -> Column:
    return Column(name, "float64", doc, nullable=nullable, nonfinite=nonfinite)


def _number32(name: str, doc: str, *, nullable: bool = False, nonfinite: bool = False) -> Column:
    return Column(name, "float32", doc, nullable=nullable, nonfinite=nonfinite)


def _measured(name: str, doc: str) -> Column:
    return _number(name, doc, nullable=True, nonfinite=True)


def _count(name: str, doc: str) -> Column:
    return _integer(name, doc, nullable=True)


_ARM = _string("arm", "Name of the compared arm, as the spec writes it; `base` for the base model.")
_PHASE = Column("phase", "string", "Part of the run the row belongs to.", one_of=PHASES)
_STEP = _integer("step", "Rollout step, from 0.")
_GROUP = _integer("group", "Group within the step, from 0: the completions of one prompt.")
_SAMPLE = _integer("sample", "Completion within its group, from 0.")
_POSITION = _integer("position", "Index of the token in its sequence, prompt included, from 0.")
_UPDATE = _integer("update", "Optimizer step of the arm in this phase, from 0.")
_SEED = _integer("seed", "Seed of the replicate, as the spec schedules it.")
_ITEM_ID = _string("item_id", "Stable id of the task.")
_METRIC = _string("metric", "Name of the score, as the spec writes it.")
_EVALUATOR_ID = _string("evaluator_id", "SHA-256 that identifies the frozen evaluator.")
_INFO_JSON = _string("info_json", "Further facts of the row as one JSON object.", nullable=True)
_SAMPLING_LOGPROB_DOC = "Log-probability under the policy that sampled the token, nats."

_LABEL = _string("label", "Which evaluation: `base`, `step-000010`, `final`.")
_EVALUATED = _integer("policy_version", "Optimizer steps done by the evaluated weights.")
_MESSAGE = (
    _integer("turn", "Agent turn the message belongs to, from 0."),
    _string("role", "Who spoke: `system`, `user`, `assistant` or `tool`."),
    _string("content", "What was said."),
    _string("tool_name", "Tool that was called or that answers.", nullable=True),
    _string("tool_args", "Arguments of the call as sent.", nullable=True),
    _string("tool_error", "Error of the call.", nullable=True),
    _string("stop_reason", "Why the policy stopped.", nullable=True),
    _integer("token_start", "First token of the message in the sequence.", nullable=True),
    _integer("token_end", "One past its last token.", nullable=True),
)
_MESSAGE_INDEX = _integer("message", "Index of the message in its episode, from 0.")

_EPISODE_KEY = ("arm", "phase", "step", "group", "sample")
_EPISODE = (_ARM, _PHASE, _STEP, _GROUP, _SAMPLE)
_STEP_FILE = ("arm", "phase", "step")
_UPDATE_FILE = ("arm", "phase", "update")

ROLLOUTS = TableSchema(
    name="rollouts",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=_EPISODE_KEY,
    doc="One finished completion or episode.",
    columns=(
        *_EPISODE,
        _ITEM_ID,
        _integer("policy_version", "Optimizer steps done by the weights that sampled."),
        _integer("seed", "Sampling seed of this completion."),
        _integer("prompt_tokens", "Tokens before the first sampled one."),
        _integer("completion_tokens", "Tokens that the policy sampled."),
        _integer("turns", "Turns that the policy took."),
        _string("stop_reason", "Why it ended: `stop`, `length`, or an environment's outcome."),
        _flag("truncated", "Whether a limit on tokens, turns or length ended it."),
        _number("reward", "Reward that training uses."),
        _number("native_reward", "The environment's own reward.", nullable=True),
        _flag("correct", "The headline grader's answer.", nullable=True),
        _flag("format_ok", "Whether the answer had the asked form.", nullable=True),
        _integer("parse_failures", "Replies that could not be parsed."),
        _integer("tool_calls", "Tool calls made."),
        _integer("tool_errors", "Tool calls that came back as an error."),
        _number("advantage", "Advantage of the completion, before any per-token form."),
        _string("completion_text", "Text of the completion (the last turn of an episode)."),
        _string("prompt_sha256", "SHA-256 of the prompt's token ids."),
        _INFO_JSON,
    ),
)

TOKENS = TableSchema(
    name="tokens",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=(*_EPISODE_KEY, "position"),
    doc="One token of a sequence, prompt tokens included.",
    columns=(
        *_EPISODE,
        _POSITION,
        _integer("turn", "Agent turn the token leads to or belongs to, from 0."),
        _integer("token_id", "Id of the token as it was sent or sampled."),
        _flag("loss_mask", "Whether the policy sampled the token and it is trained on."),
        _number32("sampling_logprob", _SAMPLING_LOGPROB_DOC, nullable=True, nonfinite=True),
        _number32(
            "advantage",
            "Advantage of the token; null off the mask, and where `rescoring` gives it.",
            nullable=True,
        ),
        _number32(
            "teacher_logprob",
            "Always null: the teacher's values stand in `rescoring`.",
            nullable=True,
            nonfinite=True,
        ),
    ),
)

TOKEN_TEXTS = TableSchema(
    name="token_texts",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=(*_STEP_FILE, "token_id"),
    doc="The text of one token id that occurs in `tokens`, so that people can read those.",
    columns=(
        _ARM,
        _PHASE,
        _STEP,
        _integer("token_id", "Id of the token."),
        _string("text", "Its text alone; U+FFFD where it is only a part of a character."),
        _string("partial_hex", "Its bytes, if it is only a part of a character.", nullable=True),
    ),
)

UPDATES = TableSchema(
    name="updates",
    version=2,
    kind="content",
    partition=_UPDATE_FILE,
    key=_UPDATE_FILE,
    doc="One optimizer step, with the diagnostics of its loss before the step was taken.",
    columns=(
        _ARM,
        _PHASE,
        _UPDATE,
        _integer("step", "Rollout step whose batch was trained on, from 0."),
        _integer("epoch", "Pass over the rollout batch, from 0."),
        _integer("minibatch", "Minibatch within the pass, from 0."),
        _integer("policy_version_before", "Optimizer steps done before this one."),
        _integer("datums", "Sequences in the minibatch."),
        _number("loss", "Loss after division by the denominator.", nonfinite=True),
        _integer("loss_tokens", "Tokens whose loss mask is true."),
        _integer("nonzero_advantage_tokens", "Loss tokens whose advantage is not 0."),
        _number("denominator", "What the summed loss was divided by."),
        _number("learning_rate", "Learning rate of the step."),
        _count("positive_advantage_tokens", "Loss tokens whose advantage is positive."),
        _count("negative_advantage_tokens", "Loss tokens whose advantage is negative."),
        _count("masked_tokens", "Loss tokens with a nonzero advantage that the loss dropped."),
        _count("removed_positive", "Of `masked_tokens`: positive advantage."),
        _count("removed_negative", "Of `masked_tokens`: negative advantage."),
        _count("keep_zero_tokens", "Loss tokens not kept, zero advantages included."),
        _count("keep_zero_advantage_zero_tokens", "Of `keep_zero_tokens`: advantage 0."),
        _count("exceed", "Loss tokens beyond the threshold in either direction."),
        _count("exceed_dropped", "Of `exceed`: in the advantage's direction, so dropped."),
        _count("exceed_dropped_positive", "Of `exceed_dropped`: positive advantage."),
        _count("exceed_dropped_negative", "Of `exceed_dropped`: negative advantage."),
        _count("exceed_restoring", "Of `exceed`: against the advantage's direction, so kept."),
        _count("exceed_zero_advantage", "Of `exceed`: advantage 0."),
        _count("ppo_counterfactual_tokens", "Nonzero-advantage tokens a ratio clip would cut."),
        _count(
            "ppo_counterfactual_with_zero_advantage_tokens",
            "The same with advantage 0 counted as negative.",
        ),
        _count("ppo_two_sided_tokens", "Loss tokens whose ratio is outside the clip's bounds."),
        _count("cap_hits", "Loss tokens whose ratio is above the cap."),
        _count("cap_hits_kept", "Of `cap_hits`: kept, advantage not 0."),
        _count("nonfinite_tokens", "Loss tokens with a log-probability that is not finite."),
        _measured("masked_fraction", "masked_tokens / loss_tokens."),
        _measured("masked_fraction_nonzero", "masked_tokens / nonzero_advantage_tokens."),
        _measured("keep_zero_fraction", "keep_zero_tokens / loss_tokens."),
        _measured("exceed_fraction", "exceed / loss_tokens."),
        _measured("ppo_counterfactual_fraction", "ppo_counterfactual_tokens / loss_tokens."),
        _measured("ppo_two_sided_fraction", "ppo_two_sided_tokens / loss_tokens."),
        _measured("pg_clipfrac_srl", "masked_tokens / (nonzero_advantage_tokens + 1e-8)."),
        _measured("pg_clipfrac_lower_srl", "removed_negative / (nonzero_advantage_tokens + 1e-8)."),
        _measured("pg_clipfrac_verl", "keep_zero_tokens / (loss_tokens + 1e-8)."),
        _measured("drift_mean", "Mean of p - q over loss tokens (probabilities)."),
        _measured("drift_q01", "0.01 quantile of p - q over loss tokens."),
        _measured("drift_q10", "0.1 quantile of p - q over loss tokens."),
        _measured("drift_q90", "0.9 quantile of p - q over loss tokens."),
        _measured("drift_q99", "0.99 quantile of p - q over loss tokens."),
        _measured("drift_min", "Smallest p - q over loss tokens."),
        _measured("drift_max", "Largest p - q over loss tokens."),
        _measured("drift_abs_mean", "Mean of |p - q| over loss tokens."),
        _measured("drift_abs_q50", "Median of |p - q| over loss tokens."),
        _measured("drift_abs_q90", "0.9 quantile of |p - q| over loss tokens."),
        _measured("drift_abs_q99", "0.99 quantile of |p - q| over loss tokens."),
        _measured("drift_abs_max", "Largest |p - q| over loss tokens."),
        _string("quantile_method", "How quantiles interpolate.", nullable=True),
        _measured("ratio_mean", "Mean probability ratio over loss tokens."),
        _measured("ratio_max", "Largest probability ratio over loss tokens."),
        _measured("log_ratio_mean", "Mean of target - sampling log-probability, nats."),
        _measured("log_ratio_abs_max", "Largest |target - sampling log-probability|, nats."),
        *(
            _count(f"prob_bin_{index}_{name}", f"{text} in sampling-probability bin {index}.")
            for index in range(PROBABILITY_BINS)
            for name, text in (
                ("tokens", "Loss tokens"),
                ("masked", "Of `masked_tokens`: those"),
                ("exceed", "Of `exceed`: those"),
                ("ppo", "Of `ppo_counterfactual_tokens`: those"),
            )
        ),
        _measured("gradient_norm", "Norm that the service reported."),
        _string(
            "logprob_dtype",
            "Type in which the log-probabilities came from the client.",
            nullable=True,
        ),
        _string("info_json", "Further metrics of the step as one JSON object.", nullable=True),
    ),
)

UPDATE_TOKENS = TableSchema(
    name="update_tokens",
    version=1,
    kind="content",
    partition=_UPDATE_FILE,
    key=(*_UPDATE_FILE, "group", "sample", "position"),
    doc="One loss token of one optimizer step.",
    columns=(
        _ARM,
        _PHASE,
        _UPDATE,
        _GROUP,
        _SAMPLE,
        _POSITION,
        _integer("token_id", "Id of the token."),
        _number32("target_logprob", "Under the policy before this step, nats.", nonfinite=True),
        _number32("sampling_logprob", _SAMPLING_LOGPROB_DOC, nonfinite=True),
        _number32("advantage", "Advantage of the token."),
        _number(
            "prob_ratio", "exp(target - anchor log-probability), after the cap.", nonfinite=True
        ),
        _flag("keep", "Whether the loss kept the token's gradient."),
        _flag("removed", "Whether a gradient that was not 0 was removed."),
    ),
)

SENTINELS = TableSchema(
    name="sentinels",
    version=1,
    kind="content",
    partition=("arm", "phase", "updates_done"),
    key=("arm", "phase", "updates_done", "group", "sample", "position"),
    doc="One fixed token of the trained batch, scored again after some updates of a diagnostic.",
    columns=(
        _ARM,
        _PHASE,
        _integer("updates_done", "Optimizer steps done by the weights that scored it."),
        _GROUP,
        _SAMPLE,
        _POSITION,
        _integer("token_id", "Id of the token."),
        _number32("trainer_logprob", "As the trainer computes it, nats.", nonfinite=True),
        _number32("sampling_logprob", _SAMPLING_LOGPROB_DOC, nonfinite=True),
        _number32(
            "rescored_logprob",
            "As the sampler that sampled it scores it again, nats; before the first update alone.",
            nullable=True,
            nonfinite=True,
        ),
    ),
)

EVALUATIONS = TableSchema(
    name="evaluations",
    version=1,
    kind="content",
    partition=("arm", "label"),
    key=("arm", "label", "policy_version", "item_id", "metric", "seed"),
    doc="One score of one held-out item. Invalid outputs are rows too.",
    columns=(
        _ARM,
        _LABEL,
        _EVALUATED,
        _ITEM_ID,
        _METRIC,
        _SEED,
        _number("value", "The score in the endpoint's units.", nonfinite=True),
        _string("prediction", "Text of the prediction."),
        _string("reference", "What it is compared with.", nullable=True),
        _string("stop_reason", "Why the completion ended."),
        _string("extracted", "Answer that the grader read.", nullable=True),
        _EVALUATOR_ID,
        _INFO_JSON,
    ),
)

OBSERVATIONS = TableSchema(
    name="observations",
    version=1,
    kind="content",
    partition=(),
    key=("item_id", "arm", "seed", "metric"),
    doc="One scored observation that the decision rule reads.",
    columns=(
        _ITEM_ID,
        _ARM,
        _SEED,
        _METRIC,
        _number("value", "The score, neither clipped nor rounded.", nonfinite=True),
        _EVALUATOR_ID,
    ),
)

DECISION = TableSchema(
    name="decision",
    version=1,
    kind="content",
    partition=(),
    key=("criterion",),
    doc="One criterion of the decision rule, as computed.",
    columns=(
        _string("criterion", "Id of the criterion."),
        _METRIC,
        _measured("effect", "Mean over items of the weighted score."),
        _measured("lower", "Lower end of the interval."),
        _measured("upper", "Upper end of the interval."),
        _measured("half_width", "Half the width of the interval."),
        _number("margin", "Margin that the interval must clear."),
        _integer("n_items", "Items the effect is a mean of."),
        _string("status", "What the interval says of the margin."),
    ),
)

TURNS = TableSchema(
    name="turns",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=(*_EPISODE_KEY, "message"),
    doc="One message of a multi-turn episode.",
    columns=(*_EPISODE, _MESSAGE_INDEX, *_MESSAGE),
)

EVALUATION_TURNS = TableSchema(
    name="evaluation_turns",
    version=1,
    kind="content",
    partition=("arm", "label"),
    key=("arm", "label", "policy_version", "item_id", "seed", "message"),
    doc="One message of a multi-turn episode on a held-out item: what its scores rest on.",
    columns=(_ARM, _LABEL, _EVALUATED, _ITEM_ID, _SEED, _MESSAGE_INDEX, *_MESSAGE),
)

RESCORING = TableSchema(
    name="rescoring",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=(*_EPISODE_KEY, "position"),
    doc="One trained token as the feedback-conditioned teacher scores it.",
    columns=(
        *_EPISODE,
        _POSITION,
        _number32(
            "teacher_logprob",
            "Log-probability under the feedback-conditioned prompt, nats; NaN where there is none.",
            nonfinite=True,
        ),
        _number32("sampling_logprob", _SAMPLING_LOGPROB_DOC, nonfinite=True),
        _number32("advantage", "Advantage of the token that follows from the two."),
        _integer(
            "teacher_prefix_tokens",
            "Tokens of the teacher's system message; 0 where nothing was scored.",
        ),
    ),
)

SUPPORTS = TableSchema(
    name="supports",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=(*_EPISODE_KEY, "position", "rank"),
    doc="One of the likeliest tokens at a trained position, for losses on whole distributions.",
    columns=(
        *_EPISODE,
        _POSITION,
        _integer("rank", "Its place among the policy's likeliest tokens there, from 0."),
        _integer("token_id", "Id of the token."),
        _number32("sampling_logprob", "Under the policy that sampled, nats.", nonfinite=True),
        _number32("teacher_logprob", "Under the feedback-conditioned prompt, nats."),
    ),
)

TEACHERS = TableSchema(
    name="teachers",
    version=1,
    kind="content",
    partition=_STEP_FILE,
    key=_EPISODE_KEY,
    doc="What the teacher of one trajectory was shown, and what became of its scores.",
    columns=(
        *_EPISODE,
        _integer("policy_version", "Optimizer steps done by the teacher's weights."),
        _integer(
            "solution_sample", "Sibling whose conversation was chosen to be shown.", nullable=True
        ),
        _number("solution_reward", "Reward of that sibling.", nullable=True),
        _number(
            "solution_native_reward",
            "The environment's own reward of that sibling, which may have failed.",
            nullable=True,
        ),
        _flag("solution_shown", "Whether it stands in the teacher's prompt."),
        _flag("solution_dropped", "Whether it was left out because the sequence was too long."),
        _flag("feedback_shown", "Whether feedback on the attempt stands in the prompt."),
        _flag("over_length", "Whether the sequence was too long even so: no token has a signal."),
        _integer("student_prefix_tokens", "Tokens of the policy's own system message."),
        _integer("teacher_prefix_tokens", "Tokens of the teacher's; 0 if nothing was scored."),
        _integer("teacher_tokens", "Tokens of the scored sequence; 0 if nothing was scored."),
        _integer("trained_tokens", "Trained tokens of the trajectory."),
        _integer("missing_tokens", "Of them: without a teacher log-probability, advantage 0."),
        _integer("clipped_tokens", "Of them: with an advantage that the clip changed."),
        _string("prefix_sha256", "SHA-256 of the teacher's prefix token ids.", nullable=True),
    ),
)

_ATTEMPT = _integer("attempt", "Attempt of the run, from 1.")

TIMINGS = TableSchema(
    name="timings",
    version=1,
    kind="journal",
    partition=("attempt", "arm", "phase", "step"),
    key=("attempt", "arm", "phase", "step", "what"),
    doc="One measured duration. `arm` is `all` where no arm is meant.",
    columns=(
        _ATTEMPT,
        _ARM,
        _PHASE,
        _STEP,
        _string("what", "What was timed: `sampling`, `update`, `evaluation`, ..."),
        _number("seconds", "Wall time, seconds."),
        _integer("units", "Units of work timed."),
        _integer("samples", "Completions or items within them."),
    ),
)

SERVICE_IDS = TableSchema(
    name="service_ids",
    version=1,
    kind="journal",
    partition=("attempt", "arm", "what"),
    key=("attempt", "arm", "what", "name"),
    doc="One name that the service gave to something of this run.",
    columns=(
        _ATTEMPT,
        _ARM,
        _string("what", "What is named: `training_client`, `checkpoint`, `session`, ..."),
        _string("name", "The run's own name for it."),
        _string("service_id", "The service's name for it."),
    ),
)

RESTORES = TableSchema(
    name="restores",
    version=1,
    kind="journal",
    partition=("arm", "phase", "restore"),
    key=("arm", "phase", "restore"),
    doc="One load of a training checkpoint. Restore 0 is the load at creation.",
    columns=(
        _ARM,
        _PHASE,
        _integer("restore", "Count of loads of this arm's training state, from 0."),
        _ATTEMPT,
        _integer("policy_version", "Optimizer steps contained in the checkpoint."),
        _string("checkpoint", "URI of the checkpoint that was loaded."),
        _flag("with_optimizer", "Whether the optimizer's state was loaded too."),
        _integer("replayed_updates", "Stored updates applied again after the load."),
        _string("optimizer_check", "What the check of the optimizer said.", nullable=True),
        _INFO_JSON,
    ),
)

TABLES: Mapping[str, TableSchema] = MappingProxyType(
    {
        schema.name: schema
        for schema in (
            ROLLOUTS,
            TOKENS,
            TOKEN_TEXTS,
            UPDATES,
            UPDATE_TOKENS,
            SENTINELS,
            EVALUATIONS,
            OBSERVATIONS,
            DECISION,
            TURNS,
            EVALUATION_TURNS,
            RESCORING,
            SUPPORTS,
            TEACHERS,
            TIMINGS,
            SERVICE_IDS,
            RESTORES,
        )
    }
)


def table_schema(name: str) -> TableSchema:
    """Return the schema of a table.

    Raises:
        InputError: if there is no such table.
    """
    try:
        return TABLES[name]
    except KeyError:
        raise InputError("table", name, f"one of {', '.join(TABLES)}") from None
