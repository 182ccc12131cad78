"""Advantages: how much better an answer was than expected.

B rows, P prompts, G samples of one prompt (its group).
"""

from typing import Literal

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.gae import gae as gae  # with a critic instead of a group: a file of its own


@torch.no_grad()
def group_advantages(rewards: Tensor, group: Tensor, scale: Literal["std", "none"] = "std", ddof: int = 0,
                     eps: float = 0.0) -> Tensor:
    """Each reward relative to the other samples of its prompt: A = (r - mean) / std, the critic of GRPO.

    rewards : (B,) finite, any scale
    group   : (B,) int64, the prompt each row answers: any sizes above 1, rows in any order
    scale   : "std"   GRPO, arXiv:2402.03300 sec. 4.1.2
              "none"  A = r - mean: Dr. GRPO, arXiv:2503.20783 sec. 3.2
    ddof    : 0 divides the variance by G, 1 (verl, TRL) by G - 1. The paper does not say which; 0 is our
              choice: [1, 0, 0, 1] gives exactly [1, -1, -1, 1], and a share p of right answers gives each
              of them sqrt((1 - p) / p). With 1, advantages are smaller by sqrt((G - 1) / G)
    eps     : added to std: 1e-6 in verl, 1e-4 in TRL. Not needed, since equal rewards are found by comparison
    returns : (B, 1) unitless, no gradient; **exactly 0** in a group whose rewards are equal

    UserError: a reward that is not finite, a group of one, an option that does not exist.
    """
    if scale not in ("std", "none") or ddof not in (0, 1):
        raise UserError(f'scale {scale!r} with ddof {ddof!r}: use "std" or "none", and 0 or 1')
    rewards, index, count = _checked(rewards, group)
    mean = _group_sum(rewards, index, count) / count  # (P,)
    advantages = rewards - mean[index]  # (B,)
    if scale == "std":
        variance = _group_sum(advantages.square(), index, count) / (count - ddof)
        advantages = advantages / (variance.sqrt() + eps)[index]
    # The float32 mean of equal rewards need not be that reward, and rounding over a std of rounding is 1.
    return torch.where(_constant(rewards, index, count)[index], 0.0, advantages)[:, None]


@torch.no_grad()
def constant_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """(P,) bool, ordered by prompt id: True where all rewards are equal, so that there is nothing to learn.

    Their share is worth a look at every step. With a success rate p it is p^G + (1 - p)^G: at p = 0.18 it is
    70 % for groups of 2, 20 % for groups of 8, 4 % for groups of 16.
    """
    return _constant(*_checked(rewards, group))


def _checked(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards as floats, the number of each row's group (B,) in 0..P-1, and the groups' sizes (P,)."""
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise UserError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must both be (B,)")
    bad = (~rewards.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise UserError(f"the reward of row {row} (prompt {int(group[row])}) is {float(rewards[row])}: "
                        "rewards must be finite, mend the reward function")
    ids, index, count = group.unique(return_inverse=True, return_counts=True)
    if (count < 2).any():
        raise UserError(f"prompt {int(ids[count < 2][0])} has one sample and nothing to compare it with: "
                        "use a group_size of 2 or more, and drop whole groups, never single rows")
    return (rewards if rewards.is_floating_point() else rewards.float()), index, count


def _group_sum(values: Tensor, index: Tensor, count: Tensor) -> Tensor:
    return values.new_zeros(len(count)).index_add(0, index, values)


def _constant(rewards: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """(P,) bool: equal but for the last bits. 0.1 + 0.2 and 0.3 are one reward, computed in two ways."""
    zeros = rewards.new_zeros(len(count))
    high = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    low = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    return high - low <= 4 * torch.finfo(rewards.dtype).eps * torch.maximum(high.abs(), low.abs())
