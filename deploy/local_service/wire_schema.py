"""The protobuf messages of the protocol, by field number.

Stated here rather than taken from the client library, so that one server answers every version of
it: releases add fields and rename messages, the numbers stay. Maps are written as what they are on
the wire, repeated key and value pairs, and enums as integers.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32 = 1, 2, 3
STOP_REASON_STOP, STOP_REASON_LENGTH = 0, 1

_PACKAGE = "gated_rl_wire"
_MESSAGES: dict[str, tuple[str, ...]] = {
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "Tensor": ("1 bytes dense", "2 SparseCsr sparse_csr", "3 int32 dtype", "4 *int64 shape"),
    "EncodedTextChunk": ("1 bytes tokens",),
    "OtherChunk": (),
    "Chunk": ("1 EncodedTextChunk encoded_text", "2 OtherChunk image", "3 OtherChunk dmel"),
    "InputEntry": ("1 string key", "2 Tensor value"),
    "Datum": ("1 *Chunk model_input", "2 *InputEntry loss_fn_inputs"),
    "NumberEntry": ("1 string key", "2 double value"),
    "ConfigValue": ("1 double number", "2 string text"),
    "ConfigEntry": ("1 string key", "2 ConfigValue value"),
    "ForwardBackwardRequest": (
        "1 string model_id",
        "2 int32 seq_id",
        "3 *Datum data",
        "4 string loss_fn",
        "5 *NumberEntry loss_fn_config",
        "6 bool forward_only",
        "7 *ConfigEntry loss_fn_config_v2",
    ),
    "BatchedTensor": (
        "1 bytes data",
        "2 bytes offsets",
        "3 int32 dtype",
        "4 *int64 trailing_shape",
    ),
    "FieldEntry": ("1 string key", "2 BatchedTensor value"),
    "ArrayRecord": ("1 string type_tag", "2 *FieldEntry fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type",
        "2 *ArrayRecord loss_fn_outputs",
        "3 *NumberEntry metrics",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "SampledSequence": (
        "1 int32 stop_reason",
        "2 bytes tokens",
        "3 bytes logprobs",
        "4 TopkLogprobs topk_sampled_logprobs",
    ),
    "PromptAltTokens": ("1 Tensor tokens", "2 Tensor logprobs"),
    "SampleResponse": (
        "1 *SampledSequence sequences",
        "2 bytes prompt_logprobs",
        "3 TopkLogprobs topk_prompt_logprobs",
        "4 int32 prompt_cache_hit_tokens",
        "5 Tensor target_prompt_logprobs",
        "6 PromptAltTokens prompt_alt_tokens",
    ),
}
_SCALARS = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines:
            number, kind, field_name = line.split()
            field = message.field.add(name=field_name, number=int(number))
            repeated = kind.startswith("*")
            kind = kind.removeprefix("*")
            field.label = (
                descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            )
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _build()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
