"""``gated-rl serve-local``: run the embedded service in the foreground."""

import argparse
import os
import sys
from typing import Never

from pydantic import ValidationError

from deploy.local_service.launch import thread_environment
from deploy.local_service.settings import from_arguments, to_arguments
from evidence.errors import InputError

_DEFAULT_PORT = 8808


def serve_local(args: argparse.Namespace) -> Never:
    """Replace this process by the service, with the thread settings torch reads at start-up.

    Raises:
        InputError: if an option's value is out of its range.
    """
    try:
        settings = from_arguments(args)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + "-".join(str(part).replace("_", "-") for part in first["loc"])
        if option == "--":  # a rule about several options: its message names them
            raise InputError("options", " ".join(sys.argv[2:]), first["msg"]) from None
        raise InputError(option, first["input"], first["msg"]) from None
    if "port" not in settings.model_fields_set:
        settings = settings.model_copy(update={"port": _DEFAULT_PORT})
    environment = os.environ | thread_environment(settings)
    if settings.api_key is not None:
        environment["GATED_RL_LOCAL_API_KEY"] = settings.api_key
    print(
        f"gated-rl: starting the embedded service on http://{settings.host}:{settings.port} "
        "(Ctrl-C stops it)",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "deploy.local_service.server", *to_arguments(settings)]
    os.execve(sys.executable, command, environment)
