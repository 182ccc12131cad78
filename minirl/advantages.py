"""Advantages: how much better an answer was than expected.

B rows, P prompts, G samples of one prompt (its group).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.gae import gae as gae  # with a critic instead of a group: a file of its own
from minirl.gae import masked_moments

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh

Baseline = Literal["mean", "leave-one-out", "length", "half", "none"]
Scale = Literal["std", "batch", "none"]


@torch.no_grad()
def group_advantages(rewards: Tensor, group: Tensor, scale: Scale = "std", ddof: int = 0, eps: float = 0.0,
                     baseline: Baseline = "mean", lengths: Tensor | None = None, mesh: Mesh | None = None) -> Tensor:
    """Each reward relative to the other samples of its prompt: A = (r - baseline) / scale, the critic of GRPO.

    rewards  : (B,) finite, any scale
    group    : (B,) int64, the prompt each row answers: any sizes above 1, rows in any order
    baseline : "mean"           of the group: GRPO, arXiv:2402.03300 sec. 4.1.2. It contains r itself, which shrinks the
                                expected gradient by (G - 1) / G and changes nothing else
               "leave-one-out"  mean of the others: RLOO, arXiv:2402.14740, unbiased; G / (G - 1) times the one before
               "length"         sum of length x r / sum of lengths: OPO, arXiv:2505.23585, the least
                                variance if the gradients of all tokens have one size; needs `lengths` (B,)
               "half"           1/2, between right and wrong: what is all right or all wrong is a signal, too
               "none"           A = r / scale: equal rewards are a signal as well (REINFORCE++ whitens afterwards)
    scale    : "std"    of the group's rewards: GRPO
               "batch"  of all rewards, over all replicas of `mesh`: a group cannot gain weight by being nearly constant
               "none"   Dr. GRPO, arXiv:2503.20783 sec. 3.2
    ddof     : 0 divides the variance by G, 1 (verl, TRL) by G - 1. The paper does not say which; 0 is our
               choice: [1, 0, 0, 1] gives exactly [1, -1, -1, 1], and a share p of right answers gives each
               of them sqrt((1 - p) / p). With 1, advantages are smaller by sqrt((G - 1) / G)
    eps      : added to std: 1e-6 in verl, 1e-4 in TRL. Not needed, since equal rewards are found by comparison
    returns  : (B, 1) unitless, no gradient; **exactly 0** in a group whose rewards are equal, but for "half" and "none"

    UserError: a reward that is not finite, a group of one, an option that does not exist.
    """
    if scale not in Scale.__args__ or ddof not in (0, 1) or baseline not in Baseline.__args__:
        raise UserError(f"scale {scale!r}, baseline {baseline!r}, ddof {ddof!r}: use one of {Scale.__args__}, "
                        f"one of {Baseline.__args__}, and 0 or 1")
    rewards, index, count = _checked(rewards, group)
    centred = rewards - (_group_sum(rewards, index, count) / count)[index]  # (B,)
    if baseline == "mean":
        advantages = centred
    elif baseline == "leave-one-out":
        advantages = centred * (count.to(rewards.dtype) / (count - 1))[index]
    elif baseline == "length":
        if lengths is None:
            raise UserError('baseline "length" weighs rewards by the lengths of their answers: pass lengths (B,)')
        weight = lengths.to(rewards.dtype).clamp(min=1)  # a group of empty answers has a mean, too
        advantages = rewards - (_group_sum(weight * rewards, index, count) / _group_sum(weight, index, count))[index]
    else:
        advantages = rewards - 0.5 if baseline == "half" else rewards
    constant = _constant(rewards, index, count)[index]
    if scale == "std":
        variance = _group_sum(centred.square(), index, count) / (count - ddof)
        # Rounding over a std of rounding would be 1.
        advantages = advantages / torch.where(constant, 1.0, variance.sqrt()[index] + eps)
    elif scale == "batch":
        _, variance, rows = masked_moments(rewards, torch.ones_like(rewards, dtype=torch.bool), mesh)
        spread = (variance * rows / (rows - ddof).clamp(min=1)).sqrt()
        advantages = advantages / torch.where(spread > 0, spread + eps, 1.0).to(rewards.dtype)
    if baseline not in ("half", "none"):
        advantages = torch.where(constant, 0.0, advantages)  # the float32 mean of equal rewards need not be that reward
    return advantages[:, None]


@torch.no_grad()
def constant_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """(P,) bool, ordered by prompt id: True where all rewards are equal, so that there is nothing to learn.

    Their share is worth a look at every step. With a success rate p it is p^G + (1 - p)^G: at p = 0.18 it is
    70 % for groups of 2, 20 % for groups of 8, 4 % for groups of 16.
    """
    return _constant(*_checked(rewards, group))


@torch.no_grad()
def group_std(rewards: Tensor, index: Tensor) -> Tensor:
    """(P,): the std of the rewards (B,) of each group, the population's; index (B,) in 0 .. P - 1."""
    count = torch.bincount(index)
    mean = _group_sum(rewards, index, count) / count
    return (_group_sum((rewards - mean[index]).square(), index, count) / count).sqrt()


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
