"""Self-distillation: losses, token advantages, siblings and teachers, by hand."""

import math

import pytest
import torch

from losses import sdpo_siblings
from losses.errors import LossConfigError, LossInputError
from losses.inputs import LossInputs
from losses.objective import batch_loss
from losses.sdpo_advantage import (
    align_teacher_logprobs,
    hybrid_advantages,
    registered_sdpo_advantages,
    sequence_advantages,
    token_advantages,
)
from losses.sdpo_logit import SdpoLogit
from losses.sdpo_siblings import SiblingRule, demonstration_indices, teacher_contexts
from losses.sdpo_teacher import ema_update, trust_region_logits
from losses.sdpo_token_level import SdpoTokenLevel
from tests.losses.builders import inputs, logs, tensor

NAN = float("nan")


def gradient(loss, target, given):
    target = target.clone().requires_grad_(True)
    output = loss(target, given)
    (grad,) = torch.autograd.grad(output.loss, target)
    return output, grad


def test_token_level_gradient_is_student_minus_teacher():
    """s = -1, t = -3 and s = -2, t = -1.5: gradients 2 and -0.5, terms 2 * -1 and -0.5 * -2."""
    given = inputs(tensor(-1.0, -2.0), tensor(9.0, 9.0), teacher_logprobs_T=tensor(-3.0, -1.5))

    output, grad = gradient(SdpoTokenLevel(is_clip=None), tensor(-1.0, -2.0), given)

    assert grad.tolist() == [2.0, -0.5]
    assert output.per_token_T.tolist() == [-2.0, 1.0]


def test_token_level_importance_weight_is_capped():
    """Ratio 0.75 / 0.25 = 3 is capped at 2 and constant; ratio 0.5 is below the cap."""
    given = inputs(
        logs(0.25, 0.5), tensor(0.0, 0.0), teacher_logprobs_T=logs(0.75 / math.e, 0.25 / math.e)
    )

    output, grad = gradient(SdpoTokenLevel(is_clip=2.0), logs(0.75, 0.25), given)

    assert grad.tolist() == pytest.approx([2.0, 0.5], rel=1e-13)
    assert output.prob_ratio_T.tolist() == pytest.approx([2.0, 0.5], rel=1e-13)


def test_token_level_without_teacher_is_refused():
    """Nothing stands in for it."""
    with pytest.raises(LossInputError, match="teacher_logprobs_T: None"):
        SdpoTokenLevel(is_clip=None)(logs(0.5), inputs(logs(0.5), tensor(1.0)))


def logit_inputs(teacher, mask=(True,), **over):
    count = len(mask)
    return LossInputs(
        sampling_logprobs_T=over.pop("sampling", torch.zeros(count, dtype=torch.float64)),
        advantages_T=torch.zeros(count, dtype=torch.float64),
        loss_mask_T=torch.tensor(mask),
        teacher_logprobs_TK=teacher,
        **over,
    )


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.0, 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        (1.0, 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)),
        (
            0.5,
            0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375))
            + 0.5 * (0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375)),
        ),
    ],
)
@pytest.mark.parametrize("support", ["full", "topk_renormalised"])
def test_logit_level_by_hand(alpha, expected, support):
    """Student (3/4, 1/4), teacher (1/2, 1/2): KL both ways and Jensen-Shannon."""
    student, teacher = logs(0.75, 0.25).unsqueeze(0), logs(0.5, 0.5).unsqueeze(0)

    output, _ = gradient(SdpoLogit(alpha=alpha, support=support), student, logit_inputs(teacher))

    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-13)


def test_logit_level_weight_leans_on_the_mixture_not_the_other_side():
    """alpha 0.25 mixes 3/4 student and 1/4 teacher: m = (0.6875, 0.3125)."""
    student, teacher = logs(0.75, 0.25).unsqueeze(0), logs(0.5, 0.5).unsqueeze(0)
    expected = 0.75 * (0.75 * math.log(0.75 / 0.6875) + 0.25 * math.log(0.25 / 0.3125)) + 0.25 * (
        0.5 * math.log(0.5 / 0.6875) + 0.5 * math.log(0.5 / 0.3125)
    )

    output, _ = gradient(SdpoLogit(alpha=0.25, support="full"), student, logit_inputs(teacher))

    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-13)


def test_tail_closes_the_support():
    """Top 1 with 0.75 against 0.5 and a tail of 0.25 against 0.5 is the full two-token case."""
    closed, _ = gradient(
        SdpoLogit(alpha=1.0, support="topk_tail"),
        logs(0.75).unsqueeze(0),
        logit_inputs(logs(0.5).unsqueeze(0)),
    )

    assert float(closed.loss.detach()) == pytest.approx(
        0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5), rel=1e-13
    )


def test_tail_of_a_full_support_is_finite():
    """All mass on the listed token: the tail is held at 1e-7 and the gradient finite."""
    _, grad = gradient(
        SdpoLogit(alpha=0.5, support="topk_tail"),
        tensor(0.0, -40.0).unsqueeze(0),
        logit_inputs(logs(0.5, 0.3).unsqueeze(0)),
    )

    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("support", ["full", "topk_tail", "topk_renormalised"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_logit_level_padding_is_inert(support, alpha):
    """NaN and -inf off the mask give no term and no gradient."""
    student = torch.stack([logs(0.6, 0.3), tensor(NAN, -math.inf)])
    teacher = torch.stack([logs(0.5, 0.4), tensor(-math.inf, NAN)])
    alone, alone_grad = gradient(
        SdpoLogit(alpha=alpha, support=support), student[:1], logit_inputs(teacher[:1])
    )

    output, grad = gradient(
        SdpoLogit(alpha=alpha, support=support), student, logit_inputs(teacher, (True, False))
    )

    assert torch.equal(output.loss, alone.loss)
    assert torch.equal(grad[0], alone_grad[0])
    assert grad[1].tolist() == [0.0, 0.0]


def test_logit_level_importance_weight_reads_the_last_column():
    """The sampled token moved from 0.25 to 0.75: weight 3 capped at 2; its column gets nothing."""
    student = torch.cat([logs(0.75, 0.25), logs(0.75)]).unsqueeze(0)
    teacher = logs(0.5, 0.5).unsqueeze(0)
    plain, _ = gradient(SdpoLogit(alpha=1.0, support="full"), student[:, :2], logit_inputs(teacher))

    output, grad = gradient(
        SdpoLogit(alpha=1.0, support="full", is_clip=2.0),
        student,
        logit_inputs(teacher, sampling=logs(0.25)),
    )

    assert float(output.loss.detach()) == pytest.approx(2 * float(plain.loss.detach()), rel=1e-13)
    assert grad[0, 2] == 0.0


def test_logit_level_needs_matching_columns():
    """Two columns against a teacher of three."""
    with pytest.raises(LossInputError, match=r"target_logprobs: shape \(1, 2\); expected \(1, 3\)"):
        SdpoLogit(alpha=1.0, support="full")(
            logs(0.5, 0.5).unsqueeze(0), logit_inputs(logs(0.4, 0.3, 0.3).unsqueeze(0))
        )


def test_logit_level_refuses_a_teacher_that_is_not_finite_on_a_trained_position():
    """A probability of 0 has no logarithm to compare with."""
    with pytest.raises(LossInputError, match="teacher_logprobs_TK"):
        SdpoLogit(alpha=1.0, support="full")(
            logs(0.5, 0.5).unsqueeze(0), logit_inputs(tensor(-math.inf, 0.0).unsqueeze(0))
        )


def test_logit_level_goes_through_the_minibatch_path():
    """Two datums of different length with K = 2 columns."""
    loss = SdpoLogit(alpha=1.0, support="topk_renormalised")
    targets = [
        torch.stack([logs(0.6, 0.3), logs(0.5, 0.4)]).requires_grad_(),
        logs(0.7, 0.1).unsqueeze(0).requires_grad_(),
    ]
    given = [
        logit_inputs(torch.stack([logs(0.5, 0.4)] * 2), (True, False)),
        logit_inputs(logs(0.5, 0.4).unsqueeze(0)),
    ]

    result = batch_loss(loss, targets, given, denominator=1.0)
    result.loss.backward()

    assert result.loss_tokens == 2
    assert targets[0].grad[1].tolist() == [0.0, 0.0]


# student: S0 S1 | a b | T T T | c d        (2 prompt, 2 sampled, 3 tool, 2 sampled tokens)
# teacher: P0 P1 P2 P3 P4 | a b | T T T | c d
TEACHER = [None, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -7.0, -7.0, -7.0, -3.0, -4.0]
MASK = torch.tensor([False, True, True, False, False, False, True, True])
SAMPLING = tensor(0.0, -1.5, -1.5, 0.0, 0.0, 0.0, -1.5, -1.5)


def aligned(teacher=TEACHER):
    return align_teacher_logprobs(
        teacher, sequence_tokens=9, student_prefix_tokens=2, teacher_prefix_tokens=5
    )


def test_alignment_keeps_every_token_at_its_own_place():
    """c and d, after three tool tokens, get their own values and not those of the tool tokens."""
    result = aligned()

    assert result.teacher_logprobs_T[1:].tolist() == [-1.0, -2.0, -7.0, -7.0, -7.0, -3.0, -4.0]
    assert math.isnan(result.teacher_logprobs_T[0])
    assert (result.scored, result.unanswered, result.beyond_context) == (7, 0, 0)


def test_token_advantages_by_hand():
    """teacher - sampling on a, b, c, d: 0.5, -0.5, -1.5, -2.5, clipped at 2."""
    result = token_advantages(aligned(), SAMPLING, MASK, clip_nats=2.0, missing="no_signal")

    assert result.advantages_T.tolist() == [0.0, 0.5, -0.5, 0.0, 0.0, 0.0, -1.5, -2.0]
    assert (result.missing_tokens, result.clipped_tokens) == (0, 1)


def test_clip_is_optional_and_positive():
    """None leaves -2.5; 0 would silence the arm."""
    free = token_advantages(aligned(), SAMPLING, MASK, clip_nats=None, missing="no_signal")

    assert free.advantages_T[7] == -2.5
    with pytest.raises(LossConfigError, match="clip_nats: 0"):
        token_advantages(aligned(), SAMPLING, MASK, clip_nats=0.0, missing="no_signal")


@pytest.mark.parametrize(("missing", "expected"), [("no_signal", 0.0), ("zero_nats", 1.5)])
def test_unanswered_token_has_no_signal_or_is_taken_as_certain(missing, expected):
    """b without an answer: 0, or 0 - (-1.5)."""
    teacher = [*TEACHER[:6], None, *TEACHER[7:]]

    result = token_advantages(aligned(teacher), SAMPLING, MASK, clip_nats=5.0, missing=missing)

    assert result.advantages_T[2] == expected
    assert result.missing_tokens == 1


@pytest.mark.parametrize("missing", ["no_signal", "zero_nats"])
def test_tokens_beyond_the_context_have_no_signal(missing):
    """The teacher's context ended after the tool tokens: c and d are 0 and counted."""
    short = aligned(TEACHER[:10])

    result = token_advantages(short, SAMPLING, MASK, clip_nats=5.0, missing=missing)

    assert short.beyond_context == 2
    assert result.advantages_T.tolist()[6:] == [0.0, 0.0]
    assert result.missing_tokens == 2


def test_teacher_context_shorter_than_its_prompt_gives_nothing():
    """Every token after the prefix is beyond the context."""
    short = aligned(TEACHER[:3])

    assert (short.scored, short.unanswered, short.beyond_context) == (0, 0, 7)


def test_garbage_under_the_mask_is_inert():
    """NaN sampling values on tool tokens."""
    sampling = SAMPLING.clone()
    sampling[3:6] = NAN

    dirty = token_advantages(aligned(), sampling, MASK, clip_nats=2.0, missing="no_signal")
    clean = token_advantages(aligned(), SAMPLING, MASK, clip_nats=2.0, missing="no_signal")

    assert torch.equal(dirty.advantages_T, clean.advantages_T)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"student_prefix_tokens": 0}, "student_prefix_tokens: 0"),
        ({"student_prefix_tokens": 10}, "student_prefix_tokens: 10; expected 1 to 9"),
        ({"teacher_prefix_tokens": 0}, "teacher_prefix_tokens: 0"),
        ({"teacher_prefix_tokens": 4}, "teacher_logprobs_S: 12 entries; expected at most 11"),
    ],
)
def test_impossible_lengths_are_refused(over, message):
    """A shift would otherwise go unnoticed."""
    lengths = {
        "sequence_tokens": 9, "student_prefix_tokens": 2, "teacher_prefix_tokens": 5
    }  # fmt: skip
    with pytest.raises(LossInputError, match=message):
        align_teacher_logprobs(TEACHER, **(lengths | over))


def test_prefixes_of_one_token_are_enough():
    """The first token is nobody's target; everything after it is rescored."""
    result = align_teacher_logprobs(
        [None, -1.0, -2.0], sequence_tokens=3, student_prefix_tokens=1, teacher_prefix_tokens=1
    )

    assert result.teacher_logprobs_T.tolist() == [-1.0, -2.0]


def test_unknown_treatment_of_missing_values_is_refused():
    """The allowed ones are named."""
    with pytest.raises(LossConfigError, match="missing: 'skip'; expected one of"):
        token_advantages(aligned(), SAMPLING, MASK, clip_nats=None, missing="skip")


def test_sequence_level_is_the_mean_over_trained_tokens():
    """(0.5 - 0.5 - 1.5 - 2.5) / 4 = -1 on each of the four."""
    tokens = token_advantages(aligned(), SAMPLING, MASK, clip_nats=None, missing="no_signal")

    result = sequence_advantages(tokens.advantages_T, MASK)

    assert result.tolist() == [0.0, -1.0, -1.0, 0.0, 0.0, 0.0, -1.0, -1.0]


def test_sequence_level_of_nothing_is_zero():
    """No trained token: no 0/0."""
    assert sequence_advantages(tensor(1.0, NAN), torch.tensor([False, False])).tolist() == [0, 0]


def test_hybrid_weight_is_the_share_of_grpo():
    """0.9 * 1 + 0.1 * -2 = 0.7."""
    assert hybrid_advantages(tensor(1.0), tensor(-2.0), weight_grpo=0.9).tolist() == [
        pytest.approx(0.7, rel=1e-15)
    ]
    assert hybrid_advantages(tensor(1.0), tensor(-2.0), weight_grpo=1.0).tolist() == [1.0]
    assert hybrid_advantages(tensor(1.0), tensor(-2.0), weight_grpo=0.0).tolist() == [-2.0]
    with pytest.raises(LossConfigError, match=r"weight_grpo: 1.1"):
        hybrid_advantages(tensor(1.0), tensor(-2.0), weight_grpo=1.1)


def registered(config, **over):
    return registered_sdpo_advantages(config, aligned(), SAMPLING, MASK, **over)


def test_registered_token_sequence_and_hybrid_by_hand():
    """Differences 0.5, -0.5, -1.5, -2.5.

    Token, clip 2: the last is -2. Sequence, clip 0.75: the mean -1 becomes -0.75 on all four.
    Hybrid, lambda 0.9, group advantage 1: 0.9 + 0.1 * each clipped difference.
    """
    token = registered({"kind": "sdpo_token", "clip": 2.0})
    sequence = registered({"kind": "sdpo_sequence", "clip": 0.75})
    hybrid = registered(
        {"kind": "sdpo_hybrid", "clip": 2.0, "grpo_weight": 0.9}, group_advantage=1.0
    )

    assert token.advantages_T[MASK].tolist() == [0.5, -0.5, -1.5, -2.0]
    assert sequence.advantages_T[MASK].tolist() == [-0.75] * 4
    assert sequence.clipped_tokens == 4
    assert hybrid.advantages_T[MASK].tolist() == pytest.approx([0.95, 0.85, 0.75, 0.7])
    for result in (token, sequence, hybrid):
        assert result.advantages_T[~MASK].tolist() == [0.0] * 4


def test_registered_sequence_without_clip_is_the_mean():
    """null: -1 stays."""
    result = registered({"kind": "sdpo_sequence", "clip": None})

    assert result.advantages_T[MASK].tolist() == [-1.0] * 4
    assert result.clipped_tokens == 0


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"kind": "sdpo"}, LossConfigError, "advantage.kind: 'sdpo'; expected one of"),
        ({"kind": "sdpo_token"}, LossConfigError, "advantage.clip: missing"),
        ({"kind": "sdpo_sequence", "clip": -1.0}, LossConfigError, "clip_nats: -1.0"),
        ({"kind": "sdpo_hybrid", "clip": 5.0}, LossInputError, "group_advantage: None"),
    ],
)
def test_registered_advantage_must_be_complete(config, error, message):
    """Field, value and expectation."""
    with pytest.raises(error, match=message):
        registered(config)


def test_registered_hybrid_needs_its_weight():
    """There is no default share."""
    with pytest.raises(LossConfigError, match="weight_grpo: nan"):
        registered({"kind": "sdpo_hybrid", "clip": 5.0}, group_advantage=1.0)


def rule(**over) -> SiblingRule:
    values = {
        "success_threshold": 0.8,
        "choice": "best",
        "exclude_self": True,
        "use_feedback": True,
        "feedback_only_without_demonstration": False,
        "remove_thinking": False,
    }
    return SiblingRule(**(values | over))


def test_best_sibling_excludes_self_and_breaks_ties_by_index():
    """Scores 0.8, 0.95, 0.95, 0.79: index 1 is best, it gets 2 itself; 0.79 is never shown."""
    scores = [0.8, 0.95, 0.95, 0.79]

    assert demonstration_indices(["a"] * 4, scores, rule=rule()) == [1, 2, 1, 1]
    assert demonstration_indices(["a"] * 4, scores, rule=rule(choice="first")) == [1, 0, 0, 0]
    assert demonstration_indices(["a"] * 4, scores, rule=rule(choice="none")) == [None] * 4


def test_lone_success_gets_no_demonstration_but_shows_one():
    """0.83 is the group's only success."""
    assert demonstration_indices(["a"] * 3, [0.1, 0.83, 0.2], rule=rule()) == [1, None, 1]


def test_groups_do_not_mix():
    """Interleaved groups: each sees its own."""
    assert demonstration_indices(["a", "b", "a", "b"], [1, 1, 0, 0], rule=rule()) == [
        None, None, 0, 1
    ]  # fmt: skip


def test_context_without_demonstration_or_feedback_has_no_signal():
    """Blank feedback is none; such a sample is left out of the loss."""
    contexts = teacher_contexts(
        ["a", "a"], [0.0, 0.1], responses=["x", "y"], feedback=[" ", "ask first"], rule=rule()
    )

    assert [context.has_signal for context in contexts] == [False, True]


def test_message_takes_texts_literally():
    """Braces and back-references in a text mean nothing."""
    context = sdpo_siblings.TeacherContext(0, r"{prompt} \1 {text}", "{feedback}")

    message = sdpo_siblings.teacher_user_message(
        "{demonstration}",
        context,
        template="{prompt}|{demonstration}|{feedback}",
        demonstration_template="D:{text}",
        feedback_template="F:{text}",
    )

    assert message == r"{demonstration}|D:{prompt} \1 {text}|F:{feedback}"


def test_sibling_lists_must_fit():
    """Lengths are named."""
    with pytest.raises(LossInputError, match="scores: 1 entries; expected 2"):
        demonstration_indices(["a", "a"], [1.0], rule=rule())
    with pytest.raises(LossInputError, match="feedback: 1 entries; expected 2"):
        teacher_contexts(["a", "a"], [1.0, 1.0], responses=["x", "y"], feedback=[None], rule=rule())
    with pytest.raises(LossConfigError, match="choice: 'random'"):
        rule(choice="random")


def test_moving_average_rate_is_the_students_share():
    """0.05 of the way from 1 to 3 is 1.1; inputs are not changed."""
    teacher, student = tensor(1.0), tensor(3.0)

    assert ema_update(teacher, student, update_rate=0.05).tolist() == [pytest.approx(1.1)]
    assert teacher.tolist() == [1.0]
    assert trust_region_logits(teacher, student, mix=0.25).tolist() == [1.5]
    with pytest.raises(LossConfigError, match="update_rate: 2"):
        ema_update(teacher, student, update_rate=2.0)
    with pytest.raises(LossConfigError, match="mix: -1"):
        trust_region_logits(teacher, student, mix=-1.0)
    with pytest.raises(LossInputError, match="student: shape"):
        ema_update(teacher, tensor(1.0, 2.0), update_rate=0.5)
