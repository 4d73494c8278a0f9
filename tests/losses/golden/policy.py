"""Golden policy losses: mask forms, clipped surrogate and the service's stock losses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from losses import aggregation, cispo, dppo, grpo_clip, importance_sampling, topk_divergence
from losses.dppo_rule import DppoRule
from losses.errors import LossInputError
from losses.inputs import LossInputs
from losses.published_metrics import clip_form_metrics, mask_form_metrics
from losses.reference import aggregation as reference_aggregation
from losses.reference import policy as reference_policy
from tests.losses.golden.compare import Computed, require_known
from tests.losses.golden.loading import Block, numbers

MASK_FORMS: dict[str, tuple[str, str]] = {
    "dppo_binary_tv": ("binary_tv", "sampling"),
    "dppo_binary_kl": ("binary_kl", "sampling"),
    "dppo_binary_tv_recompute": ("binary_tv", "recompute"),
    "dppo_binary_kl_recompute": ("binary_kl", "recompute"),
    "dppo_topk_tv": ("topk_tv", "sampling"),
    "dppo_topk_kl": ("topk_kl", "sampling"),
    "ppo": ("ratio", "sampling"),
    "ppo_recompute": ("ratio", "recompute"),
    "ppo_ablation_positive": ("ratio_ablation_positive", "sampling"),
    "ppo_ablation_negative": ("ratio_ablation_negative", "sampling"),
    "ppo_ablation_both": ("ratio_ablation_both", "sampling"),
    "pg_no_mask": ("none", "sampling"),
}
STOCK = ("importance_sampling", "ppo", "cispo")
PUBLISHED_LIMIT = 20.0


def torch_dtype(block: Block) -> torch.dtype:
    return {"float64": torch.float64, "float32": torch.float32}[block.dtype]


def trained(block: Block) -> np.ndarray:
    return numbers(block.inputs["mask"]) > 0


def tensor(block: Block, name: str) -> Tensor | None:
    if name not in block.inputs:
        return None
    return torch.tensor(numbers(block.inputs[name]), dtype=torch_dtype(block))


def denominator(block: Block, mask: np.ndarray) -> float:
    """Name the denominator that the published aggregation would have used."""
    info = dict(block.params.get("global_batch_info", {}))
    unknown = set(info) - {
        "dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"
    }  # fmt: skip
    assert not unknown, f"{block.id}: global_batch_info {sorted(unknown)} not known"
    mode = block.params["loss_agg_mode"]
    rows = [torch.tensor(row) for row in mask]
    local = aggregation.local_denominator(mode, rows, width=mask.shape[1])
    workers = info.get("dp_size") or 1
    if mode == "token-mean":
        return (info.get("batch_num_tokens") or local) / workers
    if mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        return (info.get("global_batch_size") or local) / workers
    if mode == "seq-mean-token-sum-norm":
        return info.get("loss_scale_factor") or local
    return local


def nonfinite_on_trained(block: Block) -> bool:
    mask = trained(block)
    names = ("current_logprobs", "rollout_logprobs", "old_logprobs")
    return any(
        not np.isfinite(numbers(block.inputs[name])[mask]).all()
        for name in names
        if name in block.inputs
    )


def stock_settings(block: Block) -> Any:
    low, high = block.params["clip_low_threshold"], block.params["clip_high_threshold"]
    kind = block.params["loss_fn"]
    assert kind in STOCK, f"{block.id}: loss_fn {kind!r} is not one of {STOCK}"
    if kind == "ppo":
        return grpo_clip.GrpoClip(clip_low_threshold=low, clip_high_threshold=high, dual_clip=None)
    if kind == "cispo":
        return cispo.Cispo(clip_low_threshold=low, clip_high_threshold=high)
    return importance_sampling.ImportanceSampling()


def settings(block: Block) -> Any:
    """Translate the published parameters into the project's loss."""
    params = block.params
    if "loss_fn" in params:
        require_known(
            block, "loss_fn", "clip_low_threshold", "clip_high_threshold", "loss_agg_mode"
        )
        return stock_settings(block)
    require_known(
        block,
        "loss_mode", "delta_low", "delta_high", "clip_ratio_c", "loss_agg_mode",
        "global_batch_info",
    )  # fmt: skip
    mode = params.get("loss_mode", "dppo_binary_tv")
    if mode == "vanilla":
        return grpo_clip.GrpoClip(
            clip_low_threshold=1 - params["delta_low"],
            clip_high_threshold=1 + params["delta_high"],
            dual_clip=params["clip_ratio_c"],
            anchor="recompute",
            log_ratio_limit_nats=PUBLISHED_LIMIT,
        )
    assert mode in MASK_FORMS, f"{block.id}: loss_mode {mode!r} is not known"
    divergence, anchor = MASK_FORMS[mode]
    none = divergence == "none"
    rule = DppoRule(
        divergence=divergence,
        anchor=anchor,
        delta_low=None if none else params["delta_low"],
        delta_high=None if none else params["delta_high"],
    )
    return dppo.Dppo(rule=rule, ratio_cap=params["clip_ratio_c"])


def topk(block: Block) -> topk_divergence.TopkDivergence | None:
    """Always float32, as published: the block's precision says nothing about these."""
    if "topk_token_ids" not in block.inputs:
        return None
    logits = torch.tensor(numbers(block.inputs["current_logits"]), dtype=torch.float32)
    ids = torch.tensor(block.inputs["topk_token_ids"])
    sampled = torch.tensor(numbers(block.inputs["rollout_topk_logprobs"]), dtype=torch.float32)
    return topk_divergence.topk_divergence(topk_divergence.gather_logprobs(logits, ids), sampled)


def loss_inputs(block: Block, settings: Any, row: int, divergence: Tensor | None) -> LossInputs:
    def pick(name: str) -> Tensor | None:
        values = tensor(block, name)
        return None if values is None else values[row]

    weighted = isinstance(settings, grpo_clip.GrpoClip)
    return LossInputs(
        sampling_logprobs_T=pick("rollout_logprobs"),
        advantages_T=pick("advantages"),
        loss_mask_T=torch.tensor(trained(block)[row]),
        anchor_logprobs_T=pick("old_logprobs"),
        weights_T=pick("rollout_is_weights") if weighted else None,
        divergence_T=None if divergence is None else divergence[row].to(torch_dtype(block)),
    )


def unchecked_terms(settings: Any, target: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Terms and decisions below the input check, for what the check refuses."""
    if isinstance(settings, grpo_clip.GrpoClip):
        terms = grpo_clip.clip_terms(target, inputs, settings=settings)
    else:
        terms = dppo.dppo_terms(target, inputs, settings=settings)
    zero = torch.zeros_like(terms.per_token_T)
    kept = terms.keep_T & inputs.loss_mask_T
    return torch.where(inputs.loss_mask_T, terms.per_token_T, zero), kept


def computed_by_torch(block: Block) -> Computed:
    loss = settings(block)
    mask = trained(block)
    current = tensor(block, "current_logprobs").requires_grad_(True)
    divergence = topk(block)
    picked = None
    if divergence is not None:
        picked = divergence.kl_T if block.params["loss_mode"].endswith("kl") else divergence.tv_T
    terms, keeps = [], []
    for row in range(mask.shape[0]):
        inputs = loss_inputs(block, loss, row, picked)
        if nonfinite_on_trained(block):
            with pytest.raises(LossInputError, match="on trained token"):
                loss(current[row], inputs)
            term, keep = unchecked_terms(loss, current[row], inputs)
        else:
            output = loss(current[row], inputs)
            term, keep = output.per_token_T, output.keep_T
        terms.append(term)
        keeps.append(keep)
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
        grad=current.grad.numpy().astype(np.float64),
        per_token=torch.stack(terms).detach().numpy().astype(np.float64),
        keep=torch.stack(keeps).numpy(),
        divergences=None if divergence is None else [d.numpy() for d in divergence],
    )


def reference_terms(block: Block) -> Any:
    loss, mask = settings(block), trained(block)
    current = numbers(block.inputs["current_logprobs"])
    sampling = numbers(block.inputs["rollout_logprobs"])
    advantages = numbers(block.inputs["advantages"])
    if isinstance(loss, importance_sampling.ImportanceSampling):
        return reference_policy.importance_sampling(current, sampling, advantages, mask)
    if isinstance(loss, cispo.Cispo):
        return reference_policy.cispo(
            current, sampling, advantages, mask,
            low=loss.clip_low_threshold, high=loss.clip_high_threshold,
        )  # fmt: skip
    if isinstance(loss, grpo_clip.GrpoClip):
        anchor = sampling if loss.anchor == "sampling" else numbers(block.inputs["old_logprobs"])
        return reference_policy.clipped_surrogate(
            current, anchor, advantages, mask,
            low=loss.clip_low_threshold, high=loss.clip_high_threshold,
            dual_clip=loss.dual_clip, log_ratio_limit=loss.log_ratio_limit_nats,
        )  # fmt: skip
    topk_values = None
    if "topk_token_ids" in block.inputs:
        kl, tv = reference_topk(block)
        topk_values = kl if loss.rule.divergence == "topk_kl" else tv
    recomputed = loss.rule.anchor == "recompute"
    return reference_policy.dppo(
        current,
        sampling,
        advantages,
        mask,
        form=reference_policy.MaskForm(
            divergence=loss.rule.divergence,
            delta_low=loss.rule.delta_low,
            delta_high=loss.rule.delta_high,
            ratio_cap=loss.ratio_cap,
        ),
        anchor=numbers(block.inputs["old_logprobs"]) if recomputed else None,
        topk=topk_values,
    )


def reference_topk(block: Block) -> tuple[np.ndarray, np.ndarray]:
    return reference_policy.topk_divergences(
        numbers(block.inputs["current_logits"]),
        block.inputs["topk_token_ids"],
        numbers(block.inputs["rollout_topk_logprobs"]),
    )


def computed_by_reference(block: Block) -> Computed:
    mask = trained(block)
    with np.errstate(invalid="ignore", divide="ignore"):
        terms = reference_terms(block)
    term, slope = terms.term, terms.slope
    if "rollout_is_weights" in block.inputs and block.params.get("loss_mode") == "vanilla":
        weights = np.where(mask, numbers(block.inputs["rollout_is_weights"]), 0.0)
        term, slope = term * weights, slope * weights
    total = reference_aggregation.aggregate(
        term, slope, mask, mode=block.params["loss_agg_mode"], denominator=denominator(block, mask)
    )
    divergences = list(reference_topk(block)) if "topk_token_ids" in block.inputs else None
    return outputs(
        block,
        loss=total.loss,
        grad=total.gradient,
        per_token=term,
        keep=terms.keep,
        divergences=divergences,
    )


def outputs(
    block: Block,
    *,
    loss: float,
    grad: np.ndarray,
    per_token: np.ndarray,
    keep: np.ndarray,
    divergences: list[np.ndarray] | None,
) -> Computed:
    """Put one implementation's results into the golden form."""
    mask = trained(block)
    advantages = np.where(mask, numbers(block.inputs["advantages"]), 0.0)
    dropped = mask & ~keep
    positive = int((dropped & (advantages > 0)).sum())
    negative = int((dropped & (advantages < 0)).sum())
    values: dict[str, Any] = {
        "loss": loss,
        "grad": grad,
        "per_token": per_token,
        "keep_mask": keep.astype(int),
        "n_dropped_positive": positive,
        "n_dropped_negative": negative,
        "masked_fraction_all_loss_tokens": (positive + negative) / int(mask.sum())
        if mask.any()
        else None,
    }
    if "metrics" in block.expected:
        values["metrics"] = metrics(block, keep)
    if divergences is not None:
        values["topk_kl"], values["topk_tv"] = divergences
    if "cross_entropy_weights" in block.expected:
        values["cross_entropy_weights"] = -grad
    finite = np.abs(per_token[mask & np.isfinite(per_token)]).sum()
    share = denominator(block, mask)
    computed = Computed(
        values,
        mask=mask,
        loss_scale=float(finite) / share,
        # Means of log-ratios cancel to about 0; published top-K values are float32 throughout.
        absolute={"topk_kl": 1e-6, "topk_tv": 1e-6}
        | ({"metrics": 1e-6} if block.dtype == "float32" else {}),
    )
    if nonfinite_on_trained(block):
        return computed
    return with_known_differences(block, computed, mask)


def with_known_differences(block: Block, computed: Computed, mask: np.ndarray) -> Computed:
    """Handle what the published code gets wrong: NaN from padding and from an empty mask."""
    gradient = numbers(block.expected["grad"]) if "grad" in block.expected else np.zeros(0)
    if np.isnan(gradient).any():
        leaked = np.isnan(gradient)
        assert not leaked[mask].any(), f"{block.id}: golden gradient is NaN on a trained token"
        assert (computed.values["grad"][leaked] == 0.0).all(), f"{block.id}: padding has a gradient"
        computed.values["grad"] = np.where(leaked, np.nan, computed.values["grad"])
    if np.isnan(numbers(block.expected["loss"])):
        padding_nan = any(
            not np.isfinite(numbers(values)).all()
            for name, values in block.inputs.items()
            if name.endswith("logprobs")
        )
        assert padding_nan or not mask.any(), f"{block.id}: golden loss is NaN without a reason"
        assert np.isfinite(computed.values["loss"]), f"{block.id}: NaN leaked into the loss"
        if not mask.any():
            assert computed.values["loss"] == 0.0, f"{block.id}: an empty mask must give 0"
        computed.not_to_copy = computed.not_to_copy | {"loss"}
    return computed


def metrics(block: Block, keep: np.ndarray) -> dict[str, float]:
    inputs = block.inputs
    with np.errstate(invalid="ignore"):
        if block.params["loss_mode"] == "vanilla":
            return clip_form_metrics(
                target_logprobs=numbers(inputs["current_logprobs"]),
                anchor_logprobs=numbers(inputs["old_logprobs"]),
                advantages=numbers(inputs["advantages"]),
                loss_mask=trained(block),
                bounds=(1 - block.params["delta_low"], 1 + block.params["delta_high"]),
                dual_clip=block.params["clip_ratio_c"],
            )._asdict()
        return mask_form_metrics(
            target_logprobs=numbers(inputs["current_logprobs"]),
            sampling_logprobs=numbers(inputs["rollout_logprobs"]),
            advantages=numbers(inputs["advantages"]),
            loss_mask=trained(block),
            keep=keep,
        )._asdict()
