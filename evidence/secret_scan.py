"""Find secrets in the bytes of a file, and say where without repeating them.

Three nets, each over every byte: the values of this process's environment variables whose names
sound secret, or that are named as such (as they are, URL-encoded, JSON-escaped, in base64); the
project's own rules (service keys, authorization headers, passwords in assignments, URLs with
credentials or signatures, private keys); and the token formats that the detect-secrets package
knows. Its entropy detectors are not used: evidence is full of SHA-256 digests.

A script that reads ``os.environ["..._SECRET"]`` holds no secret and passes.

Every rule has a literal that it cannot match without. The file is searched for those literals,
which is fast, and a rule is tried only around them, so that 40 MiB take a second or two.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

MAX_FINDINGS = 20

_SECRET_NAME = re.compile(
    r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|AUTH|COOKIE|WEBHOOK|DSN|CONNECTION|DATABASE_URL|_PAT$", re.I
)
_HARMLESS_NAME = re.compile(r"TOKENIZER|KEYBOARD|SSH_AUTH_SOCK|XAUTHORITY|AUTHOR(?!I)", re.I)
_MIN_VALUE_CHARS = 8
_PUBLIC_VALUE = re.compile(r"tml-local(?:-[a-z-]+)?")
"""Keys of the embedded service that are written in the documentation."""
_PLAIN_URL = re.compile(r"[a-z+]+://[^\s?@]*", re.I)

_BEFORE, _AFTER = 160, 2000
"""How far around its literal a detector or a rule may look, bytes."""


class _Rule(NamedTuple):
    """A pattern, the lower-case literals one of which it starts with, and a further test."""

    kind: str
    literals: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    accepts: Callable[[bytes], bool]


_Hit = tuple[int, str]
"""Offset of a finding, and what it is."""

_MASK = re.compile(rb"[*x.]+|redacted", re.I)
_NOT_LITERAL = re.compile(rb"[{}$<>()\[\]*]|environ|getenv|redacted", re.I)
_SCHEME = re.compile(rb"(?:bearer|basic|token|digest)\s+", re.I)
_CODE_NAME = re.compile(rb"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_LONG_NAME = 16
"""A lower-case word of this length without underscores is a value rather than a name in code."""


def _is_literal(found: bytes, *, shortest: int) -> bool:
    """Whether what stands after the colon is a value, not the code that fetches one."""
    is_quoted = found.lstrip(b"\\")[:1] in (b"'", b'"')
    stated, schemes = _SCHEME.subn(b"", found.strip(b"\\\"' "), count=1)
    value = stated.strip(b"\\\"' ")
    if len(value) < shortest or _NOT_LITERAL.search(value) or b" " in value:
        return False
    if not is_quoted and not schemes and _CODE_NAME.fullmatch(value):
        word = b"." not in value and b"_" not in value
        return word and (len(value) >= _LONG_NAME or not value.islower())
    return not (value.isalpha() and value.islower() and len(value) < 16)


def _is_header_value(found: bytes) -> bool:
    return _is_literal(found, shortest=8)


def _is_assigned_secret(found: bytes) -> bool:
    return _is_literal(found, shortest=12) and any(chr(byte).isdigit() for byte in found)


def _is_password(found: bytes) -> bool:
    return _MASK.fullmatch(found) is None


def _is_signature(found: bytes) -> bool:
    return _NOT_LITERAL.search(found) is None


def _always(_: bytes) -> bool:
    return True


def _key_rule(kind: str, literals: Sequence[bytes], pattern: bytes) -> _Rule:
    full = re.compile(rb"(?<![A-Za-z0-9])(?P<value>" + pattern + rb")")
    return _Rule(kind, tuple(literals), full, _always)


_VALUE = (
    rb"\\?[\"']?\s*[:=]\s*"
    rb"(?P<value>\\?[\"'][^\"'\n]{0,300}|[^\s,;}\])]{1,300}(?:[ \t]+[^\s,;}\])]{1,300})?)"
)
_HEADERS = (
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"x-auth-token",
    b"modal-key",
    b"modal-secret",
    b"cookie",
)
_SIGNED_PARAMETERS = (
    b"x-amz-signature=",
    b"x-amz-credential=",
    b"x-amz-security-token=",
    b"x-goog-signature=",
    b"x-goog-credential=",
    b"awsaccesskeyid=",
    b"signature=",
    b"sig=",
    b"secret=",
    b"token=",
    b"access_token=",
    b"auth=",
    b"api_key=",
    b"apikey=",
    b"key=",
    b"password=",
)
_ASSIGNED = (
    b"password",
    b"passwd",
    b"secret",
    b"api_key",
    b"api-key",
    b"apikey",
    b"access_key",
    b"access-key",
    b"accesskey",
    b"auth_token",
    b"auth-token",
    b"access_token",
    b"access-token",
    b"private_key",
)

_RULES: tuple[_Rule, ...] = (
    _key_rule("Tinker API key", [b"tml-"], rb"tml-[A-Za-z0-9_-]{12,}"),
    _key_rule(
        "Modal token", [b"ak-", b"as-", b"wk-", b"ws-"], rb"(?:ak|as|wk|ws)-[A-Za-z0-9]{18,}"
    ),
    _key_rule("Hugging Face token", [b"hf_"], rb"hf_[A-Za-z0-9]{30,}"),
    _key_rule("model provider key", [b"sk-"], rb"sk-[A-Za-z0-9_-]{32,}"),
    _key_rule("Google key", [b"aiza", b"ya29."], rb"(?:AIza[\w-]{35}|ya29\.[\w-]{20,})"),
    _key_rule("GitHub token", [b"github_pat_"], rb"github_pat_[A-Za-z0-9_]{30,}"),
    _key_rule("Prefect API key", [b"pnu_", b"pnb_"], rb"pn[ub]_[A-Za-z0-9]{30,}"),
    _key_rule("private key", [b"-----begin "], rb"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY"),
    _Rule(
        "URL with credentials",
        (b"://",),
        re.compile(rb"://[^\s/@:\"'<>{}$\\]{1,100}:(?P<value>[^\s/@\"'<>{}$\\]{3,200})@"),
        _is_password,
    ),
    _Rule(
        "signed or credential-bearing URL",
        tuple(mark + name for name in _SIGNED_PARAMETERS for mark in (b"?", b"&")),
        re.compile(
            rb"[?&](?:" + b"|".join(_SIGNED_PARAMETERS) + rb")(?P<value>[^\s&\"'<>{}\\]{8,300})",
            re.I,
        ),
        _is_signature,
    ),
    _Rule(
        "authorization header",
        _HEADERS,
        re.compile(rb"(?:" + b"|".join(_HEADERS) + rb")" + _VALUE, re.I),
        _is_header_value,
    ),
    _Rule(
        "assigned password, key or token",
        _ASSIGNED,
        re.compile(rb"(?:" + b"|".join(_ASSIGNED) + rb")" + _VALUE, re.I),
        _is_assigned_secret,
    ),
)

_DETECTORS: Mapping[str, tuple[bytes, ...]] = {
    "ArtifactoryDetector": (b"akc",),
    "AWSKeyDetector": (b"a3t", b"abia", b"acca", b"akia", b"asia", b"aws"),
    "AzureStorageKeyDetector": (b"accountkey=",),
    "CloudantDetector": (b"cloudant",),
    "GitHubTokenDetector": (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"),
    "GitLabTokenDetector": (
        *(b"glpat-", b"gldt-", b"glft-", b"glsoat-", b"glrt-", b"gr1348941"),
        *(b"glcbt-", b"glimt-", b"glptt-", b"glagent-", b"gloas-"),
    ),
    "IbmCloudIamDetector": (b"ibm",),
    "IbmCosHmacDetector": (b"secret_access_key", b"secret-access-key", b"hmac"),
    "JwtTokenDetector": (b"eyj",),
    "NpmDetector": (b":_authtoken",),
    "OpenAIDetector": (b"t3blbkfj",),
    "PrivateKeyDetector": (b"private key", b"putty-user-key"),
    "PypiTokenDetector": (b"pypi-age",),
    "SendGridDetector": (b"sg.",),
    "SlackDetector": (b"xoxa-", b"xoxb-", b"xoxp-", b"xoxo-", b"xoxs-", b"xoxr-", b"hooks.slack"),
    "SoftlayerDetector": (b"softlayer",),
    "SquareOAuthDetector": (b"sq0csp-",),
    "StripeDetector": (b"rk_live_", b"sk_live_"),
    "TwilioKeyDetector": (b"AC", b"SK"),
}
"""Detectors of the package, and literals one of which their patterns hold.

Lower-case literals are looked for in any case, others as they are.
"""

_WORD_DETECTORS: Mapping[str, bytes] = {
    "DiscordBotTokenDetector": b".",
    "MailchimpDetector": b"-us",
    "TelegramBotTokenDetector": b":",
}
"""Detectors whose literals are too common: they look at distinct long words that hold them."""

_TOKEN_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:"
_TO_SPACE = bytes(byte if byte in _TOKEN_BYTES else 32 for byte in range(256))
_LONG_WORD = 36
_DIGEST = re.compile(rb"(?:sha256:)?(?:[0-9a-f]{64}|[0-9a-f]{40}|[0-9a-f]{32})")


def scan_bytes(
    name: str,
    data: bytes,
    *,
    environment: Mapping[str, str] | None = None,
    secret_variables: Collection[str] = (),
) -> list[str]:
    """Return what is secret in a file, one line each, without the secret itself.

    Args:
        name: the file's name; some names (`.env`, `id_rsa`) are secret whatever they hold.
        data: the file's bytes, text or not.
        environment: variables whose values must not occur; this process's by default.
        secret_variables: names of variables that hold a secret whatever they are called.

    Returns:
        Texts such as ``line 3: private key``, at most 20; empty if nothing was found.
    """
    variables = os.environ if environment is None else environment
    found = dict.fromkeys(f"name: {what}" for what in _secret_name(name))
    views = [data, data.replace(b"\x00", b"")] if b"\x00" in data else [data]
    for view in views:
        hits = {*_environment(view, variables, secret_variables)}
        hits |= {*_own_rules(view), *_known_formats(view)}
        for offset, what in sorted(hits):
            line = view.count(b"\n", 0, offset) + 1
            found[f"line {line}: {what}"] = None
    return list(found)[:MAX_FINDINGS]


def _secret_name(name: str) -> Iterator[str]:
    last = name.replace("\\", "/").rpartition("/")[2].lower()
    if last.startswith(".env") or last in (".netrc", ".pypirc", "credentials"):
        yield "a credentials file"
    if last.startswith(("id_rsa", "id_ed25519", "id_ecdsa")) and not last.endswith(".pub"):
        yield "a private key file"


def _environment(
    data: bytes, variables: Mapping[str, str], secret_variables: Collection[str]
) -> Iterator[_Hit]:
    for name, value in variables.items():
        if not (
            _is_named_secret(name, value, secret_variables) or _is_secret_variable(name, value)
        ):
            continue
        for form in _forms(value):
            offset = data.find(form)
            if offset >= 0:
                yield offset, f"value of environment variable {name}"


def _is_named_secret(name: str, value: str, secret_variables: Collection[str]) -> bool:
    usable = len(value) >= _MIN_VALUE_CHARS and not _PUBLIC_VALUE.fullmatch(value)
    return usable and name in secret_variables


def _is_secret_variable(name: str, value: str) -> bool:
    if len(value) < _MIN_VALUE_CHARS or not _SECRET_NAME.search(name):
        return False
    if _is_path(value) or _PLAIN_URL.fullmatch(value) or _PUBLIC_VALUE.fullmatch(value):
        return False
    return _HARMLESS_NAME.search(name) is None


def _is_path(value: str) -> bool:
    """Whether a value names a file: one secret of 64 in base64 begins with a slash too.

    A path on this machine begins with a folder that is there, which a secret does not.
    """
    first, _, rest = value.removeprefix("/").partition("/")
    if not value.startswith("/") or not first:
        return False
    return os.path.lexists(value) or (bool(rest) and os.path.isdir(f"/{first}"))  # noqa: PTH112


def _forms(value: str) -> set[bytes]:
    raw = value.encode("utf-8", errors="surrogateescape")
    return {
        raw,
        quote(raw, safe="").encode(),
        json.dumps(value)[1:-1].encode(),
        base64.b64encode(raw).rstrip(b"="),
        base64.urlsafe_b64encode(raw).rstrip(b"="),
    }


def _own_rules(data: bytes) -> Iterator[_Hit]:
    lowered = data.lower()
    for rule in _RULES:
        for literal in rule.literals:
            for at in _places(lowered, literal):
                match = rule.pattern.match(data, at, at + _AFTER)
                if match and rule.accepts(match["value"]):
                    yield at, rule.kind


def _known_formats(data: bytes) -> Iterator[_Hit]:
    """Run the package's detectors around their literals, or on each distinct long word."""
    lowered = data.lower()
    for name, literals in _DETECTORS.items():
        for literal in literals:
            tried: set[bytes] = set()
            for at in _places(lowered if literal.islower() else data, literal):
                window = _window(data, at)
                if window not in tried:
                    tried.add(window)
                    if _detect(name, window):
                        yield at, _detector(name)[0]
    words = {word for word in data.translate(_TO_SPACE).split() if len(word) >= _LONG_WORD}
    for word in words:
        if _DIGEST.fullmatch(word):
            continue
        for name, literal in _WORD_DETECTORS.items():
            if literal in word and _detect(name, word):
                yield data.find(word), _detector(name)[0]


def _places(data: bytes, literal: bytes) -> Iterator[int]:
    at = data.find(literal)
    while at >= 0:
        yield at
        at = data.find(literal, at + 1)


def _window(data: bytes, at: int) -> bytes:
    """Return the part of the line around a place that a detector looks at."""
    start = max(data.rfind(b"\n", max(0, at - _BEFORE), at) + 1, at - _BEFORE, 0)
    end = data.find(b"\n", at, at + _BEFORE)
    return data[start : at + _BEFORE if end < 0 else end]


def _detect(name: str, window: bytes) -> bool:
    return _detector(name)[1](window.decode("latin-1"))


@functools.cache
def _detector(name: str) -> tuple[str, Callable[[str], bool]]:
    # A quarter of a second to load, and most commands never scan.
    from detect_secrets.core.plugins.util import (  # noqa: PLC0415
        get_mapping_from_secret_type_to_class,
    )

    # The mapping's own type is lost behind a cache decorator on some installations.
    classes: dict[str, Any] = get_mapping_from_secret_type_to_class()
    plugin = next(found for found in classes.values() if found.__name__ == name)()
    kind = str(plugin.secret_type).lower()
    return kind, lambda line: any(plugin.analyze_string(line))
