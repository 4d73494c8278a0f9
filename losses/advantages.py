"""Group-relative advantages, with and without the standard deviation.

Shape legend: P problems (groups), G completions of one problem, T tokens of one sequence, B
sequences of a batch.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from losses.errors import LossConfigError, LossInputError


def total_reward(step_rewards: Sequence[float], final_reward: float) -> float:
    """Add an episode's step rewards and its final reward, in that order."""
    return sum(step_rewards) + final_reward


def require_rewards(name: str, rewards_G: Tensor) -> None:
    """Refuse an empty group or a reward that is no number.

    Raises:
        LossInputError: names the field and what it holds.
    """
    if rewards_G.dim() != 1 or rewards_G.numel() == 0:
        message = f"{name}: shape {tuple(rewards_G.shape)}; expected [G] with at least one reward"
        raise LossInputError(message)
    if not bool(torch.isfinite(rewards_G).all()):
        message = f"{name}: {rewards_G.tolist()}; expected finite rewards"
        raise LossInputError(message)


def is_constant(rewards_G: Tensor) -> bool:
    """Whether all rewards of a group are the same number."""
    return bool((rewards_G == rewards_G[0]).all())


def group_mean_advantages(rewards_G: Tensor) -> Tensor:
    """Return ``r - mean(r)`` of one group, without dividing by the standard deviation.

    Equal rewards, and a group of one, give exactly 0: the rounding of the mean is not allowed to
    leave a residue. The arithmetic is in the rewards' dtype; float32 loses rewards that share a
    large offset, so pass float64.

    Args:
        rewards_G: [G] total reward of each completion of one problem.

    Returns:
        [G] advantages.

    Raises:
        LossInputError: if the group is empty or a reward is not finite.

    Sources:
        Group mean without std: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO).
    """
    require_rewards("rewards_G", rewards_G)
    if is_constant(rewards_G):
        return torch.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def group_advantages(config: Mapping[str, Any], rewards_G: Tensor) -> Tensor:
    """Return the advantages of one group as the execution file registers them.

    ``{"kind": "group_mean", "std_norm": false}`` is ``group_mean_advantages``; with ``std_norm``
    true it is verl's form with the registered ``epsilon`` (1e-6 unless stated).

    Args:
        config: the ``advantage`` block.
        rewards_G: [G] total reward of each completion of one problem, float64.

    Returns:
        [G] advantages.

    Raises:
        LossConfigError: names the field, its value and what is allowed.
        LossInputError: if the group is empty or a reward is not finite.
    """
    if config.get("kind") != "group_mean":
        message = f"advantage.kind: {config.get('kind')!r}; expected 'group_mean'"
        raise LossConfigError(message)
    std_norm, epsilon = config.get("std_norm"), config.get("epsilon", 1e-6)
    if not isinstance(std_norm, bool):
        message = f"advantage.std_norm: {std_norm!r}; expected true or false"
        raise LossConfigError(message)
    if not std_norm:
        return group_mean_advantages(rewards_G)
    return verl_group_advantages(rewards_G, norm_by_std=True, epsilon=float(epsilon))


def informative_groups(rewards_P: Sequence[Sequence[float]], *, keep_one: bool) -> list[int]:
    """Return the indices of the groups whose rewards differ.

    Args:
        rewards_P: total rewards of each group.
        keep_one: if every group is constant, return the first instead of none.
    """
    varied = [index for index, rewards_G in enumerate(rewards_P) if len(set(rewards_G)) > 1]
    if not varied and keep_one and rewards_P:
        return [0]
    return varied


def verl_group_advantages(rewards_G: Tensor, *, norm_by_std: bool, epsilon: float) -> Tensor:
    """Return verl's GRPO advantages of one group.

    ``(r - mean) / (std + epsilon)`` with the sample standard deviation, or ``r - mean``. A group of
    one keeps its raw reward (mean 0, standard deviation 1), unlike ``group_mean_advantages``. Equal
    rewards give exactly 0, decided on the rewards: a rounding residue divided by ``epsilon`` would
    be an advantage of thousands.

    Args:
        rewards_G: [G] total reward of each completion of one problem.
        norm_by_std: whether to divide.
        epsilon: added to the standard deviation.

    Returns:
        [G] advantages.

    Raises:
        LossInputError: if the group is empty or a reward is not finite.

    Sources:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.
    """
    require_rewards("rewards_G", rewards_G)
    if rewards_G.numel() == 1:
        return rewards_G / (1.0 + epsilon) if norm_by_std else rewards_G.clone()
    if is_constant(rewards_G):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(unbiased=True) + epsilon) if norm_by_std else centred_G


def verl_outcome_advantages(
    token_rewards_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    groups_B: Sequence[Hashable],
    norm_by_std: bool,
    epsilon: float,
) -> Tensor:
    """Sum token rewards, take verl's group advantages and spread them over the trained tokens.

    Args:
        token_rewards_BT: [B, T] rewards; all of them count, also off the mask.
        loss_mask_BT: [B, T] bool.
        groups_B: group key of each sequence; members need not be neighbours.
        norm_by_std: whether to divide by the standard deviation.
        epsilon: added to the standard deviation.

    Returns:
        [B, T] advantages, exactly 0 off the mask.

    Raises:
        LossInputError: if the group keys do not fit or a reward is not finite.
    """
    totals_B = token_rewards_BT.sum(-1)
    if len(groups_B) != totals_B.numel():
        message = f"groups_B: {len(groups_B)} entries; expected {totals_B.numel()}, one a sequence"
        raise LossInputError(message)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups_B):
        members.setdefault(group, []).append(index)
    advantages_B = torch.zeros_like(totals_B)
    for indices in members.values():
        advantages_B[indices] = verl_group_advantages(
            totals_B[indices], norm_by_std=norm_by_std, epsilon=epsilon
        )
    return broadcast_advantages(advantages_B, loss_mask_BT)


def broadcast_advantages(advantages_B: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Give every trained token of a sequence the sequence's advantage, and others exactly 0."""
    spread_BT = advantages_B.unsqueeze(-1).expand(loss_mask_BT.shape)
    return torch.where(loss_mask_BT, spread_BT, torch.zeros_like(spread_BT))
