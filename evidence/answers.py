"""Agreement of answers, overlap of prompts, and which tasks are audited: the rules of the audit."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from evidence.canonical import digest
from evidence.values import as_mapping, is_integer, is_number

ANSWER_COMPARISONS = ("numeric_exact", "categorical_exact")

_MAX_NUMBER_CHARS = 400
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_RATIO = re.compile(r"[+-]?[0-9]+/[0-9]+")


def answer_agreement(label: object, independent_answer: object, strategy: object) -> bool | None:
    """Say whether an independent answer agrees with a label under a declared comparison.

    ``numeric_exact`` compares scalar numbers and fractions exactly, with no tolerance and never as
    floats: ``2/4`` agrees with ``0.5``, ``0.1`` does not with ``0.10000000000000001``.
    ``categorical_exact`` is equality of non-empty text: case and white space count.

    Args:
        label: the stored answer, as text or a number.
        independent_answer: the answer of an independent solver.
        strategy: ``numeric_exact`` or ``categorical_exact``.

    Returns:
        True or False; None if the two cannot be compared: no or another strategy, or an answer
        that is no scalar number (NaN, infinity, 1/0, words) or no text.
    """
    if strategy == "numeric_exact":
        numbers = exact_number(label), exact_number(independent_answer)
        return None if None in numbers else numbers[0] == numbers[1]
    if strategy == "categorical_exact":
        both = (label, independent_answer)
        if not all(isinstance(answer, str) and answer for answer in both):
            return None
        return label == independent_answer
    return None


def exact_number(answer: object) -> Fraction | None:
    """Return the exact value of a scalar number or fraction, None if the answer is none.

    White space around the number is ignored. A float stands for its shortest decimal form.
    """
    if is_integer(answer):
        return Fraction(answer)
    text = repr(answer) if isinstance(answer, float) and is_number(answer) else answer
    if not isinstance(text, str) or len(text) > _MAX_NUMBER_CHARS:
        return None
    text = text.strip()
    if not (_DECIMAL.fullmatch(text) or _RATIO.fullmatch(text)):
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def normalize_prompt(prompt: str) -> str:
    """Return a prompt in NFKC form, case folded, each run of white space one space."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def accepted_tasks(tasks: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the tasks that were accepted; a task without a disposition counts as accepted."""
    rows = [task for task in tasks if isinstance(task, Mapping)]
    return [task for task in rows if task.get("disposition", "accepted") == "accepted"]


def evaluation_overlap(tasks: Sequence[Any], evaluation: Sequence[Any]) -> list[str]:
    """Return the ids of accepted tasks whose prompt is also in the held-out set.

    Prompts are compared by `normalize_prompt`. Paraphrases are not found.

    Args:
        tasks: rows with ``item_id``, ``prompt`` and, where known, ``disposition``.
        evaluation: rows with ``prompt``: the full frozen evaluation set.
    """
    held_out = {
        normalize_prompt(prompt)
        for prompt in (as_mapping(row).get("prompt") for row in evaluation)
        if isinstance(prompt, str)
    }
    return [
        str(task.get("item_id"))
        for task in accepted_tasks(tasks)
        if isinstance(task.get("prompt"), str) and normalize_prompt(task["prompt"]) in held_out
    ]


def select_sample(tasks: Sequence[Any], size: int, seed: int) -> list[Mapping[str, Any]]:
    """Choose which accepted tasks are audited.

    Args:
        tasks: rows with ``item_id``; rejected ones and rows without an id are passed over.
        size: how many to choose; all of them if there are fewer.
        seed: the audit's ``sample_seed``.

    Returns:
        The accepted tasks with the smallest SHA-256 of the canonical JSON ``[seed,item_id]``, in
        the order of that hash.
    """
    rows = [task for task in accepted_tasks(tasks) if isinstance(task.get("item_id"), str)]
    return sorted(rows, key=lambda task: digest([seed, task["item_id"]]))[: max(size, 0)]
