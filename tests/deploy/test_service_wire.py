"""Messages of the protocol, against the converters of the installed client."""

import numpy as np
import pytest
import tinker
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from deploy.local_service import requests, wire, wire_schema
from deploy.local_service.errors import ApiError


def client_bytes(data, *, loss_fn="ppo", config=None, seq_id=3):
    """Encode a request as the client does."""
    request = tinker.types.ForwardBackwardRequest(
        model_id="s:train:0",
        seq_id=seq_id,
        forward_backward_input=tinker.types.ForwardBackwardInput(
            data=data, loss_fn=loss_fn, loss_fn_config=config
        ),
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = True
    return message.SerializeToString()


def datum(tokens, **inputs):
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={name: np.asarray(value) for name, value in inputs.items()},
    )


def test_client_request_is_read_as_it_was_meant():
    """Tokens, inputs with their types, loss and configuration survive the wire."""
    body = client_bytes(
        [datum([5, 6], target_tokens=[6, 7], advantages=np.array([0.5, -1.0], np.float32))],
        config={"clip_low_threshold": 0.8},
    )
    request = wire.decode_train_request(body)

    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 3, "ppo")
    assert request.forward_only
    assert request.config == {"clip_low_threshold": 0.8}
    assert request.data_D[0].tokens == (5, 6)
    assert request.data_D[0].inputs["target_tokens"].tolist() == [6, 7]
    assert request.data_D[0].inputs["target_tokens"].dtype == np.int64
    assert request.data_D[0].inputs["advantages"].tolist() == [0.5, -1.0]


def test_sparse_inputs_are_read_as_dense_with_zeros():
    """A [3, 40] matrix with two values comes sparse from the client."""
    torch = pytest.importorskip("torch")
    weights = torch.zeros(3, 40)
    weights[0, 7], weights[2, 39] = 1.5, -2.0
    body = client_bytes(
        [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints([1, 2, 3]),
                loss_fn_inputs={
                    "target_tokens": torch.zeros(3, 40, dtype=torch.int64),
                    "weights": weights,
                },
            )
        ]
    )
    message = wire_schema.ForwardBackwardRequest()
    message.ParseFromString(body)
    sent_sparse = [e.value.HasField("sparse_csr") for e in message.data[0].loss_fn_inputs]
    inputs = wire.decode_train_request(body).data_D[0].inputs

    assert any(sent_sparse)
    assert np.array_equal(inputs["weights"], weights.numpy())
    assert inputs["target_tokens"].shape == (3, 40)


def test_fingerprint_depends_on_content_alone():
    """Equal content has one fingerprint; one changed bit has another."""
    one = client_bytes([datum([5], target_tokens=[6], weights=np.array([1.0], np.float32))])
    other = client_bytes([datum([5], target_tokens=[6], weights=np.array([1.0000001], np.float32))])

    first = wire.decode_train_request(one).fingerprint()
    assert wire.decode_train_request(one).fingerprint() == first
    assert wire.decode_train_request(other).fingerprint() != first


def test_client_reads_the_training_result():
    """Ragged [T] and [T, K] log-probabilities come back in order, with metrics."""
    arrays = [
        np.array([-1.0, -2.0], np.float32),
        np.array([[-3.0, -4.0]], np.float32),
        np.array([-5.0], np.float32),
    ]
    output = deserialize_forward_backward_output(
        wire.encode_train_result(arrays, {"loss:sum": 2.5})
    )

    assert output.metrics == {"loss:sum": 2.5}
    assert [o["logprobs"].tolist() for o in output.loss_fn_outputs] == [
        [-1.0, -2.0],
        [[-3.0, -4.0]],
        [-5.0],
    ]


def test_client_reads_the_sampling_result():
    """Sequences with stop reasons, prompt log-probabilities with a gap, top-k tables."""
    result = wire.SampleResult(
        sequences=[
            wire.SequenceResult(
                [7, 2],
                [-0.5, -0.25],
                stopped=True,
                topk=wire.TopK(np.array([[7], [2]]), np.array([[-0.5], [-0.25]])),
            ),
            wire.SequenceResult([9], [-1.0], stopped=False),
        ],
        prompt_logprobs_P=np.array([np.nan, -2.0], np.float32),
        prompt_topk=wire.TopK(
            np.array([[0, 0], [4, 5]]),
            np.array([[wire.MISSING_LOGPROB] * 2, [-0.5, -0.75]]),
        ),
        cached_prompt_tokens=1,
    )
    read = deserialize_sample_response(wire.encode_sample_result(result))

    assert [s.stop_reason for s in read.sequences] == ["stop", "length"]
    assert [list(s.tokens) for s in read.sequences] == [[7, 2], [9]]
    assert list(read.sequences[0].logprobs) == [-0.5, -0.25]
    assert read.sequences[0].topk_logprobs == [[(7, -0.5)], [(2, -0.25)]]
    assert read.prompt_logprobs == [None, -2.0]
    assert read.topk_prompt_logprobs == [None, [(4, -0.5), (5, -0.75)]]
    assert read.prompt_cache_hit_tokens == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_client_reads_target_logprobs_in_the_layout_it_asked_in(sparse):
    """A sparse question gets a sparse answer with the same cells."""
    torch = pytest.importorskip("torch")
    ids = torch.full((2, 3), -1, dtype=torch.int64)
    ids[1, 2] = 8
    data = (
        tinker.TensorData.from_torch_sparse(ids, pad_value=-1)
        if sparse
        else tinker.TensorData.from_torch(ids)
    )
    asked = requests.TensorData(
        data=list(data.data),
        dtype=data.dtype,
        shape=list(data.shape),
        sparse_crow_indices=data.sparse_crow_indices,
        sparse_col_indices=data.sparse_col_indices,
    )
    targets = wire.target_tokens(asked, prompt_length=3)
    logprobs = np.where(targets >= 0, np.float32(-1.25), np.float32(0.0))
    read = deserialize_sample_response(
        wire.encode_sample_result(
            wire.SampleResult(sequences=[], target_logprobs=logprobs, targets=asked)
        )
    )

    assert targets.tolist() == [[-1, -1, -1], [-1, -1, 8]]
    assert read.target_prompt_logprobs.to_torch().tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, -1.25]]
    assert (read.target_prompt_logprobs.sparse_crow_indices is not None) is sparse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.data[0].model_input.add().image.SetInParent(), "not text"),
        (lambda m: setattr(m, "model_id", ""), "model_id"),
        (lambda m: setattr(m.data[0].loss_fn_inputs[0].value, "dense", b"abc"), "multiple of 8"),
        (lambda m: setattr(m.data[0].loss_fn_inputs[0].value, "dtype", 9), "dtype 9"),
        (lambda m: m.data[0].loss_fn_inputs[0].value.shape.append(5), "expected shape"),
    ],
)
def test_malformed_request_is_refused_with_the_reason(change, message):
    """Each defect is a 400 that names it."""
    parsed = wire_schema.ForwardBackwardRequest()
    parsed.ParseFromString(client_bytes([datum([5, 6], target_tokens=[6, 7])]))
    change(parsed)

    with pytest.raises(ApiError, match=message) as caught:
        wire.decode_train_request(parsed.SerializeToString())
    assert caught.value.status == 400


def test_bytes_that_are_no_message_are_refused():
    """Noise is a 400, not a crash."""
    with pytest.raises(ApiError) as caught:
        wire.decode_train_request(b"\xff\xff\xff\xff")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("rows", "columns"),
    [([0, 1, 3], [0, 1]), ([0, 2, 1], [0, 1]), ([0, 1, 2], [0, 9]), ([0, 2], [0, 1])],
)
def test_sparse_indices_outside_the_matrix_are_refused(rows, columns):
    """No index reads or writes outside the [2, 3] matrix."""
    with pytest.raises(ApiError):
        wire.dense_from_csr(
            np.array([1.0, 2.0]), np.array(rows), np.array(columns), (2, 3), fill=0, what="x"
        )
