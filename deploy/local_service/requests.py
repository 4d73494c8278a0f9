"""The JSON bodies of the protocol, checked on arrival.

Unknown fields are ignored (newer clients send more), known ones are strict where a wrong value
would otherwise surface inside the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Identifier = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^/\s]+$")]
SeqId = Annotated[int, Field(ge=0, lt=2**63)]
MAX_RANK = 256
MAX_SAMPLES = 1024
MAX_TOP_K = 4096


class WireModel(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(WireModel):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = "unknown"
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(WireModel):
    """POST session_heartbeat."""

    session_id: Identifier


class FinishReason(WireModel):
    """How a client says its session ended."""

    type: str = "unknown"


class FinishSession(WireModel):
    """POST sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: Any = None


class LoraConfig(WireModel):
    """Shape and initialization of an adapter."""

    rank: int = Field(default=32, ge=1, le=MAX_RANK)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(WireModel):
    """Optimizer family, and the hyperparameters that the client fixes for the model's lifetime.

    The SDK's default names the family alone. A client that also names hyperparameters (an
    ``OptimizerConfigBase`` with further fields) has the server hold them: it reports them before
    the first step, and refuses a step with other values.
    """

    type: str = "adamw"
    learning_rate: FiniteFloat | None = Field(default=None, ge=0)
    beta1: FiniteFloat | None = Field(default=None, ge=0, lt=1)
    beta2: FiniteFloat | None = Field(default=None, ge=0, lt=1)
    eps: FiniteFloat | None = Field(default=None, ge=0)
    weight_decay: FiniteFloat | None = Field(default=None, ge=0)
    grad_clip_norm: FiniteFloat | None = Field(default=None, ge=0)

    def fixed(self) -> dict[str, float]:
        """Return the hyperparameters that are named."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class CreateModel(WireModel):
    """POST create_model."""

    session_id: Identifier
    model_seq_id: SeqId
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class LoadWeights(WireModel):
    """POST load_weights: a new model (session and model_seq_id) or an existing one (model_id)."""

    path: str
    optimizer: bool
    model_id: Identifier | None = None
    seq_id: SeqId | None = None
    session_id: Identifier | None = None
    model_seq_id: SeqId | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None


class AdamParams(WireModel):
    """One AdamW step: decoupled weight decay, global gradient norm clipping (0 is off)."""

    learning_rate: FiniteFloat = Field(default=1e-4, ge=0)
    beta1: FiniteFloat = Field(default=0.9, ge=0, lt=1)
    beta2: FiniteFloat = Field(default=0.95, ge=0, lt=1)
    eps: FiniteFloat = Field(default=1e-12, ge=0)
    weight_decay: FiniteFloat = Field(default=0.0, ge=0)
    grad_clip_norm: FiniteFloat = Field(default=0.0, ge=0)


class OptimStep(WireModel):
    """POST optim_step."""

    model_id: Identifier
    seq_id: SeqId
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(WireModel):
    """POST save_weights."""

    model_id: Identifier
    seq_id: SeqId
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=1)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(WireModel):
    """POST save_weights_for_sampler: a named checkpoint, or an ephemeral sampling session."""

    model_id: Identifier
    seq_id: SeqId
    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(default=None, ge=1)
    user_metadata: dict[str, str] | None = None


class ModelReference(WireModel):
    """POST get_info."""

    model_id: Identifier


class CreateSamplingSession(WireModel):
    """POST create_sampling_session."""

    session_id: Identifier
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(WireModel):
    """A piece of a prompt; only text is served."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(WireModel):
    """A prompt in pieces."""

    chunks: list[PromptChunk]


class SamplingParams(WireModel):
    """How to sample."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | list[int] | list[str] | None = None
    temperature: FiniteFloat = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: FiniteFloat = Field(default=1.0, gt=0, le=1)


class TensorData(WireModel):
    """A tensor in JSON: dense and flat, or sparse by rows (CSR)."""

    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(WireModel):
    """POST asample."""

    sampling_session_id: Identifier
    seq_id: SeqId
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_K)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_K)
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=MAX_TOP_K)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)


class RetrieveFuture(WireModel):
    """POST retrieve_future."""

    request_id: Annotated[str, Field(min_length=1, max_length=600)]


class WeightsInfo(WireModel):
    """POST weights_info."""

    tinker_path: str


class SetTtl(WireModel):
    """PUT …/ttl."""

    ttl_seconds: int | None = Field(default=None, ge=1)


def first_error(errors: list[Mapping[str, Any]]) -> str:
    """Return one line about the first thing wrong with a body: field, value, expectation."""
    if not errors:
        return "body: not valid"
    error = errors[0]
    where = ".".join(str(part) for part in error.get("loc", ()) if part != "body") or "body"
    value = repr(error.get("input"))
    return f"{where}: {value[:200]}, {error.get('msg', 'not valid')}"
