"""The program as evidence: packs that unpack to the same bytes, and an honest revision."""

import pytest

from evidence.canonical import sha256_hex
from evidence.errors import InputError
from evidence.sources import read_sources, revision, source_packs, unpack_sources

FILES = {"evidence/a.py": b"x = 1\n# ---- file trap\n", "evidence/b.py": b"", "flows/c.py": b"y"}


def test_packs_unpack_to_the_same_files():
    """A file that holds a line like a head is still one file."""
    packs = source_packs(FILES)

    assert sorted(packs) == ["evidence", "flows"]
    assert unpack_sources(packs["evidence"]) | unpack_sources(packs["flows"]) == FILES
    assert packs["flows"].splitlines()[0] == (
        f"# ---- file flows/c.py, 1 bytes, sha256 {sha256_hex(b'y')}".encode()
    )


@pytest.mark.parametrize(
    ("old", "new"), [(b"x = 1", b"x = 2"), (b"# ---- file evidence/a", b"# -- file a")]
)
def test_edited_pack_is_refused(old, new):
    pack = source_packs(FILES)["evidence"].replace(old, new, 1)

    with pytest.raises(InputError, match=r"sha256|the line of a file"):
        unpack_sources(pack)


def test_own_sources_are_all_packages(real_program):
    files = read_sources()

    assert {path.partition("/")[0] for path in files} == {
        *("flows", "tasks", "losses", "envs", "evidence", "deploy")
    }


def _git(answers):
    return lambda arguments: answers.get(arguments[0])


def test_revision_of_a_changed_tree_has_a_patch():
    answers = {"ls-files": b"x", "rev-parse": b"abc123\n", "diff": b"+x"}

    found = revision(FILES, git=_git(answers))

    assert found.record["git_commit"] == "abc123"
    assert found.record["git_dirty"] is True
    assert found.patch == b"+x"


def test_revision_of_a_clean_tree_has_none():
    found = revision(FILES, git=_git({"ls-files": b"x", "rev-parse": b"abc\n", "diff": b""}))

    assert found.record["git_dirty"] is False
    assert found.patch is None


def test_revision_without_git_is_the_package_version():
    """A repository that does not track this file is somebody else's: its commit is not ours."""
    found = revision(FILES, git=_git({"rev-parse": b"other\n", "diff": b"+x"}))

    assert found.record["git_commit"] is None
    assert found.record["git_dirty"] is None
    assert found.record["package_version"]
    assert found.patch is None
