"""The command line ``gated-rl``: parse, hand over to one command, turn errors into one line.

Exit status: 0 supported or done, 10 refuted, 11 inconclusive, 20 stopped by a gate, 30 no
capacity, 2 bad input, 1 defect. Commands that need torch or Prefect are imported only when they
are asked for, so that ``check`` and ``verify`` answer at once.
"""

import argparse
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from deploy.exit_codes import ExitCode
from deploy.local_service.settings import add_arguments as add_service_arguments
from envs.errors import EnvInputError
from evidence.errors import InputError, StoreError

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EXIT_STATUS_HELP = (
    "exit status: 0 supported or done, 10 refuted, 11 inconclusive, 20 stopped by a gate, "
    "30 no capacity (the same command goes on later), 2 bad input, 1 defect"
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="gated-rl",
        description="Pre-registered, gated comparisons of RL fine-tuning methods on any "
        "Tinker-compatible training service.",
        epilog=_EXIT_STATUS_HELP,
    )
    parser.add_argument("--version", action="version", version=f"gated-rl {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_check,
        _add_run,
        _add_status,
        _add_report,
        _add_verify,
        _add_audit,
        _add_diagnose,
        _add_investigate,
        _add_warm_start,
        _add_conformance,
        _add_serve_local,
        _add_ui,
        _add_sweep,
    ):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Nothing a person does ends in a traceback."""
    args = build_parser().parse_args(argv)
    handler: Callable[[argparse.Namespace], int] = args.handler
    try:
        return int(handler(args))
    except StoreError as error:
        return _fail(ExitCode.CAPACITY, f"{error}; what it holds is kept, try again later")
    except (InputError, EnvInputError) as error:
        return _fail(ExitCode.BAD_INPUT, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted; finished work is kept, the same command goes on from there")
    except BrokenPipeError:
        # The reader of our output is gone (for example `| head`): nothing to tell anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except OSError as error:
        return _fail(ExitCode.DEFECT, _explain_os_error(error))
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line, details in a file
        return _fail(ExitCode.DEFECT, _explain_defect(error))


def _fail(code: int, message: str) -> int:
    print(f"gated-rl: {' '.join(message.split())}", file=sys.stderr)
    return int(code)


def _explain_os_error(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return (
            f"the disk is full{where}: free some space and give the same command again; "
            "everything finished is intact"
        )
    return f"{error.strerror or type(error).__name__}{where}"


def _explain_defect(error: Exception) -> str:
    details = "".join(traceback.format_exception(error))
    if os.environ.get("GATED_RL_DEBUG"):
        print(details, file=sys.stderr)
    handle, path = tempfile.mkstemp(prefix="gated-rl-defect-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(details)
    return f"defect: {type(error).__name__}: {error} (details: {path}); finished work is kept"


def _version() -> str:
    try:
        return metadata.version("gated-rl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _add_check(commands: "_Commands") -> None:
    command = commands.add_parser(
        "check",
        help="say what a spec means before anything is spent",
        description="Spec preflight and what it means: which gates apply, which settings are "
        "missing, how wide the interval is, what effect could settle the rule, what is unresolved.",
    )
    command.add_argument("spec", metavar="SPEC", help="a shipped spec's name, or a file")
    command.add_argument(
        "--execution", metavar="FILE", help="execution file (default: beside SPEC)"
    )
    command.add_argument(
        "--profile", metavar="NAME", help="look at the spec as this profile scales it"
    )
    command.add_argument(
        "--base-score", type=float, metavar="X", help="measured score of the base model, if known"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=_check)


def _add_run(commands: "_Commands") -> None:
    command = commands.add_parser(
        "run",
        help="run a comparison to its verdict (or go on with one)",
        description="Run a comparison through every gate to its verdict. The same command goes on "
        "with a run that was stopped, wherever it was.",
        epilog=_EXIT_STATUS_HELP,
    )
    command.add_argument("spec", metavar="SPEC", help="a shipped spec's name, or a file")
    command.add_argument(
        "--service",
        default="local",
        metavar="local|URL",
        help="'local' starts the embedded service on this machine; else the URL of a "
        "Tinker-compatible service (default: local)",
    )
    command.add_argument(
        "--service-profile",
        metavar="FILE",
        help="JSON file that names the environment variables of extra request headers",
    )
    command.add_argument(
        "--profile", metavar="NAME", help="scale the spec (recorded as deviations)"
    )
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are kept")
    command.add_argument("--run-id", metavar="ID", help="name of this run (default: from the spec)")
    command.add_argument(
        "--execution", metavar="FILE", help="execution file (default: beside SPEC)"
    )
    command.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="stop after N rollout steps per arm; such a run never gives a verdict",
    )
    command.add_argument(
        "--accept-unverified",
        action="append",
        default=[],
        metavar="GATE",
        help="go on although this gate lacks evidence that the service cannot give; "
        "the verdict is then withheld (may be given several times)",
    )
    command.add_argument(
        "--strict-model", action="store_true", help="refuse to replace a model that is not served"
    )
    command.add_argument(
        "--no-prefect",
        dest="prefect",
        action="store_false",
        help="run without Prefect (by default each gate and step is a task of a Prefect flow run; "
        "without PREFECT_API_URL a server is started for the length of the run)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object at the end")
    command.set_defaults(handler=_run)


def _add_status(commands: "_Commands") -> None:
    command = commands.add_parser("status", help="list the runs and how far each is")
    command.add_argument("run", nargs="?", metavar="RUN", help="one run's folder or id")
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are kept")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=_status)


def _add_report(commands: "_Commands") -> None:
    command = commands.add_parser("report", help="write report.md and report.html of a run")
    command.add_argument("run", metavar="RUN", help="a run's folder or id")
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are kept")
    command.set_defaults(handler=_report)


def _add_verify(commands: "_Commands") -> None:
    command = commands.add_parser(
        "verify",
        help="recompute a bundle's hashes, means, interval and verdict offline",
        description="Recompute everything a bundle claims from its files alone. Exit status 0 if "
        "all of it holds, 2 if the bundle cannot be read, 20 if something does not hold.",
    )
    command.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=_verify)


def _add_audit(commands: "_Commands") -> None:
    command = commands.add_parser(
        "audit",
        help="judge any record of a run by the contract's rules",
        description="Give every validation that the contract defines for a spec and the record of "
        "a run, from this program or from any other.",
    )
    command.add_argument("spec", metavar="SPEC", help="a spec, or a triage document holding one")
    command.add_argument("record", metavar="RECORD", help="the record of a run")
    command.add_argument("--files", metavar="DIR", help="folder with the run's evidence files")
    command.add_argument(
        "--execution", metavar="FILE", help="execution file: which arm has which role"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=_audit)


def _add_diagnose(commands: "_Commands") -> None:
    command = commands.add_parser(
        "diagnose",
        help="find out within a hard cap why a mask is active or not",
        description="Bounded diagnostic: one frozen batch of train tasks, at most 16 optimizer "
        "updates, a hard wall-clock cap that counts set-up, four fixed rules. It answers why a "
        "gate failed; it launches nothing, and its verdict is always inconclusive.",
        epilog="exit status: 0 carried out, 20 stopped by its cap or by the budget, 30 no capacity "
        "(the same command goes on while the cap lasts), 2 bad input, 1 defect",
    )
    command.add_argument("spec", metavar="SPEC", help="a shipped spec's name, or a file")
    command.add_argument(
        "--settings", metavar="FILE", help="settings of the diagnostic (default: beside SPEC)"
    )
    command.add_argument(
        "--from-run",
        metavar="RUN",
        help="folder of the run that gave rise to it: its initial checkpoint is restored, its time "
        "counts on the budget, and it is left as it is",
    )
    command.add_argument("--service", default="local", metavar="local|URL", help="as for run")
    command.add_argument("--service-profile", metavar="FILE", help="as for run")
    command.add_argument("--profile", metavar="NAME", help="scale the spec first")
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are kept")
    command.add_argument("--run-id", metavar="ID", help="name of this run (default: from the spec)")
    command.add_argument(
        "--execution", metavar="FILE", help="execution file (default: beside SPEC)"
    )
    command.add_argument(
        "--prefect",
        action="store_true",
        help="run as a Prefect flow run, each part a task (starting Prefect counts on the cap)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object at the end")
    command.set_defaults(handler=_diagnose)


def _add_investigate(commands: "_Commands") -> None:
    command = commands.add_parser(
        "investigate",
        help="say from a run's files alone why its mask was active or not",
        description="Offline investigation: hashes and alignment checked again, losses, masks and "
        "gradients replayed against the float64 reference, forced cases, and one conclusion with "
        "its figures. The run is left as it is.",
        epilog="exit status: 0 the mask was active or rightly inactive, 20 a defect or a wrong "
        "variant, 11 evidence is missing, 2 files that cannot be read, 1 defect of this program",
    )
    command.add_argument("run", metavar="RUN", help="a run's folder or id")
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are kept")
    command.add_argument("--arm", metavar="NAME", help="the arm (default: the one that masks)")
    command.add_argument(
        "--phase",
        choices=("diagnostic", "train", "pilot"),
        help="part of the run (default: the first of these with updates)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=_investigate)


def _add_conformance(commands: "_Commands") -> None:
    command = commands.add_parser(
        "conformance",
        help="measure what a Tinker-compatible service really does",
        description="Measure from the client's side alone whether losses are sums, steps are "
        "applied once, states are restored, log-probabilities and seeds mean what they should; "
        "say which known mistake a wrong answer looks like.",
        epilog="exit status: 0 what comparisons need conforms, 20 some of it differs, 11 some of "
        "it could not be told, 30 no capacity, 2 bad input, 1 defect",
    )
    command.add_argument("--service", default="local", metavar="local|URL", help="as for run")
    command.add_argument("--service-profile", metavar="FILE", help="as for run")
    command.add_argument(
        "--base-model", metavar="NAME", help="model to train (default: the first that is served)"
    )
    command.add_argument(
        "--rank", type=int, default=8, metavar="N", help="rank of the adapters (default: 8)"
    )
    command.add_argument(
        "--capacity-clients",
        type=int,
        default=0,
        metavar="N",
        help="also open up to N training clients at once, to see how a refusal for lack of room "
        "looks (default: 0, because it takes the room of others)",
    )
    command.add_argument("--out", metavar="FILE", help="write the record (JSON) to this file")
    command.add_argument("--json", action="store_true", help="print the record instead of a table")
    command.set_defaults(handler=_conformance)


def _add_warm_start(commands: "_Commands") -> None:
    command = commands.add_parser(
        "warm-start",
        help="make the adapter that both arms of a comparison start from",
        description="Supervised steps on audited demonstrations of training tasks, with success on "
        "training tasks before and after. The same command goes on with one that was stopped, and "
        "gives the same bits at the same number of threads.",
    )
    command.add_argument("spec", metavar="SPEC", help="a shipped spec's name, or a file")
    command.add_argument("--out", required=True, metavar="DIR", help="gets the adapter")
    command.add_argument(
        "--execution", metavar="FILE", help="execution file (default: beside SPEC)"
    )
    command.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of the service (default: 1)"
    )
    command.add_argument(
        "--episodes",
        type=int,
        default=36,
        metavar="N",
        help="training tasks played before and after (default: 36)",
    )
    command.set_defaults(handler=_warm_start)


def _add_serve_local(commands: "_Commands") -> None:
    command = commands.add_parser(
        "serve-local",
        help="start the embedded Tinker-compatible service",
        description="Start the embedded service: LoRA training and sampling of a small model on "
        "this machine's CPU, over the Tinker protocol. Loopback only unless --host says otherwise.",
    )
    add_service_arguments(command)
    command.set_defaults(handler=_serve_local)


def _add_ui(commands: "_Commands") -> None:
    command = commands.add_parser(
        "ui",
        help="start Prefect's page with the run form, and everything behind it",
        description="Start a Prefect server with the deployments, a worker, the embedded service, "
        "a read-only file server and the sweeper, all on this machine, and print where they are. "
        "Ctrl-C stops all of it; unfinished runs go on the next time.",
        epilog="environment: GATED_RL_NOTIFY=TYPE/NAME names a notification block of the Prefect "
        "server (slack-webhook/team, say) that is told of gate refusals, capacity blocks and "
        "verdicts; GATED_RL_PATIENCE_SECONDS bounds how long a flow run's process waits for "
        "capacity; GATED_RL_REQUEUE_SECONDS says when it is started again",
    )
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are kept")
    command.add_argument(
        "--service",
        default="local",
        metavar="local|URL",
        help="'local' starts the embedded service; else the address that the form offers",
    )
    for option, what in (
        ("--port", "of Prefect's page (default: 4200, or a free one)"),
        ("--service-port", "of the embedded service (default: 8808, or a free one)"),
        ("--files-port", "of the file server (default: 8809, or a free one)"),
    ):
        command.add_argument(option, type=int, metavar="PORT", help=what)
    command.add_argument(
        "--database",
        metavar="URL",
        help="database of the Prefect server, e.g. postgresql+asyncpg://user@host/prefect "
        "(default: a file under DIR)",
    )
    command.add_argument(
        "--at-once", type=int, default=4, metavar="N", help="flow runs at a time (default: 4)"
    )
    command.add_argument(
        "--allow-faults",
        action="store_true",
        help="let requests make the embedded service misbehave (for tests)",
    )
    command.set_defaults(handler=_ui)


def _add_sweep(commands: "_Commands") -> None:
    command = commands.add_parser(
        "sweep",
        help="make flow runs go on whose process is gone",
        description="Find flow runs on the Prefect server of PREFECT_API_URL whose process died, "
        "prove it by the locks that a living process holds, and set them to start again. Takes as "
        "long as the proof: up to two minutes. `gated-rl ui` does this all the time.",
    )
    command.add_argument("--forever", action="store_true", help="go on looking")
    command.set_defaults(handler=_sweep)


def _check(args: argparse.Namespace) -> int:
    from deploy.commands.check import check  # noqa: PLC0415 - each command loads only what it uses

    return check(args)


def _run(args: argparse.Namespace) -> int:
    from deploy.commands.run import run  # noqa: PLC0415 - Prefect and torch take seconds to load

    return run(args)


def _status(args: argparse.Namespace) -> int:
    from deploy.commands.status import status  # noqa: PLC0415 - loads pyarrow

    return status(args)


def _report(args: argparse.Namespace) -> int:
    from deploy.commands.report import report  # noqa: PLC0415 - loads pyarrow

    return report(args)


def _verify(args: argparse.Namespace) -> int:
    from deploy.commands.verify import verify  # noqa: PLC0415 - each command loads only what it uses

    return verify(args)


def _audit(args: argparse.Namespace) -> int:
    from deploy.commands.audit import audit  # noqa: PLC0415 - each command loads only what it uses

    return audit(args)


def _diagnose(args: argparse.Namespace) -> int:
    from deploy.commands.diagnose import diagnose  # noqa: PLC0415 - torch takes seconds to load

    return diagnose(args)


def _investigate(args: argparse.Namespace) -> int:
    from deploy.commands.investigate import investigate  # noqa: PLC0415 - loads torch

    return investigate(args)


def _conformance(args: argparse.Namespace) -> int:
    from deploy.commands.conformance import conformance  # noqa: PLC0415 - torch takes seconds to load

    return conformance(args)


def _ui(args: argparse.Namespace) -> int:
    from deploy.commands.ui import ui  # noqa: PLC0415 - each command loads only what it uses

    return ui(args)


def _sweep(args: argparse.Namespace) -> int:
    from deploy.commands.sweep import sweep  # noqa: PLC0415 - Prefect takes seconds to load

    return sweep(args)


def _warm_start(args: argparse.Namespace) -> int:
    from deploy.commands.warm_start import warm_start  # noqa: PLC0415 - loads torch

    return warm_start(args)


def _serve_local(args: argparse.Namespace) -> int:
    from deploy.commands.serve_local import serve_local  # noqa: PLC0415 - each command loads only what it uses

    return serve_local(args)


if __name__ == "__main__":
    sys.exit(main())
