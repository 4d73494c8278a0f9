"""Builders for the environments' tests: a byte tokenizer, a scripted sampler, GSM8K rows."""

import json
from collections.abc import Callable, Sequence

import pytest
from transformers import AutoTokenizer

from deploy.local_service.byte_tokenizer import (
    CHAT_END,
    CHAT_START,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    byte_alphabet,
    write_tokenizer,
)
from envs.protocols import SampledSequence
from envs.rendering import make_renderer

STOP = 2
"""Id of <|im_end|> in the byte tokenizer."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A byte tokenizer with chat tokens: ids 0 to 2 are special, byte b is 3 + b."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = [END_OF_TEXT, CHAT_START, CHAT_END]
    write_tokenizer(
        folder,
        tokens=[*special, *byte_alphabet()],
        merges=[],
        special=special,
        split_digits=False,
        chat_template=CHAT_TEMPLATE,
        max_length=4096,
    )
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """The renderer that fits SmolLM2's chat format, over the byte tokenizer."""
    return make_renderer("qwen3_instruct", tokenizer)


class ScriptedSampler:
    """Answers each request with the next reply, or with what a function of the prompt says.

    A reply is a text (ended by the stop token) or a (text, stop_reason) pair. Log-probabilities
    are -0.5, -0.25, -0.125, ... so that every position is recognisable.
    """

    def __init__(
        self, replies: Sequence[str | tuple[str, str]] | Callable[[str], str | tuple[str, str]]
    ):
        self._replies = replies
        self.requests: list[dict] = []

    async def sample(self, prompt_tokens, **settings):
        self.requests.append({"prompt_tokens": tuple(prompt_tokens), **settings})
        if callable(self._replies):
            text = bytes(t - 3 for t in prompt_tokens if t > 2).decode("utf-8", "replace")
            reply = self._replies(text)
        else:
            reply = self._replies[len(self.requests) - 1]
        text, stop_reason = reply if isinstance(reply, tuple) else (reply, "stop")
        tokens = [3 + byte for byte in text.encode("utf-8", "surrogateescape")]
        if stop_reason == "stop":
            tokens.append(STOP)
        logprobs = [-(0.5 ** (1 + n % 20)) for n in range(len(tokens))]
        return [SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason=stop_reason)]


@pytest.fixture
def scripted():
    """The class of scripted samplers."""
    return ScriptedSampler


@pytest.fixture
def gsm8k_folder(tmp_path):
    """A folder of six training and two held-out rows in GSM8K's format."""

    def row(question: str, answer: str) -> str:
        return json.dumps({"question": question, "answer": f"Some steps.\n#### {answer}"})

    train = [row(f"Tim has {n} apples and buys one. How many?", str(n + 1)) for n in range(6)]
    test = [
        row("Eggs cost 2 each. What do 9 cost?", "18"),
        row("A house costs what?", "1,450,000"),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(train) + "\n")
    (tmp_path / "test.jsonl").write_text("\n".join(test) + "\n")
    return tmp_path
