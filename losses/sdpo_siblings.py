"""Which sibling's attempt and which feedback a teacher is shown.

Everything here is a list with one entry per sample of a rollout batch, in batch order.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from losses.errors import LossConfigError, LossInputError

SiblingChoice: TypeAlias = Literal["first", "best", "none"]
"""``first`` success of the group in batch order; the ``best``, ties to the lower index; or
``none``: no demonstration is shown."""

THINKING = re.compile(r"<think>.*?</think>\s*", flags=re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingRule:
    """How demonstrations and feedback are chosen. Every field is stated, none has a default."""

    success_threshold: float
    """Least score of a demonstration, inclusive."""
    choice: SiblingChoice
    exclude_self: bool
    """True: a sample is never its own demonstration, so a lone success gets none."""
    use_feedback: bool
    feedback_only_without_demonstration: bool
    remove_thinking: bool
    """True: ``<think>`` blocks are cut from demonstrations."""

    def __post_init__(self) -> None:
        """Refuse an unknown choice.

        Raises:
            LossConfigError: if ``choice`` is unknown.
        """
        if self.choice not in ("first", "best", "none"):
            message = f"choice: {self.choice!r}; expected one of ['first', 'best', 'none']"
            raise LossConfigError(message)


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """What one sample's teacher is shown beyond the original prompt."""

    demonstration_index: int | None
    """Batch index of the chosen sibling."""
    demonstration: str | None
    feedback: str | None

    @property
    def has_signal(self) -> bool:
        """Whether the teacher sees anything; without it the sample is left out of the loss."""
        return self.demonstration is not None or self.feedback is not None


@dataclass(frozen=True, slots=True)
class ContextFractions:
    """How many groups and samples have something to show."""

    success_group_fraction: float
    """Groups with at least one success, whoever may be shown it."""
    success_sample_fraction: float
    """Samples that get a demonstration."""
    feedback_available_fraction: float
    feedback_used_fraction: float
    reprompt_sample_fraction: float
    """Samples with a demonstration or feedback."""


def demonstration_indices(
    groups: Sequence[Hashable], scores: Sequence[float], *, rule: SiblingRule
) -> list[int | None]:
    """Choose, for every sample, the index of the sibling that its teacher is shown.

    Raises:
        LossInputError: if the lists differ in length.
    """
    if len(groups) != len(scores):
        message = f"scores: {len(scores)} entries; expected {len(groups)}, one per sample"
        raise LossInputError(message)
    successes: dict[Hashable, list[int]] = {group: [] for group in groups}
    for index, (group, score) in enumerate(zip(groups, scores, strict=True)):
        if score >= rule.success_threshold and rule.choice != "none":
            successes[group].append(index)
    if rule.choice == "best":
        for candidates in successes.values():
            candidates.sort(key=lambda index: (-scores[index], index))
    chosen: list[int | None] = []
    for index, group in enumerate(groups):
        rest = [j for j in successes[group] if not (rule.exclude_self and j == index)]
        chosen.append(rest[0] if rest else None)
    return chosen


def teacher_contexts(
    groups: Sequence[Hashable],
    scores: Sequence[float],
    *,
    responses: Sequence[str],
    feedback: Sequence[str | None],
    rule: SiblingRule,
) -> list[TeacherContext]:
    """Choose demonstration and feedback for every sample.

    Feedback that is empty or only spaces counts as none. The attempt itself is never part of a
    context, except as its own demonstration where the rule allows that.

    Raises:
        LossInputError: if the lists differ in length.
    """
    for name, values in (("responses", responses), ("feedback", feedback)):
        if len(values) != len(groups):
            message = f"{name}: {len(values)} entries; expected {len(groups)}, one per sample"
            raise LossInputError(message)
    contexts = []
    for index, chosen in enumerate(demonstration_indices(groups, scores, rule=rule)):
        shown = available_feedback(feedback[index], rule=rule)
        if rule.feedback_only_without_demonstration and chosen is not None:
            shown = None
        text = None if chosen is None else demonstration_text(responses[chosen], rule=rule)
        contexts.append(TeacherContext(chosen, text, shown))
    return contexts


def available_feedback(feedback: str | None, *, rule: SiblingRule) -> str | None:
    """Return the feedback where the rule uses any and there is some."""
    if not rule.use_feedback or feedback is None or not feedback.strip():
        return None
    return feedback


def demonstration_text(response: str, *, rule: SiblingRule) -> str:
    """Return a sibling's text as it is shown."""
    return THINKING.sub("", response) if rule.remove_thinking else response


def context_fractions(
    groups: Sequence[Hashable],
    scores: Sequence[float],
    *,
    feedback: Sequence[str | None],
    contexts: Sequence[TeacherContext],
    rule: SiblingRule,
) -> ContextFractions:
    """Count what the contexts of one batch hold.

    Raises:
        LossInputError: if the batch is empty.
    """
    if not groups:
        message = "groups: empty; expected at least one sample"
        raise LossInputError(message)
    successful = {
        group
        for group, score in zip(groups, scores, strict=True)
        if score >= rule.success_threshold
    }
    samples = len(groups)
    available = sum(available_feedback(text, rule=rule) is not None for text in feedback)
    return ContextFractions(
        success_group_fraction=len(successful) / len(set(groups)),
        success_sample_fraction=sum(c.demonstration is not None for c in contexts) / samples,
        feedback_available_fraction=available / samples,
        feedback_used_fraction=sum(c.feedback is not None for c in contexts) / samples,
        reprompt_sample_fraction=sum(c.has_signal for c in contexts) / samples,
    )


def teacher_user_message(
    prompt: str,
    context: TeacherContext,
    *,
    template: str,
    demonstration_template: str,
    feedback_template: str,
) -> str:
    """Fill the teacher's last user message; without any signal it is the plain prompt.

    ``template`` holds ``{prompt}``, ``{demonstration}`` and ``{feedback}``; the other two hold
    ``{text}``. Texts are put in as they are: braces inside them mean nothing.
    """
    if not context.has_signal:
        return prompt
    sections = {
        "prompt": prompt,
        "demonstration": fill(demonstration_template, context.demonstration),
        "feedback": fill(feedback_template, context.feedback),
    }
    return re.sub(
        r"\{(prompt|demonstration|feedback)\}", lambda match: sections[match.group(1)], template
    )


def fill(template: str, text: str | None) -> str:
    """Return the section for one text, or nothing where there is none."""
    return "" if text is None else template.replace("{text}", text)
