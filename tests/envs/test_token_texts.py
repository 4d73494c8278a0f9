"""Texts of single tokens: whole characters as text, parts of characters as bytes."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from envs.token_texts import TokenText, token_texts


def test_byte_tokens_are_text_or_bytes(tokenizer):
    """Ids are 3 + byte: the two bytes of an accented e are no characters alone."""
    found = token_texts(tokenizer, [3 + ord("a"), 3 + ord("\n"), 2, 3 + 0xC3, 3 + 0xA9])

    assert found == [
        TokenText("a"),
        TokenText("\n"),
        TokenText("<|im_end|>"),
        TokenText("\ufffd", b"\xc3"),
        TokenText("\ufffd", b"\xa9"),
    ]


def test_every_byte_of_the_alphabet_comes_back(tokenizer):
    found = token_texts(tokenizer, [3 + byte for byte in range(256)])

    for byte, text in enumerate(found):
        assert (text.partial or text.text.encode()) == bytes([byte])


def test_ids_outside_the_vocabulary_are_numbers(tokenizer):
    assert token_texts(tokenizer, [99_999]) == [TokenText("<token 99999>")]


@pytest.mark.parametrize(("piece", "text"), [("hello", "hello"), ("\ufffd", "\ufffd")])
def test_other_vocabularies_are_decoded(piece, text):
    """No byte-level vocabulary: the piece of U+FFFD is that character and no part of another."""
    made = Tokenizer(models.WordLevel({piece: 0, "<unk>": 1}, unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)

    assert token_texts(tokenizer, [0]) == [TokenText(text)]
