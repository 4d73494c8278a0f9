"""The limits: what is split, what is left out, what is refused."""

import pytest

from evidence import manifest
from evidence.canonical import canonical_bytes, sha256_hex
from evidence.errors import InputError
from evidence.manifest import Candidate, fit, read_manifest, split_lines

MIB = 1024 * 1024


def _part(**over):
    """A manifest's entry of the first of two parts, changed."""
    part_of = {"name": "a.jsonl", "sha256": "b" * 64, "parts": 2, "part": 1, **over}
    return {"name": "a", "kind": "spec", "sha256": "a" * 64, "size": 1, "part_of": part_of}


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
    """61 files fit beside manifest, statement and crate; of 70, journals go before results do."""
    offered = [Candidate(f"j{i:02d}", "journal", b"x") for i in range(40)]
    offered += [Candidate(f"r{i:02d}", "result", b"x") for i in range(30)]

    fitted = fit(offered)

    assert len(fitted.files) == 61
    assert [entry.name for entry, _ in fitted.files][:2] == ["r00", "r01"]
    assert [entry.name for entry, _ in fitted.omitted] == [f"j{i:02d}" for i in range(31, 40)]


def test_ledger_is_fitted_in_before_artifacts_and_newest_attempts_first():
    """Of 1 ledger, 1 timing, 50 artifacts and 40 attempts, the 31 oldest attempts do not fit."""
    offered = [Candidate(f"attempt-{i}.json", "journal", b"x") for i in range(1, 41)]
    offered += [Candidate(f"a{i:02d}", "artifact", b"x") for i in range(50)]
    offered += [
        Candidate("timings.jsonl", "journal", b"x"),
        Candidate("ledger.jsonl", "journal", b"x"),
    ]

    fitted = fit(offered)

    names = [entry.name for entry, _ in fitted.files]
    assert names[:2] == ["ledger.jsonl", "a00"]
    assert names[51:54] == ["timings.jsonl", "attempt-40.json", "attempt-39.json"]
    assert fitted.omitted[0][0].name == "attempt-31.json"
    assert len(fitted.omitted) == 31


def test_room_is_kept_for_what_the_manifest_says_of_many_files():
    """2000 small files leave 40 MiB less 192 KiB and 2000 KiB to the others."""
    offered = [Candidate(f"j{i:04d}", "journal", b"x") for i in range(1996)]
    offered += [Candidate(f"r{i}", "result", b"x" * int(9.5 * MIB)) for i in range(4)]

    fitted = fit(offered)

    assert [entry.name for entry, _ in fitted.files][:4] == ["r0", "r1", "r2", "j0000"]


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
        ({"files": [_part(part="x")]}, r"\.part_of\.part"),
        ({"files": [_part(part=None)]}, r"\.part_of\.part"),
        ({"files": [_part(parts=-1)]}, r"\.part_of\.parts"),
        ({"files": [_part(name=["a"])]}, r"\.part_of"),
        ({"files": [_part(sha256="b")]}, r"\.part_of"),
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
