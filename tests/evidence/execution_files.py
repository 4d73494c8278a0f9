"""An execution file for each of the two real specs, as plain data."""

import json
from pathlib import Path

from evidence.spec import Spec

SEEDS = Path(__file__).parent / "seeds"


def real_spec(name):
    return Spec.parse((SEEDS / f"{name}_spec.json").read_bytes())


def _common(spec, *, rate, rank, environment):
    return {
        "version": 1,
        "spec_sha256": spec.digest,
        "environment": {"name": environment, "settings": {}},
        "denominator": {"kind": "none"},
        "optimizer": {
            "name": "adamw",
            "learning_rate": rate,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        },
        "lora": {
            "rank": rank,
            "seed": 0,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": False,
        },
        "renderer": "qwen3_5_disable_thinking",
        "system_prompt": None,
        "checkpoint_every": 1,
        "feasibility": {"recovery_seconds": 60.0},
        "max_seq_len_policy": "end_episode",
        "sources": {"rollout.groups": "the spec's method"},
    }


def dppo_execution():
    """The settings that the DPPO spec states in its method, as fields."""
    return _common(real_spec("dppo"), rate=2e-5, rank=32, environment="gsm8k") | {
        "arms": {
            "grpo_seed0": {
                "role": "baseline",
                "loss": {
                    "kind": "grpo_clip",
                    "clip_low_threshold": 0.8,
                    "clip_high_threshold": 1.2,
                    "dual_clip": None,
                },
            },
            "dppo_seed0": {
                "role": "treatment",
                "loss": {
                    "kind": "dppo",
                    "divergence": "binary_tv",
                    "anchor": "sampling",
                    "delta_low": 0.15,
                    "delta_high": 0.15,
                    "ratio_cap": 10.0,
                },
            },
        },
        "advantage": {"kind": "group_mean", "std_norm": False},
        "rollout": {
            "groups": 32,
            "group_size": 8,
            "minibatches": 2,
            "epochs": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 512,
        },
        "rollout_steps": 50,
        "pilot": {"arm": "dppo_seed0", "steps": 5},
        "evaluation": {"temperature": 0.0, "max_tokens": 512, "items": 1319, "every": None},
    }


def sdpo_execution():
    """The settings that the SDPO spec states in its method, as fields."""
    served = {"kind": "served", "temperature": 0.0, "max_tokens": 512}
    return _common(real_spec("sdpo"), rate=4e-5, rank=32, environment="tau_retail") | {
        "arms": {
            "grpo": {"role": "baseline", "loss": {"kind": "importance_sampling"}},
            "sdpo_token": {
                "role": "treatment",
                "loss": {"kind": "importance_sampling"},
                "advantage": {
                    "kind": "sdpo_token",
                    "clip": 5.0,
                    "solution_threshold": 0.8,
                    "solution_choice": "best",
                    "exclude_self": True,
                    "feedback": "judge",
                    "feedback_only_without_solution": False,
                    "teacher": "current",
                    "prompt_template": "sdpo-v1",
                    "max_teacher_tokens": 24576,
                    "over_length": "drop_solution",
                },
            },
        },
        "advantage": {"kind": "group_mean", "std_norm": False},
        "rollout": {
            "groups": 4,
            "group_size": 4,
            "minibatches": 1,
            "epochs": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 512,
            "max_turns": 12,
        },
        "rollout_steps": 20,
        "pilot": {"arm": "sdpo_token", "steps": 2, "other_arms": ["grpo"]},
        "evaluation": {"temperature": 0.0, "max_tokens": 512, "items": 60, "every": None},
        "simulator": served | {"model": "Qwen/Qwen3-8B", "prompt_template": "user-v1"},
        "judge": served
        | {
            "model": "openai/gpt-oss-120b",
            "prompt_template": "judge-v1",
            "current_date": "2026-01-01",
        },
        "fallbacks": [{"kind": "frozen_initial_teacher", "source": "the spec's command"}],
        "calibration": {"max_steps": 4, "max_wall_minutes": 15.0},
    }


def as_bytes(document):
    return json.dumps(document).encode()
