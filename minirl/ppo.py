"""PPO's choices: options with a name each, what VAPO sets them to, and the advantages and losses that they give.

    class Config(PPOOptions, ...)                   train_ppo.py; fill_in(config) while it is made
    earned = rewards_of_tokens(config, rollout, scores, kl, kl_coef, mesh)
    rollout = with_advantages(config, rollout, earned, critic, pretraining, mesh)
    critic_loss(out, mb, config, total)             loss_fn of `forward_backward`, with `out.values` of the critic
    policy_loss(out, mb, config, kl_coef, ...)      and with `out.logprobs` of the policy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from minirl.config import UserError, check_not_negative, check_positive, fill
from minirl.critic import state_values
from minirl.gae import gae, length_adaptive_lambda, reward_to_go, token_rewards, whiten
from minirl.logprobs import Output
from minirl.losses import (
    aggregate,
    clipped_surrogate,
    kl_estimate,
    policy_stats,
    right_tokens,
    row_sum,
    sft_loss,
    value_loss,
    value_stats,
)
from minirl.model import Transformer
from minirl.rewards import missing_eos_penalty
from minirl.rollout import Rollout

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh

# An option that is not given is that of its row. VAPO, arXiv:2504.05118: a critic that is trained first, on what was
# really earned; a lambda of its own for the policy, by length; room above the clip; right answers imitated; and groups.
# Its lam_alpha is 0.05, for answers of thousands of tokens: 1,000 give lambda 0.98, but the 4 of a sum would give 0.
ROWS = {
    "ppo": dict(prompts_per_step=1024, group_size=1, value_pretraining=0, lam_alpha=0.0, value_lam=0.95, eps_high=0.2,
                positive_nll=0.0),
    "vapo": dict(prompts_per_step=256, group_size=4, value_pretraining=10, lam_alpha=5.0, value_lam=1.0, eps_high=0.28,
                 positive_nll=0.1),
}


@dataclass(frozen=True)
class PPOOptions:
    # rollout
    vapo: bool = False  # VAPO: the second value of each option that has two
    prompts_per_step: int | None = None  # prompts a step, over all ranks; none: 1024, and 256 with --vapo
    group_size: int | None = None  # answers to each prompt; none: 1, and 4 with --vapo
    # reward
    reward_model: str = ""  # folder of a reward model that pays; empty: the task's verifier does
    reward_model_every: int = 0  # rollouts between updates of the reward model, on pairs of their answers that the task
                                 # judges (CoRLHF); 0: it stays as it is
    reward_lr: float = 1e-4  # learning rate of these updates
    missing_eos_penalty: float = 0.0  # taken from the score of an answer that was cut before it ended
    whiten_rewards: bool = False  # divide the rewards of tokens by their std
    kl: Literal["reward", "loss"] = "reward"  # the distance from the reference is a cost of each token, or a loss term
    kl_kind: Literal["k1", "k2", "k3"] = "k1"  # its estimator
    kl_coef: float = 0.001  # its weight; 0: no reference model
    kl_control: Literal["fixed", "proportional", "threshold"] = "fixed"  # how the weight follows the distance
    kl_target: float = 6.0  # nats a response that a controller holds
    # critic
    critic: Literal["own", "joint", "detached"] = "own"  # a network of its own, or a head on the policy's: one that
                                                         # shapes the layers, or one that only reads them
    critic_init: str = ""  # folder of a model or reward model the own critic starts from; empty: the policy's weights
    critic_lr: float = 1e-3  # its peak learning rate, on the policy's schedule
    value_clip: float = 0.2  # a value further than this from the old one has no gradient towards its target; 0: off
    value_coef: float = 0.5  # weight of the value loss in the loss of --critic joint or detached
    value_pretraining: int | None = None  # first rollouts, on which only the critic learns; none: 0, 10 with --vapo
    # advantage
    advantage: Literal["gae", "baseline", "reinforce"] = "gae"  # what was earned compared with the critic's values,
                                                                # with its mean, or with nothing
    gamma: float = 1.0  # discount a token
    lam: float = 0.95  # GAE's lambda: 0 trusts the critic, 1 what was earned
    lam_alpha: float | None = None  # lambda = 1 - 1 / (alpha x tokens) instead; 0: --lam. None: 0, 5 with --vapo
    value_lam: float | None = None  # lambda of the critic's targets; none: 0.95, 1 with --vapo
    bootstrap_cut: bool = False  # a cut answer would have earned the value of its last state; else a cut is an end
    whiten: bool = True  # advantages to mean 0 and std 1 (with --advantage reinforce to std 1)
    # objective
    aggregate: Literal["token", "sequence", "prompt", "constant"] = "token"  # how the tokens' losses are weighed
    eps_low: float = 0.2  # a ratio below 1 - eps_low has no gradient when the advantage is negative
    eps_high: float | None = None  # a ratio above 1 + this has none when it is positive; none: 0.2, 0.28 with --vapo
    entropy_coef: float = 0.0  # weight of the entropy, a bonus
    positive_nll: float | None = None  # weight of the negative log-prob of right answers; none: 0, 0.1 with --vapo
    target_kl: float = 0.0  # leave the rest of a rollout once approx_kl is above this; 0: never


def fill_in(config: PPOOptions) -> None:
    """Called while a config is made: what was not given takes the value of its row, then all is checked."""
    asked = "--vapo" if config.vapo and config.value_pretraining is None else "--value-pretraining"
    fill(config, ROWS["vapo" if config.vapo else "ppo"])
    check_positive(config, "prompts_per_step", "group_size", "critic_lr", "reward_lr", "kl_target")
    check_not_negative(config, "eps_low", "eps_high", "kl_coef", "missing_eos_penalty", "value_clip", "value_coef",
                       "value_pretraining", "lam_alpha", "entropy_coef", "positive_nll", "target_kl",
                       "reward_model_every")
    for name in ("gamma", "lam", "value_lam"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(config, name)}: it must lie between 0 and 1")
    if config.kl == "loss" and config.kl_kind == "k1" and config.kl_coef:
        raise UserError("--kl loss --kl-kind k1 trains nothing, since the gradient of k1 is 0 on average: use k2 or k3")
    if config.kl_control != "fixed" and not config.kl_coef:
        raise UserError(f"--kl-control {config.kl_control} multiplies --kl-coef, which is 0: start it above 0")
    if config.reward_model_every and (not config.reward_model or config.group_size < 2):
        raise UserError("--reward-model-every teaches a reward model with pairs of answers to one prompt: give "
                        "--reward-model, and --group-size 2 or more")
    if config.critic_init and (config.critic != "own" or config.advantage != "gae"):
        raise UserError("--critic-init is what an own critic starts from: use --critic own and --advantage gae, or "
                        "leave it out")
    if config.value_pretraining and (config.critic != "own" or config.advantage != "gae"):
        raise UserError(f"{asked} trains a critic while the policy stands still, and with --critic {config.critic} "
                        f"--advantage {config.advantage} there is no network of its own to train: use --critic own and "
                        "--advantage gae, or --value-pretraining 0")


# ---- what was earned, and what was expected ----

def rewards_of_tokens(config: PPOOptions, rollout: Rollout, scores: Tensor, kl: Tensor | None, kl_coef: float,
                      mesh: Mesh) -> Tensor:
    """Scores (B,), and the KL of each token (B, S) where it is a cost -> what each token earned, (B, S)."""
    mask = rollout.action_mask
    paid = missing_eos_penalty(scores, rollout.finished, config.missing_eos_penalty)
    earned = token_rewards(paid, mask, kl if config.kl == "reward" else None, kl_coef)
    return whiten(earned, mask, mesh, shift_mean=False) if config.whiten_rewards else earned


def with_advantages(config: PPOOptions, rollout: Rollout, earned: Tensor, critic: Transformer | None, pretraining: bool,
                    mesh: Mesh) -> Rollout:
    """The rollout with the advantage of each token, and with the critic's values and what it shall learn, its returns.

    earned : (B, S), of `rewards_of_tokens`
    """
    mask = rollout.action_mask
    if config.advantage == "gae":
        values, bootstrap = state_values(critic, rollout, config.microbatch_size, mesh, config.bootstrap_cut)
        lam = length_adaptive_lambda(mask.sum(1), config.lam_alpha) if config.lam_alpha else config.lam
        value_lam = 1.0 if pretraining else config.value_lam
        advantages, _ = gae(earned, values, mask, config.gamma, lam, bootstrap)
        _, returns = gae(earned, values, mask, config.gamma, value_lam, bootstrap)
        rollout = rollout.replace(values=values, returns=returns)
    else:
        advantages = reward_to_go(earned, mask, config.gamma)
    if config.whiten:
        advantages = whiten(advantages, mask, mesh, shift_mean=config.advantage != "reinforce")
    return rollout.replace(advantages=advantages)


# ---- losses ----

def critic_loss(out: Output, mb: Rollout, config: PPOOptions, total: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of the value loss, and what to log. `total` is that of the policy: `loss_total`."""
    per_token = value_loss(out.values, mb.values, mb.returns, config.value_clip)
    loss = aggregate(per_token, mb.action_mask, config.aggregate, total, mb.prompt_tokens, mb.row_tokens)
    return loss, value_stats(out.values, mb.values, mb.returns, mb.action_mask, config.value_clip)


def policy_loss(out: Output, mb: Rollout, config: PPOOptions, kl_coef: float, total: Tensor,
                right_total: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of the loss of the policy, and what to log.

    clipped surrogate + kl_coef KL (with --kl loss) - entropy_coef entropy, all per token; the likelihood of right
    answers, over their own tokens (`right_total`); and of a critic that shares the layers, its loss.
    """
    surrogate = clipped_surrogate(out.logprobs, mb.old_logprobs, mb.advantages, config.eps_low, config.eps_high)
    per_token = surrogate
    if config.kl == "loss" and mb.ref_logprobs is not None:
        per_token = per_token + kl_coef * kl_estimate(out.logprobs, mb.ref_logprobs, config.kl_kind)
    if config.entropy_coef:
        per_token = per_token - config.entropy_coef * out.entropy
    loss = aggregate(per_token, mb.action_mask, config.aggregate, total, mb.prompt_tokens, mb.row_tokens)
    stats = policy_stats(out.logprobs, mb.old_logprobs, mb.ref_logprobs, out.entropy, mb.advantages, mb.action_mask,
                         config.eps_low, config.eps_high, row_tokens=mb.row_tokens)
    stats["policy_loss"] = row_sum(surrogate.detach(), mb.action_mask).sum()
    if config.positive_nll:
        right = right_tokens(mb.action_mask, mb.rewards)
        loss = loss + config.positive_nll * aggregate(sft_loss(out.logprobs), right, "token", right_total)
    if out.values is not None:
        value, value_sums = critic_loss(out, mb, config, total)
        loss, stats = loss + config.value_coef * value, stats | value_sums
    return loss, stats
