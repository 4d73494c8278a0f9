"""GRPO against SDPO in the embedded shop on the tiny model: small, and everything a run needs.

The tiny model writes noise, so that every attempt earns the same composite. The bar for a solution
lies below it: siblings are shown, and the teacher's scores differ from the sampler's.
"""

from __future__ import annotations

import copy
from typing import Any

from evidence.canonical import digest
from tests.flows import tiny_spec
from tests.flows.tiny_spec import Document

SDPO: Document = {
    "kind": "sdpo_token",
    "clip": 5.0,
    "solution_threshold": 0.3,
    "solution_choice": "best",
    "exclude_self": True,
    "feedback": "judge",
    "feedback_only_without_solution": False,
    "teacher": "current",
    "prompt_template": "sdpo-system-v1",
    "max_teacher_tokens": 4000,
    "over_length": "drop_solution",
}
IMPORTANCE: Document = {"kind": "importance_sampling"}
CHECKS = [
    {"metric": "sdpo_frac_tokens_abs_adv_gt_0.1", "min": 0.05},
    {"metric": "sdpo_mean_abs_token_adv", "min": 0.01, "max": 3.0},
    {"metric": "sdpo_frac_trajectories_with_feedback", "min": 0.9},
    {"metric": "grpo_frac_groups_nonzero_adv", "min": 0.0},
    {"metric": "judge_parse_success_rate", "min": 0.95},
    {"metric": "executed_base_model", "one_of": ["tiny"]},
]


def spec(**changes: Any) -> Document:
    """The small spec with top-level fields replaced."""
    document = tiny_spec.spec(
        title="GRPO and SDPO on the tiny model",
        dataset={"name": "shop", "split": "train", "n_examples": 4},
        optimizer={"name": "adam", "lr": 0.01},
        steps=2,
        batch_size=6,
        max_seq_len=1024,
        eval={"benchmark": "shop", "metric": "composite", "n_examples": 2},
        arms=[
            {"name": "grpo", "loss": "importance", "seed": 0, "lr": 0.01, "updates_per_batch": 1},
            {"name": "sdpo", "loss": "importance", "seed": 0, "lr": 0.01, "updates_per_batch": 1},
        ],
        primary_endpoint="composite_rubric_score on held-out tasks at the final checkpoint",
    )
    document["activation_gate"]["checks"] = copy.deepcopy(CHECKS)
    document["decision_rule"]["criteria"] = [
        _criterion("primary", "composite_rubric_score", 0.03),
        _criterion("reward_guard", "task_reward", -0.1),
    ]
    document["restoration_preflight"]["groups"] = [
        {
            "arms": [
                {
                    "name": name,
                    "optimizer": "adam",
                    "optimizer_config": tiny_spec.OPTIMIZER | {"learning_rate": 0.01},
                }
                for name in ("grpo", "sdpo")
            ]
        }
    ]
    paths = document["correctness_preflight"]["paths"]
    document["correctness_preflight"]["paths"] = [
        paths[0] | {"id": "grpo_via_new_advantage_path"},
        paths[0] | {"id": "sdpo_token_advantage"},
    ]
    return document | copy.deepcopy(changes)


def _criterion(name: str, metric: str, margin: float) -> Document:
    return {
        "id": name,
        "metric": metric,
        "weights": {"treatment": 1, "baseline": -1},
        "margin": margin,
        "bounds": [0, 1],
    }


def execution(document: Document, *, sdpo: Document | None = None, **changes: Any) -> Document:
    """The execution file of a spec, with settings of the SDPO advantage and top-level fields."""
    made = tiny_spec.execution(
        document,
        environment={"name": "retail", "settings": {"reward": "composite"}},
        arms={
            "grpo": {"role": "baseline", "loss": IMPORTANCE},
            "sdpo": {"role": "treatment", "loss": IMPORTANCE, "advantage": SDPO | (sdpo or {})},
        },
        system_prompt="Help.",
        rollout_steps=2,
        pilot={"arm": "sdpo", "steps": 1, "other_arms": ["grpo"]},
        max_seq_len_policy="end_episode",
        simulator={"kind": "scripted"},
        judge={"kind": "rules"},
    )
    made["optimizer"]["learning_rate"] = 0.01
    made["rollout"] |= {
        "groups": 2, "group_size": 3, "minibatches": 1, "max_tokens": 40, "max_turns": 3,
    }  # fmt: skip
    made["evaluation"] |= {"items": 2, "max_tokens": 24}
    return made | copy.deepcopy(changes) | {"spec_sha256": digest(document)}


def hybrid_execution(document: Document) -> Document:
    """GRPO's advantage mixed with that of the frozen initial teacher."""
    return execution(
        document, sdpo={"kind": "sdpo_hybrid", "grpo_weight": 0.25, "teacher": "initial"}
    )
