"""The texts of single tokens, for people who read stored sequences."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envs.rendering import TOKENIZER_LOCK

REPLACEMENT = "\ufffd"


class TokenText(NamedTuple):
    """One token's text alone; `partial` holds its bytes where they are no whole characters."""

    text: str
    partial: bytes | None = None


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[TokenText]:
    """Return the text of every token id.

    Byte-level vocabularies split characters; what a token alone cannot say is kept as bytes. An id
    that the vocabulary lacks is shown as its number.
    """
    with TOKENIZER_LOCK:
        pieces = tokenizer.convert_ids_to_tokens(list(token_ids))
        alone = [str(tokenizer.decode([token])) for token in token_ids]
    return [
        _text(token, piece, decoded)
        for token, piece, decoded in zip(token_ids, pieces, alone, strict=True)
    ]


def _text(token: int, piece: str | None, decoded: str) -> TokenText:
    if piece is None:
        return TokenText(f"<token {token}>")
    if REPLACEMENT not in decoded:
        return TokenText(decoded)
    if any(character not in _BYTES for character in piece):
        return TokenText(decoded)
    raw = bytes(_BYTES[character] for character in piece)
    whole = raw.decode("utf-8", "replace")
    # The token may be the replacement character itself.
    return TokenText(whole) if whole.encode() == raw else TokenText(whole, raw)


def _byte_level() -> Mapping[str, int]:
    """Characters that stand for bytes in byte-level vocabularies, as GPT-2 introduced them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_level()
