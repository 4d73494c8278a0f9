"""``gated-rl sweep``: make flow runs go on whose process is gone."""

import argparse
import asyncio
import os
import sys

import httpx

from deploy.commands.run import quiet_prefect
from deploy.exit_codes import ExitCode
from evidence.errors import InputError

_LOOK_SECONDS = 2.0


def sweep(args: argparse.Namespace) -> int:
    """Look until every flow run without a process is proved dead or alive; say what was done.

    Raises:
        InputError: if no Prefect server is named.
    """
    quiet_prefect(os.environ)
    from prefect.settings import PREFECT_API_URL  # noqa: PLC0415 - Prefect takes seconds to load

    if not PREFECT_API_URL.value():
        expected = "the address of a Prefect server, as gated-rl ui prints it"
        raise InputError("PREFECT_API_URL", None, expected)
    asyncio.run(_sweep(forever=args.forever))
    return ExitCode.OK


async def _sweep(*, forever: bool) -> None:
    from prefect.client.orchestration import get_client  # noqa: PLC0415
    from prefect.exceptions import PrefectHTTPStatusError  # noqa: PLC0415

    from deploy.ui.sweeper import Sweeper  # noqa: PLC0415

    async with get_client() as client:
        sweeper = Sweeper(client)
        while True:
            try:
                for line in await sweeper.sweep():
                    print(line, flush=True)
            except (httpx.HTTPError, PrefectHTTPStatusError) as error:
                if not forever:
                    raise
                print(f"the Prefect server does not answer: {error}", file=sys.stderr, flush=True)
            if not (forever or sweeper.waiting):
                return
            await asyncio.sleep(_LOOK_SECONDS)
