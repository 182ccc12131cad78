r"""The policy loss of the GRPO family: which ratio, and what is done with it. Two choices, and every paper is a pair.

Ratios, from the log-ratio d_t = logprobs - old_logprobs of each token of an answer y:

    ratio         log of it                      source
    "token"       d_t                            PPO, arXiv:1707.06347; GRPO
    "sequence"    sum_t d_t / |y|                GSPO, arXiv:2507.18071 eq. 7: the same for every token of the row
    "gspo-token"  sg(sum_t d_t / |y|) + d_t - sg(d_t)   its eq. 14: that value, but each token has its own gradient,
                                                 and may have its own advantage; with one a row, the same as "sequence"
    "product"     sum_t d_t                      the true ratio of two answers: Kimi k1.5, arXiv:2501.12599

Surrogates are objectives: the loss is minus them. rho is the ratio, A the advantage, sg(...) has no gradient:

    surrogate    objective of a token                                source
    "clip"       min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)  PPO eq. 7. With dual_clip c above 0 and A < 0 it is
                                                                     at least c A: two-sided, arXiv:1912.09729 eq. 5
    "unclipped"  rho A                                               importance sampling; LUFFY, arXiv:2504.14945
    "weight"     sg(clip(rho, 1 - eps_low, 1 + eps_high)) A logp     CISPO, arXiv:2506.13585 eq. 4: no token loses its
                                                                     gradient. eps_low 1: no lower bound
    "soft"       A (4 / tau) sigmoid(tau (rho - 1))                  SAPO, arXiv:2511.20347; tau_negative where A < 0
    "geometric"  A exp(mean_t m_t), m_t = min(d_t, eps_high) if      GMPO, arXiv:2507.20673: a clip in log space, on the
                 A > 0, max(d_t, -eps_low) if A < 0                  side that is too optimistic, then the mean
    "square"     -(A - tau log rho)^2, with the ratio "product"      Kimi k1.5 eq. 3, with the mean reward for its log Z
    "reinforce"  A logp                                              Williams 1992: no ratio, so one update a rollout

A value that belongs to a whole row is given to each of its tokens. The mode "sequence" of `aggregate` is then the mean
over rows, and with context parallelism each rank adds its tokens' part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.losses import bounded_expm1, row_sum

if TYPE_CHECKING:
    from minirl.parallel.mesh import Group

Ratio = Literal["token", "sequence", "gspo-token", "product"]
Surrogate = Literal["clip", "unclipped", "weight", "soft", "geometric", "square", "reinforce"]


class PolicyLoss(NamedTuple):
    per_token: Tensor  # (B, S) unreduced, lower is better: pass it to `aggregate`
    clipped: Tensor  # (B, S) bool: the bound binds, so that moving on in this direction would pay nothing more


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: Ratio = "token",
                surrogate: Surrogate = "clip", eps_low: float | Tensor = 0.2, eps_high: float | Tensor = 0.2,
                dual_clip: float = 0.0, tau: float = 1.0, tau_negative: float = 1.0, row_tokens: Tensor | None = None,
                cp_group: Group | None = None) -> PolicyLoss:
    """One of the pairs above. Gradient flows to `logprobs` only, and never to a masked column, whatever lies there.

    logprobs, old_logprobs : (B, S) nats
    advantages : (B, 1) or (B, S) unitless
    mask       : (B, S) bool: the tokens of y
    eps_low, eps_high : distances from 1, for all or (B, S); of "geometric", distances from 0 in nats
    tau        : of "soft", how fast the gradient fades; of "square", nats of reward that a nat of log-ratio costs
    row_tokens : (B,) tokens of the whole rows, and cp_group, the ranks with their other columns, as in `aggregate`
    UserError  : an unknown name, or a pair that nobody defined
    """
    check_pair(ratio, surrogate)
    d = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)  # 0 x NaN is NaN, in the gradient as well
    logp, advantages = torch.where(mask, logprobs, 0.0), advantages.detach()
    tokens = (mask.sum(1) if row_tokens is None else row_tokens).clamp(min=1)[:, None]  # (B, 1)

    def row_mean(x: Tensor) -> Tensor:
        return row_sum(x, mask, cp_group)[:, None] / tokens

    inside = torch.zeros_like(mask)  # of the surrogates that have no bound
    if surrogate == "reinforce":
        return PolicyLoss(-advantages * logp, inside)
    if surrogate == "geometric":
        m = torch.where(advantages > 0, d.clamp(max=eps_high), torch.where(advantages < 0, d.clamp(min=-eps_low), d))
        return PolicyLoss(-(advantages * (1 + bounded_expm1(row_mean(m)))).expand_as(d), m != d)

    if ratio == "sequence":
        d = row_mean(d)  # (B, 1)
    elif ratio == "gspo-token":
        d = row_mean(d).detach() + d - d.detach()
    elif ratio == "product":
        d = row_sum(d, mask, cp_group)[:, None]  # (B, 1)
    if surrogate == "square":
        return PolicyLoss((advantages - tau * d).square().expand_as(logp), inside)

    rho = 1 + bounded_expm1(d)
    low, high = 1 - eps_low, 1 + eps_high
    if surrogate == "unclipped":
        objective, clipped = rho * advantages, inside
    elif surrogate == "weight":
        objective = rho.detach().clamp(low, high) * advantages * logp
        clipped = (rho < low) | (rho > high)
    elif surrogate == "soft":
        taus = torch.where(advantages < 0, tau_negative, tau)
        objective, clipped = advantages * 4 / taus * torch.sigmoid(taus * (rho - 1)), inside
    else:
        # min, for either sign of the advantage: clipping may only make the objective more pessimistic, so a bad
        # move (the ratio drifting the wrong way) keeps its gradient, up to dual_clip.
        objective = torch.minimum(rho * advantages, rho.clamp(low, high) * advantages)
        clipped = ((advantages > 0) & (rho > high)) | ((advantages < 0) & (rho < low))
        if dual_clip:
            objective = torch.where(advantages < 0, objective.maximum(dual_clip * advantages), objective)
            clipped = clipped | ((advantages < 0) & (rho > dual_clip))
    return PolicyLoss((-objective).expand_as(logp), clipped.expand_as(mask))


def expert_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor, gamma: float = 0.1) -> Tensor:
    """(B, S) loss of rows that an expert wrote, among the policy's own: -A p / (p + gamma), p = exp(logprobs).

    LUFFY, arXiv:2504.14945: nobody knows what the expert's probabilities were, so they count as 1 and the ratio is p
    itself. Shaped like this, a token that the policy finds unlikely has the larger gradient: by p itself it would have
    hardly any. Advantages are A = r - mean over the expert's row and the others together, as everywhere.
    """
    p = torch.where(mask, logprobs, 0.0).exp()
    return -advantages.detach() * p / (p + gamma)


def check_pair(ratio: str, surrogate: str) -> None:
    """UserError unless the names exist and somebody has defined the pair."""
    for value, names, what in ((ratio, Ratio, "ratio"), (surrogate, Surrogate, "surrogate")):
        if value not in names.__args__:
            raise UserError(f"{what} {value!r} does not exist: use one of {', '.join(names.__args__)}")
    needs = {"square": ("product",), "geometric": ("sequence",)}.get(surrogate, ("token", "sequence", "gspo-token"))
    if surrogate != "reinforce" and ratio not in needs:  # who has no ratio does not mind which
        raise UserError(f"surrogate {surrogate!r} is not defined for the ratio {ratio!r}: use {' or '.join(needs)}")
