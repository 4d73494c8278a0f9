"""Sampling requests and the sessions they belong to.

Sampling changes nothing, so a request that is sent again after its result was dropped may be
computed again; while the result is kept, the first one answers. A sampling session on a saved
checkpoint, on a base model or on published weights is found again after a restart.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from pathlib import Path
from typing import Any

from deploy.local_service import requests, validation
from deploy.local_service.context import Context
from deploy.local_service.errors import ApiError, conflict, invalid_request, model_lost, not_found
from deploy.local_service.live import BaseFacts, ModelEntry
from deploy.local_service.samplers import SampleJob, WeightsSource
from deploy.local_service.sessions import SamplerSource, Session


class SamplingDesk:
    """Takes sampling requests in, on the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._published = context.settings.store / "published"

    # ---- sessions

    async def create_session(self, request: requests.CreateSamplingSession) -> dict[str, Any]:
        """Open a sampling session on a checkpoint or on a base model."""
        session = self._context.sessions.live(request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        source = await self._source_of(request, sampler_id)
        known = session.samplers.get(sampler_id)
        if known is None:
            self._context.sessions.add_sampler(session, source)
        elif known != source:
            raise conflict(f"sampling session {sampler_id}: opened before with other weights")
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def _source_of(
        self, request: requests.CreateSamplingSession, sampler_id: str
    ) -> SamplerSource:
        if request.model_path is not None:
            record = self._context.checkpoints.get(request.model_path)
            await self._context.bases.ensure(record.base_model)
            return SamplerSource(sampler_id, record.base_model, record.path, record.blob)
        if request.base_model is None:
            raise invalid_request("create_sampling_session: neither model_path nor base_model")
        await self._context.bases.ensure(request.base_model)
        return SamplerSource(sampler_id, request.base_model, None, None)

    def publication_folder(self, session_id: str) -> Path:
        """Return a new folder for weights that are published without a checkpoint."""
        return self._published / session_id / secrets.token_hex(12)

    def add_published(
        self, session: Session, sampler_id: str, entry: ModelEntry, folder: Path, *, inflight: bool
    ) -> None:
        """Open a sampling session on published weights; all of one model's inflight ones move on."""
        sampler_ids = {sampler_id}
        if inflight:
            sampler_ids |= {
                source.sampler_id
                for source in list(session.samplers.values())
                if source.inflight_of == entry.model_id
            }
        for name in sorted(sampler_ids):
            source = SamplerSource(
                sampler_id=name,
                base_model=entry.record.base_model,
                model_path=None,
                blob=folder.name,
                published=True,
                inflight_of=entry.model_id if inflight else None,
            )
            self._context.sessions.add_sampler(session, source)

    def find(self, sampler_id: str) -> tuple[Session, SamplerSource]:
        """Return a sampling session and the client session it belongs to.

        Raises:
            ApiError: 404 if it never was one, 410 if its session has ended.
        """
        session_id = sampler_id.partition(":")[0]
        session = self._context.sessions.find(session_id)
        source = None if session is None else session.samplers.get(sampler_id)
        if session is None or source is None:
            raise not_found(f"sampling session {sampler_id!r}: unknown sampling session")
        return self._context.sessions.live(session_id), source

    def describe(self, sampler_id: str) -> dict[str, Any]:
        """Return what the SDK's sampler type has."""
        _, source = self.find(sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": source.base_model,
            "model_path": source.model_path,
        }

    def _weights(self, source: SamplerSource, session_id: str) -> WeightsSource:
        if source.blob is None:
            return WeightsSource(source.base_model, None)
        if source.published:
            folder = self._published / session_id / source.blob
        else:
            folder = self._context.checkpoints.blob_folder(source.blob)
        if not folder.is_dir():
            raise model_lost(
                f"sampling session {source.sampler_id}: its weights are gone (the checkpoint was "
                "deleted or has expired)"
            )
        return WeightsSource(source.base_model, folder)

    # ---- requests

    async def sample(self, request: requests.Sample) -> dict[str, Any]:
        """Accept a sampling request."""
        session, source = self.find(request.sampling_session_id)
        base = await self._context.bases.ensure(source.base_model)
        prompt = validation.prompt_of(request)
        validation.check_sample(request, prompt, base)
        targets = validation.targets_of(request, prompt, base)
        weights = self._weights(source, session.session_id)
        request_id = f"{request.sampling_session_id}:{request.seq_id}"
        promise, is_new = self._context.futures.open(
            request_id,
            session_id=session.session_id,
            fingerprint=hashlib.sha256(repr(request).encode()).hexdigest(),
            sequence_ids=[f"{request_id}:{index}" for index in range(request.num_samples)],
        )
        if is_new:
            try:
                self._context.check_queue(status=429)
            except ApiError:
                self._context.futures.forget(promise)
                raise
            self._context.engine.submit_sample(
                SampleJob(
                    promise=promise,
                    source=weights,
                    request=self._bounded(request, prompt, base),
                    prompt=prompt,
                    targets=targets,
                    vocab_size=base.vocab_size,
                )
            )
        return {"request_id": request_id, "sample_sequence_ids": list(promise.sequence_ids)}

    def _bounded(
        self, request: requests.Sample, prompt: tuple[int, ...], base: BaseFacts
    ) -> requests.Sample:
        if request.sampling_params.max_tokens is not None:
            return request
        room = base.context_length - len(prompt)
        params = request.sampling_params.model_copy(update={"max_tokens": room})
        return request.model_copy(update={"sampling_params": params})

    def cancel(self, request_id: str) -> None:
        """Stop a sampling request that nobody waits for; training requests are never cancelled."""
        promise = self._context.futures.find(request_id)
        if promise is not None and promise.sequence_ids:
            promise.cancelled = True

    # ---- release

    def release(self, session: Session) -> None:
        """Remove a session's published weights."""
        shutil.rmtree(self._published / session.session_id, ignore_errors=True)

    def clean(self) -> None:
        """Remove published weights of sessions that have ended (left by a kill)."""
        if not self._published.is_dir():
            return
        for folder in self._published.iterdir():
            session = self._context.sessions.find(folder.name)
            if session is None or session.finished is not None:
                shutil.rmtree(folder, ignore_errors=True)
