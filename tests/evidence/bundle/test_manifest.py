"""The limits: what is split, what is left out, what is refused."""

import pytest

from evidence import manifest
from evidence.canonical import canonical_bytes, sha256_hex
from evidence.errors import InputError
from evidence.manifest import Candidate, fit, read_manifest, split_lines

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("data", "limit", "parts"),
    [
        (b"", 4, [b""]),
        (b"ab\n", 4, [b"ab\n"]),
        (b"a\nb\nc\n", 4, [b"a\nb\n", b"c\n"]),
        (b"a\nb\nc\n", 3, [b"a\n", b"b\n", b"c\n"]),
        (b"abcdef\ng\n", 4, [b"abcdef\n", b"g\n"]),
        (b"a\nbcdefgh", 4, [b"a\n", b"bcdefgh"]),
    ],
)
def test_lines_are_split_at_their_ends(data, limit, parts):
    assert split_lines(data, limit=limit) == parts
    assert b"".join(split_lines(data, limit=limit)) == data


def test_large_json_lines_become_numbered_parts():
    """Two rows of 6 MiB are two parts; each names the whole file and its hash."""
    row = b'{"x":"' + b"a" * (6 * MIB) + b'"}\n'
    fitted = fit([Candidate("p.jsonl", "predictions", row * 2)])

    assert [entry.name for entry, _ in fitted.files] == [
        "p.part-01-of-02.jsonl",
        "p.part-02-of-02.jsonl",
    ]
    assert [entry.rows for entry, _ in fitted.files] == [1, 1]
    assert fitted.files[1][0].part_of == {
        "name": "p.jsonl",
        "sha256": sha256_hex(row * 2),
        "parts": 2,
        "part": 2,
    }
    assert fitted.omitted == ()


def test_large_file_without_lines_is_left_out_with_its_hash():
    data = b"x" * (10 * MIB + 1)
    fitted = fit([Candidate("blob.bin", "artifact", data), Candidate("a.txt", "artifact", b"x")])

    (entry, why) = fitted.omitted[0]
    assert [kept.name for kept, _ in fitted.files] == ["a.txt"]
    assert (entry.name, entry.size, entry.sha256) == ("blob.bin", len(data), sha256_hex(data))
    assert "no JSON Lines to split" in why


def test_exactly_the_limit_of_a_file_fits():
    fitted = fit([Candidate("a.txt", "artifact", b"x" * (10 * MIB))])

    assert fitted.omitted == ()


def test_files_are_fitted_in_by_kind_then_name():
    """62 files fit beside manifest and statement; of 70, journals go before results do."""
    offered = [Candidate(f"j{i:02d}", "journal", b"x") for i in range(40)]
    offered += [Candidate(f"r{i:02d}", "result", b"x") for i in range(30)]

    fitted = fit(offered)

    assert len(fitted.files) == 62
    assert [entry.name for entry, _ in fitted.files][:2] == ["r00", "r01"]
    assert [entry.name for entry, _ in fitted.omitted] == [f"j{i:02d}" for i in range(32, 40)]


def test_smaller_file_still_fits_after_one_that_does_not():
    """39.75 MiB are left for files: 4 of 9.9 MiB fit no fifth of 1 MiB, but one of 0.1 MiB."""
    offered = [Candidate(f"a{i}", "result", b"x" * int(9.9 * MIB)) for i in range(4)]
    offered += [
        Candidate("b", "metrics", b"x" * MIB),
        Candidate("c", "metrics", b"x" * (MIB // 10)),
    ]

    fitted = fit(offered)

    assert [entry.name for entry, _ in fitted.files] == ["a0", "a1", "a2", "a3", "c"]
    assert fitted.omitted[0][1] == "the bundle has no room for its bytes"


@pytest.mark.parametrize(
    "names", [("a", "a"), ("a", "A"), ("manifest.json",), ("../a",), ("",), ("x/y",), (".env",)]
)
def test_name_that_cannot_be_kept_is_refused(names):
    with pytest.raises(InputError, match="file name"):
        fit([Candidate(name, "artifact", b"") for name in names])


def test_unknown_kind_is_refused():
    with pytest.raises(InputError, match="one of spec, execution"):
        fit([Candidate("a", "poem", b"")])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, r"manifest\.version"),
        ({"run_id": None}, r"manifest\.run_id"),
        ({"files": {}}, r"manifest\.files"),
        ({"files": [{"name": "a"}]}, r"manifest\.files\[0\]\.kind"),
        ({"files": [{"name": "a", "kind": "spec", "sha256": "x"}]}, r"\[0\]\.sha256"),
        ({"files": [{"name": "a", "kind": "spec", "sha256": "a" * 64, "size": -1}]}, r"\.size"),
        ({"files": [{"name": "a", "kind": "spec", "sha256": "a" * 64, "size": True}]}, r"\.size"),
    ],
)
def test_manifest_of_another_form_is_refused(change, named):
    record = {"version": 1, "run_id": "r", "spec_sha256": "a" * 64, "files": [], **change}

    with pytest.raises(InputError, match=named):
        read_manifest(canonical_bytes(record))


def test_rule_states_the_limits():
    """The rule in every manifest names the numbers it works with."""
    for number in ("10485760", "41943040", "64 files"):
        assert number in manifest.RULE
