"""Keeps a flow run's artifacts up to date while the run works.

The pages are made from the run directory (`flows.board`), so they say what is kept, not what was
meant. Each is one artifact that is changed in place; a later process of the same flow run adds a
version. Whatever goes wrong here is logged and never hurts the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncIterator
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from evidence.errors import InputError
from evidence.run import Run
from flows.board import Board, Links, Page, percent_done
from tasks.progress import Progress, ProgressEvent

EVERY_SECONDS = 5.0
LONGEST_PAGE = 400_000
_FINAL_SECONDS = 60.0


class Noticeboard:
    """The artifacts of one run.

    Args:
        run_path: the run directory; it need not exist yet.
        run_id: name of the run, part of every artifact's key.
        logger: of the flow run.
    """

    def __init__(self, run_path: str, *, run_id: str, logger: logging.Logger) -> None:
        self._run_path, self._slug, self._logger = run_path, key_of(run_id), logger
        self._board: Board | None = None
        self._run: Run | None = None
        self._shown: dict[str, tuple[UUID, str]] = {}
        self._progress: tuple[UUID, tuple[float, str]] | None = None
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
        work = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.show(), _FINAL_SECONDS)

    async def show(self) -> None:
        """Bring every artifact up to date. Trouble is logged, never raised."""
        try:
            pages, done = await asyncio.to_thread(self._look)
            for page in pages:
                await self._show_page(page)
            if self._run is not None:
                await self._show_progress(done)
        except Exception as error:  # noqa: BLE001 - showing is a convenience, the run is not
            self._logger.warning("artifacts are not up to date: %s", error)

    async def _keep(self) -> None:
        while True:
            await self.show()
            await asyncio.sleep(EVERY_SECONDS)

    def _look(self) -> tuple[list[Page], float]:
        if self._run is None:
            try:
                self._run = Run.open(self._run_path)
            except (InputError, OSError):
                return [], 0.0  # it has not been created yet
            self._board = Board(self._run, Links.of(self._run))
        return (self._board.pages() if self._board else []), percent_done(self._run)

    async def _show_page(self, page: Page) -> None:
        text = page.markdown
        if len(text) > LONGEST_PAGE:
            text = f"{text[: text.rindex(chr(10), 0, LONGEST_PAGE)]}\n\n(cut: the rest is in the run directory)"
        digest = hashlib.sha256(text.encode()).hexdigest()
        known = self._shown.get(page.kind)
        if known is not None and known[1] == digest:
            return
        if known is None:
            made = await acreate_markdown_artifact(
                markdown=text, key=f"{self._slug}-{page.kind}", description=page.title
            )
            self._shown[page.kind] = (made, digest)
            return
        async with get_client() as client:
            await client.update_artifact(known[0], ArtifactUpdate(data=text))
        self._shown[page.kind] = (known[0], digest)

    async def _show_progress(self, done: float) -> None:
        state = (done, self._said)
        if self._progress is None:
            made = await acreate_progress_artifact(
                progress=done, key=f"{self._slug}-progress", description=self._said or "started"
            )
            self._progress = (made, state)
        elif self._progress[1] != state:
            update = ArtifactUpdate(data=done, description=self._said)
            async with get_client() as client:
                await client.update_artifact(self._progress[0], update)
            self._progress = (self._progress[0], state)


def key_of(run_id: str) -> str:
    """A run's name as part of an artifact's key: lowercase letters, digits and dashes.

    Names that this makes equal get a mark of their own.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if slug == run_id:
        return slug
    mark = hashlib.sha256(run_id.encode()).hexdigest()[:6]
    return f"{slug}-{mark}" if slug else mark
