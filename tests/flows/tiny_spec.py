"""A small comparison on the tiny model, and ways to change it."""

from __future__ import annotations

import copy
from typing import Any

from evidence.canonical import digest

Document = dict[str, Any]

TOLERANCE = {"atol": 1e-05, "rtol": 0.001}
GRADIENT = {**TOLERANCE, "min_cosine": 0.999}
OPTIMIZER = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08}
REFERENCE = "gated-rl losses/reference"

SPEC: Document = {
    "title": "Two losses on the tiny model",
    "hypothesis": "The mask is better than the clip on sums of small numbers.",
    "method": "Two losses, everything else equal.",
    "baseline": "The clipped ratio.",
    "success_criterion": "The interval lies above 0.",
    "base_model": "tiny",
    "lora_rank": 4,
    "dataset": {"name": "arithmetic", "split": "train", "n_examples": 8},
    "optimizer": {"name": "adam", "lr": 0.05},
    "steps": 4,
    "batch_size": 32,
    "max_seq_len": 256,
    "eval": {"benchmark": "arithmetic", "metric": "greedy accuracy", "n_examples": 10},
    "experiment_features": {
        "custom_loss": True,
        "custom_optimizer": False,
        "paired_comparison": True,
        "paired_training_arms": True,
        "checkpoint_restore": False,
        "warmup_adaptation": False,
        "generated_training_data": False,
        "learned_generator": False,
        "heldout_loss": False,
        "adaptive_selection": False,
    },
    "correctness_preflight": {
        "required": True,
        "paths": [
            {
                "id": "losses",
                "kind": "loss",
                "baseline_revision": REFERENCE,
                "reference_revision": REFERENCE,
                "tolerances": {
                    "baseline_loss": TOLERANCE,
                    "baseline_gradient": GRADIENT,
                    "reference_loss": TOLERANCE,
                    "reference_gradient": GRADIENT,
                },
            }
        ],
    },
    "activation_gate": {
        "applicable": True,
        "reason": "The pilot must take two updates per batch of the planned model.",
        "checks": [
            {"metric": "dppo_masked_token_fraction", "min": 0.0, "max": 1.0},
            {"metric": "policy_drift_abs_p_q90", "min": 0.0},
            {"metric": "grpo_clip_fraction", "min": 0.0},
            {"metric": "executed_updates_per_batch", "min": 2, "max": 2},
            {"metric": "executed_base_model", "one_of": ["tiny"]},
        ],
    },
    "restoration_preflight": {
        "applicable": True,
        "fixed_batch_required": True,
        "groups": [
            {
                "arms": [
                    {"name": "grpo", "optimizer": "adam", "optimizer_config": OPTIMIZER},
                    {"name": "dppo", "optimizer": "adam", "optimizer_config": OPTIMIZER},
                ]
            }
        ],
    },
    "decision_rule": {
        "version": 1,
        "unit": "fixed_checkpoint_items",
        "seeds": [0],
        "alpha": 0.05,
        "method": "paired_hoeffding",
        "criteria": [
            {
                "id": "primary",
                "metric": "accuracy",
                "weights": {"treatment": 1, "baseline": -1},
                "margin": 0.0,
                "bounds": [0, 1],
            }
        ],
    },
    "primary_endpoint": "accuracy on held-out sums at the final checkpoint",
    "arms": [
        {"name": "grpo", "loss": "clip", "seed": 0, "lr": 0.05, "updates_per_batch": 2},
        {"name": "dppo", "loss": "mask", "seed": 0, "lr": 0.05, "updates_per_batch": 2},
    ],
    "feasibility_required": True,
    "budget": {"max_wall_minutes": 30},
    "generation_audit": {"required": False},
}

GRPO = {
    "kind": "grpo_clip",
    "clip_low_threshold": 0.8,
    "clip_high_threshold": 1.2,
    "dual_clip": None,
}
DPPO = {
    "kind": "dppo",
    "divergence": "binary_tv",
    "anchor": "sampling",
    "delta_low": 0.001,
    "delta_high": 0.001,
    "ratio_cap": 10.0,
}

EXECUTION: Document = {
    "version": 1,
    "environment": {"name": "arithmetic", "settings": {"operand_max": 4, "held_out": 10}},
    "arms": {
        "grpo": {"role": "baseline", "loss": GRPO},
        "dppo": {"role": "treatment", "loss": DPPO},
    },
    "advantage": {"kind": "group_mean", "std_norm": False},
    "denominator": {"kind": "none"},
    "rollout": {
        "groups": 4,
        "group_size": 8,
        "minibatches": 2,
        "epochs": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 40,
    },
    "optimizer": {"name": "adamw", **OPTIMIZER, "weight_decay": 0.0, "grad_clip_norm": 0.0},
    "rollout_steps": 2,
    "lora": {"rank": 4, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": False},
    "renderer": "qwen3_instruct",
    "system_prompt": "Add.",
    "pilot": {"arm": "dppo", "steps": 2},
    "checkpoint_every": 1,
    "evaluation": {"temperature": 0.0, "max_tokens": 6, "items": 10, "every": None},
    "feasibility": {"recovery_seconds": 5.0},
    "max_seq_len_policy": "fail",
}


def spec(**changes: Any) -> Document:
    """The small spec with top-level fields replaced."""
    return copy.deepcopy(SPEC) | copy.deepcopy(changes)


def execution(document: Document, **changes: Any) -> Document:
    """The execution file of a spec, with top-level fields replaced."""
    made = copy.deepcopy(EXECUTION) | copy.deepcopy(changes)
    return {"spec_sha256": digest(document), **made}


def same_arm_twice() -> tuple[Document, Document]:
    """A control: both arms are the same thing under two names."""
    document = spec()
    checks = document["activation_gate"]["checks"]
    document["activation_gate"]["checks"] = [
        check for check in checks if check["metric"] != "grpo_clip_fraction"
    ]
    made = execution(document)
    made["arms"]["grpo"]["loss"] = copy.deepcopy(DPPO)
    return document, made
