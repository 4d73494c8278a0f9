"""Golden self-distillation: losses, siblings, teachers and token advantages."""

from typing import Any

import numpy as np
import torch

from losses import aggregation, sdpo_advantage, sdpo_siblings, sdpo_teacher
from losses.inputs import LossInputs
from losses.reference import aggregation as reference_aggregation
from losses.reference import sdpo as reference_sdpo
from losses.sdpo_logit import SdpoLogit
from losses.sdpo_token_level import SdpoTokenLevel
from tests.losses.golden.compare import Computed, require_known
from tests.losses.golden.loading import Block, numbers
from tests.losses.golden.policy import torch_dtype, with_known_differences

GRADIENT_OF = ("student_logprobs", "student_all_logprobs", "student_topk_logprobs")


def known(block: Block) -> None:
    require_known(
        block,
        "loss_agg_mode", "grad_with_respect_to", "full_logit_distillation", "alpha",
        "distillation_topk", "distillation_add_tail", "is_clip",
    )  # fmt: skip
    of = block.params["grad_with_respect_to"]
    assert of in GRADIENT_OF, f"{block.id}: gradient with respect to {of!r} is not known"


def trained(block: Block) -> np.ndarray:
    mask = numbers(block.inputs["mask"]) > 0
    if "self_distillation_mask" in block.inputs:
        mask = mask & (numbers(block.inputs["self_distillation_mask"]) > 0)[:, None]
    return mask


def support(block: Block) -> str:
    if block.params["distillation_topk"] is None:
        return "full"
    return "topk_tail" if block.params["distillation_add_tail"] else "topk_renormalised"


def teacher_name(block: Block) -> str:
    return block.params["grad_with_respect_to"].replace("student", "teacher")


def denominator(block: Block, mask: np.ndarray) -> float:
    rows = [torch.tensor(row) for row in mask]
    return aggregation.local_denominator(block.params["loss_agg_mode"], rows, width=mask.shape[1])


def loss_by_torch(block: Block) -> Computed:
    known(block)
    mask, dtype = trained(block), torch_dtype(block)

    def tensor(name: str) -> torch.Tensor | None:
        if name not in block.inputs:
            return None
        return torch.tensor(numbers(block.inputs[name]), dtype=dtype)

    student = tensor(block.params["grad_with_respect_to"]).requires_grad_(True)
    logits = block.params["full_logit_distillation"]
    is_clip, alpha = block.params["is_clip"], block.params["alpha"]
    if logits:
        loss: Any = SdpoLogit(
            alpha=alpha, support=support(block), is_clip=is_clip, anchor="recompute"
        )
    else:
        assert alpha == 1.0, f"{block.id}: token level exists for alpha 1 alone"
        loss = SdpoTokenLevel(is_clip=is_clip, anchor="recompute")
    sampled, weights = tensor("student_logprobs"), tensor("rollout_is_weights")
    old = tensor("old_logprobs")
    teacher = tensor(teacher_name(block))
    terms = []
    for row in range(mask.shape[0]):
        target = student[row]
        if logits and is_clip is not None:
            target = torch.cat([target, sampled[row].unsqueeze(-1)], dim=-1)
        inputs = LossInputs(
            sampling_logprobs_T=sampled[row],
            advantages_T=torch.zeros_like(sampled[row]),
            loss_mask_T=torch.tensor(mask[row]),
            anchor_logprobs_T=(sampled if old is None else old)[row],
            weights_T=None if weights is None else weights[row],
            teacher_logprobs_T=None if logits else teacher[row],
            teacher_logprobs_TK=teacher[row] if logits else None,
        )
        terms.append(loss(target, inputs).per_token_T)
    total = aggregation.aggregate(
        terms,
        [torch.tensor(row) for row in mask],
        mode=block.params["loss_agg_mode"],
        denominator=denominator(block, mask),
    )
    assert total.empty == (not mask.any())
    total.loss.backward()
    return outputs(
        block,
        loss=float(total.loss.detach()),
        grad=student.grad.numpy(),
        per_token=torch.stack(terms).detach().numpy(),
    )


def loss_by_reference(block: Block) -> Computed:
    known(block)
    mask = trained(block)
    sampled = numbers(block.inputs["student_logprobs"])
    old = numbers(block.inputs.get("old_logprobs", block.inputs["student_logprobs"]))
    weights = reference_sdpo.importance_weight(sampled, old, is_clip=block.params["is_clip"])
    if "rollout_is_weights" in block.inputs:
        weights = weights * numbers(block.inputs["rollout_is_weights"])
    teacher = numbers(block.inputs[teacher_name(block)])
    if block.params["full_logit_distillation"]:
        term, slope = reference_sdpo.logit_level(
            numbers(block.inputs[block.params["grad_with_respect_to"]]),
            teacher,
            mask,
            alpha=block.params["alpha"],
            support=support(block),
            weights=weights,
        )
    else:
        terms = reference_sdpo.token_level(sampled, teacher, mask, weights=weights)
        term, slope = terms.term, terms.slope
    total = reference_aggregation.aggregate(
        term,
        slope,
        mask,
        mode=block.params["loss_agg_mode"],
        denominator=denominator(block, mask),
    )
    return outputs(block, loss=total.loss, grad=total.gradient, per_token=term)


def outputs(block: Block, *, loss: float, grad: np.ndarray, per_token: np.ndarray) -> Computed:
    mask = trained(block)
    scale = float(np.abs(per_token[mask]).sum()) / denominator(block, mask)
    # The tail bucket is what remains of almost all mass: float32 cancels there. Elsewhere a slope
    # is a difference of two numbers near each other, right to float32 at the largest slope's size.
    single = block.dtype == "float32"
    tail = support(block) == "topk_tail" and single
    largest = float(np.abs(grad).max())
    computed = Computed(
        {"loss": loss, "grad": grad, "per_token": per_token},
        mask=mask,
        loss_scale=scale,
        relative={"grad": 1e-3, "per_token": 1e-4, "loss": 1e-4} if tail else {},
        absolute={"grad": 1e-6 * largest} if single and not tail else {},
    )
    return with_known_differences(block, computed, mask)


def siblings(block: Block) -> Computed:
    require_known(
        block,
        "success_reward_threshold", "dont_reprompt_on_self_success",
        "include_environment_feedback", "environment_feedback_only_without_solution",
        "remove_thinking_from_demonstration",
    )  # fmt: skip
    rule = sdpo_siblings.SiblingRule(
        success_threshold=block.params["success_reward_threshold"],
        choice="first",
        exclude_self=block.params["dont_reprompt_on_self_success"],
        use_feedback=block.params["include_environment_feedback"],
        feedback_only_without_demonstration=block.params[
            "environment_feedback_only_without_solution"
        ],
        remove_thinking=block.params["remove_thinking_from_demonstration"],
    )
    groups, scores = block.inputs["group"], block.inputs["sequence_reward"]
    contexts = sdpo_siblings.teacher_contexts(
        groups,
        scores,
        responses=block.inputs["response_text"],
        feedback=block.inputs["feedback"],
        rule=rule,
    )
    fractions = sdpo_siblings.context_fractions(
        groups, scores, feedback=block.inputs["feedback"], contexts=contexts, rule=rule
    )
    messages = [
        sdpo_siblings.teacher_user_message(
            f"q{group}",
            context,
            template="P[{prompt}]S[{demonstration}]F[{feedback}]",
            demonstration_template="{text}",
            feedback_template="{text}",
        )
        for group, context in zip(groups, contexts, strict=True)
    ]
    return Computed(
        {
            "demonstration_index": [context.demonstration_index for context in contexts],
            "self_distillation_mask": [float(context.has_signal) for context in contexts],
            "teacher_user_message": messages,
            "metrics": {
                name: getattr(fractions, name)
                for name in (
                    "success_group_fraction",
                    "success_sample_fraction",
                    "feedback_available_fraction",
                    "feedback_used_fraction",
                    "reprompt_sample_fraction",
                )
            },
        },
        relative={"metrics": 1e-6},
    )


def teacher_by_torch(block: Block) -> Computed:
    require_known(block, "teacher_update_rate")
    teacher, student, x = (
        torch.tensor(numbers(block.inputs[name]), dtype=torch_dtype(block))
        for name in ("teacher_param", "student_param", "x")
    )
    rate = block.params["teacher_update_rate"]
    return Computed(
        {
            "ema_param_after": sdpo_teacher.ema_update(teacher, student, update_rate=rate).numpy(),
            "trust_region_logits": sdpo_teacher.trust_region_logits(
                x @ teacher, x @ student, mix=rate
            ).numpy(),
        }
    )


def teacher_by_reference(block: Block) -> Computed:
    teacher, student, x = (
        numbers(block.inputs[name]) for name in ("teacher_param", "student_param", "x")
    )
    rate = block.params["teacher_update_rate"]
    return Computed(
        {
            "ema_param_after": reference_sdpo.moving_average(teacher, student, rate=rate),
            "trust_region_logits": reference_sdpo.moving_average(
                x @ teacher, x @ student, rate=rate
            ),
        }
    )


def layout(block: Block) -> dict[str, Any]:
    """Rebuild the sequences of a token-advantage case."""
    require_known(block, "clip", "max_context_length")
    inputs = block.inputs
    prompt, teacher_prompt = len(inputs["student_prompt"]), len(inputs["teacher_prompt"])
    completion = len(inputs["completion"])
    holes = set(inputs["masked_completion_positions"])
    scored = max(min(completion, block.params["max_context_length"] - teacher_prompt), 0)
    none = set(inputs["teacher_none_positions"])
    answers = [
        None if position in none else inputs["teacher_logprobs"][position]
        for position in range(scored)
    ]
    return {
        "teacher": [None] * teacher_prompt + answers,
        "sampling": [0.0] * prompt + list(inputs["student_logprobs"]),
        "mask": [False] * prompt + [position not in holes for position in range(completion)],
        "student_prefix": prompt,
        "teacher_prefix": teacher_prompt,
    }


def advantage_by_torch(block: Block) -> Computed:
    case = layout(block)
    aligned = sdpo_advantage.align_teacher_logprobs(
        case["teacher"],
        sequence_tokens=len(case["mask"]),
        student_prefix_tokens=case["student_prefix"],
        teacher_prefix_tokens=case["teacher_prefix"],
    )
    sampling = torch.tensor(case["sampling"][1:], dtype=torch.float64)
    mask = torch.tensor(case["mask"][1:])
    plain, clipped = (
        sdpo_advantage.token_advantages(
            aligned, sampling, mask, clip_nats=clip, missing="zero_nats"
        ).advantages_T.numpy()
        for clip in (None, block.params["clip"])
    )
    return advantage_outputs(block, mask.numpy(), plain, clipped)


def advantage_by_reference(block: Block) -> Computed:
    case = layout(block)
    plain, clipped = (
        np.asarray(
            reference_sdpo.aligned_advantages(
                case["teacher"],
                case["sampling"],
                case["mask"],
                student_prefix=case["student_prefix"],
                teacher_prefix=case["teacher_prefix"],
                clip=clip,
                zero_nats=True,
            )
        )
        for clip in (None, block.params["clip"])
    )
    return advantage_outputs(block, np.asarray(case["mask"][1:]), plain, clipped)


def advantage_outputs(
    block: Block, mask: np.ndarray, plain: np.ndarray, clipped: np.ndarray
) -> Computed:
    published = numbers(block.expected["cookbook_advantages"])
    return Computed(
        {
            "mask": mask.astype(float),
            "aligned_advantages": plain,
            "aligned_advantages_clipped": clipped,
            # The published code shifts tokens after a hole: it is shown to differ, not copied.
            "cookbook_equals_aligned": bool(np.allclose(published, plain, rtol=1e-5, atol=1e-6)),
        },
        not_to_copy=frozenset({"cookbook_advantages"}),
    )
