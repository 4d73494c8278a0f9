"""Endpoints that make models, train them and save them."""

from __future__ import annotations

from typing import Any

import zstandard
from fastapi import APIRouter, Request

from deploy.local_service import requests
from deploy.local_service.errors import ApiError, invalid_request
from deploy.local_service.records import model_info
from deploy.local_service.service import Service
from deploy.local_service.wire import decode_train_request


def router(service: Service) -> APIRouter:
    """Return the endpoints over a service."""
    api = APIRouter()
    training = service.training

    @api.post("/create_model")
    async def create_model(body: requests.CreateModel) -> dict[str, Any]:
        return await training.create_model(body)

    @api.post("/load_weights")
    async def load_weights(body: requests.LoadWeights) -> dict[str, Any]:
        return await training.load_weights(body)

    @api.post("/get_info")
    async def get_info(body: requests.ModelReference) -> dict[str, Any]:
        entry = service.queue.entry(body.model_id)
        if entry.model is None:
            raise ApiError(404, "not_found", f"model_id {body.model_id}: is still being made")
        base = service.context.bases.facts(entry.record.base_model)
        faults = service.context.faults
        info = model_info(entry, base, report_optimizer=not faults.on("lost_optimizer_report"))
        if faults.on("wrong_base_model_report"):
            info["model_name"] = info["model_data"]["model_name"] = "another/base-model"
        return info

    @api.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        body = await _plain_body(request, limit=service.settings.max_body_bytes)
        return training.forward_backward(decode_train_request(body))

    @api.post("/optim_step")
    async def optim_step(body: requests.OptimStep) -> dict[str, Any]:
        return training.optim_step(body)

    @api.post("/save_weights")
    async def save_weights(body: requests.SaveWeights) -> dict[str, Any]:
        return training.save_weights(body)

    @api.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: requests.SaveWeightsForSampler) -> dict[str, Any]:
        return training.save_weights_for_sampler(body)

    return api


async def _plain_body(request: Request, *, limit: int) -> bytes:
    """Return the body, decompressed if it says that it is compressed."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise invalid_request(f"content-encoding {encoding!r}: expected zstd or none")
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise invalid_request(f"body: not zstd ({error})") from error
    if len(plain) > limit:
        raise ApiError(413, "too_large", f"body: expected at most {limit} bytes decompressed")
    return plain
