"""Inputs whose decision is known beforehand: tokens that must and must not lose their gradient.

Expected values are literals worked out by hand, not computed by any loss. They are run through the
torch losses and through the float64 reference, in gates and in offline investigations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from losses.inputs import LossInputs, TokenLoss
from losses.parity import reference_terms
from losses.registry import make_loss

NAN, MINUS_INFINITY = float("nan"), float("-inf")
HALF = math.log(0.5)
FLOAT32_STEP_BELOW_HALF = 0.5 - 2.0**-25
GRADIENT_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedToken:
    """One token and what must become of it."""

    name: str
    why: str
    target: float
    """Current log-probability, nats."""
    sampling: float
    """Sampling log-probability, nats."""
    advantage: float
    keep: bool
    """Expected decision; False off the mask."""
    removed: bool
    """Whether a non-zero gradient must be removed: engagement of the treatment."""
    gradient: float
    """Expected d loss / d target of the sum."""
    trained: bool = True


@dataclass(frozen=True, slots=True)
class ForcedSet:
    """Tokens that share one loss configuration."""

    name: str
    config: Mapping[str, Any]
    tokens: tuple[ForcedToken, ...]


@dataclass(frozen=True, slots=True)
class ForcedResult:
    """One token through one implementation."""

    case: str
    token: str
    implementation: str
    """``torch`` or ``reference``."""
    passed: bool
    expected: tuple[bool, bool, float]
    """keep, removed, gradient."""
    actual: tuple[bool, bool, float]


def dppo_config(**over: Any) -> dict[str, Any]:
    """Return a DPPO configuration for forced cases: TV, delta 0.15 on both sides, cap 10."""
    config: dict[str, Any] = {
        "kind": "dppo",
        "divergence": "binary_tv",
        "anchor": "sampling",
        "delta_low": 0.15,
        "delta_high": 0.15,
        "ratio_cap": 10.0,
    }
    return config | over


def log(p: float) -> float:
    """Return the log of a probability, -inf for 0."""
    return math.log(p) if p > 0.0 else MINUS_INFINITY


DIRECTIONS = (
    ForcedToken(
        name="up_positive",
        why="0.5 -> 0.75 beyond 0.15, A > 0 pushes further up",
        target=log(0.75), sampling=HALF, advantage=1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="down_negative",
        why="0.5 -> 0.25 beyond 0.15, A < 0 pushes further down",
        target=log(0.25), sampling=HALF, advantage=-1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="down_positive_recovers",
        why="0.5 -> 0.25 beyond 0.15, but A > 0 brings it back: -1 * 0.25 / 0.5",
        target=log(0.25), sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-0.5,
    ),
    ForcedToken(
        name="up_negative_recovers",
        why="0.5 -> 0.75 beyond 0.15, but A < 0 brings it back: 2 * 0.75 / 0.5",
        target=log(0.75), sampling=HALF, advantage=-2.0,
        keep=True, removed=False, gradient=3.0,
    ),
    ForcedToken(
        name="within_up",
        why="0.5 -> 0.6 is within 0.15: -1 * 0.6 / 0.5",
        target=log(0.6), sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-1.2,
    ),
    ForcedToken(
        name="within_down",
        why="0.5 -> 0.4 is within 0.15: 1 * 0.4 / 0.5",
        target=log(0.4), sampling=HALF, advantage=-1.0,
        keep=True, removed=False, gradient=0.8,
    ),
    ForcedToken(
        name="unmoved",
        why="no drift at all",
        target=HALF, sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-1.0,
    ),
)  # fmt: skip

INERT = (
    ForcedToken(
        name="zero_advantage_up",
        why="A = 0 upwards: kept by the published side rule, nothing to remove",
        target=log(0.75), sampling=HALF, advantage=0.0,
        keep=True, removed=False, gradient=0.0,
    ),
    ForcedToken(
        name="zero_advantage_down",
        why="A = 0 downwards: not kept by the published side rule, and still no engagement",
        target=log(0.25), sampling=HALF, advantage=0.0,
        keep=False, removed=False, gradient=0.0,
    ),
    ForcedToken(
        name="padding_nan",
        why="NaN under the mask is inert",
        target=NAN, sampling=NAN, advantage=NAN,
        keep=False, removed=False, gradient=0.0, trained=False,
    ),
    ForcedToken(
        name="padding_infinite",
        why="-inf under the mask is inert",
        target=MINUS_INFINITY, sampling=MINUS_INFINITY, advantage=1.0,
        keep=False, removed=False, gradient=0.0, trained=False,
    ),
    ForcedToken(
        name="padding_that_would_be_dropped",
        why="a tool token beyond delta is no engagement",
        target=log(0.75), sampling=HALF, advantage=1.0,
        keep=False, removed=False, gradient=0.0, trained=False,
    ),
)  # fmt: skip

TAILS = (
    ForcedToken(
        name="tail_rises_within_tail",
        why="e^-30 -> e^-28 is a ratio of e^2 = 7.389056098930650 and no probability at all",
        target=-28.0, sampling=-30.0, advantage=1.0,
        keep=True, removed=False, gradient=-7.389056098930650,
    ),
    ForcedToken(
        name="tail_falls",
        why="e^-28 -> e^-30: ratio e^-2 = 0.1353352832366127",
        target=-30.0, sampling=-28.0, advantage=-1.0,
        keep=True, removed=False, gradient=0.1353352832366127,
    ),
    ForcedToken(
        name="tail_becomes_likely",
        why="e^-30 -> 0.5, A > 0 pushes further up",
        target=HALF, sampling=-30.0, advantage=1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="likely_becomes_tail",
        why="0.5 -> e^-30, A < 0 pushes further down",
        target=-30.0, sampling=HALF, advantage=-1.0,
        keep=False, removed=True, gradient=0.0,
    ),
)  # fmt: skip

CAP = (
    ForcedToken(
        name="cap_hit",
        why="0.01 -> 0.15 is within 0.15 with ratio 15, weighted with 10",
        target=log(0.15), sampling=log(0.01), advantage=1.0,
        keep=True, removed=False, gradient=-10.0,
    ),
    ForcedToken(
        name="cap_hit_negative",
        why="the cap does not depend on the sign: 0.5 * 10",
        target=log(0.15), sampling=log(0.01), advantage=-0.5,
        keep=True, removed=False, gradient=5.0,
    ),
    ForcedToken(
        name="below_cap",
        why="0.02 -> 0.16: ratio 8",
        target=log(0.16), sampling=log(0.02), advantage=1.0,
        keep=True, removed=False, gradient=-8.0,
    ),
    ForcedToken(
        name="beyond_20_nats",
        why="e^-60 -> e^-38: 22 nats are limited to 20 and then to the cap",
        target=-38.0, sampling=-60.0, advantage=1.0,
        keep=True, removed=False, gradient=-10.0,
    ),
)  # fmt: skip

AT_DELTA = (
    ForcedToken(
        name="exactly_delta_up",
        why="0.5 -> 1 moves by exactly 0.5: kept, the test is strict",
        target=0.0, sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-2.0,
    ),
    ForcedToken(
        name="exactly_delta_down",
        why="1 -> 0.5 moves by exactly 0.5: kept",
        target=HALF, sampling=0.0, advantage=-1.0,
        keep=True, removed=False, gradient=0.5,
    ),
)  # fmt: skip

BEYOND_DELTA = (
    ForcedToken(
        name="one_step_beyond_up",
        why="0.5 -> 1 against a delta one float32 step below 0.5",
        target=0.0, sampling=HALF, advantage=1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="one_step_beyond_down",
        why="1 -> 0.5 against a delta one float32 step below 0.5",
        target=HALF, sampling=0.0, advantage=-1.0,
        keep=False, removed=True, gradient=0.0,
    ),
)  # fmt: skip

ASYMMETRIC = (
    ForcedToken(
        name="up_uses_high",
        why="0.5 -> 0.7 is within delta_high 0.25: 0.7 / 0.5",
        target=log(0.7), sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-1.4,
    ),
    ForcedToken(
        name="down_uses_low",
        why="0.5 -> 0.3 is beyond delta_low 0.1",
        target=log(0.3), sampling=HALF, advantage=-1.0,
        keep=False, removed=True, gradient=0.0,
    ),
)  # fmt: skip

KL = (
    ForcedToken(
        name="kl_up_beyond",
        why="KL(0.5 || 0.75) = 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.1438 > 0.05",
        target=log(0.75), sampling=HALF, advantage=1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="kl_recovers",
        why="the same drift with A < 0 comes back: 0.75 / 0.5",
        target=log(0.75), sampling=HALF, advantage=-1.0,
        keep=True, removed=False, gradient=1.5,
    ),
    ForcedToken(
        name="kl_within",
        why="KL(0.5 || 0.6) = 0.0204 <= 0.05",
        target=log(0.6), sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-1.2,
    ),
    ForcedToken(
        name="kl_tail_ratio",
        why="0.01 -> 0.04: KL = 0.0164 although the ratio is 4",
        target=log(0.04), sampling=log(0.01), advantage=1.0,
        keep=True, removed=False, gradient=-4.0,
    ),
)  # fmt: skip

CLIP = (
    ForcedToken(
        name="clip_up_positive",
        why="ratio 1.5 > 1.2, A > 0",
        target=log(0.75), sampling=HALF, advantage=1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="clip_down_negative",
        why="ratio 0.5 < 0.8, A < 0",
        target=log(0.25), sampling=HALF, advantage=-1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="clip_recovers",
        why="ratio 0.5 < 0.8, but A > 0",
        target=log(0.25), sampling=HALF, advantage=1.0,
        keep=True, removed=False, gradient=-0.5,
    ),
    ForcedToken(
        name="clip_tail_ratio",
        why="e^-30 -> e^-28: ratio 7.39 > 1.2, removed although no probability moved",
        target=-28.0, sampling=-30.0, advantage=1.0,
        keep=False, removed=True, gradient=0.0,
    ),
    ForcedToken(
        name="clip_zero_advantage",
        why="A = 0: nothing is removed",
        target=log(0.75), sampling=HALF, advantage=0.0,
        keep=True, removed=False, gradient=0.0,
    ),
    ForcedToken(
        name="clip_padding",
        why="NaN under the mask is inert",
        target=NAN, sampling=0.0, advantage=1.0,
        keep=False, removed=False, gradient=0.0, trained=False,
    ),
)  # fmt: skip

FORCED_SETS: tuple[ForcedSet, ...] = (
    ForcedSet("dppo_tv_directions", dppo_config(), DIRECTIONS),
    ForcedSet("dppo_tv_inert", dppo_config(), INERT),
    ForcedSet("dppo_tv_tails", dppo_config(), TAILS),
    ForcedSet("dppo_tv_cap", dppo_config(), CAP),
    ForcedSet("dppo_tv_at_delta", dppo_config(delta_low=0.5, delta_high=0.5), AT_DELTA),
    ForcedSet(
        "dppo_tv_beyond_delta",
        dppo_config(delta_low=FLOAT32_STEP_BELOW_HALF, delta_high=FLOAT32_STEP_BELOW_HALF),
        BEYOND_DELTA,
    ),
    ForcedSet("dppo_tv_asymmetric", dppo_config(delta_low=0.1, delta_high=0.25), ASYMMETRIC),
    ForcedSet("dppo_kl", dppo_config(divergence="binary_kl", delta_low=0.05, delta_high=0.05), KL),
    ForcedSet(
        "grpo_clip",
        {
            "kind": "grpo_clip",
            "clip_low_threshold": 0.8,
            "clip_high_threshold": 1.2,
            "dual_clip": None,
        },
        CLIP,
    ),
)
"""Every forced case, by loss configuration."""


def run_forced_cases(
    sets: Sequence[ForcedSet] = FORCED_SETS,
    *,
    build: Callable[[Mapping[str, Any]], TokenLoss] = make_loss,
) -> list[ForcedResult]:
    """Run every forced token through the torch loss and the reference.

    Args:
        sets: which cases.
        build: what turns a configuration into the loss under test.

    Returns:
        One result per token and implementation; a caller requires that all passed.
    """
    results: list[ForcedResult] = []
    for case in sets:
        results += compared(case, "torch", torch_outcomes(case, build(case.config)))
        results += compared(case, "reference", reference_outcomes(case))
    return results


def torch_outcomes(case: ForcedSet, loss: TokenLoss) -> list[tuple[bool, float]]:
    """Return keep and gradient of every token by the torch loss."""
    target = torch.tensor([t.target for t in case.tokens], dtype=torch.float64).requires_grad_(True)
    inputs = LossInputs(
        sampling_logprobs_T=torch.tensor([t.sampling for t in case.tokens], dtype=torch.float64),
        advantages_T=torch.tensor([t.advantage for t in case.tokens], dtype=torch.float64),
        loss_mask_T=torch.tensor([t.trained for t in case.tokens]),
    )
    output = loss(target, inputs)
    (gradient,) = torch.autograd.grad(output.loss, target)
    return list(zip(output.keep_T.tolist(), gradient.tolist(), strict=True))


def reference_outcomes(case: ForcedSet) -> list[tuple[bool, float]]:
    """Return keep and gradient of every token by the reference."""
    terms = reference_terms(
        case.config,
        current=[t.target for t in case.tokens],
        sampling=[t.sampling for t in case.tokens],
        advantages=[t.advantage for t in case.tokens],
        mask=[t.trained for t in case.tokens],
    )
    return list(zip(terms.keep.tolist(), terms.slope.tolist(), strict=True))


def compared(
    case: ForcedSet, implementation: str, outcomes: Sequence[tuple[bool, float]]
) -> list[ForcedResult]:
    """Compare outcomes with what must be."""
    results = []
    for token, (keep, gradient) in zip(case.tokens, outcomes, strict=True):
        removed = token.trained and token.advantage != 0 and not keep
        close = abs(gradient - token.gradient) <= GRADIENT_TOLERANCE * max(1.0, abs(token.gradient))
        results.append(
            ForcedResult(
                case.name,
                token.name,
                implementation,
                passed=(keep, removed) == (token.keep, token.removed) and close,
                expected=(token.keep, token.removed, token.gradient),
                actual=(keep, removed, gradient),
            )
        )
    return results
