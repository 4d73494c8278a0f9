"""Tokenizer files for the models the service makes itself: byte-level BPE with chat tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""Ids 0, 1 and 2 in every model of this family; ``CHAT_END`` ends a turn and stops sampling."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Turns between chat tokens, and no system message unless the caller gives one."""


def byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for the bytes 0 to 255, in byte order.

    Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards: the table of
    GPT-2's byte-level encoding, which the ``tokenizers`` library uses.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def write_tokenizer(
    folder: Path,
    *,
    tokens: list[str],
    merges: list[tuple[str, str]],
    special: list[str],
    split_digits: bool,
    chat_template: str,
    max_length: int,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into a folder.

    Args:
        folder: an existing folder.
        tokens: every token in id order, special tokens included, in byte-level characters.
        merges: BPE merges, best first.
        special: tokens that are never split and are left out of plain text.
        split_digits: give every digit a token of its own, as SmolLM2 does.
        chat_template: Jinja text for ``apply_chat_template``.
        max_length: context limit in tokens, as the model's config says.
    """
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([digits, by_byte]) if split_digits else by_byte
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CHAT_START,
        "eos_token": CHAT_END,
        "pad_token": CHAT_END,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": chat_template,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON with sorted keys, so that equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
