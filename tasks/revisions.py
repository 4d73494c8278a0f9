"""Which code a preflight executed, and which published revisions it reproduces."""

from __future__ import annotations

import hashlib
from pathlib import Path

import losses
from evidence.canonical import digest

REPRODUCED = {
    "c6af1d119c0fe30d16dd9a837d35fdf695acd226": "sail-sg/Stable-RL core_algos",
    "0e6d5106abe69f578c63bf38a9394e22905c8773": "lasgroup/SDPO core_algos",
    "1dda039b9c6311889a9c9a26040677e1254814f9": "verl-project/verl core_algos",
    "a9564572eb8e91076be43c1bd5e4615e3de17265": "NovaSky-AI/SkyRL loss_fns",
    "9dfcc3a2": "thinking-machines-lab/tinker-cookbook rl/data_processing",
}
"""Commits whose outputs the float64 reference reproduces on recorded cases (tests/losses)."""

OWN_REFERENCE = "gated-rl losses/reference"


def _folder() -> Path:
    return Path(next(iter(losses.__path__)))


def code_digest(pattern: str) -> str:
    """SHA-256 over the names and contents of source files below `losses`."""
    files = {
        path.relative_to(_folder()).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(_folder().glob(pattern))
    }
    return digest(files)


def implementation_revision() -> str:
    """The code of the path that trains."""
    return f"gated-rl losses sha256 {code_digest('*.py')}"


def reference_revision() -> str:
    """The code of the independent reference."""
    return f"{OWN_REFERENCE} sha256 {code_digest('reference/*.py')}"


def executed_revision(planned: object) -> str:
    """The revision that was executed, in the spec's words where they name one of ours.

    A plan names either a published commit whose outputs the reference reproduces, or this
    program's own reference. Any other text is not repeated: what stands here then is what was
    really executed, and the check stays unverified.
    """
    if isinstance(planned, str):
        if any(commit in planned for commit in REPRODUCED):
            return planned
        if planned.startswith(OWN_REFERENCE) and (
            "sha256" not in planned or code_digest("reference/*.py") in planned
        ):
            return planned
    return reference_revision()
