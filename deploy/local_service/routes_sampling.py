"""Endpoints that sample."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from deploy.local_service import requests
from deploy.local_service.service import Service


def router(service: Service) -> APIRouter:
    """Return the endpoints over a service."""
    api = APIRouter()
    sampling = service.sampling

    @api.post("/create_sampling_session")
    async def create_sampling_session(body: requests.CreateSamplingSession) -> dict[str, Any]:
        return await sampling.create_session(body)

    @api.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        return sampling.describe(sampler_id)

    @api.post("/asample")
    async def asample(body: requests.Sample) -> dict[str, Any]:
        return await sampling.sample(body)

    return api
