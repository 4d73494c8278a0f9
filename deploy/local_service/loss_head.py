"""The unembedding in training: log-probabilities of all targets, loss and gradient in one pass.

The loss is a function of every target's log-probability, so its derivative is known as soon as a
chunk of rows is unembedded; logits are never kept, and rows without gradient cost no more than
their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.local_service import kernels
from deploy.local_service.adapter_gradient import AdapterGradient
from deploy.local_service.builtin_losses import LossFunction
from deploy.local_service.head import Pairs, pairs_of, unembed
from deploy.local_service.matrices import Matrix
from evidence.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Target tokens of some packed sequences, laid flat, and what the loss needs for each."""

    rows_M: Tensor
    tokens_M: Tensor
    inputs: Mapping[str, Tensor]
    """Each [M] float32."""

    @classmethod
    def of(
        cls, rows_S: Sequence[Tensor], data: Sequence[Mapping[str, Tensor]], names: Sequence[str]
    ) -> Targets:
        """Lay targets flat, sequence by sequence.

        Args:
            rows_S: per sequence, the row of each position.
            data: per sequence, ``target_tokens`` [T] or [T, K] and inputs of the same shape.
            names: the inputs to take.
        """
        rows, tokens = [], []
        for rows_T, inputs in zip(rows_S, data, strict=True):
            targets = inputs["target_tokens"]
            rows.append(rows_T.repeat_interleave(targets[0].numel()))
            tokens.append(targets.reshape(-1))
        flat = {name: torch.cat([d[name].reshape(-1).float() for d in data]) for name in names}
        return cls(torch.cat(rows), torch.cat(tokens), flat)


@dataclass(frozen=True, slots=True, eq=False)
class HeadResult:
    """What the pass over the targets gives."""

    logprobs_M: Tensor
    loss: float
    hidden_gradient: Tensor | None
    """[N, hidden], or None if no gradient was asked for or all of it is 0."""


class LossHead:
    """Unembedding, loss and its derivative."""

    def __init__(
        self,
        head_VH: Matrix,
        *,
        loss: LossFunction,
        config: Mapping[str, float],
        gradient: AdapterGradient | None,
    ) -> None:
        """Prepare.

        Args:
            head_VH: unembedding with the adapter merged in.
            loss: the loss function.
            config: its settings.
            gradient: takes the share of an adapted unembedding; None for no gradient at all.
        """
        self._head = head_VH
        self._loss = loss
        self._config = config
        self._gradient = gradient

    def run(self, hidden_NH: Tensor, targets: Targets) -> HeadResult:
        """Return log-probabilities and loss of the targets, and the gradient of the hidden rows.

        Raises:
            InputError: if the loss of a target is not finite.
        """
        pairs = Pairs.of(targets.rows_M, targets.tokens_M)
        order = torch.argsort(pairs.inverse, stable=True)
        inverse = pairs.inverse[order]
        inputs = {name: value[order] for name, value in targets.inputs.items()}
        logprobs = torch.empty(len(order))
        losses = torch.empty(len(order))
        hidden_gradient = torch.zeros_like(hidden_NH)
        anything = False
        for rows, logits in unembed(self._head, hidden_NH, torch.unique(pairs.rows_P)):
            span, local = pairs_of(pairs, rows)
            begin, end = (int(torch.searchsorted(inverse, n)) for n in (span.start, span.stop))
            chunk = slice(begin, end)
            maxima, values, sums = kernels.exponentials(logits)
            normalizers = kernels.log_normalizers_of(maxima, sums)
            tokens = pairs.tokens_P[span]
            pair_logprobs = logits[local, tokens] - normalizers[local]
            logprobs[chunk] = pair_logprobs[inverse[chunk] - span.start]
            chunk_inputs = {name: value[chunk] for name, value in inputs.items()}
            value = self._loss(logprobs[chunk], chunk_inputs, self._config)
            losses[chunk] = value.per_token
            if self._gradient is not None:
                share = torch.zeros(len(tokens))
                share.index_add_(0, inverse[chunk] - span.start, value.derivative)
                softmax = _Softmax(values, sums, width=logits.shape[1])
                anything |= self._add_gradient(
                    self._gradient,
                    hidden_NH,
                    hidden_gradient,
                    rows,
                    softmax,
                    (local, tokens, share),
                )
        _check_finite(losses)
        unsorted = torch.empty_like(logprobs)
        unsorted[order] = logprobs
        return HeadResult(
            unsorted, float(losses.double().sum()), hidden_gradient if anything else None
        )

    def _add_gradient(
        self,
        gradient: AdapterGradient,
        hidden_NH: Tensor,
        hidden_gradient: Tensor,
        rows_C: Tensor,
        softmax: _Softmax,
        pairs: tuple[Tensor, Tensor, Tensor],
    ) -> bool:
        """Add a chunk's gradient of the hidden rows; say whether there is any."""
        local, tokens, share = pairs
        row_share = torch.zeros(len(rows_C)).index_add_(0, local, share)
        touched = torch.zeros(len(rows_C), dtype=torch.bool)
        touched[local[share != 0]] = True
        if not bool(touched.any()):
            return False
        chosen = touched.nonzero()[:, 0]
        logits_gradient = softmax.rows(chosen).mul_(-row_share[chosen, None])
        place = torch.cumsum(touched, 0) - 1
        mine = touched[local]
        logits_gradient.index_put_((place[local[mine]], tokens[mine]), share[mine], accumulate=True)
        rows = rows_C[chosen]
        hidden_gradient[rows] = gradient.multiply_head_back(
            self._head, hidden_NH[rows], logits_gradient
        )
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Softmax:
    """Probabilities of a chunk of rows, from the parts that `kernels.exponentials` returns."""

    values: Tensor
    sums: Tensor
    width: int

    def rows(self, chosen: Tensor) -> Tensor:
        """Return the probabilities of some rows, [C, V]."""
        totals = self.sums[chosen].sum(-1, keepdim=True).float()
        flat = self.values[chosen].view(len(chosen), -1)[:, : self.width]
        return flat / totals


def _check_finite(losses: Tensor) -> None:
    wrong = losses[~losses.isfinite()]
    if len(wrong):
        raise InputError("loss", float(wrong[0]), "a finite loss of every token")
