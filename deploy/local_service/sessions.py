"""Client sessions: who is there, what is theirs, and when it may be released.

Clients never say that a model or sampler is no longer needed. A session ends when it says so, or
when it has been silent for too long; then its adapters, samplers and results are released.
Sessions are kept on disk, so that a client may go on after the service was restarted.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from deploy.local_service.checkpoint_store import utc_now
from deploy.local_service.errors import ApiError
from deploy.local_service.journal import AppendLog, read_document, read_log, write_document


@dataclass(frozen=True, slots=True)
class SamplerSource:
    """Which weights a sampling session uses, where that outlives the process."""

    sampler_id: str
    base_model: str
    model_path: str | None
    """Checkpoint address; None for the base model."""
    blob: str | None
    """The checkpoint's folder, so that a name that is saved anew changes nothing here."""
    published: bool = False
    """Whether the folder is one of weights published without a checkpoint."""
    inflight_of: str | None = None
    """Model whose later publications this session follows."""


@dataclass(slots=True)
class Session:
    """One client session."""

    session_id: str
    created_at: str
    request: dict[str, Any]
    """What the client said at the start: tags, metadata, SDK version, display name."""
    last_seen: float
    """Monotonic seconds of the last heartbeat or request."""
    finished: dict[str, Any] | None = None
    """How and when it ended; None while it goes on."""
    model_ids: list[str] = field(default_factory=list)
    samplers: dict[str, SamplerSource] = field(default_factory=dict)


def session_ended(session_id: str, how: dict[str, Any]) -> ApiError:
    """Return the answer to anything asked of a session that has ended."""
    return ApiError(
        410,
        "session_finished",
        f"session {session_id}: ended at {how['at']} ({how['reason']}); its models and samplers are "
        "released, open a new client and restore from a checkpoint",
    )


class SessionBook:
    """All sessions of one store folder."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder / "sessions"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        for file in sorted(self._folder.glob("*.json")):
            self._read(file)

    def _read(self, file: Path) -> None:
        document = read_document(file)
        if document is None:
            return
        session = Session(
            session_id=document["session_id"],
            created_at=document["created_at"],
            request=document["request"],
            last_seen=self._monotonic(),
            finished=document["finished"],
        )
        for record in read_log(self._samplers_file(session.session_id)):
            source = SamplerSource(**record)
            session.samplers[source.sampler_id] = source
        self._sessions[session.session_id] = session

    def _samplers_file(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.samplers.jsonl"

    def _write(self, session: Session) -> None:
        write_document(
            self._folder / f"{session.session_id}.json",
            {
                "session_id": session.session_id,
                "created_at": session.created_at,
                "request": session.request,
                "finished": session.finished,
            },
        )

    def create(self, request: dict[str, Any]) -> Session:
        """Open a session."""
        session = Session(
            session_id=secrets.token_hex(8),
            created_at=self._clock().isoformat(),
            request=request,
            last_seen=self._monotonic(),
        )
        self._write(session)
        with self._lock:
            self._sessions[session.session_id] = session
        return session

    def find(self, session_id: str) -> Session | None:
        """Return a session, ended or not."""
        return self._sessions.get(session_id)

    def live(self, session_id: str) -> Session:
        """Return a session that goes on, and note that it was heard of.

        Raises:
            ApiError: 403 if it never was one (as the hosted service answers), 410 if it has ended.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(403, "invalid_session", f"session_id {session_id!r}: no such session")
        if session.finished is not None:
            raise session_ended(session_id, session.finished)
        session.last_seen = self._monotonic()
        return session

    def touch(self, session_id: str) -> None:
        """Note that a session was heard of."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.last_seen = self._monotonic()

    def all(self) -> list[Session]:
        """Return all sessions, newest first."""
        with self._lock:
            sessions = list(self._sessions.values())
        return sorted(sessions, key=lambda s: (s.created_at, s.session_id), reverse=True)

    def add_sampler(self, session: Session, source: SamplerSource) -> None:
        """Note a sampling session; one on lasting weights can be recreated after a restart."""
        with self._lock:
            session.samplers[source.sampler_id] = source
            log = AppendLog(self._samplers_file(session.session_id))
            try:
                log.append(asdict(source))
            finally:
                log.close()

    def finish(self, session_id: str, *, reason: str, detail: str | None) -> Session | None:
        """End a session; ending it again changes nothing.

        Returns:
            The session if it was going on until now.
        """
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.finished is not None:
                return None
            session.finished = {
                "at": self._clock().isoformat(),
                "reason": reason,
                "detail": detail,
            }
            self._write(session)
        return session

    def silent(self, *, seconds: float) -> list[Session]:
        """Return the sessions that go on and were not heard of for so long."""
        horizon = self._monotonic() - seconds
        with self._lock:
            return [
                session
                for session in self._sessions.values()
                if session.finished is None and session.last_seen <= horizon
            ]
