"""Keeps a flow run's artifacts up to date while the run works.

The pages are made from the run directory (`flows.board`), so they say what is kept, not what was
meant. Each is one artifact that is changed in place, by later processes of the same flow run too.
Whatever goes wrong here is logged and never hurts the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncIterator
from typing import Any, TypeAlias
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.context import FlowRunContext

from evidence.errors import InputError
from evidence.run import Run
from flows.board import Board, Links, Page, percent_done
from tasks.progress import Progress, ProgressEvent

EVERY_SECONDS = 5.0
LONGEST_PAGE = 400_000
_FINAL_SECONDS = 60.0
Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"


class Noticeboard:
    """The artifacts of one run.

    Args:
        run_path: the run directory; it need not exist yet.
        run_id: name of the run, part of every artifact's key.
        logger: of the flow run.
    """

    def __init__(self, run_path: str, *, run_id: str, logger: Logger) -> None:
        self._run_path, self._slug, self._logger = run_path, key_of(run_id), logger
        self._board: Board | None = None
        self._run: Run | None = None
        self._made: dict[str, UUID] | None = None
        self._shown: dict[str, tuple[Any, str]] = {}
        self._said = ""
        self._logged: dict[str, str] = {}

    def note(self, event: ProgressEvent) -> None:
        """Remember what the run said last, and write it to the flow run's log."""
        arm = f" ({event.arm})" if event.arm else ""
        words = f"{event.phase.replace('_', ' ')}{arm}"
        if event.message and self._logged.get(words) != event.message:
            self._logged[words] = event.message
            self._logger.info("%s: %s", words, event.message)
        counted = f" {event.done} of {event.total}" if event.total else ""
        text = f": {event.message}" if event.message else ""
        self._said = f"{words}{counted}{text}"

    def listener(self, other: Progress) -> Progress:
        """A listener that hands everything on to another one too."""

        def hear(event: ProgressEvent) -> None:
            self.note(event)
            other(event)

        return hear

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Keep the artifacts up to date for the length of a block, and once more at its end."""
        ended = asyncio.Event()
        work = asyncio.create_task(self._keep(ended))
        try:
            yield
        finally:
            ended.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(work, _FINAL_SECONDS)

    async def show(self) -> None:
        """Bring every artifact up to date. Trouble is logged, never raised."""
        try:
            pages, done = await asyncio.to_thread(self._look)
            if self._run is None:
                return
            await self._show("progress", done, self._said or "started")
            for page in pages:
                await self._show(page.kind, _bounded(page.markdown), page.title)
        except Exception as error:  # noqa: BLE001 - showing is a convenience, the run is not
            self._logger.warning("artifacts are not up to date: %s", error)

    async def _keep(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await self.show()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), EVERY_SECONDS)
        await self.show()

    def _look(self) -> tuple[list[Page], float]:
        if self._run is None:
            try:
                self._run = Run.open(self._run_path)
            except (InputError, OSError):
                return [], 0.0  # it has not been created yet
            self._board = Board(self._run, Links.of(self._run))
        return (self._board.pages() if self._board else []), percent_done(self._run)

    async def _show(self, kind: str, data: float | str, description: str) -> None:
        """Make an artifact, or change it where it shows something else."""
        if self._shown.get(kind) == (data, description):
            return
        made = await self._known()
        if kind in made:
            async with get_client() as client:
                update = ArtifactUpdate(data=data, description=description)
                await client.update_artifact(made[kind], update)
        elif isinstance(data, str):
            made[kind] = await acreate_markdown_artifact(
                markdown=data, key=self._key(kind), description=description
            )
        else:
            made[kind] = await acreate_progress_artifact(
                progress=data, key=self._key(kind), description=description
            )
        self._shown[kind] = (data, description)

    async def _known(self) -> dict[str, UUID]:
        """The artifacts by kind, those of earlier processes of this flow run among them."""
        if self._made is None:
            context = FlowRunContext.get()
            flow_run = None if context is None else context.flow_run
            self._made = {} if flow_run is None else await self._of_earlier(flow_run.id)
        return self._made

    async def _of_earlier(self, flow_run_id: UUID) -> dict[str, UUID]:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        async with get_client() as client:
            found = await client.read_artifacts(artifact_filter=wanted)
        start = self._key("")
        return {
            one.key.removeprefix(start): one.id
            for one in found
            if one.key is not None and one.key.startswith(start)
        }

    def _key(self, kind: str) -> str:
        return f"{self._slug}-{kind}"


def _bounded(text: str) -> str:
    if len(text) <= LONGEST_PAGE:
        return text
    kept = text[: text.rindex("\n", 0, LONGEST_PAGE)]
    return f"{kept}\n\n(cut: the rest is in the run directory)"


def key_of(run_id: str) -> str:
    """A run's name as part of an artifact's key: lowercase letters, digits and dashes.

    Names that this makes equal get a mark of their own.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if slug == run_id:
        return slug
    mark = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    return f"{slug}-{mark}" if slug else mark
