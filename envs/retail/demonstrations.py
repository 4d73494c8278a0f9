"""Demonstrations for the warm start, played by the scripted agent on training tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envs.data_order import epoch_order
from envs.errors import EnvInputError
from envs.protocols import Episode, EpisodeSettings
from envs.rendering import ChatRenderer
from envs.retail.scripted_agent import ScriptedPolicy, ideal_turns

if TYPE_CHECKING:
    from envs.retail.environment import RetailEnvironment

_SETTINGS = EpisodeSettings(max_tokens=4096, max_turns=16)


async def demonstrations(
    environment: RetailEnvironment, *, renderer: ChatRenderer, count: int, seed: int
) -> list[Episode]:
    """Play `count` training tasks with the scripted agent.

    They go through the same loop as the policy's episodes, so a model that is trained on their
    masked tokens sees exactly the prompts it will be asked with. Deterministic in `seed`.

    Args:
        environment: the shop.
        renderer: of the policy model.
        count: at most the number of training tasks.
        seed: chooses tasks and phrasings.

    Raises:
        EnvInputError: if there are fewer tasks, or a demonstration does not solve its task.
    """
    ids = environment.train_ids
    if not 1 <= count <= len(ids):
        raise EnvInputError("demonstrations", count, f"1 to {len(ids)}")
    episodes = []
    for place, index in enumerate(epoch_order(len(ids), seed=seed)[:count]):
        task = environment.task(ids[index])
        policy = ScriptedPolicy(ideal_turns(task, seed=seed + place), renderer)
        episode = await environment.run_episode(task.task_id, policy, settings=_SETTINGS, seed=seed)
        if episode.native_reward != 1.0:
            raise EnvInputError(f"demonstration of {task.task_id}", episode.stop_reason, "solved")
        episodes.append(episode)
    return episodes
