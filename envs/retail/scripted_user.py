"""A user that always answers the same way: states a wish, gives the email, says yes, leaves."""

import re

from envs.conversation import STOP_TEXT, UserReply
from envs.retail.data import database_sha256
from envs.retail.tasks import RetailTask
from envs.retail.tools import Shop

PATIENCE = 3
"""Messages without progress after which the user leaves."""

_ASKS_EMAIL = re.compile(r"e-?mail", re.IGNORECASE)
_ASKS_YES = re.compile(
    r"confirm|\byes\b|shall i|should i|is that (ok|right)|go ahead", re.IGNORECASE
)


class ScriptedUser:
    """Plays one task's user against one episode's shop.

    In this order: once the order is as wished, thanks and leaves; gives the email when a message
    mentions it, once; says yes to a request for confirmation; otherwise repeats the wish, and
    leaves after `PATIENCE` messages that brought nothing. An email that was given is not given
    again, so that asking for it over and over does not go on for ever.

    Args:
        task: the wish.
        shop: the episode's shop, looked at and never changed.
    """

    def __init__(self, task: RetailTask, shop: Shop) -> None:
        self._task, self._shop = task, shop
        self._gave_email = False
        self._idle = 0

    async def first(self) -> UserReply:
        """Return the wish."""
        return UserReply(self._task.opening, stops=False)

    async def reply(self, agent_text: str) -> UserReply:
        """Answer a message of the agent."""
        if database_sha256(self._shop.database) == self._task.goal_sha256:
            return UserReply(f"Thank you. {STOP_TEXT}", stops=True)
        if _ASKS_EMAIL.search(agent_text) and not self._gave_email:
            self._gave_email = True
            return UserReply(f"My email is {self._task.email}", stops=False)
        if _ASKS_YES.search(agent_text) and self._idle < PATIENCE - 1:
            self._idle += 1
            return UserReply("Yes.", stops=False)
        self._idle += 1
        if self._idle >= PATIENCE:
            return UserReply(f"I give up. {STOP_TEXT}", stops=True)
        return UserReply(self._task.opening, stops=False)
