"""From one score an answer to an advantage for every token: what PPO has in the place of GRPO's group.

    scores (B,), KL (B, S)  ->  token_rewards (B, S)  ->  gae  ->  advantages, returns (B, S)

A row is an episode, and its steps are the tokens that the policy chose. What a tool returned stands between two
actions but is none: it has no reward, no value and no advantage, and the step from the action before it to the action
behind it is one step. Padding is nothing at all.

    tokens     12*3=  <calc>  12*3  </calc>   36     36   <eos>   padding
    mask                1       1      1       0      1      1       0
    values             V0      V1     V2       -     V3     V4       -        of the state in which the token is chosen
    the step of V2 leads to V3;  that of V4 to the end (0), or where the row was cut to `bootstrap`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirl.config import UserError

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh


@torch.no_grad()
def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """An answer's score on its last action token, and on every action token what it costs to leave the reference.

    scores  : (B,)            mask : (B, S) bool
    kl      : (B, S) nats from `kl_estimate(old_logprobs, ref_logprobs, ...)`; None: no such cost
    returns : (B, S), 0 outside the mask. A row without an action has no place for its score

    InstructGPT, arXiv:2203.02155 eq. 2, token by token as in arXiv:1909.08593. The score belongs to the last token
    that was chosen, which is EOS where there is one: one column further is padding, and nobody would learn of it.
    """
    rewards = torch.zeros_like(mask, dtype=scores.dtype)
    if kl is not None:
        rewards = torch.where(mask, -kl_coef * kl, 0.0).to(torch.promote_types(kl.dtype, scores.dtype))
    column = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, column, -1).amax(1, keepdim=True)  # (B, 1)
    return torch.where(mask & (column == last), rewards + scores[:, None], rewards)


@torch.no_grad()
def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor,
        bootstrap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16) over the action tokens alone.

        delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1        return_t = A_t + V_t

    where t + 1 is the next **action** token of the row. lam 0 gives the TD error, and lam 1 what was really earned from
    here on, less V_t: no bias of the critic, and all the noise of what came later.

    token_rewards, values : (B, S)          mask : (B, S) bool
    lam       : a number, or (B,) one a row (`length_adaptive_lambda`)
    bootstrap : (B,) the critic's value of the state after a row's last token, for rows that were cut off and would have
                gone on; 0 for those that ended. None: all ended. A cut that is taken for an end tells the critic that
                long answers are worth nothing
    returns   : advantages, returns (B, S), no gradient, 0 outside the mask. Returns are of advantages as they are here:
                whitening comes later, and is for the policy alone
    """
    if not 0 <= gamma <= 1:
        raise UserError(f"gamma {gamma} must lie between 0 and 1")
    lam = torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    if not ((lam >= 0) & (lam <= 1)).all():
        raise UserError(f"lambda {lam.tolist()} must lie between 0 and 1")
    dtype = torch.promote_types(token_rewards.dtype, values.dtype)
    advantages = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    next_value = advantages.new_zeros(len(mask)) if bootstrap is None else bootstrap.to(dtype)  # (B,)
    next_advantage = torch.zeros_like(next_value)
    for s in range(mask.shape[1] - 1, -1, -1):
        delta = token_rewards[:, s] + gamma * next_value - values[:, s]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, s] = torch.where(mask[:, s], advantage, 0.0)
        next_advantage = torch.where(mask[:, s], advantage, next_advantage)  # over what others wrote: as if not there
        next_value = torch.where(mask[:, s], values[:, s], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)


@torch.no_grad()
def reward_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """What a row earned from each action token on, (B, S): REINFORCE's weight of that token, without any critic."""
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma, 1.0)[0]


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha l) for rows of l action tokens, (B,) -> (B,): VAPO, arXiv:2504.05118 sec. 4.2.

    The weights of the deltas then add up to about alpha l in every row, so that the reward at the end of a long answer
    is still heard at its beginning. Below 1 / alpha tokens the formula is negative; there it is 0 (our choice).
    """
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0.0)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, mesh: Mesh | None = None, shift_mean: bool = True, ddof: int = 0,
           eps: float = 1e-8) -> Tensor:
    """(x - mean) / std over the True entries of all replicas: (B, S) -> (B, S), 0 outside the mask.

    shift_mean : False keeps the mean, for rewards, whose sign means something
    ddof       : 1 divides the variance by n - 1 (TRL); 0, the default, by n
    A single entry, and equal ones, become 0 (or stay): there is no spread to divide by.
    """
    mean, variance, count = masked_moments(x, mask, mesh)
    variance = variance * count / (count - ddof).clamp(min=1)
    scaled = (x - mean) * (variance + eps).rsqrt() + (0.0 if shift_mean else mean)
    return torch.where(mask, scaled, 0.0)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, mesh: Mesh | None = None) -> float:
    """1 - var(returns - values) / var(returns) over the action tokens of all replicas: how well the critic predicts.

    1 is perfect, 0 is as good as a constant, below 0 is worse. NaN where all returns are the same.
    """
    error, spread = (float(masked_moments(x, mask, mesh)[1]) for x in (returns - values, returns))
    return 1 - error / spread if spread > 0 else float("nan")


def replica_mean(x: Tensor, mesh: Mesh | None = None) -> float:
    """The mean of x (B,) over the rows of all replicas."""
    return float(masked_moments(x, torch.ones_like(x, dtype=torch.bool), mesh)[0])


def masked_moments(x: Tensor, mask: Tensor, mesh: Mesh | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance (divided by n) and n of the True entries of all replicas: scalars in float64.

    Two passes: the variance of float32 numbers far from 0, as mean of squares less square of mean, is rounding.
    The ranks of cp, tp and pp have the same rows, and count once.
    """
    def over_replicas(value: Tensor) -> Tensor:
        if mesh is None or mesh.dp == 1:
            return value
        from minirl.parallel.collectives import all_reduce  # torch.distributed is not needed on a laptop

        return all_reduce(value, mesh.dp_group)

    x = torch.where(mask, x, 0.0).double()
    total, count = over_replicas(torch.stack((x.sum(), mask.sum().double())))
    mean = total / count.clamp(min=1)
    square = over_replicas(torch.where(mask, x - mean, 0.0).square().sum())
    return mean, square / count.clamp(min=1), count
