"""Advantages that know more than one reward a row: which right answers are rare, which tokens or steps deserve it.

All are pure functions without gradient, (B, 1) or (B, S) out. B rows; group (B,) is the prompt each row answers;
correct (B,) bool is what the verifier said. Where a paper leaves something open the docstring says so.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.losses import row_sum


def sum_within(values: Tensor, index: Tensor) -> Tensor:
    """(B, ...) -> (B, ...): the sum over the rows with the same number in index (B,)."""
    sums = values.new_zeros(int(index.max()) + 1 if len(index) else 0, *values.shape[1:])
    return sums.index_add(0, index, values)[index]


@torch.no_grad()
def ucpo_advantages(advantages: Tensor, correct: Tensor, mean_logprobs: Tensor, group: Tensor,
                    tau: float = 0.2) -> Tensor:
    """Share out the advantage of a group's right answers, more of it to the rare ones: UCPO, arXiv:2605.00365.

    advantages    : (B, 1) of any kind; those of wrong answers stay
    mean_logprobs : (B,) nats a token, at sampling time
    tau           : 0 nothing, 1 in proportion to 1 / q alone
    With q the softmax of mean_logprobs over the n right answers of a group, A_i becomes A_i n w_i with
    w_i = (1 - tau) / n + tau (1 / q_i) / sum_j (1 / q_j). Where n < 2 nothing happens.
    """
    _, index = group.unique(return_inverse=True)
    likely = torch.where(correct, mean_logprobs, -torch.inf)
    top = likely.new_full((int(index.max()) + 1,), -torch.inf).scatter_reduce(0, index, likely, "amax")[index]
    weight = torch.where(correct, (likely - top).exp(), 0.0)  # none right: exp(NaN) is not taken
    n = sum_within(correct.to(weight.dtype), index)
    q = (weight / sum_within(weight, index).clamp(min=1e-30)).clamp(min=1e-6)
    rare = torch.where(correct, 1 / q, 0.0)
    factor = (1 - tau) + tau * n * rare / sum_within(rare, index).clamp(min=1e-30)
    return torch.where((correct & (n >= 2))[:, None], advantages * factor[:, None], advantages)


@torch.no_grad()
def gtpo_advantages(correct: Tensor, entropy: Tensor, mask: Tensor, group: Tensor, base: float = 1.0,
                    bonus: float = 0.1) -> Tensor:
    """(B, S): tokens of high entropy gain in right answers and lose less in wrong ones. GTPO, arXiv:2508.04349.

    All tokens of right answers of a group get mean 0 and std 1, of what `gtpo_rewards` pays them, and so do those of
    wrong ones, apart.

    That is what the code we know does, and it says it follows eq. 3, 5, 6, 7; the paper's text we have not seen. Mind
    the consequence: the mean token of a right answer has advantage 0, a sure one a negative advantage.
    """
    _, index = group.unique(return_inverse=True)
    paid = gtpo_rewards(correct, entropy, mask, group, base, bonus)
    total = torch.zeros_like(paid)
    for side in (correct, ~correct):
        own = mask & side[:, None]
        n = sum_within(own.sum(1).to(paid.dtype), index).clamp(min=1)[:, None]
        mean = sum_within(row_sum(paid, own), index)[:, None] / n
        deviation = torch.where(own, paid - mean, 0.0)
        std = (sum_within(deviation.square().sum(1), index)[:, None] / n).sqrt()
        total = total + torch.where(std > 1e-8, deviation / std.clamp(min=1e-8), 0.0)
    return total


@torch.no_grad()
def gtpo_rewards(correct: Tensor, entropy: Tensor, mask: Tensor, group: Tensor, base: float = 1.0,
                 bonus: float = 0.1) -> Tensor:
    """(B, S): what GTPO pays each token, before any mean is taken off; 0 outside the mask.

    entropy : (B, S) nats, at sampling time. With d_t the right (wrong) answers of the group that have a token t,
    right   base + bonus d_t H_t / sum H_t over those;  wrong   -base - bonus d_t (1 / H_t) / sum (1 / H_t)
    """
    _, index = group.unique(return_inverse=True)
    place = (mask.cumsum(1) - 1).clamp(min=0)  # the action's number in its row, so that prompts may differ in length
    paid = torch.zeros_like(entropy)
    for side, sign in ((correct, 1.0), (~correct, -1.0)):
        own = mask & side[:, None]
        value = torch.where(own, entropy if sign > 0 else 1 / entropy.clamp(min=1e-6), 0.0)
        by_place = torch.zeros_like(value).scatter_add(1, place, value)
        alive = torch.zeros_like(value).scatter_add(1, place, own.to(value.dtype))
        sums, counts = (sum_within(x, index).gather(1, place) for x in (by_place, alive))
        paid = torch.where(own, sign * (base + bonus * counts * value / sums.clamp(min=1e-30)), paid)
    return paid


@torch.no_grad()
def grpo_s_rewards(rewards: Tensor, entropy: Tensor, mask: Tensor, group: Tensor, bonus: float = 0.1) -> Tensor:
    """(B,): a row's reward plus `bonus` times its share of the group's entropy: GRPO-S, of the same paper as GTPO.

    r_i + bonus G H_i / sum_j H_j, with H_i the mean entropy of the row's tokens. The form is recalled; the weights of
    the paper's latest version are not established.
    """
    _, index = group.unique(return_inverse=True)
    mean = row_sum(entropy, mask) / mask.sum(1).clamp(min=1)
    size = sum_within(torch.ones_like(mean), index)
    return rewards + bonus * size * mean / sum_within(mean, index).clamp(min=1e-30)


@torch.no_grad()
def amplify(advantages: Tensor, rewards: Tensor, factor: float = 3.0) -> Tensor:
    """R3L's positive amplification, arXiv:2601.03715: a full reward (1 or more) has advantage 1, another one above the
    mean `factor` times its own, one below the mean its own. So a full reward is not amplified: as in its code.

    advantages : (B, 1), rewards less the group's mean
    """
    amplified = torch.where(advantages >= 0, factor * advantages, advantages)
    return torch.where(rewards[:, None] >= 1, 1.0, amplified)


@torch.no_grad()
def suffix_mask(mask: Tensor, start: Tensor) -> Tensor:
    """(B, S) bool: of each row the actions from its action number start (B,) on.

    What a retry shares with the row it starts from is not its own (R3L's pivotal credit; SRPO, arXiv:2605.25507).
    """
    return mask & (mask.cumsum(1) > start[:, None])


# ---- a group as a list ----

@torch.no_grad()
def listwise_advantages(kind: Literal["pairs", "simplex", "contrast"], rewards: Tensor, correct: Tensor,
                        mean_logprobs: Tensor, group: Tensor, tau: float = 1.0) -> Tensor:
    """(B, 1): advantages that come of comparing the rows of a group one by one, or as a distribution.

    pairs    A_i = mean over the others j of sign(r_i - r_j): only who is better counts, not by how much.
             Soft-Pair-GRPO, arXiv:2605.06375. Of rewards 0 and 1 it makes RLOO's advantages, which fits the paper's
             theorem that its gradient is GRPO's up to a factor. Medium: for groups of more than two the mean is ours
    simplex  A_i = G w_i - 1 with the target w = softmax(r / tau) over the group. LPO, arXiv:2605.06139: the policy,
             restricted to the group, is drawn towards a target. Of that projection this is the first step, the gradient
             of KL(w || policy) where all rows count alike; later ones would need the whole group in each update. Medium
    contrast InfoNCE with the mean log-prob s of a row's tokens as its score: for each right answer i the loss
             -log(e^(s_i / tau) / (e^(s_i / tau) + sum over wrong j of e^(s_j / tau))), mean over i, and an advantage is
             minus its derivative by s. ConSPO, arXiv:2605.12969, without its growing margin. Medium: tau is ours

    rewards (B,), correct (B,) bool, mean_logprobs (B,) nats a token; all 0 where nothing differs in the group
    """
    _, index = group.unique(return_inverse=True)
    same = index[:, None] == index  # (B, B)
    size = same.sum(1)
    if kind == "pairs":
        found = torch.where(same, (rewards[:, None] - rewards).sign(), 0.0).sum(1) / (size - 1).clamp(min=1)
    elif kind == "simplex":
        found = size * _share(rewards / tau, same).diagonal() - 1
    else:
        score, wrong = mean_logprobs / tau, same & ~correct
        rivals = wrong | torch.eye(len(score), dtype=torch.bool, device=score.device)  # of row i: itself and the wrong
        share = torch.where(correct[:, None], _share(score, rivals), 0.0)  # (B, B), right rows i
        right = sum_within(correct.to(score.dtype), index).clamp(min=1)
        own = torch.where(correct, 1 - share.diagonal(), 0.0)
        found = (own - torch.where(wrong, share, 0.0).sum(0)) / right / tau
    return found.to(rewards.dtype)[:, None]


def _share(score: Tensor, among: Tensor) -> Tensor:
    """(B, B): the softmax of score (B,) over the columns that `among` (B, B) names in each row."""
    return torch.where(among, score, -torch.inf).softmax(1).nan_to_num(0.0)


@torch.no_grad()
def success_weight(rewards: Tensor, group: Tensor, power: float) -> Tensor:
    """(B, 1): (mean reward of the group)^-power, for rewards from 0 on; 1 where the mean is 0.

    The gradient of Tsallis' logarithm of the success rate, arXiv:2604.25907: 0 is RL, 1 the likelihood of success, and
    hard problems count more on the way. Where no sample succeeds nothing can be amplified, see `tsallis.garl_loss`.
    """
    _, index = group.unique(return_inverse=True)
    mean = sum_within(rewards, index) / sum_within(torch.ones_like(rewards), index)
    return torch.where(mean > 0, mean.clamp(min=1e-30) ** -power, 1.0)[:, None]


# ---- steps ----

@torch.no_grad()
def min_form(step_rewards: Tensor, step_mask: Tensor, temperature: float = 0.1) -> Tensor:
    """Credit of each step so that their sum is about the worst step's reward: PURE, arXiv:2504.15275.

    step_rewards : (B, K), within -1 .. 1: p(good) - p(bad) of a process reward model
    step_mask    : (B, K) bool
    returns r softmax(-r / temperature): a long row of good steps gains nothing by being long
    """
    weight = torch.where(step_mask, -step_rewards / temperature, -torch.inf).softmax(1)
    return torch.where(step_mask, weight * step_rewards, 0.0)


@torch.no_grad()
def pure_advantages(credit: Tensor, step_tokens: Tensor, group: Tensor) -> Tensor:
    """(B, K): each step's return (credit from it on) less what the other rows would have got for as many tokens.

    credit      : (B, K) from `min_form`
    step_tokens : (B, K) int64, tokens of each step, 0 where there is none
    A baseline for each step would reward having few; so it is the others' credit a token times the tokens that remain.
    """
    _, index = group.unique(return_inverse=True)
    own, tokens = credit.sum(1), step_tokens.sum(1).to(credit.dtype)
    others = sum_within(own, index) - own
    rate = others / (sum_within(tokens, index) - tokens).clamp(min=1)
    gain = credit - rate[:, None] * step_tokens
    advantages = gain.flip(1).cumsum(1).flip(1)
    return torch.where(step_tokens > 0, advantages, 0.0)


@torch.no_grad()
def vps_advantages(advantages: Tensor, belief: Tensor, segment: Tensor, weight: float = 0.5) -> Tensor:
    """(B, S): a row's advantage, and what each segment adds to the belief in the right answer. VPS, arXiv:2604.20659.

    belief  : (B, M + 1), probability of the right answer after 0 .. M segments of the row
    segment : (B, S) int64, number 0 .. M - 1 of each token's segment
    A_t = A + weight (C_m - C_{m-1}) of its segment m; the gains add up to C_M - C_0. **Not established**: how the paper
    combines the two (its eq. 7), the weight, whether the probability is taken a token. This is the least there can be.
    """
    gain = belief[:, 1:] - belief[:, :-1]
    if int(segment.max()) >= gain.shape[1]:
        raise UserError(f"segment {int(segment.max())} has no belief: {gain.shape[1] + 1} beliefs are of "
                        f"{gain.shape[1]} segments, pass one more than there are segments")
    return advantages + weight * gain.gather(1, segment)
