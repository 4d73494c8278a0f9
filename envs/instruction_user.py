"""A deterministic user for domains that describe their users in an instruction."""

import re

from envs.conversation import STOP_TEXT, UserReply

MAX_ANSWERS = 6
"""Answers after which the user leaves."""

_ASKS_YES = re.compile(r"confirm|\byes\b|shall i|should i|proceed|go ahead", re.IGNORECASE)


class InstructionUser:
    """Says the whole instruction at once, agrees to what is asked, and leaves.

    It is no natural user; it makes runs repeatable without a served model. It never looks at the
    database or the right actions.

    Args:
        instruction: who the user is and what they want.
    """

    def __init__(self, instruction: str) -> None:
        self._instruction = instruction
        self._answers = 0

    async def first(self) -> UserReply:
        """Return the instruction."""
        return UserReply(f"Hello. This is about me: {self._instruction}", stops=False)

    async def reply(self, agent_text: str) -> UserReply:
        """Agree to a request for confirmation, refer a question to the instruction, else leave."""
        self._answers += 1
        if self._answers > MAX_ANSWERS:
            return UserReply(STOP_TEXT, stops=True)
        if _ASKS_YES.search(agent_text):
            return UserReply("Yes, please.", stops=False)
        if "?" in agent_text:
            return UserReply(f"All I know is this: {self._instruction}", stops=False)
        return UserReply(STOP_TEXT, stops=True)
