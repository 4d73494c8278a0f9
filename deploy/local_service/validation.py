"""What can be seen to be wrong with a request before it is queued.

An error found here is a plain 400 on the submission, which clients do not repeat; the same error
found in the engine would reach them as a failed promise without a status.
"""

from __future__ import annotations

import numpy as np

from deploy.local_service import builtin_losses, requests
from deploy.local_service.errors import invalid_request
from deploy.local_service.live import BaseFacts
from deploy.local_service.wire import Array, TrainRequest, WireDatum, target_tokens
from evidence.errors import InputError


def check_train_request(request: TrainRequest, base: BaseFacts) -> None:
    """Refuse training data that the engine could not use.

    Raises:
        ApiError: 400 naming the datum and the field.
    """
    try:
        loss = builtin_losses.find_loss(request.loss_fn)
        builtin_losses.settings(loss, request.config)
    except InputError as error:
        raise invalid_request(str(error)) from error
    if not request.data_D:
        raise invalid_request("data: empty, expected at least one datum")
    for index, datum in enumerate(request.data_D):
        _check_datum(datum, loss.inputs, base, where=f"data[{index}]")


def _check_datum(datum: WireDatum, needed: tuple[str, ...], base: BaseFacts, *, where: str) -> None:
    length = len(datum.tokens)
    if not 0 < length <= base.context_length:
        raise invalid_request(
            f"{where}: {length} tokens, expected 1 to {base.context_length} (context window)"
        )
    wanted = ("target_tokens", *(name for name in needed if name != "weights"))
    missing = [name for name in wanted if name not in datum.inputs]
    if missing:
        raise invalid_request(f"{where}: {', '.join(missing)} missing")
    _check_tokens(np.asarray(datum.tokens), base, where=f"{where}.model_input")
    targets = datum.inputs["target_tokens"]
    if targets.dtype != np.int64 or targets.ndim not in (1, 2) or targets.shape[0] != length:
        raise invalid_request(
            f"{where}.target_tokens: {targets.dtype} {list(targets.shape)}, expected int64 "
            f"[{length}] or [{length}, K] (one row per input token)"
        )
    _check_tokens(targets, base, where=f"{where}.target_tokens")
    for name in needed:
        if name in datum.inputs:
            _check_like_targets(datum.inputs[name], targets, where=f"{where}.{name}")


def _check_like_targets(array: Array, targets: Array, *, where: str) -> None:
    if array.shape != targets.shape:
        raise invalid_request(f"{where}: {list(array.shape)}, expected {list(targets.shape)}")
    if not bool(np.isfinite(array).all()):
        raise invalid_request(f"{where}: holds a NaN or an infinity, expected finite numbers")


def _check_tokens(tokens: Array, base: BaseFacts, *, where: str) -> None:
    if tokens.size == 0:
        return
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= base.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise invalid_request(f"{where}: token {wrong}, expected 0 to {base.vocab_size - 1}")


def prompt_of(request: requests.Sample) -> tuple[int, ...]:
    """Return the prompt's tokens, its chunks put together.

    Raises:
        ApiError: 400 for a chunk that is not text.
    """
    tokens: list[int] = []
    for chunk in request.prompt.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise invalid_request(f"prompt: a chunk of type {chunk.type!r}, expected text alone")
        tokens += chunk.tokens
    return tuple(tokens)


def check_sample(request: requests.Sample, prompt: tuple[int, ...], base: BaseFacts) -> None:
    """Refuse a sampling request that the engine could not carry out.

    Raises:
        ApiError: 400 naming the field.
    """
    if not prompt:
        raise invalid_request("prompt: empty, expected at least one token")
    _check_tokens(np.asarray(prompt), base, where="prompt")
    new = request.sampling_params.max_tokens or 1
    if len(prompt) + new > base.context_length:
        raise invalid_request(
            f"prompt: {len(prompt)} tokens and max_tokens {new} exceed the context window of "
            f"{base.context_length}"
        )
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and last < len(prompt)):
        raise invalid_request(
            f"prompt_logprobs_last_n: {last}, expected 1 to {len(prompt) - 1} with prompt_logprobs"
        )
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(request, name) > base.vocab_size:
            raise invalid_request(
                f"{name}: {getattr(request, name)}, expected at most {base.vocab_size}"
            )
    if request.prompt_alt_tokens_k:
        raise invalid_request("prompt_alt_tokens_k: not served here, expected 0")
    stop = request.sampling_params.stop
    if isinstance(stop, list) and any(isinstance(item, str) and not item for item in stop):
        raise invalid_request("stop: an empty string, expected text")


def targets_of(request: requests.Sample, prompt: tuple[int, ...], base: BaseFacts) -> Array | None:
    """Return the prompt targets of a sampling request, if it names any.

    Raises:
        ApiError: 400 if they do not fit the prompt or the vocabulary.
    """
    asked = request.target_prompt_logprobs
    if asked is None:
        return None
    targets = target_tokens(asked, prompt_length=len(prompt))
    if int(targets.max()) >= base.vocab_size or int(targets.min()) < -1:
        raise invalid_request(f"target_prompt_logprobs: ids outside -1 to {base.vocab_size - 1}")
    return targets


def check_optimizer_config(config: requests.OptimizerConfig) -> None:
    """Refuse an optimizer family that is not served.

    Raises:
        ApiError: 400.
    """
    if config.type != "adamw":
        raise invalid_request(f"optimizer_config.type {config.type!r}: not served, expected adamw")


def adam_params(request: requests.OptimStep, fixed: dict[str, float]) -> requests.AdamParams:
    """Return the hyperparameters of an optimizer step.

    Args:
        request: the step.
        fixed: those that the client fixed when it made the model.

    Raises:
        ApiError: 400 for another family, or for a value other than the fixed one.
    """
    params = request.adam_params
    if params is None:
        raise invalid_request("optim_step: no adam_params, expected those of AdamW")
    for name, value in fixed.items():
        if getattr(params, name) != value:
            raise invalid_request(
                f"adam_params.{name}: {getattr(params, name)}, expected {value}, which was fixed "
                "when the model was made"
            )
    return params
