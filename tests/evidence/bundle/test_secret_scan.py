"""Secrets are found by kind and line, never repeated; what reads a secret is left alone."""

import base64
from pathlib import Path

import pytest

from evidence.secret_scan import scan_bytes

ROOT = Path(__file__).resolve().parents[3]


def _join(*parts):
    """Keep planted secrets out of this file's own text."""
    return "".join(parts)


PLANTED = {
    "Tinker API key": _join("tm", "l-AbCdEf0123456789"),
    "Modal token": _join("w", "k-AbCdEf0123456789xyz"),
    "Hugging Face token": _join("h", "f_", "a1B2" * 9),
    "model provider key": _join("s", "k-ant-", "a1B2" * 9),
    "Google key": _join("AI", "za", "a" * 35),
    "github token": _join("gh", "p_", "a1B2" * 9),
    "private key": _join("-----BEG", "IN EC PRIVATE KEY-----"),
    "aws access key": _join("AK", "IA", "ABCDEFGH01234567"),
    "json web token": _join("ey", "JhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlMTIz"),
    "slack token": _join("xo", "xb-123456789012-abcdefghij"),
    "stripe access key": _join("sk", "_live_", "a" * 24),
    "twilio api key": _join("A", "C", "0a" * 16),
    "mailchimp access key": _join("0123456789abcdef" * 2, "-us", "7"),
    "telegram bot token": _join("123456789", ":", "AbCdE" * 7),
    "npm tokens": _join("//registry.example/:_auth", "Token=npm_abc"),
    "URL with credentials": _join("postgresql://user:", "hunter22", "@db/x"),
    "signed or credential-bearing URL": _join("https://b/x?X-Amz-", "Signature=0123456789abcdef"),
    "authorization header": _join("Authorization: Bearer ", "abcDEF0123456789"),
    "assigned password, key or token": _join("my_api_", "key = 'abcdef012345'"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_secret_is_named_but_not_shown(kind):
    """The finding says what and on which line, and never holds the secret."""
    secret = PLANTED[kind]
    data = f"first line\nbefore {secret} after\n".encode()

    found = scan_bytes("log.txt", data, environment={})

    assert f"line 2: {kind}" in found
    assert all(secret not in text for text in found)


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_secret_is_found_in_json_and_utf16(kind):
    """A secret inside a JSON string, or in UTF-16 text, is found too."""
    secret = PLANTED[kind]

    in_json = scan_bytes("a.jsonl", b'{"text":"' + secret.encode() + b'"}\n', environment={})
    in_utf16 = scan_bytes("a.txt", f"x {secret} y".encode("utf-16"), environment={})

    assert any(text.endswith(kind) for text in in_json)
    assert any(text.endswith(kind) for text in in_utf16)


@pytest.mark.parametrize(
    "text",
    [
        "headers = {'Modal-Key': os.environ['MODAL_TOKEN_ID'], 'Modal-Secret': os.environ['S']}",
        'api_key = os.getenv("TINKER_API_KEY")',
        'request.headers["Authorization"] = f"Bearer {key}"',
        "x-api-key: $TINKER_API_KEY",
        "Authorization: Bearer <token>",
        'headers={"X-API-Key": self._settings.api_key}',
        "client_secret = derive_secret(spec, 12345)",
        "postgresql://user:***@db/x",
        "evaluator_id: " + "0a" * 32,
        "tinker://a14956b6cd9d6e01ce4bdf0b832d6fd8:train:0/sampler_weights/grpo-s14",
        "the password is on the desk, the secret: be kind; cookie: chocolate",
        '{"token_id": 12345, "stop_reason": "stop", "sampling_logprob": -0.123456789}',
        "https://example.com/attachments/a.txt?page=2",
    ],
)
def test_text_without_a_secret_passes(text):
    assert scan_bytes("run.py", text.encode(), environment={}) == []


def test_value_of_an_environment_variable_is_found():
    """Any secret-sounding variable's value is refused, encoded or not; others are not."""
    environment = {"SERVICE_SECRET": "s3cr3t/value", "HOME_DIRECTORY": "plainvalue"}
    encoded = base64.b64encode(b"s3cr3t/value").decode()

    for text in ("x s3cr3t/value y", "s3cr3t%2Fvalue", encoded):
        assert scan_bytes("a", f"\n{text}".encode(), environment=environment) == [
            "line 2: value of environment variable SERVICE_SECRET"
        ]
    assert scan_bytes("a", b"plainvalue", environment=environment) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("API_KEY", "short"),
        ("TOKENIZERS_PARALLELISM", "false-value"),
        ("SSH_AUTH_SOCK", "/tmp/ssh-agent.1"),
        ("AUTH_URL", "http://127.0.0.1:4200/api"),
        ("TINKER_API_KEY", "tml-local"),
    ],
)
def test_harmless_variable_is_no_secret(name, value):
    assert scan_bytes("a", value.encode(), environment={name: value}) == []


@pytest.mark.parametrize(
    "value",
    ["/aB3dE5fG7hJ9kL1mN3pQ5r=", "/x9/Ty4+Qw8eRt2/yU6iOp0aS", "/", "//////////", "/9aB8cD7e"],
)
def test_secret_that_begins_with_a_slash_is_found(value):
    """One of 64 secrets in base64 does; no folder of that name is there."""
    expected = ["line 1: value of environment variable API_KEY"] if len(value) > 7 else []

    assert scan_bytes("a", value.encode(), environment={"API_KEY": value}) == expected


def test_path_in_a_variable_is_no_secret(tmp_path):
    """A file that is there, one that is not, and one that was never made on this machine."""
    there = tmp_path / "key"
    there.write_bytes(b"x")

    for value in (str(there), str(tmp_path / "missing" / "key.pem")):
        assert scan_bytes("a", value.encode(), environment={"SSH_KEY": value}) == []


@pytest.mark.parametrize("value", ["tenant-4711-blue", "/tmp/blue-4711", "https://x.example/blue"])
def test_variable_that_is_named_as_secret_is_found(value):
    """Whatever it is called and looks like; the documented key of the embedded service is none."""
    environment = {"PROXY_ID": value, "OTHER": "other-value", "PROXY_MODE": "short"}

    def scan(text, names):
        return scan_bytes("a", text, environment=environment, secret_variables=names)

    text = f"{value} other-value short tml-local".encode()
    assert scan(text, {"PROXY_ID", "PROXY_MODE"}) == [
        "line 1: value of environment variable PROXY_ID"
    ]
    assert scan(text, ()) == []
    local = {"PROXY_ID": "tml-local-key"}
    found = scan_bytes("a", b"tml-local-key", environment=local, secret_variables={"PROXY_ID"})
    assert not any("PROXY_ID" in text for text in found)


def test_environment_is_this_process_by_default(monkeypatch):
    monkeypatch.setenv("PLANTED_PASSWORD", "correct-horse-battery")

    found = scan_bytes("a", b"correct-horse-battery")

    assert found == ["line 1: value of environment variable PLANTED_PASSWORD"]


@pytest.mark.parametrize("name", [".env", "x/.env.local", "id_rsa", "credentials", ".netrc"])
def test_file_names_that_are_secret_by_themselves(name):
    assert scan_bytes(name, b"", environment={})[0].startswith("name: ")
    assert scan_bytes("id_rsa.pub", b"", environment={}) == []


def test_findings_are_bounded():
    data = (PLANTED["Tinker API key"] + "\n").encode() * 100

    assert len(scan_bytes("a", data, environment={})) == 20


def test_own_program_passes():
    """The bundle keeps the program's files, so none of them may look like a secret."""
    found = {
        str(path.relative_to(ROOT)): scan_bytes(path.name, path.read_bytes(), environment={})
        for folder in ("flows", "tasks", "losses", "envs", "evidence", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".json", ".md", ".yaml")
    }

    assert {name: hits for name, hits in found.items() if hits} == {}
