"""A finished run, built by hand: 40 items on which the treatment is better, all gates passed."""

from datetime import UTC, datetime, timedelta

from evidence import decision
from evidence.canonical import canonical_bytes, sha256_hex
from evidence.evaluator import evaluator_id
from evidence.gate import CheckResult, GateResult
from evidence.result import StructuredResult
from evidence.run import Run
from evidence.verdict_inputs import final_verdict

ARMS = ("grpo", "dppo")
GATES = ("spec_preflight", "correctness", "restoration", "activation", "feasibility")


def spec(**over):
    """A spec whose rule needs a gain above 0 on a score in [0, 1]."""
    return {
        "title": "A treatment against a baseline",
        "hypothesis": "The treatment scores higher.",
        "success_criterion": "The interval lies above 0.",
        "primary_endpoint": "accuracy@final",
        "arms": [{"name": "grpo", "seed": 0}, {"name": "dppo", "seed": 0}],
        "experiment_features": {
            **{"custom_loss": False, "custom_optimizer": False, "paired_training_arms": True},
            **{"checkpoint_restore": False, "generated_training_data": False},
            **{"paired_comparison": True, "adaptive_selection": False},
        },
        "restoration_preflight": {
            "applicable": True,
            "groups": [{"arms": [{"name": name, "optimizer": "adam"} for name in ARMS]}],
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
        "budget": {"gpu_hours": None, "max_wall_minutes": 60},
        **over,
    }


def execution():
    return {
        "version": 1,
        "arms": {"grpo": {"role": "baseline"}, "dppo": {"role": "treatment"}},
        "rollout": {"groups": 2, "group_size": 2},
    }


class Ticking:
    """A clock that moves one second with every look."""

    def __init__(self):
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self):
        self.now += timedelta(seconds=1)
        return self.now


def provenance(items):
    return {
        "code_sha256": "c" * 64,
        "prompt_template": "{question}",
        "decoding": {"temperature": 0, "max_tokens": 8, "stop": []},
        "parser": "last number",
        "items": {"ids": [f"i{i}" for i in range(items)]},
    }


def initialization_provenance(*, restores=0, actual_after_restore="adamw"):
    """Both arms start from one adapter; each restore is followed by a check of its optimizer."""
    return {
        "version": 1,
        "arms": [
            {
                "arm": arm,
                "initialization": {
                    "base_checkpoint": "m",
                    "adapter_sha256": "d" * 64,
                    "source": "server_response",
                    "evidence_ref": "ledger.jsonl",
                    "before_first_update": True,
                },
                "restore_count": restores,
                "optimizer_checks": [
                    {
                        "after_restore": number,
                        "before_next_update": True,
                        "actual": actual_after_restore if number else "adamw",
                        "source": "server_response",
                        "evidence_ref": "ledger.jsonl",
                    }
                    for number in range(restores + 1)
                ],
            }
            for arm in ARMS
        ],
    }


def _lines(rows):
    return b"".join(canonical_bytes(row) + b"\n" for row in rows)


def write_training(run, *, steps=2):
    """Write rollouts and updates of both arms: rewards rise, drift grows."""
    for arm in ARMS:
        for step in range(steps):
            rows = [
                {
                    "group": group,
                    "sample": sample,
                    "item_id": f"t{group}",
                    "policy_version": 2 * step,
                    "seed": 7,
                    "prompt_tokens": 3,
                    "completion_tokens": 2,
                    "turns": 1,
                    "stop_reason": "stop",
                    "truncated": False,
                    "reward": float(sample == 0 or step > 0),
                    "correct": sample == 0 or step > 0,
                    "parse_failures": 0,
                    "tool_calls": 0,
                    "tool_errors": 0,
                    "advantage": 0.5 - sample if step == 0 else 0.0,
                    "completion_text": "4",
                    "prompt_sha256": "a" * 64,
                }
                for group in range(2)
                for sample in range(2)
            ]
            run.write_table("rollouts", rows, key=(arm, "train", step))
        for update in range(2 * steps):
            drift = 0.01 * (update + 1)
            row = {
                "step": update // 2,
                "epoch": 0,
                "minibatch": update % 2,
                "policy_version_before": update,
                "datums": 2,
                "loss": -0.1,
                "loss_tokens": 4,
                "nonzero_advantage_tokens": 4,
                "denominator": 1.0,
                "learning_rate": 2e-4,
                "masked_fraction": float("nan") if update == 3 else 0.25,
                "drift_abs_q90": float("inf") if (arm, update) == ("grpo", 2) else drift,
            }
            run.write_table("updates", [row], key=(arm, "train", update))


def write_gates(run, **over):
    for name in GATES:
        status = over.get(name, "passed")
        reasons = () if status == "passed" else (f"{name}: planned to be {status}",)
        check = CheckResult(check=f"{name}_check", status=status, tolerance=0.1, measured=0.05)
        run.write_gate(GateResult(name, status, reasons=reasons, checks=(check,)))


def write_scores(run, result, scores, prediction="4"):
    """Post the evaluation of base and arms; ``scores`` maps an arm to its values by item."""
    items = len(scores["grpo"])
    known = provenance(items)
    identity = evaluator_id(known)
    posted = []
    for arm, values in scores.items():
        name = f"predictions-{arm}.jsonl"
        rows = [
            {
                "item_id": f"i{i}",
                "arm": arm,
                "seed": 0,
                "metric": "accuracy",
                "value": value,
                "prediction": prediction if value else "\ud83d <script>alert(1)</script> | `x`",
                "reference": "4",
                "evaluator_id": identity,
            }
            for i, value in enumerate(values)
        ]
        run.write_file(name, _lines(rows))
        posted.append(
            {
                "arm": arm,
                "metric": "accuracy",
                "value": sum(values) / len(values),
                "evaluator_id": identity,
                "seed": 0,
                "predictions_ref": name,
            }
        )
    evaluation = {
        "version": 1,
        "evaluators": {identity: known},
        "scores": posted,
        "comparisons": [{"metric": "accuracy", "arms": list(ARMS)}],
    }
    result.post_block("evaluation", evaluation)
    return evaluation


def write_decision(run, result, evaluation, scores):
    identity = next(iter(evaluation["evaluators"]))
    rows = [
        {
            "item_id": f"i{i}",
            "arm": arm,
            "seed": 0,
            "metric": "accuracy",
            "value": value,
            "evaluator_id": identity,
        }
        for arm in ARMS
        for i, value in enumerate(scores[arm])
    ]
    run.write_table("observations", rows)
    data = _lines(rows)
    run.write_file("scored-observations.jsonl", data)
    report = {
        "version": 1,
        "observations_file": {"name": "scored-observations.jsonl", "sha256": sha256_hex(data)},
    }
    result.post_block("decision", report)
    return decision.validate(
        run.spec,
        report,
        evaluation=evaluation,
        files={"scored-observations.jsonl": data},
        roles={"treatment": "dppo", "baseline": "grpo"},
    )


def build_finished_run(
    root,
    name="r1",
    *,
    treatment=40,
    baseline=10,
    items=40,
    gates=None,
    deviations=(),
    prediction="4",
    initialization=None,
):
    """Write a run from start to verdict; arguments change scores, gates or deviations."""
    run = Run.create(
        str(root),
        run_id=name,
        spec=spec(),
        execution=execution(),
        identity={"base_sha256": "b" * 64, "limit": None},
        clock=Ticking(),
    )
    run.append("started", attempt=1)
    result = StructuredResult(run)
    result.start("Started.")
    result.deviate(
        list(deviations),
        original_hypothesis_tested=not deviations,
        tested_instead="The same on fewer items." if deviations else None,
    )
    run.write_json("effective-config.json", {"steps": 4, "arms": list(ARMS)})
    write_gates(run, **(gates or {}))
    result.post_block("initialization_provenance", initialization or initialization_provenance())
    scores = {
        "base": [0.0] * items,
        "grpo": [float(i < baseline) for i in range(items)],
        "dppo": [float(i < treatment) for i in range(items)],
    }
    result.post_base({"accuracy": 0.0})
    write_training(run)
    run.append(
        "checkpoint",
        arm="dppo",
        phase="train",
        step=1,
        policy_version=4,
        uri="tinker://m/weights/s4",
    )
    for arm in ARMS:
        result.complete_arm(arm, {"accuracy": sum(scores[arm]) / items})
    evaluation = write_scores(run, result, scores, prediction)
    judged = write_decision(run, result, evaluation, scores)
    final = final_verdict(
        judged,
        spec=run.spec,
        result={**result.current, "status": "succeeded"},
        gates={name: (gates or {}).get(name, "passed") for name in GATES},
        files={},
        identity=run.identity,
    )
    result.finish(
        status="succeeded",
        verdict=final.verdict,
        outcome_reason=final.outcome_reason,
        summary="Both arms ran. The interval was compared with the margin.",
    )
    return run
