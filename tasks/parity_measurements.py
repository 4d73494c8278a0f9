"""What a correctness preflight measures: a loss through the service, against what it must equal.

Three comparisons, of which the worst counts for each check:

* the training path against the independent float64 reference, on log-probabilities that the
  service returned and on made-up ones that reach both sides of every threshold;
* the same sequences joined end to end against one at a time (packed and unpacked);
* the gradient that the service back-propagates: its own surrogate sum against the one computed
  here, and, for a loss that it has built in, its loss value and the weights after one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from evidence.parity import parity_errors
from losses.errors import LossConfigError
from losses.inputs import LossInputs
from losses.objective import batch_loss
from losses.parity import reference_terms
from losses.reference import sdpo
from losses.reference.arrays import TokenTerms
from losses.support_columns import step_loss

Errors = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured comparison.

    Attributes:
        check: ``loss`` or ``gradient``.
        what: what was compared with what.
        errors: the four numbers of the contract.
    """

    check: str
    what: str
    errors: Errors

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return {"check": self.check, "what": self.what, "errors": dict(self.errors)}


class GradientProbe:
    """A loss as the SDK calls it, which keeps the gradient that the SDK is about to send."""

    def __init__(self, loss: Mapping[str, Any], inputs_D: Sequence[LossInputs]) -> None:
        self._loss, self.inputs_D = step_loss(loss), list(inputs_D)
        self.logprobs_D: list[NDArray[np.float32]] = []
        self.losses_D: list[float] = []
        self.gradients_D: list[NDArray[np.float32]] = []

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss; differentiate it once here and leave it for the SDK to do again."""
        result = batch_loss(self._loss, logprobs, self.inputs_D, denominator=1.0)
        gradients = torch.autograd.grad(result.loss, logprobs, retain_graph=True)
        self.logprobs_D = [values.detach().numpy().copy() for values in logprobs]
        self.gradients_D = [values.numpy().copy() for values in gradients]
        self.losses_D = [float(output.loss) for output in result.outputs_D]
        return result.loss, {}

    def run(self, logprobs_D: Sequence[NDArray[np.float32]]) -> None:
        """Compute it on given log-probabilities, as the SDK would."""
        leaves = [torch.from_numpy(values.copy()).requires_grad_() for values in logprobs_D]
        self([], leaves)

    @property
    def surrogate_sum(self) -> float:
        """What the service's cross-entropy must report for the gradient that it is sent.

        Its weights are minus the gradient, and it sums ``-log-probability * weight``.
        """
        return sum(
            float((values.astype(np.float64) * gradient.astype(np.float64)).sum())
            for values, gradient in zip(self.logprobs_D, self.gradients_D, strict=True)
        )


def against_reference(
    loss: Mapping[str, Any], probe: GradientProbe, where: str
) -> list[Comparison]:
    """The path's loss and full gradient against the independent reference."""
    terms = [
        reference_of(loss, values, inputs)
        for values, inputs in zip(probe.logprobs_D, probe.inputs_D, strict=True)
    ]
    return compared(
        f"{where}, against the float64 reference",
        probe,
        losses=[float(term.term.sum()) for term in terms],
        slopes=[term.slope for term in terms],
    )


def reference_of(
    loss: Mapping[str, Any], target_logprobs: NDArray[Any], inputs: LossInputs
) -> TokenTerms:
    """The independent reference's terms and slopes of one sequence, computed in float64."""
    if loss["kind"] == "sdpo_logit" and inputs.teacher_logprobs_TK is not None:
        return support_reference(loss, target_logprobs, inputs)

    def floats(value: torch.Tensor | None) -> NDArray[np.float64] | None:
        return None if value is None else value.numpy()

    return reference_terms(
        loss,
        current=np.asarray(target_logprobs, dtype=np.float64),
        sampling=inputs.sampling_logprobs_T.numpy(),
        advantages=inputs.advantages_T.numpy(),
        mask=inputs.loss_mask_T.numpy(),
        anchor=floats(inputs.anchor_logprobs_T),
        teacher=floats(inputs.teacher_logprobs_T),
    )


def support_reference(
    loss: Mapping[str, Any], target_logprobs: NDArray[Any], inputs: LossInputs
) -> TokenTerms:
    """The reference of a logit-level loss on [T, K + 1] targets; the last column has no slope.

    Raises:
        LossConfigError: if the loss's importance weight needs recomputed values that are not there.
    """
    current = np.asarray(target_logprobs, dtype=np.float64)
    mask = inputs.loss_mask_T.numpy()
    recomputes = loss.get("anchor", "sampling") == "recompute"
    anchor = inputs.anchor_logprobs_T if recomputes else inputs.sampling_logprobs_T
    if anchor is None or inputs.teacher_logprobs_TK is None:
        raise LossConfigError("anchor: None; expected values, needed by the importance weight")
    support = "topk_tail" if loss["add_tail"] else "topk_renormalised"
    terms, slopes = sdpo.logit_level(
        current[None, :, :-1],
        inputs.teacher_logprobs_TK.numpy()[None],
        mask[None],
        alpha=loss["alpha"],
        support=support,
        weights=sdpo.importance_weight(
            current[None, :, -1], anchor.numpy()[None], is_clip=loss["is_clip"]
        ),
    )
    slope = np.concatenate([slopes[0], np.zeros((len(current), 1))], axis=1)
    return TokenTerms(terms[0], slope, mask)


def compared(
    what: str,
    probe: GradientProbe,
    *,
    losses: Sequence[float] | None,
    slopes: Sequence[NDArray[Any]],
) -> list[Comparison]:
    """A probe's losses and gradients against given ones, by sequence.

    Args:
        what: what is compared with what.
        probe: it has been run.
        losses: summed loss of each sequence; None where the values are not comparable.
        slopes: [T] gradient of each sequence.
    """
    found = [_comparison("gradient", what, _flat(probe.gradients_D), _flat(slopes))]
    if losses is not None:
        found.insert(0, _comparison("loss", what, probe.losses_D, losses))
    return found


def packed_against_unpacked(
    loss: Mapping[str, Any], probe: GradientProbe, where: str
) -> list[Comparison]:
    """All sequences joined end to end against one at a time."""
    losses, gradients = [], []
    for values, inputs in zip(probe.logprobs_D, probe.inputs_D, strict=True):
        alone = GradientProbe(loss, [inputs])
        alone.run([values])
        losses += alone.losses_D
        gradients += alone.gradients_D
    what = f"{where}, packed against unpacked"
    return [
        _comparison("loss", what, probe.losses_D, losses),
        _comparison("gradient", what, _flat(probe.gradients_D), _flat(gradients)),
    ]


def served_sums(probe: GradientProbe, metrics: Mapping[str, float]) -> list[Comparison]:
    """What the service says it back-propagated, against what it was sent."""
    surrogate = metrics.get("surrogate_loss:sum")
    if surrogate is None:
        return []
    what = "surrogate sum of the service, against the gradient that it was sent"
    return [_comparison("loss", what, [surrogate], [probe.surrogate_sum])]


def against_builtin_value(probe: GradientProbe, metrics: Mapping[str, float]) -> list[Comparison]:
    """Our loss against the value that the service's built-in loss reports on the same data."""
    value = metrics.get("loss:sum")
    if value is None:
        return []
    what = "loss, against the service's built-in loss"
    return [_comparison("loss", what, [sum(probe.losses_D)], [value])]


def against_builtin_step(
    before: Sequence[NDArray[np.float32]],
    ours: Sequence[NDArray[np.float32]],
    stock: Sequence[NDArray[np.float32]],
) -> Comparison:
    """How one step moved the log-probabilities: our path against the built-in loss."""
    moved = _flat(ours) - _flat(before)
    expected = _flat(stock) - _flat(before)
    what = "weights after one step, against the built-in loss (moved log-probabilities)"
    return _comparison("gradient", what, moved, expected)


def worst(comparisons: Sequence[Comparison], check: str, tolerance: Mapping[str, Any]) -> Errors:
    """The comparison of a check that is closest to, or furthest beyond, its tolerance."""
    found = [one.errors for one in comparisons if one.check == check]
    return max(found, key=lambda errors: _strain(errors, tolerance))


def _strain(errors: Errors, tolerance: Mapping[str, Any]) -> float:
    """Error over its bound, or how far the cosine is below its own; not measured is worst."""
    error, largest = errors["max_abs_error"], errors["reference_max_abs"]
    if error is None or largest is None:
        return float("inf")
    bound = tolerance.get("atol", 0.0) + tolerance.get("rtol", 0.0) * largest
    strain = error / bound if bound > 0 else (0.0 if error == 0 else float("inf"))
    least, cosine = tolerance.get("min_cosine"), errors["cosine_similarity"]
    if least is not None and cosine is not None and least < 1.0:
        strain = max(strain, (1.0 - cosine) / (1.0 - least))
    return strain


def _comparison(check: str, what: str, actual: Any, reference: Any) -> Comparison:
    ours, theirs = np.asarray(actual, dtype=float), np.asarray(reference, dtype=float)
    return Comparison(check, what, parity_errors(ours.tolist(), theirs.tolist()))


def _flat(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])
