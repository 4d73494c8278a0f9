"""What ``gated-rl verify`` prints."""

import argparse

import pytest

from deploy.commands import verify as command
from evidence.verify import Verification


@pytest.mark.parametrize(
    ("problems", "state"),
    [((), "Everything that can be checked offline holds."), (("a: b",), "Do not trust it.")],
)
def test_verify_says_which_folder_was_checked(monkeypatch, capsys, problems, state):
    """Of a run directory it is the newest bundle, of a bundle the bundle itself."""
    found = Verification("runs/r1/bundle-2", "r1", "supported", problems, ("hashes",), ("grades",))
    monkeypatch.setattr(command, "verify_bundle", lambda _path: found)

    status = command.verify(argparse.Namespace(bundle="runs/r1", json=False))

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Checked runs/r1/bundle-2"
    assert lines[1] == "holds        hashes"
    assert lines[-1] == f"Run r1: verdict supported. {state}"
    assert status == (20 if problems else 0)
