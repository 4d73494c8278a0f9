"""What a correctness report claims: only checks that were compared with something stock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evidence import correctness
from tasks.context import RunContext
from tasks.correctness import _report
from tests.flows import tiny_spec

EXACT = {
    "max_abs_error": 0.0,
    "reference_max_abs": 1.0,
    "relative_l2_error": 0.0,
    "cosine_similarity": 1.0,
}


def _measured(*stock: str) -> dict[str, Any]:
    compared = [{"check": check, "what": "x", "errors": EXACT} for check in ("loss", "gradient")]
    return {
        "inputs": [],
        "forced_inputs": {},
        "stock_compared": list(stock),
        "comparisons": {"baseline": compared, "reference": compared},
    }


@pytest.mark.parametrize(
    ("stock", "missing"),
    [
        (("gradient", "loss"), []),
        (("loss",), ["baseline_gradient"]),
        ((), ["baseline_loss", "baseline_gradient"]),
    ],
)
def test_baseline_that_was_compared_with_nothing_stock_is_unverified(
    stock: tuple[str, ...], missing: list[str]
) -> None:
    document = tiny_spec.spec()
    plan = document["correctness_preflight"]["paths"][0]
    ctx = cast(RunContext, SimpleNamespace(server=SimpleNamespace(local={}), trained_arms=()))

    path = _report(ctx, plan, _measured(*stock))

    result = correctness.validate(document, {"required": True, "paths": [path]})
    assert [row.check for row in result.checks if row.status == "unverified"] == missing


@pytest.mark.parametrize(
    ("local", "words"), [({"dtype": "bfloat16"}, "bfloat16"), ({}, "not reported")]
)
def test_precision_is_what_the_service_says(local: dict[str, Any], words: str) -> None:
    ctx = cast(RunContext, SimpleNamespace(server=SimpleNamespace(local=local), trained_arms=()))

    path = _report(ctx, {"id": "losses"}, _measured())

    assert path["precision"].startswith(f"matrix products of the service: {words};")
