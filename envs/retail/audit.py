"""The audit of the generated training tasks: executed, and solved again without their labels."""

import json
import time
from collections.abc import Sequence
from typing import Any

from envs.retail.data import database_sha256, fresh_database
from envs.retail.resolver import RESOLVER_ID, resolve
from envs.retail.tasks import RetailTask, build_tasks
from envs.retail.tools import Shop

DATASET_FILE = "generated-tasks.jsonl"
EVALUATION_FILE = "heldout-tasks.jsonl"
AUDIT_FILE = "generation-audit.json"


def generation_report(*, sample_seed: int = 0) -> dict[str, Any]:
    """Audit the generated training tasks: every one is executed, and solved again blind.

    Returns:
        `report` in the contract's form, `tasks` (the rows of its dataset file), `evaluation` (the
        rows of its held-out file), and the `seconds` that `generation` and `audit` took.
    """
    started = time.perf_counter()
    train, held_out = build_tasks()
    rows = [_row(task) for task in train]
    generated = time.perf_counter()
    accepted = [task for task, row in zip(train, rows, strict=True) if _accepted(row)]
    samples = [_sample(task) for task in accepted]
    labels = {row["item_id"]: row["answer"] for row in rows}
    errors = sum(sample["independent_answer"] != labels[sample["item_id"]] for sample in samples)
    report = {
        "version": 1,
        "stage": "before_training",
        "dataset_file": DATASET_FILE,
        "evaluation_file": EVALUATION_FILE,
        "audit_file": AUDIT_FILE,
        "counts": {
            "generated": len(rows),
            "accepted": len(accepted),
            "rejected": 0,
            "execution_errors": len(rows) - len(accepted),
        },
        "sample_seed": sample_seed,
        "samples": samples,
        "label_error_count": errors,
        "overlap_count": _overlaps(train, held_out),
    }
    evaluation = [{"item_id": task.task_id, "prompt": task.opening} for task in held_out]
    seconds = {"generation": generated - started, "audit": time.perf_counter() - generated}
    return {"report": report, "tasks": rows, "evaluation": evaluation, "seconds": seconds}


def _row(task: RetailTask) -> dict[str, Any]:
    """One generated task; accepted if its label, executed, leads to its goal."""
    shop = Shop(fresh_database())
    worked = all(shop.call(*action).error is None for action in task.actions)
    solved = worked and database_sha256(shop.database) == task.goal_sha256
    return {
        "item_id": task.task_id,
        "prompt": task.opening,
        "answer": json.dumps(list(task.actions[0]), sort_keys=True),
        "disposition": "accepted" if solved else "execution_error",
    }


def _accepted(row: dict[str, Any]) -> bool:
    return bool(row["disposition"] == "accepted")


def _sample(task: RetailTask) -> dict[str, Any]:
    """One task solved again from its opening alone."""
    found = resolve(task.opening, fresh_database())
    return {
        "item_id": task.task_id,
        "resolver_id": RESOLVER_ID,
        "method": "independent_resolve",
        "reasoning": found.reasoning,
        "blind_to_label": True,
        "independent_answer": found.answer,
    }


def _overlaps(train: Sequence[RetailTask], held_out: Sequence[RetailTask]) -> int:
    """Training tasks whose opening is also a held-out one."""
    known = {task.opening.casefold() for task in held_out}
    return sum(task.opening.casefold() in known for task in train)
