"""What a row of the table in recipes.py means: from its columns to advantages, weights and the loss of each token.

    rollout = look_again(policy, rollout, config, ...)            what the policy says of the rows before its update
    rollout = rollout.replace(advantages=make_advantages(rollout, config, limit))
    rollout = leave_out(rollout, config)                          filters
    minibatch = weigh(minibatch, config, seed)                    of each update: the weights of its tokens
    loss, clipped = recipe_loss(logprobs, minibatch, config, ...) of each token, unreduced

In the order in which a step of `train_grpo.py` needs them. Each function asks a few columns and calls what stands in a
page of its own, so that a new column is an argument here and a formula there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirl.advantages import constant_groups, group_std
from minirl.branching import tree_advantages
from minirl.config import UserError
from minirl.credit import (
    amplify,
    grpo_s_rewards,
    gtpo_advantages,
    listwise_advantages,
    min_form,
    pure_advantages,
    success_weight,
    ucpo_advantages,
)
from minirl.gae import whiten
from minirl.generate import uniform
from minirl.label_free import pseudo_rewards
from minirl.logprobs import rollout_certainty, rollout_logprobs, token_vectors
from minirl.losses import bounded_expm1, kl_estimate, row_sum
from minirl.policy_loss import expert_loss, policy_loss
from minirl.rewards import overlong_penalty
from minirl.shaping import (
    answer_alone,
    cosine_length_reward,
    kimi_length_reward,
    put_back,
    repetition_penalty,
    self_aligned_reward,
)
from minirl.token_weights import (
    clip_cov,
    covariance,
    delta_weights,
    mismatch_weight,
    normalized,
    off_policy_keep,
    top_tokens,
)
from minirl.turns import ended_by_itself, process_rewards, spread, turn_advantages, turn_numbers, without_void_turns

if TYPE_CHECKING:
    from minirl.model import Transformer
    from minirl.parallel.mesh import Group, Mesh
    from minirl.recipes import RecipeOptions
    from minirl.rollout import Rollout


def look_again(policy: Transformer, rollout: Rollout, config: RecipeOptions, first_token: int, microbatch_size: int,
               temperature: float, mesh: Mesh | None = None) -> Rollout:
    """The rollout with what the policy, before its first update on it, says of it: as far as some column asks.

    first_token : what stands before an answer without its prompt: BOS, or where there is none EOS
    """
    measure = (microbatch_size, temperature, mesh)
    if rollout.expert is not None:  # nobody knows what the expert's log-probs were: the ratio is of the policy's own
        logprobs = rollout_logprobs(policy, rollout, *measure)
        rollout = rollout.replace(old_logprobs=torch.where(rollout.expert[:, None] & rollout.action_mask, logprobs,
                                                           rollout.old_logprobs))
    if config.old_logprobs == "trainer" or config.entropy_credit != "none" or config.top_entropy < 1:
        logprobs, entropy, *_ = rollout_logprobs(policy, rollout, *measure, entropy=True)
        rollout = rollout.replace(old_entropy=entropy)
        if config.old_logprobs == "trainer":
            rollout = rollout.replace(sampler_logprobs=rollout.old_logprobs, old_logprobs=logprobs)
    if config.labels != "task":
        certain = rollout_certainty(policy, rollout, *measure) if config.labels == "self-certainty" else None
        rollout = rollout.replace(pseudo_rewards=pseudo_rewards(config.labels, rollout, certain))
    if config.delta:
        rollout = rollout.replace(vectors=token_vectors(policy, rollout, *measure))
    if config.sar_coef:
        alone = rollout_logprobs(policy, answer_alone(rollout, first_token), *measure)
        rollout = rollout.replace(alone_logprobs=put_back(alone, rollout.action_mask))
    return rollout


def verdict(rollout: Rollout) -> Tensor:
    """(B,): what each answer is paid for, by the task or by what stands in for it."""
    return rollout.rewards if rollout.pseudo_rewards is None else rollout.pseudo_rewards


def rewards_of(rollout: Rollout, config: RecipeOptions, limit: int) -> list[tuple[float, Tensor]]:
    """(weight, reward (B,)) of the task and of all that is added to it. `limit`: tokens of the longest answer."""
    lengths, right = rollout.action_mask.sum(1), verdict(rollout) >= 1
    rewards = [(1.0, verdict(rollout))]
    if cache := int(config.overlong * limit):
        rewards.append((1.0, overlong_penalty(lengths, limit, cache)))
    if config.length_reward == "kimi":
        rewards.append((config.length_coef, kimi_length_reward(lengths, right, rollout.group)))
    elif config.length_reward == "cosine":
        rewards.append((config.length_coef, cosine_length_reward(lengths, right, limit)))
    if config.repetition_coef:
        rewards.append((config.repetition_coef, repetition_penalty(rollout.tokens, rollout.action_mask)))
    if config.sar_coef:
        rewards.append((config.sar_coef, self_aligned_reward(rollout.alone_logprobs, rollout.old_logprobs,
                                                             rollout.action_mask)))
    return [(weight, reward.to(rollout.rewards.dtype)) for weight, reward in rewards]


def make_advantages(rollout: Rollout, config: RecipeOptions, limit: int, mesh: Mesh | None = None) -> Tensor:
    """(B, 1) or (B, S): how much better than expected each answer, or each of its tokens, was."""
    mask, group, right = rollout.action_mask, rollout.group, verdict(rollout) >= 1
    lengths = mask.sum(1)
    mean_logprobs = row_sum(rollout.old_logprobs, mask) / lengths.clamp(min=1)
    constant_groups(rollout.rewards, group)  # which refuses a reward that is no number, whatever is made of it below
    how = dict(baseline=config.baseline, scale=config.advantage_scale, ddof=config.std_ddof, mesh=mesh)

    def relative(rewards: Tensor) -> Tensor:
        if config.tree_credit != "none":
            return tree_advantages(config.tree_credit, rollout, rewards, **how)
        return turn_advantages(config.credit, rewards, group, rollout.turns, mask, config.turn_gamma,
                               config.state_weight, **how)

    weighed = rewards_of(rollout, config, limit)
    rewards = sum(weight * reward for weight, reward in weighed)
    if config.entropy_credit == "grpo-s":
        rewards = grpo_s_rewards(rewards, rollout.old_entropy, mask, group)
    if config.combine == "separate":
        advantages = sum(weight * relative(reward) for weight, reward in weighed)
    elif config.entropy_credit == "gtpo":
        advantages = gtpo_advantages(right, rollout.old_entropy, mask, group)
    elif config.listwise != "none":
        advantages = listwise_advantages(config.listwise, rewards, right, mean_logprobs, group, config.listwise_tau)
    else:
        advantages = relative(rewards)
    if config.success_power:
        advantages = advantages * success_weight(rewards, group, config.success_power)
    if config.positive != 1:
        advantages = torch.where(advantages > 0, config.positive * advantages, advantages)
    if config.process == "min-form":
        advantages = advantages + config.process_weight * step_credit(rollout)
    elif config.process == "belief":
        if rollout.gains is None:
            raise UserError("--process belief needs the policy's beliefs from when the rows were sampled, and this "
                            "rollout has none: do not replay it")
        advantages = advantages + config.process_weight * rollout.gains
    if config.amplify:
        advantages = amplify(advantages, rewards, config.amplify)
    if config.ucpo_tau:
        advantages = ucpo_advantages(advantages, right, mean_logprobs, group, config.ucpo_tau)
    if config.whiten:
        # One number a row counts as one, not once for each token: verl weighs long rows more here.
        advantages = whiten(advantages, mask if advantages.shape[1] > 1 else torch.ones_like(advantages).bool(), mesh)
    return advantages.to(rollout.rewards.dtype)


def step_credit(rollout: Rollout) -> Tensor:
    """(B, S): PURE's credit of each action, of what the task's checks say of it, compared with the other rows."""
    mask = rollout.action_mask
    numbers = turn_numbers(mask)
    checks = process_rewards(rollout.turns, numbers, rollout.rewards)  # (B, K)
    tokens = torch.zeros_like(checks, dtype=torch.int64).scatter_add(1, numbers.clamp(min=0), mask.long())
    return spread(pure_advantages(min_form(checks, tokens > 0), tokens, rollout.group), numbers)


def leave_out(rollout: Rollout, config: RecipeOptions, mesh: Mesh | None = None) -> Rollout:
    """The rollout with an empty action mask in the rows that the columns under "filters" take away."""
    mask = rollout.action_mask
    if config.mask_truncated:
        mask = mask & ended_by_itself(rollout.turns, rollout.finished)[:, None]
    if config.mask_void:
        mask = mask & without_void_turns(rollout.turns, len(rollout)).to(mask.device)[:, None]
    if config.mask_constant:
        _, index = rollout.group.unique(return_inverse=True)
        mask = mask & ~constant_groups(verdict(rollout), rollout.group)[index][:, None]
    if config.keep_groups < 1:
        _, index = rollout.group.unique(return_inverse=True)
        std = group_std(verdict(rollout), index)[:, None]  # (P, 1)
        mask = mask & top_tokens(std, torch.ones_like(std, dtype=torch.bool), config.keep_groups, mesh)[index]
    if config.mask_shared and rollout.shared is not None:
        columns = torch.arange(mask.shape[1], device=mask.device)
        mask = mask & (columns + 1 >= rollout.shared[:, None])
    return rollout.replace(action_mask=mask)


def weigh(minibatch: Rollout, config: RecipeOptions, seed: int, mesh: Mesh | None = None) -> Rollout:
    """The rows of one update with the weights of their tokens, and prices for moving, where a column asks for them."""
    mask, weights, anchors = minibatch.action_mask, [], None
    if config.mismatch != "none":
        weights.append(mismatch_weight(minibatch.old_logprobs, minibatch.sampler_logprobs, mask, config.mismatch,
                                       config.mismatch_low, config.mismatch_high))
    if config.delta:
        weights.append(normalized(delta_weights(minibatch.vectors, minibatch.advantages, mask, mesh=mesh), mask, mesh))
        minibatch = minibatch.replace(vectors=None)
    if config.top_entropy < 1:
        weights.append(top_tokens(minibatch.old_entropy, mask, config.top_entropy, mesh))
    if config.cov != "none":
        cov = covariance(minibatch.advantages, minibatch.old_logprobs, mask, mesh)
        if config.cov == "kl":
            anchors = config.cov_coef * top_tokens(cov, mask, config.cov_share, mesh)
        else:
            noise = token_noise(minibatch, seed + 1)
            weights.append(clip_cov(cov, mask, noise, config.cov_share, mesh=mesh))
    if config.rescue:
        minibatch = minibatch.replace(slack=config.rescue * token_noise(minibatch, seed + 3).to(
            minibatch.old_logprobs.dtype))
    if weights:
        minibatch = minibatch.replace(weights=math.prod(w.to(minibatch.old_logprobs.dtype) for w in weights))
    return minibatch if anchors is None else minibatch.replace(anchors=anchors)


def token_noise(minibatch: Rollout, seed: int) -> Tensor:
    """(B, S) uniform numbers that belong to the tokens, in every layout; the tokens were drawn with another seed."""
    columns = torch.arange(minibatch.action_mask.shape[1], device=minibatch.action_mask.device)
    return uniform(seed, minibatch.sample_ids[:, None], columns)


def recipe_loss(logprobs: Tensor, mb: Rollout, config: RecipeOptions, cp_group: Group | None = None,
                entropy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(loss of each token, unreduced; where a bound takes its gradient away): (B, S) both.

    logprobs : (B, S) nats, with gradient; `mb` has the rest, cut to the same rows and columns
    entropy  : (B, S) nats, with gradient, of the distributions that the tokens are drawn from; None: no bonus for it
    """
    slack = 0.0 if mb.slack is None else mb.slack
    loss, clipped = policy_loss(
        logprobs, mb.old_logprobs, mb.advantages, mb.action_mask, ratio=config.ratio, surrogate=config.surrogate,
        eps_low=config.eps_low + slack, eps_high=config.eps_high + slack, dual_clip=config.dual_clip, tau=config.tau,
        tau_negative=config.tau_negative, row_tokens=mb.row_tokens, cp_group=cp_group)
    if mb.expert is not None:
        expert = mb.expert[:, None].expand_as(loss)
        loss = torch.where(expert, expert_loss(logprobs, mb.advantages, mb.action_mask, config.expert_gamma), loss)
        clipped = clipped & ~expert
    if mb.weights is not None:
        loss = loss * mb.weights
    if config.off_policy_gap:
        tokens = mb.action_mask.sum(1) if mb.row_tokens is None else mb.row_tokens
        gap = row_sum(mb.old_logprobs - logprobs.detach(), mb.action_mask, cp_group) / tokens.clamp(min=1)
        loss = loss * off_policy_keep(mb.advantages, gap[:, None], config.off_policy_gap)
    if mb.anchors is not None:
        moved = logprobs - mb.old_logprobs
        # Before the first update this is rounding, and the sign of that would be a gradient of full size.
        still = moved.detach().abs() <= 64 * torch.finfo(moved.dtype).eps * (1 + mb.old_logprobs.abs())
        loss = loss + mb.anchors * torch.where(still, 0.0, moved.abs())
    if mb.ref_logprobs is not None:
        kl = kl_estimate(logprobs, mb.ref_logprobs, config.kl_kind)
        if config.kl_ratio:
            kl = kl * (1 + bounded_expm1(logprobs - mb.old_logprobs))
        loss = loss + config.kl_coef * kl
    if config.entropy_coef and entropy is not None:
        loss = loss - config.entropy_coef * entropy
    return loss, clipped


def by_token(config: RecipeOptions) -> bool:
    """Whether each token's loss is a matter of its own column, so that the head may go through some at a time."""
    per_token = config.surrogate == "reinforce" or (config.ratio == "token" and config.surrogate != "geometric")
    return per_token and not config.off_policy_gap  # which is a sum over the row
