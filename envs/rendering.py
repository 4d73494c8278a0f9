"""Turn messages into token ids and sampled token ids back into text, safely under threads.

The cookbook's Qwen renderers switch `split_special_tokens` on one shared fast tokenizer while
they encode. Two threads doing so at once make the tokenizer raise `Already borrowed`, so every
use of a tokenizer in this package goes through one lock. Encoding a short prompt takes well under
a millisecond; nothing is awaited while the lock is held.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    ToolSpec,
    get_renderer,
    get_text_content,
)

from envs.errors import EnvInputError

TOKENIZER_LOCK = threading.Lock()
"""Held by whoever uses a tokenizer."""

THINKING_END = "</think>"
TOOL_CALL_START = "<tool_call>"


class ParsedReply(NamedTuple):
    """A sampled reply as text; `stopped` says that it ended with the renderer's stop token."""

    text: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """A cookbook renderer whose calls are serialised.

    Attributes:
        renderer: the cookbook's renderer.
        name: the name it was asked for, part of an evaluator's provenance.
    """

    renderer: Renderer
    name: str
    _stop: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _special: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up what the tokenizer takes for special tokens wherever it stands."""
        with TOKENIZER_LOCK:
            pattern = _special_strings(self.renderer.tokenizer)
        object.__setattr__(self, "_special", pattern)

    def stop_tokens(self) -> list[int]:
        """Ids of the tokens that end a turn.

        Raises:
            EnvInputError: if the renderer stops on strings, which token-exact episodes refuse.
        """
        if not self._stop:
            with TOKENIZER_LOCK:
                stop = self.renderer.get_stop_sequences()
            ids = [token for token in stop if isinstance(token, int)]
            if not ids or len(ids) != len(stop):
                raise EnvInputError("renderer", self.name, "a renderer that stops on token ids")
            self._stop[:] = ids
        return list(self._stop)

    def plain(self, text: str) -> str:
        """The text with a space inside whatever the tokenizer would take for a special token.

        Only some of the cookbook's renderers encode what a message says as text and nothing else.
        With the others a quoted end token would end the message, and what follows would be read as
        structure that nobody wrote.
        """
        while self._special.search(text):  # once more: what is left may be another one
            text = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation up to where the assistant's next turn starts.

        What messages say is text: see `plain`.
        """
        typed = [
            Message(role=message["role"], content=self.plain(message["content"]))
            for message in messages
        ]
        with TOKENIZER_LOCK:
            return tuple(self.renderer.build_generation_prompt(typed).to_ints())

    def parse(self, tokens: Sequence[int]) -> ParsedReply:
        """Text of a sampled reply, without its stop token and without thinking blocks."""
        with TOKENIZER_LOCK:
            message, termination = self.renderer.parse_response(list(tokens))
        return ParsedReply(
            text=get_text_content(message), stopped=bool(termination.is_stop_sequence)
        )

    def continuation(self, message: Mapping[str, str]) -> tuple[int, ...]:
        """Token ids from an assistant turn's end to the start of the next, with one message between.

        Appended to the tokens as they were sampled, they give the next prompt without rendering
        the turn again, whatever the renderer would make of it.

        Raises:
            EnvInputError: if the renderer does not end every message with its stop token.
        """
        around = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, message)
        rendered, stop = self.prompt(around), self.stop_tokens()[0]
        ends = [position for position, token in enumerate(rendered) if token == stop]
        if len(ends) != len(around):
            raise EnvInputError(
                "renderer", self.name, "one that ends every message with its stop token"
            )
        return rendered[ends[1] + 1 :]

    def system_with_tools(self, tools: Sequence[Mapping[str, Any]], policy: str) -> str:
        """The system message in which this model family expects its tools, as text.

        Args:
            tools: function specifications with `name`, `description` and `parameters`.
            policy: the text that goes with them.

        Raises:
            EnvInputError: if the renderer puts tools anywhere else.
        """
        specs = [
            ToolSpec(
                name=tool["name"], description=tool["description"], parameters=tool["parameters"]
            )
            for tool in tools
        ]
        messages = self.renderer.create_conversation_prefix_with_tools(specs, policy)
        if len(messages) != 1 or not isinstance(messages[0]["content"], str):
            raise EnvInputError("renderer", self.name, "one that puts tools in a system message")
        system = messages[0]["content"]
        if self.plain(system) != system:
            expected = "one that describes tools without special tokens, for a policy without them"
            raise EnvInputError("renderer", self.name, expected)
        return system

    def system_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens the first message of a prompt has, its end token included."""
        return list(prompt).index(self.stop_tokens()[0]) + 1

    def turn_text(self, tokens: Sequence[int]) -> str:
        """A sampled turn as written, tool calls included, without stop token and thinking."""
        stop = set(self.stop_tokens())
        text = self.decode([token for token in tokens if token not in stop])
        thinking, closed, rest = text.partition(THINKING_END)
        return rest if closed and TOOL_CALL_START not in thinking else text

    def decode(self, tokens: Sequence[int]) -> str:
        """All tokens as text, special tokens included."""
        with TOKENIZER_LOCK:
            return str(self.renderer.tokenizer.decode(list(tokens)))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        with TOKENIZER_LOCK:
            return list(self.renderer.tokenizer.encode(text, add_special_tokens=False))


def _special_strings(tokenizer: Any) -> re.Pattern[str]:
    """Matches the special tokens of a tokenizer, longer ones first; nothing where it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    names = {str(token) for token in added.values() if getattr(token, "special", False)}
    names |= {str(name) for name in getattr(tokenizer, "all_special_tokens", None) or ()}
    alternatives = sorted((re.escape(name) for name in names if len(name) > 1), key=len)
    return re.compile("|".join(reversed(alternatives)) or r"(?!)")


def make_renderer(name: str, tokenizer: Any) -> ChatRenderer:
    """Return the cookbook renderer of that name over a tokenizer.

    Raises:
        EnvInputError: if the cookbook knows no such renderer, or it does not fit the tokenizer.
    """
    try:
        renderer = get_renderer(name, tokenizer, model_name=getattr(tokenizer, "name_or_path", ""))
    except (RendererError, ValueError) as error:
        raise EnvInputError("renderer", name, f"a tinker-cookbook renderer ({error})") from error
    return ChatRenderer(renderer=renderer, name=name)
