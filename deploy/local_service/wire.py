"""Between bytes on the wire and arrays: the two heavy calls and their results.

Shapes: ``T`` positions of one sequence, ``K`` targets or alternatives of one position, ``P`` prompt
tokens, ``D`` data of one request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from deploy.local_service import requests, wire_schema
from deploy.local_service.errors import invalid_request

Array = npt.NDArray[Any]
MISSING_LOGPROB = -99999.0
"""Stands in cells of a top-k table that hold nothing."""
_MAX_CELLS = 1 << 27

_NUMPY_TYPES: Mapping[int, type[np.generic]] = {
    wire_schema.DTYPE_FLOAT32: np.float32,
    wire_schema.DTYPE_INT64: np.int64,
    wire_schema.DTYPE_INT32: np.int32,
}


@dataclass(frozen=True, slots=True)
class WireDatum:
    """One training example as it arrived."""

    tokens: tuple[int, ...]
    """[T] input token ids."""
    inputs: Mapping[str, Array]
    """Loss inputs by name: int64 or float32, [T] or [T, K]."""


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """A forward or forward_backward request."""

    model_id: str
    seq_id: int
    loss_fn: str
    config: Mapping[str, Any]
    forward_only: bool
    data_D: tuple[WireDatum, ...]

    def fingerprint(self) -> str:
        """Return the SHA-256 of the content, whatever the order of its fields on the wire."""
        digest = hashlib.sha256()
        head = (self.loss_fn, self.forward_only, sorted(self.config.items()), len(self.data_D))
        digest.update(repr(head).encode())
        for datum in self.data_D:
            digest.update(np.asarray(datum.tokens, np.int64).tobytes())
            for name in sorted(datum.inputs):
                array = datum.inputs[name]
                digest.update(f"{name}{array.dtype}{array.shape}".encode())
                digest.update(array.tobytes())
        return digest.hexdigest()


def _from_bytes(data: bytes, kind: type[np.generic], what: str) -> Array:
    size = np.dtype(kind).itemsize
    if len(data) % size:
        raise invalid_request(f"{what}: {len(data)} bytes, expected a multiple of {size}")
    return np.frombuffer(data, kind).copy()


def _check_shape(shape: tuple[int, ...], what: str) -> None:
    if any(side < 0 for side in shape) or int(np.prod(shape, dtype=object)) > _MAX_CELLS:
        raise invalid_request(
            f"{what}: shape {list(shape)}, expected sizes of 0 to {_MAX_CELLS} cells"
        )


def dense_from_csr(
    values: Array, rows: Array, columns: Array, shape: tuple[int, ...], *, fill: float, what: str
) -> Array:
    """Return a [R, C] array from its sparse rows (CSR); cells that are not listed hold `fill`.

    Raises:
        ApiError: 400 if the indices do not describe such an array.
    """
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise invalid_request(
            f"{what}: shape {list(shape)} with {len(rows)} row marks, {len(columns)} columns and "
            f"{len(values)} values, expected a sparse matrix by rows"
        )
    _check_shape(shape, what)
    counts = np.diff(rows)
    whole = rows[0] == 0 and rows[-1] == len(values) and bool((counts >= 0).all())
    inside = len(columns) == 0 or (columns.min() >= 0 and columns.max() < shape[1])
    if not (whole and inside):
        raise invalid_request(f"{what}: indices outside shape {list(shape)}")
    dense = np.full(shape, fill, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _decode_tensor(message: Any, what: str) -> Array:
    kind = _NUMPY_TYPES.get(message.dtype)
    if kind is None:
        raise invalid_request(f"{what}: dtype {message.dtype}, expected float32 or int64")
    shape = tuple(int(side) for side in message.shape)
    if message.HasField("sparse_csr"):
        sparse = message.sparse_csr
        array = dense_from_csr(
            _from_bytes(sparse.values, kind, what),
            _from_bytes(sparse.crow_indices, np.int64, what),
            _from_bytes(sparse.col_indices, np.int64, what),
            shape,
            fill=0,
            what=what,
        )
    else:
        array = _from_bytes(message.dense, kind, what)
        _check_shape(shape, what)
        if shape and int(np.prod(shape)) != array.size:
            raise invalid_request(f"{what}: {array.size} values, expected shape {list(shape)}")
        array = array.reshape(shape) if shape else array
    return array.astype(np.int64) if array.dtype == np.int32 else array


def _decode_datum(message: Any, index: int) -> WireDatum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise invalid_request(f"data[{index}]: a chunk that is not text, expected text alone")
        tokens += _from_bytes(chunk.encoded_text.tokens, np.int32, f"data[{index}]").tolist()
    inputs = {
        entry.key: _decode_tensor(entry.value, f"data[{index}].{entry.key}")
        for entry in message.loss_fn_inputs
    }
    return WireDatum(tuple(tokens), inputs)


def decode_train_request(body: bytes) -> TrainRequest:
    """Read a protobuf forward_backward request.

    Raises:
        ApiError: 400 if the bytes are not one, with what is wrong.
    """
    message = wire_schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise invalid_request(f"body: not a ForwardBackwardRequest ({error})") from error
    if not message.model_id:
        raise invalid_request("model_id: empty, expected a model")
    config: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        config[entry.key] = entry.value.text or entry.value.number
    return TrainRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
        data_D=tuple(_decode_datum(datum, index) for index, datum in enumerate(message.data)),
    )


def encode_train_result(logprobs_D: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Write a ForwardBackwardOutput.

    Args:
        logprobs_D: per datum [T] or [T, K] float32 log-probabilities of its target tokens, nats.
        metrics: names that hold exactly one ``:`` before their reduction; ``loss:sum`` among them.

    Returns:
        The message; data of equal trailing shape share a record, in the order of the data.
    """
    message = wire_schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics.add(key=name, value=float(value))
    start = 0
    while start < len(logprobs_D):
        trailing = logprobs_D[start].shape[1:]
        stop = start
        while stop < len(logprobs_D) and logprobs_D[stop].shape[1:] == trailing:
            stop += 1
        parts = [np.ascontiguousarray(array, np.float32) for array in logprobs_D[start:stop]]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        tensor = record.fields.add(key="logprobs").value
        tensor.dtype = wire_schema.DTYPE_FLOAT32
        tensor.data = b"".join(part.tobytes() for part in parts)
        offsets = np.cumsum([0, *(part.nbytes for part in parts)])
        tensor.offsets = offsets.astype(np.int64).tobytes()
        tensor.trailing_shape.extend(trailing)
        start = stop
    encoded: bytes = message.SerializeToString()
    return encoded


@dataclass(frozen=True, slots=True)
class TopK:
    """The k most likely tokens at each of N positions."""

    token_ids: Array
    """[N, k] int32."""
    logprobs: Array
    """[N, k] float32, nats; `MISSING_LOGPROB` where a cell holds nothing."""


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One sampled sequence."""

    tokens: Sequence[int]
    """[T], the stop token included."""
    logprobs: Sequence[float]
    """[T] nats, of the model's own distribution."""
    stopped: bool
    """True if a stop token or string ended it, False if its length did."""
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The whole answer of one sampling request."""

    sequences: Sequence[SequenceResult]
    prompt_logprobs_P: Array | None = None
    """[P] float32; NaN at position 0 and where nothing was scored."""
    prompt_topk: TopK | None = None
    """P rows; the first is empty."""
    target_logprobs: Array | None = None
    """[P - 1, K] float32; 0 where no target was named."""
    targets: requests.TensorData | None = None
    """The targets as they were asked for; a sparse question gets a sparse answer."""
    alternatives: TopK | None = None
    """[P - 1, k] tokens drawn at each prompt position after the first."""
    cached_prompt_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def _put_topk(message: Any, topk: TopK) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = np.ascontiguousarray(topk.token_ids, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(topk.logprobs, np.float32).tobytes()


def _put_tensor(message: Any, array: Array) -> None:
    float_type = array.dtype.kind == "f"
    message.dtype = wire_schema.DTYPE_FLOAT32 if float_type else wire_schema.DTYPE_INT64
    message.shape.extend(array.shape)
    message.dense = np.ascontiguousarray(array, np.float32 if float_type else np.int64).tobytes()


def _put_targets(message: Any, logprobs: Array, asked: requests.TensorData) -> None:
    if asked.sparse_crow_indices is None or asked.sparse_col_indices is None:
        _put_tensor(message, logprobs)
        return
    rows = np.asarray(asked.sparse_crow_indices, np.int64)
    columns = np.asarray(asked.sparse_col_indices, np.int64)
    row_of_cell = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
    message.dtype = wire_schema.DTYPE_FLOAT32
    message.shape.extend(logprobs.shape)
    message.sparse_csr.values = logprobs[row_of_cell, columns].astype(np.float32).tobytes()
    message.sparse_csr.crow_indices = rows.tobytes()
    message.sparse_csr.col_indices = columns.tobytes()


def encode_sample_result(result: SampleResult) -> bytes:
    """Write a SampleResponse."""
    message = wire_schema.SampleResponse(prompt_cache_hit_tokens=result.cached_prompt_tokens)
    for sequence in result.sequences:
        item = message.sequences.add()
        item.stop_reason = (
            wire_schema.STOP_REASON_STOP if sequence.stopped else wire_schema.STOP_REASON_LENGTH
        )
        item.tokens = np.asarray(sequence.tokens, np.int32).tobytes()
        item.logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
        if sequence.topk is not None:
            _put_topk(item.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs_P is not None:
        message.prompt_logprobs = np.asarray(result.prompt_logprobs_P, np.float32).tobytes()
    if result.prompt_topk is not None:
        _put_topk(message.topk_prompt_logprobs, result.prompt_topk)
    if result.target_logprobs is not None and result.targets is not None:
        _put_targets(message.target_prompt_logprobs, result.target_logprobs, result.targets)
    if result.alternatives is not None:
        alternatives = result.alternatives
        _put_tensor(message.prompt_alt_tokens.tokens, alternatives.token_ids.astype(np.int64))
        _put_tensor(message.prompt_alt_tokens.logprobs, alternatives.logprobs.astype(np.float32))
    encoded: bytes = message.SerializeToString()
    return encoded


def target_tokens(asked: requests.TensorData, *, prompt_length: int) -> Array:
    """Return the [P - 1, K] int64 targets of a sampling request, -1 where none is named.

    Raises:
        ApiError: 400 if the shape does not fit the prompt or no id is named.
    """
    what = "target_prompt_logprobs"
    shape = tuple(asked.shape or ())
    if asked.dtype != "int64" or len(shape) != 2 or shape[0] != prompt_length - 1:
        raise invalid_request(
            f"{what}: {asked.dtype} {list(shape)}, expected int64 [{prompt_length - 1}, K]"
        )
    values = np.asarray(asked.data, np.int64)
    if asked.sparse_crow_indices is not None:
        rows = np.asarray(asked.sparse_crow_indices, np.int64)
        columns = np.asarray(asked.sparse_col_indices or (), np.int64)
        array = dense_from_csr(values, rows, columns, shape, fill=-1, what=what)
    else:
        _check_shape(shape, what)
        if values.size != shape[0] * shape[1]:
            raise invalid_request(f"{what}: {values.size} values, expected shape {list(shape)}")
        array = values.reshape(shape)
    if not bool((array >= 0).any()):
        raise invalid_request(f"{what}: names no token id, expected at least one")
    return array
