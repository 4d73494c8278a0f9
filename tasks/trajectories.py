"""The stored trajectories of one rollout step, and what the teacher of each is to be shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.protocols import Turn
from envs.teacher import TeacherSequence, TeacherSource
from evidence.canonical import loads_strict
from evidence.errors import InputError
from losses.sdpo_siblings import SiblingRule, available_feedback, demonstration_indices
from tasks.context import RunContext
from tasks.datums import TrainedSequence, sequences_of


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode as the tables hold it.

    Attributes:
        sequence: its tokens, as sampled.
        reward: what training uses; a sibling is chosen by it.
        native_reward: the environment's own, recorded beside.
        group_advantage: reward minus the mean of its group.
        system_tokens: tokens of the system message, which a teacher's replaces.
        feedback: the judge's words on it.
        turns: its messages after the system message.
    """

    sequence: TrainedSequence
    reward: float
    native_reward: float | None
    group_advantage: float
    system_tokens: int
    feedback: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    """What the teacher of one trajectory is shown, and what it scores.

    Attributes:
        trajectory: whose tokens are scored again.
        solution: the sibling that was chosen, if any; never the trajectory itself where the
            settings exclude that.
        feedback: words on the attempt, if any are used.
        scored: the teacher's sequence; None where there is nothing to show or it is too long.
    """

    trajectory: Trajectory
    solution: Trajectory | None
    feedback: str | None
    scored: TeacherSequence | None

    @property
    def over_length(self) -> bool:
        """Whether there was something to show, and no room for it."""
        return self.scored is None and (self.solution is not None or self.feedback is not None)

    @property
    def solution_dropped(self) -> bool:
        """Whether a sibling was chosen that there was no room for."""
        shown = self.scored is not None and self.scored.solution_shown
        return self.solution is not None and not shown


def stored_trajectories(ctx: RunContext, key: tuple[str, str, int]) -> list[Trajectory]:
    """Read the trajectories of one rollout step, by group and sample.

    Raises:
        InputError: if the messages of the step are not there, without which a teacher would be
            shown empty solutions; or if the episodes are not conversations with a system message
            of their own.
    """
    turns: dict[tuple[int, int], list[Turn]] = defaultdict(list)
    for row in ctx.run.read_table("turns", key=key):
        turns[row["group"], row["sample"]].append(_turn(row))
    rows = {(row["group"], row["sample"]): row for row in ctx.run.read_table("rollouts", key=key)}
    sequences = sequences_of(ctx.run.read_arrow("tokens", key=key))
    return [_trajectory(one, rows[one.group, one.sample], turns) for one in sequences]


def _turn(row: Mapping[str, Any]) -> Turn:
    return Turn(
        **{
            name: row[name]
            for name in (
                *("turn", "role", "content", "token_start", "token_end"),
                *("tool_name", "tool_args", "tool_error", "stop_reason"),
            )
        }
    )


def _trajectory(
    sequence: TrainedSequence,
    row: Mapping[str, Any],
    turns: Mapping[tuple[int, int], Sequence[Turn]],
) -> Trajectory:
    where = f"info_json of group {sequence.group}, sample {sequence.sample}"
    info = loads_strict(row["info_json"] or "{}", where=where).get("info") or {}
    if not isinstance(info.get("system_tokens"), int):
        expected = "how long the system message is"
        raise InputError("system_tokens", info.get("system_tokens"), expected, where=where)
    return Trajectory(
        sequence=sequence,
        reward=row["reward"],
        native_reward=row["native_reward"],
        group_advantage=row["advantage"],
        system_tokens=info["system_tokens"],
        feedback=info.get("rationale"),
        turns=tuple(turns.get((sequence.group, sequence.sample), ())),
    )


def sibling_rule(settings: Mapping[str, Any]) -> SiblingRule:
    """How solutions and feedback are chosen, from an arm's advantage settings."""
    return SiblingRule(
        success_threshold=settings["solution_threshold"],
        choice=settings["solution_choice"],
        exclude_self=settings["exclude_self"],
        use_feedback=settings["feedback"] == "judge",
        feedback_only_without_demonstration=settings["feedback_only_without_solution"],
        remove_thinking=False,
    )


def teacher_plans(
    trajectories: Sequence[Trajectory], settings: Mapping[str, Any], source: TeacherSource
) -> list[TeacherPlan]:
    """Decide for every trajectory what its teacher is shown, and write the teacher's sequence.

    Args:
        trajectories: of whole groups.
        settings: an arm's advantage settings.
        source: the environment.
    """
    rule = sibling_rule(settings)
    chosen = demonstration_indices(
        [one.sequence.group for one in trajectories],
        [one.reward for one in trajectories],
        rule=rule,
    )
    plans = []
    for trajectory, index in zip(trajectories, chosen, strict=True):
        solution = None if index is None else trajectories[index]
        feedback = available_feedback(trajectory.feedback, rule=rule)
        if rule.feedback_only_without_demonstration and solution is not None:
            feedback = None
        plans.append(planned(trajectory, solution, feedback, settings=settings, source=source))
    return plans


def planned(
    trajectory: Trajectory,
    solution: Trajectory | None,
    feedback: str | None,
    *,
    settings: Mapping[str, Any],
    source: TeacherSource,
) -> TeacherPlan:
    """Write the teacher's sequence for what it is to be shown; none without anything to show."""
    scored = None
    if solution is not None or feedback is not None:
        scored = source.teacher_sequence(
            trajectory.sequence.tokens.tolist(),
            system_tokens=trajectory.system_tokens,
            solution=None if solution is None else solution.turns,
            feedback=feedback,
            max_tokens=settings["max_teacher_tokens"],
            over_length=settings["over_length"],
        )
    return TeacherPlan(trajectory, solution, feedback, scored)
