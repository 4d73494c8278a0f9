import hashlib
import json

import pytest

from evidence.evidence_limits import MIB, name_problem, validate


def no_secrets(name, data):
    return []


def file(name="a.txt", content="x", **more):
    return {"name": name, "kind": "metrics", "content": content, **more}


def offer(*files, kept=(), scan=no_secrets):
    return validate({"version": 1, "files": list(files)}, kept=kept, scan=scan).files


def accepted(*files, **options):
    return [decision.accepted for decision in offer(*files, **options)]


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_file_is_kept_with_its_hash_and_size():
    assert offer(file(content="ß"))[0].to_record() == {
        "name": "a.txt",
        "status": "kept",
        "sha256": sha("ß"),
        "size": 2,
        "reason": None,
    }


def test_a_file_has_at_most_ten_mib():
    assert accepted(file(content="x" * (10 * MIB))) == [True]
    assert accepted(file(content="x" * (10 * MIB + 1))) == [False]
    assert accepted(file(content=b"x" * (10 * MIB + 1))) == [False]


def test_bytes_count_not_characters():
    """5 MiB + 1 characters of two bytes each."""
    assert accepted(file(content="ß" * (5 * MIB))) == [True]
    assert accepted(file(content="ß" * (5 * MIB + 1))) == [False]


def test_a_run_has_at_most_64_files():
    files = [file(f"f{n}.txt") for n in range(65)]
    assert accepted(*files) == [True] * 64 + [False]
    assert accepted(files[64], kept=files[:64]) == [False]
    assert accepted(files[0], kept=files[:64]) == [True]
    assert accepted(files[63], kept=files[:63]) == [True]


def test_a_run_has_at_most_40_mib():
    """Four files of 10 MiB fill it; what does not fit is refused, smaller files may follow."""
    full = [file(f"{n}", content=chr(97 + n) * (10 * MIB)) for n in range(4)]
    assert accepted(*full) == [True] * 4
    assert accepted(*full, file("more")) == [True] * 4 + [False]
    assert accepted(file("more"), kept=full) == [False]
    nearly = [*full[:3], file("3", content="d" * (10 * MIB - 1))]
    assert accepted(*nearly, file("two", content="xx"), file("one")) == [True] * 4 + [False, True]


def test_an_empty_file_still_counts_as_one():
    full = [file(f"{n}", content="") for n in range(64)]
    assert accepted(*full, file("more", content="")) == [True] * 64 + [False]


def test_names_stand_for_their_bytes_for_good():
    first = file("report.md", content="first")
    same, other = offer(first, file("report.md", content="second"), kept=[first])
    assert (same.status, other.status) == ("unchanged", "refused")
    assert same.sha256 == sha("first")
    twice = offer(first, first, file("report.md", content="second"))
    assert [decision.status for decision in twice] == ["kept", "unchanged", "refused"]


def test_files_kept_before_may_be_known_by_hash_and_size_alone():
    kept = [{"name": "a.txt", "sha256": sha("x").upper(), "size": 40 * MIB}]
    unchanged, full = offer(file(), file("b.txt"), kept=kept)
    assert (unchanged.status, full.status) == ("unchanged", "refused")


def test_files_that_were_refused_before_take_no_place():
    assert accepted(file("a", content="y"), kept=[file("a", content=None), file("../a")]) == [True]


@pytest.mark.parametrize(
    ("claimed", "ok"),
    [
        (None, True),
        (sha("x"), True),
        (sha("x").upper(), True),
        (sha("y"), False),
        ("abc", False),
        ("", False),
        (1, False),
        (True, False),
        ([], False),
    ],
    ids=repr,
)
def test_a_stated_hash_must_be_that_of_the_bytes(claimed, ok):
    assert accepted(file(sha256=claimed)) == [ok]


@pytest.mark.parametrize(
    "name",
    [
        "../x.txt", "..", ".", "a/b.txt", "/etc/passwd", "a\\b", "C:\\x", "C:x", "a\x00b", "a\nb", "a\tb",
        "\x7f", "", " ", None, 1, True, [], {}, " a.txt", "a.txt ", ".env", ".env.local", ".ENV", "prod.env",
        "a.env.bak", ".envrc", "\ud800", "a*b", "a?b", 'a"b', "a|b", "a<b", "x" * 256, "ß" * 128,
    ],
    ids=lambda name: repr(name)[:20],
)  # fmt: skip
def test_names_that_are_refused(name):
    assert accepted(file(name)) == [False]
    assert name_problem(name)


@pytest.mark.parametrize(
    "name",
    [
        "a.txt",
        "rx21b-diag-tensors.tar.gz",
        "env.py",
        "environment.yml",
        "conda-env.yml",
        "größe.json",
        "x" * 255,
        "-a",
        "a b.txt",
        "my.envelope.json",
        "..a",
    ],
)
def test_names_that_are_kept(name):
    assert accepted(file(name)) == [True]


@pytest.mark.parametrize("kind", [None, "", 1, []])
def test_a_file_needs_a_kind(kind):
    assert accepted({**file(), "kind": kind}) == [False]


@pytest.mark.parametrize("content", [1, True, [], {}, ["x"], "\ud800"], ids=repr)
def test_content_is_text(content):
    assert accepted(file(content=content)) == [False]


URL = "https://app.example.invalid/attachments/0123/a.txt"


def link(url, **more):
    return {"name": "a.txt", "kind": "metrics", "source_url": url, **more}


@pytest.mark.parametrize(
    ("url", "ok"),
    [
        (URL, True),
        ("https://app.example.invalid:443/attachments/a.txt", True),
        ("http://app.example.invalid/attachments/a.txt", False),
        ("https://app.example.invalid/files/a.txt", False),
        ("https://app.example.invalid/attachments/", False),
        ("https://app.example.invalid/attachments", False),
        ("https://app.example.invalid/x/attachments/a.txt", False),
        ("https://app.example.invalid/attachments/../a.txt", False),
        ("https://app.example.invalid/attachments/%2e%2e/a.txt", False),
        ("https://app.example.invalid/attachments/a.txt?X-Amz-Signature=1", False),
        ("https://app.example.invalid/attachments/a.txt#x", False),
        ("https://user:pw@app.example.invalid/attachments/a.txt", False),
        ("https://@app.example.invalid/attachments/a.txt", False),
        ("https://app.example.invalid:8443/attachments/a.txt", False),
        ("https://app.example.invalid:x/attachments/a.txt", False),
        ("https:///attachments/a.txt", False),
        ("//app.example.invalid/attachments/a.txt", False),
        ("/attachments/a.txt", False),
        ("file:///attachments/a.txt", False),
        ("https://[bad/attachments/a.txt", False),
        (" " + URL, False),
        (URL + "\n", False),
        ("", False),
        (1, False),
        (True, False),
        ([], False),
    ],
    ids=repr,
)
def test_a_source_url_is_an_attachment_over_https(url, ok):
    assert accepted(link(url)) == [ok]


def test_a_file_has_content_or_a_source_url():
    assert accepted(file(source_url=URL)) == [False]
    assert accepted(file(content=None)) == [False]
    assert accepted({"name": "a.txt", "kind": "metrics"}) == [False]


def test_a_referred_file_keeps_its_address_and_takes_a_place():
    first, again, other = offer(link(URL), link(URL), link(URL + "2"))
    assert [first.status, again.status, other.status] == ["kept", "unchanged", "refused"]
    assert first.size == 0
    assert accepted(link(URL, sha256="a" * 64)) == [True]
    assert accepted(link(URL, sha256="abc")) == [False]


def test_every_byte_is_scanned_and_any_finding_refuses():
    seen = []

    def scan(name, data):
        seen.append((name, data))
        return ["line 1: a key"] if b"key" in data else []

    decisions = offer(file("a", content="a key"), file("b", content="x"), link(URL), scan=scan)
    assert [decision.status for decision in decisions] == ["refused", "kept", "kept"]
    assert decisions[0].reason == "secret: line 1: a key"
    assert seen == [("a", b"a key"), ("b", b"x"), ("a.txt", URL.encode())]


@pytest.mark.parametrize(
    ("content", "ok"),
    [
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----\n", False),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n", False),
        ("Modal-Secret: wkEXAMPLEEXAMPLEEXAMPLE\n", False),
        ("Authorization: Bearer abcdef0123456789abcdef0123456789\n", False),
        ("GET https://bucket.example/x?X-Amz-Signature=0123456789abcdef\n", False),
        ("Authorization: Bearer abc.def.ghi\n", False),
        ("authorization: bearer abcdefghijklmnop\n", False),
        ("Modal-Secret: wsexampleexampleexample\n", False),
        ("X-Api-Key: abcdef0123456789\n", False),
        ("GET https://user:hunter2secret@host.example/x\n", False),
        ("GET https://user:password@host.example/x\n", False),
        ("GET https://user:pass@host.example/x\n", False),
        ("GET https://user:***@host.example/x\n", True),
        ("git clone ssh://git@host.example/repository\n", True),
        ("Authorization: Bearer <token>\n", True),
        ("headers = {'Modal-Secret': os.environ['MODAL_PROXY_TOKEN_SECRET']}\n", True),
        ("api_key = os.environ['TINKER_API_KEY']\n", True),
        ("sha256 " + "0123456789abcdef" * 4 + "\n", True),
        ("tinker://daecfa24-b646-4b82-b337-4447b0e95af0:train:0/weights/final\n", True),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_the_projects_scanner_is_used_where_none_is_given(content, ok):
    report = {"version": 1, "files": [{"name": "run.py", "kind": "script", "content": content}]}
    assert [decision.accepted for decision in validate(report).files] == [ok]


@pytest.mark.parametrize(
    "report", [None, [], "x", 1, {}, {"files": None}, {"files": "x"}, {"files": {}}]
)
def test_an_offer_of_another_form_keeps_nothing(report):
    assert validate(report).files == ()


def test_issues_of_an_offer_are_named():
    assert validate([], scan=no_secrets).issues == ("evidence: expected an object.",)
    assert validate({"version": 2, "files": "x"}, scan=no_secrets).issues == (
        "evidence.version: expected 1.",
        "evidence.files: expected a list.",
    )
    assert validate({"version": True}, scan=no_secrets).issues == ("evidence.version: expected 1.",)
    assert validate(None, scan=no_secrets).issues == ()


@pytest.mark.parametrize("entry", [None, 1, "x", []])
def test_a_file_of_another_form_is_refused(entry):
    assert accepted(entry) == [False]


@pytest.mark.parametrize(
    ("uri", "ok"),
    [
        ("tinker://daecfa24-b646-4b82-b337-4447b0e95af0:train:0/weights/final", True),
        ("tinker://user:pw@host/weights/final", False),
        ("https://bucket.example/weights?X-Amz-Signature=1", False),
        ("weights/final", False),
        ("", False),
        (None, False),
        ("https://[bad", False),
    ],
    ids=repr,
)
def test_checkpoints_are_references_without_credentials(uri, ok):
    report = {"version": 1, "files": [], "checkpoints": [{"arm": "a", "step": 1, "uri": uri}]}
    result = validate(report, scan=no_secrets)
    assert bool(result.issues) is not ok
    json.dumps(result.to_record())


def test_a_checkpoint_is_scanned_too():
    report = {"version": 1, "checkpoints": [{"uri": "tinker://t/weights"}]}
    assert validate(report, scan=lambda name, data: ["secret"]).issues == (
        "evidence.checkpoints[0].uri: expected a URI without secrets.",
    )


def test_the_limits_are_those_of_the_contract():
    """10 MiB = 10 485 760 bytes, 40 MiB = 41 943 040 bytes."""
    assert accepted(file(content="x" * 10_485_760), file("b", content="x" * 10_485_761)) == [
        True,
        False,
    ]
    kept = [{"name": "all", "sha256": "a" * 64, "size": 41_943_039}]
    assert accepted(file(content="x"), file("b", content="y"), kept=kept) == [True, False]


def test_content_may_be_bytes_that_are_no_text():
    decision = offer(file(content=b"\xff\x00"))[0]
    assert (decision.status, decision.size) == ("kept", 2)
    assert decision.sha256 == hashlib.sha256(b"\xff\x00").hexdigest()


def test_a_refused_file_has_no_size():
    assert offer(file("../a"))[0].to_record() == {
        "name": "../a",
        "status": "refused",
        "sha256": None,
        "size": 0,
        "reason": "a name is a plain file name, never a path",
    }
