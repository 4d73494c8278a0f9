"""Golden advantages, layouts, corrections and counts."""

from typing import Any

import numpy as np
import torch

from losses import advantages, diagnostics, dppo, objective, rollout_correction
from losses.datum_layout import SampledTurn, datum_arrays
from losses.dppo_rule import DppoRule
from losses.inputs import LossInputs
from losses.published_metrics import clip_form_metrics
from losses.reference import advantages as reference_advantages
from losses.reference import counts as reference_counts
from losses.reference import policy as reference_policy
from losses.token_arrays import token_arrays
from tests.losses.golden.compare import Computed, require_known
from tests.losses.golden.loading import Block, numbers
from tests.losses.golden.policy import torch_dtype


def totals(block: Block) -> list[list[float]]:
    require_known(block)
    return [
        [
            advantages.total_reward(steps, final)
            for steps, final in zip(group["step_rewards"], group["final_rewards"], strict=True)
        ]
        for group in block.inputs["groups"]
    ]


def group_mean_by_torch(block: Block) -> Computed:
    rewards = totals(block)
    centred = [
        advantages.group_mean_advantages(torch.tensor(group, dtype=torch_dtype(block)))
        for group in rewards
    ]
    return group_mean_outputs(
        rewards,
        [group.tolist() for group in centred],
        kept=advantages.informative_groups(rewards, keep_one=True),
        dtype=str(centred[0].dtype),
        slack=1e-7 * max(abs(value) for group in centred for value in group.tolist()),
    )


def group_mean_by_reference(block: Block) -> Computed:
    rewards = totals(block)
    kept = [index for index, group in enumerate(rewards) if max(group) > min(group)] or [0]
    # float64 against published float32: right to the spacing of float32 at the rewards' size.
    largest = max(abs(reward) for group in rewards for reward in group)
    return group_mean_outputs(
        rewards,
        [reference_advantages.group_mean(group) for group in rewards],
        kept=kept,
        dtype=f"torch.{block.dtype}",
        slack=2.0 * float(np.spacing(np.float32(largest))),
    )


def group_mean_outputs(
    rewards: list[list[float]],
    centred: list[list[float]],
    *,
    kept: list[int],
    dtype: str,
    slack: float,
) -> Computed:
    return Computed(
        {
            "total_rewards": Ragged(rewards),
            "advantages": Ragged(centred),
            "dtype": dtype,
            "kept_group_index": kept,
        },
        absolute={"advantages": slack},
    )


class Ragged(list[list[float]]):
    """Groups of different sizes, compared end to end."""


def verl_by_torch(block: Block) -> Computed:
    require_known(block, "norm_adv_by_std_in_grpo", "epsilon")
    spread = advantages.verl_outcome_advantages(
        torch.tensor(numbers(block.inputs["token_level_rewards"]), dtype=torch_dtype(block)),
        torch.tensor(numbers(block.inputs["mask"]) > 0),
        groups_B=block.inputs["group"],
        norm_by_std=block.params["norm_adv_by_std_in_grpo"],
        epsilon=block.params["epsilon"],
    )
    return verl_outputs(block, spread.numpy())


def verl_by_reference(block: Block) -> Computed:
    spread = reference_advantages.verl_outcome(
        numbers(block.inputs["token_level_rewards"]),
        numbers(block.inputs["mask"]) > 0,
        groups=block.inputs["group"],
        norm_by_std=block.params["norm_adv_by_std_in_grpo"],
        epsilon=block.params["epsilon"],
    )
    return verl_outputs(block, spread)


def verl_outputs(block: Block, spread: np.ndarray) -> Computed:
    """The published code keeps a lone sequence's standard deviation in float32, also in float64."""
    groups = block.inputs["group"]
    lone = any(groups.count(group) == 1 for group in groups)
    rough = lone and block.params["norm_adv_by_std_in_grpo"] and block.dtype == "float64"
    return Computed({"advantages": spread}, relative={"advantages": 1e-7} if rough else {})


def correction_settings(block: Block) -> dict[str, Any]:
    require_known(block, "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    return {
        "level": block.params["rollout_is"],
        "threshold": block.params["rollout_is_threshold"],
        "batch_normalize": block.params.get("rollout_is_batch_normalize", False),
    }


def correction_by_torch(block: Block) -> Computed:
    dtype = torch_dtype(block)
    rows = [
        list(torch.tensor(numbers(block.inputs[name]), dtype=dtype))
        for name in ("old_logprobs", "rollout_logprobs")
    ]
    mask = list(torch.tensor(numbers(block.inputs["mask"]) > 0))
    weights = rollout_correction.rollout_correction_weights(
        rows[0], rows[1], mask, **correction_settings(block)
    )
    return Computed({"rollout_is_weights": torch.stack(weights).numpy()})


def correction_by_reference(block: Block) -> Computed:
    weights = reference_advantages.correction_weights(
        numbers(block.inputs["old_logprobs"]),
        numbers(block.inputs["rollout_logprobs"]),
        numbers(block.inputs["mask"]) > 0,
        **correction_settings(block),
    )
    return Computed({"rollout_is_weights": weights})


def layout(block: Block) -> Computed:
    require_known(block, "trajectory_advantage")
    turns = []
    for turn in block.inputs["turns"]:
        assert set(turn) == {"new_observation", "action", "action_logprobs"}, block.id
        turns.append(
            SampledTurn(
                observation_tokens=turn["new_observation"],
                action_tokens=turn["action"],
                action_logprobs=turn["action_logprobs"],
            )
        )
    arrays = datum_arrays(turns, advantage=block.params["trajectory_advantage"])
    datum = {
        "model_input": list(arrays.input_tokens_T),
        "target_tokens": list(arrays.target_tokens_T),
        "logprobs": list(arrays.sampling_logprobs_T),
        "advantages": list(arrays.advantages_T),
        "mask": [float(entry) for entry in arrays.loss_mask_T],
    }
    return Computed({"datums": [datum]})


def custom_weights_by_torch(block: Block) -> Computed:
    """Through the minibatch path, as the service's SDK would call it: float64 on this side."""
    require_known(block, "delta_low", "delta_high", "clip_ratio_c", "loss_agg_mode")
    assert block.params["loss_agg_mode"] == "sum", block.id

    def rows(name: str) -> list[torch.Tensor]:
        return [torch.tensor(row, dtype=torch.float32) for row in block.inputs[name]]

    targets = [row.requires_grad_(True) for row in rows("current_logprobs")]
    inputs = [
        LossInputs(
            sampling_logprobs_T=sampling,
            advantages_T=advantage,
            loss_mask_T=mask > 0,
        )
        for sampling, advantage, mask in zip(
            rows("rollout_logprobs"), rows("advantages"), rows("mask"), strict=True
        )
    ]
    bridge = objective.CustomLoss(dppo_of(block), inputs, denominator=1.0)
    loss, _ = bridge(None, targets)
    loss.backward()
    weights = objective.cross_entropy_weights(targets)
    return Computed(
        {
            "loss": float(loss.detach()),
            "cross_entropy_weights": Ragged([row.tolist() for row in weights]),
        }
    )


def custom_weights_by_reference(block: Block) -> Computed:
    loss = dppo_of(block)
    total, weights = 0.0, []
    for current, sampling, advantage, mask in zip(
        *(block.inputs[n] for n in ("current_logprobs", "rollout_logprobs", "advantages", "mask")),
        strict=True,
    ):
        terms = reference_policy.dppo(current, sampling, advantage, mask, form=reference_form(loss))
        total += float(terms.term.sum())
        weights.append((-terms.slope).tolist())
    return Computed({"loss": total, "cross_entropy_weights": Ragged(weights)})


def dppo_of(block: Block) -> dppo.Dppo:
    rule = DppoRule(
        divergence="binary_tv",
        anchor="sampling",
        delta_low=block.params["delta_low"],
        delta_high=block.params["delta_high"],
    )
    return dppo.Dppo(rule=rule, ratio_cap=block.params["clip_ratio_c"])


def reference_form(loss: dppo.Dppo) -> reference_policy.MaskForm:
    return reference_policy.MaskForm(
        divergence=loss.rule.divergence,
        delta_low=loss.rule.delta_low,
        delta_high=loss.rule.delta_high,
        ratio_cap=loss.ratio_cap,
    )


def counts_by_torch(block: Block) -> Computed:
    require_known(block, "delta", "epsilon", "quantile")
    delta = block.params["delta"]
    rule = DppoRule(divergence="binary_tv", anchor="sampling", delta_low=delta, delta_high=delta)
    loss = dppo.Dppo(rule=rule, ratio_cap=None)
    dtype = torch_dtype(block)

    def flat(name: str) -> torch.Tensor:
        return torch.tensor(numbers(block.inputs[name]), dtype=dtype).ravel()

    mask = flat("mask") > 0
    inputs = LossInputs(
        sampling_logprobs_T=flat("rollout_logprobs"),
        advantages_T=flat("advantages"),
        loss_mask_T=mask,
    )
    keep = loss(flat("current_logprobs"), inputs).keep_T
    settings = diagnostics.DiagnosticSettings(
        rule=rule,
        ratio_cap=None,
        ppo_low_threshold=1 - block.params["epsilon"],
        ppo_high_threshold=1 + block.params["epsilon"],
    )
    tokens = token_arrays(
        target_logprobs=flat("current_logprobs"),
        sampling_logprobs=flat("rollout_logprobs"),
        advantages=flat("advantages"),
        loss_mask=mask,
        keep=keep,
    )
    record = diagnostics.token_diagnostics(tokens, settings=settings)
    return count_outputs(block, record)


def counts_by_reference(block: Block) -> Computed:
    delta, epsilon = block.params["delta"], block.params["epsilon"]
    columns = [
        numbers(block.inputs[name]).ravel()
        for name in ("current_logprobs", "rollout_logprobs", "advantages", "mask")
    ]
    form = reference_policy.MaskForm(
        divergence="binary_tv", delta_low=delta, delta_high=delta, ratio_cap=None
    )
    keep = reference_policy.dppo(*columns, form=form).keep
    tokens = [
        reference_counts.Token(
            target_logprob=float(lp), sampling_logprob=float(mu), advantage=float(a), keep=bool(k)
        )
        for lp, mu, a, m, k in zip(*columns, keep, strict=True)
        if m > 0
    ]
    record: dict[str, Any] = dict(
        reference_counts.recount(
            tokens, delta_low=delta, delta_high=delta, ppo=(1 - epsilon, 1 + epsilon)
        )
    )
    record["masked_fraction"] = record["masked_tokens"] / record["loss_tokens"]
    record["pg_clipfrac_srl"] = record["masked_tokens"] / (
        record["nonzero_advantage_tokens"] + 1e-8
    )
    return count_outputs(block, record)


def count_outputs(block: Block, record: dict[str, Any]) -> Computed:
    mask = numbers(block.inputs["mask"]) > 0
    drift = np.abs(
        np.exp(numbers(block.inputs["current_logprobs"])[mask])
        - np.exp(numbers(block.inputs["rollout_logprobs"])[mask])
    )
    methods = [m for m in block.expected["drift_abs_p_q90"] if m != "torch.quantile"]
    quantiles = {
        method: diagnostics.quantile(drift, block.params["quantile"], method=method)
        for method in methods
    }
    quantiles["torch.quantile"] = float(
        torch.quantile(torch.tensor(drift), block.params["quantile"])
    )
    vanilla = clip_form_metrics(
        target_logprobs=numbers(block.inputs["current_logprobs"]),
        anchor_logprobs=numbers(block.inputs["rollout_logprobs"]),
        advantages=numbers(block.inputs["advantages"]),
        loss_mask=mask,
        bounds=(1 - block.params["epsilon"], 1 + block.params["epsilon"]),
        dual_clip=1e9,
    )
    return Computed(
        {
            "loss_tokens": record["loss_tokens"],
            "nonzero_advantage_tokens": record["nonzero_advantage_tokens"],
            "exceed_abs_delta": record["exceed"],
            "official_keep_zero_on_loss_tokens": record["keep_zero_tokens"],
            "official_keep_zero_with_zero_advantage": record["keep_zero_advantage_zero_tokens"],
            "dropped_positive": record["removed_positive"],
            "dropped_negative": record["removed_negative"],
            "exceed_restoring_direction": record["exceed_restoring"],
            "exceed_with_zero_advantage": record["exceed_zero_advantage"],
            "masked_fraction_all_loss_tokens": record["masked_fraction"],
            "official_pg_clipfrac_nonzero_advantage_denominator": record["pg_clipfrac_srl"],
            "ppo_counterfactual_fraction_official_vanilla": vanilla.pg_clipfrac,
            "ppo_counterfactual_count": record["ppo_counterfactual_tokens"],
            "ppo_two_sided_count": record["ppo_two_sided_tokens"],
            "drift_abs_p_q90": quantiles,
        }
    )
