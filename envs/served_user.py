"""A user played by a served model."""

from envs.conversation import STOP_TEXT, UserReply, clipped
from envs.served import AnswerError, Partner

TEMPLATE_ID = "tau-user-v1"
"""Id of tau-bench's own prompt for its users, with `GREETING` before the first message."""

GREETING = "Hi! How can I help you today?"
"""What the agent is taken to have said before the user's first message."""

MAX_CHARS = 8_000
"""Longer messages are no message of a user."""

MAX_SHOWN_CHARS = 20_000
"""Of one message of the agent, what the user reads."""


class ServedUser:
    """Plays the user of one episode with a served model.

    The model sees the conversation from the other side: what the agent says are its user messages.
    A message that holds the stop text ends the conversation, except the first: a user that leaves
    before saying anything is a failure of the simulator, and is asked again.

    Args:
        partner: the model.
        system: what it is told, the user's instruction included.
    """

    def __init__(self, partner: Partner, *, system: str) -> None:
        self._partner = partner
        self._history = [
            {"role": "system", "content": system},
            {"role": "user", "content": GREETING},
        ]
        self._requests = 0

    async def first(self) -> UserReply:
        """Return the opening message.

        Raises:
            EnvServiceError: if the model gives none after its retries.
        """
        return await self._say(opening=True)

    async def reply(self, agent_text: str) -> UserReply:
        """Answer a message of the agent.

        Raises:
            EnvServiceError: if the model gives no answer after its retries.
        """
        self._history.append({"role": "user", "content": clipped(agent_text, MAX_SHOWN_CHARS)})
        return await self._say(opening=False)

    async def _say(self, *, opening: bool) -> UserReply:
        answer = await self._partner.ask(
            self._history,
            read=lambda text: read_user_message(text, opening=opening),
            request=self._requests,
        )
        self._requests += 1
        text = str(answer.value)
        self._history.append({"role": "assistant", "content": text})
        return UserReply(
            text, stops=STOP_TEXT in text, attempts=answer.attempts, problems=answer.problems
        )


def read_user_message(text: str, *, opening: bool) -> str:
    """Return a simulated user's message.

    Raises:
        AnswerError: if it is empty, too long, or stops the conversation before it began.
    """
    message = text.strip()
    if not message:
        raise AnswerError("empty", "empty message")
    if len(message) > MAX_CHARS:
        raise AnswerError("too_long", f"a message of {len(message)} characters")
    if opening and STOP_TEXT in message:
        raise AnswerError("stopped_first", "the first message ends the conversation")
    return message
