"""The GRPO family as a table: a row is an algorithm, a column is an option with a name. `train_grpo.py --recipe ROW`.

Forty algorithms differ in five places: what is added to the reward, how an advantage is made of rewards, which ratio is
clipped and how, how tokens are summed, and what is filtered or weighed. `RecipeOptions` has a column for each of these
choices, `TABLE` a row for each paper, and the functions below read a row: there is no other place where they differ.

    python -m minirl.recipes                    the table
    torchrun train_grpo.py --recipe dapo        a row of it
    torchrun train_grpo.py --recipe dapo --eps-high 0.4     the same, but for one column

A row says only what differs from the row `default`. A variant of your own is a row; docs/grpo_family.md adds one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from minirl.advantages import constant_groups, group_advantages
from minirl.config import UserError, check_not_negative, check_positive
from minirl.gae import whiten
from minirl.losses import bounded_expm1, kl_estimate
from minirl.policy_loss import check_pair, policy_loss

if TYPE_CHECKING:
    from minirl.parallel.mesh import Group, Mesh
    from minirl.rollout import Rollout


@dataclass(frozen=True)
class RecipeOptions:
    # recipe: a column that is not given is that of the row; `python -m minirl.recipes` prints the rows
    recipe: str = "default"  # which row
    # advantages
    baseline: Literal["mean", "leave-one-out", "length", "none"] | None = None  # what a reward is compared with
    advantage_scale: Literal["std", "batch", "none"] | None = None  # divide by the std of the group, the batch, nothing
    std_ddof: Literal[0, 1] | None = None  # 1: that std divides by one less than the number of samples
    whiten: bool | None = None  # then give the advantages of the batch mean 0 and std 1
    # ratio
    ratio: Literal["token", "sequence", "gspo-token", "product"] | None = None  # of a token, or of its whole answer
    surrogate: Literal["clip", "unclipped", "weight", "soft", "geometric", "square", "reinforce"] | None = None  # what
                                                        # is done with the ratio: minirl/policy_loss.py has the table
    eps_low: float | None = None  # a ratio below 1 - eps_low has no gradient when the advantage is negative
    eps_high: float | None = None  # a ratio above 1 + eps_high has no gradient when the advantage is positive
    dual_clip: float | None = None  # nor has a ratio above this one when the advantage is negative; 0: no such bound
    tau: float | None = None  # of "soft": how fast the gradient fades; of "square": the price of a nat
    tau_negative: float | None = None  # of "soft", where the advantage is negative
    # KL
    kl_coef: float | None = None  # weight of KL(policy || reference); 0: no reference model
    kl_kind: Literal["k1", "k2", "k3"] | None = None  # its estimator
    kl_ratio: bool | None = None  # weigh it by the ratio of the token, as old samples need it
    # sum
    aggregate: Literal["token", "sequence", "prompt", "constant"] | None = None  # how the tokens' losses are weighed
    constant_length: int | None = None  # of "constant": divide by rows x this many tokens; 0: the longest answer
    # filters
    mask_truncated: bool | None = None  # answers cut at the limit count in the baseline and are not trained on
    mask_constant: bool | None = None  # nor are groups of equal rewards, by the KL term or in the number of tokens


class Row(NamedTuple):
    source: str  # paper and equation
    idea: str  # what it changes, and why
    options: dict[str, Any]  # where it differs from the row `default`


def row(source: str, idea: str, **options) -> Row:
    return Row(source, idea, options)


TABLE = {
    "default": row(
        "2402.03300, with 2503.14476's sum", "GRPO with every token of the batch weighed alike and a light leash",
        baseline="mean", advantage_scale="std", std_ddof=0, whiten=False,
        ratio="token", surrogate="clip", eps_low=0.2, eps_high=0.2, dual_clip=0.0, tau=1.0, tau_negative=1.0,
        kl_coef=0.001, kl_kind="k3", kl_ratio=False, aggregate="token", constant_length=0,
        mask_truncated=False, mask_constant=False),

    # ---- how tokens are summed, what the advantage is divided by
    "grpo": row(
        "2402.03300 eq. 3-4", "the group's mean is the critic; its std makes easy and hard prompts weigh alike",
        aggregate="sequence", kl_coef=0.04),
    "r1": row(
        "2501.12948", "GRPO with the clip practically off: eps 10",
        aggregate="sequence", kl_coef=0.001, eps_low=10.0, eps_high=10.0),
    "dr_grpo": row(
        "2503.20783 sec. 3.2", "no division by std (it favours prompts that are nearly solved or hopeless) and none by "
        "the answer's length (it forgives long wrong answers)",
        advantage_scale="none", aggregate="constant", kl_coef=0.0),
    "dapo": row(
        "2503.14476 eq. 8-13", "room above the clip for rare tokens, every token alike, no KL. The sum over the batch "
        "is its code's; eq. 8 sums over a prompt: --aggregate prompt",
        eps_high=0.28, kl_coef=0.0),
    "luspo": row(
        "2602.05261", "GSPO without its division by length: the sum over a row's tokens, then the mean over rows",
        ratio="sequence", eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="constant", constant_length=1),

    # ---- the baseline
    "rloo": row(
        "2402.14740", "REINFORCE, each answer compared with the mean of the others: unbiased. The KL of the paper's "
        "reward is --kl-kind k2 as a loss",
        baseline="leave-one-out", advantage_scale="none", surrogate="reinforce", kl_coef=0.0,
        aggregate="constant", constant_length=1),
    "opo": row(
        "2505.23585", "the baseline that makes the gradient's variance least, if all tokens' gradients have one size",
        baseline="length", advantage_scale="none", surrogate="reinforce", kl_coef=0.0,
        aggregate="constant", constant_length=1),
    "reinforce_pp": row(
        "2501.03262", "no groups: rewards are compared with the whole batch",
        baseline="none", advantage_scale="none", whiten=True, kl_coef=0.0),
    "reinforce_pp_baseline": row(
        "2501.03262", "the group's mean, but one std for the batch: no group gains weight by being nearly constant",
        baseline="mean", advantage_scale="none", whiten=True, kl_coef=0.0),

    # ---- which ratio is clipped, and how
    "gspo": row(
        "2507.18071 eq. 5-7", "rewards belong to answers, so the ratio does as well: the geometric mean of its tokens'",
        ratio="sequence", eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="sequence"),
    "gspo_token": row(
        "2507.18071 eq. 13-14", "GSPO's value, with a gradient a token: for advantages that differ within an answer",
        ratio="gspo-token", eps_low=3e-4, eps_high=4e-4, kl_coef=0.0, aggregate="sequence"),
    "gmpo": row(
        "2507.20673", "the geometric mean of ratios that are clipped one by one: an outlier cannot carry the row",
        ratio="sequence", surrogate="geometric", eps_low=0.4, eps_high=0.4, kl_coef=0.0, aggregate="sequence"),
    "cispo": row(
        "2506.13585 eq. 4", "the clip caps a token's weight and leaves its gradient: rare tokens go on learning",
        surrogate="weight", eps_low=1.0, eps_high=0.28, kl_coef=0.0),
    "sapo": row(
        "2511.20347", "the gradient fades out, faster where the advantage is negative, instead of ending at a bound",
        surrogate="soft", tau=1.0, tau_negative=1.05, kl_coef=0.0, aggregate="sequence"),
    "two_sided": row(
        "INTELLECT-2; 1912.09729", "a bound for tokens of bad answers, too: at ratio 4 the loss stops growing",
        dual_clip=4.0),
    "kimi": row(
        "2501.12599 eq. 3", "rewards are regressed on log-ratios of whole answers: mirror descent. tau is ours",
        advantage_scale="none", ratio="product", surrogate="square", tau=0.5, kl_coef=0.0, aggregate="sequence"),

    # ---- whole systems
    "deepswe": row(
        "Agentica + Together AI, blog of 2 July 2025", "Dr. GRPO's mean, RLOO's baseline, DAPO's clip, no KL; what ran "
        "out of tokens counts in the baseline and is not trained on (no training code was published)",
        baseline="leave-one-out", advantage_scale="none", eps_high=0.28, kl_coef=0.0, aggregate="constant",
        mask_truncated=True),
    "scalerl": row(
        "2510.13786", "CISPO with cap 5, prompts weighed alike, one std for the batch, constant groups left out (after "
        "the description; its code was not read)",
        advantage_scale="batch", surrogate="weight", eps_low=1.0, eps_high=4.0, kl_coef=0.0, aggregate="prompt",
        mask_constant=True),
}
COLUMNS = tuple(field.name for field in fields(RecipeOptions) if field.name != "recipe")
RECIPES: dict[str, dict[str, Any]] = {name: TABLE["default"].options | row.options for name, row in TABLE.items()}


def fill_in(config: RecipeOptions) -> None:
    """Called while a config is made: what was not given takes the value of the row, then all is checked."""
    if config.recipe not in RECIPES:
        near = difflib.get_close_matches(config.recipe, RECIPES, n=1)
        raise UserError(f"--recipe {config.recipe}: there is no such row; " + (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}"))
    for name, value in RECIPES[config.recipe].items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)
    check_pair(config.ratio, config.surrogate)
    check_not_negative(config, "eps_low", "eps_high", "dual_clip", "kl_coef", "constant_length")
    check_positive(config, "tau", "tau_negative")
    if 0 < config.dual_clip <= 1 + config.eps_high:
        raise UserError(f"--dual-clip {config.dual_clip}: a bound on large ratios lies above 1 + eps_high; 0: none")


# ---- what the columns mean ----

def make_advantages(rollout: Rollout, config: RecipeOptions, mesh: Mesh | None = None) -> Tensor:
    """(B, 1) or (B, S): how much better than expected each answer, or each of its tokens, was."""
    advantages = group_advantages(rollout.rewards, rollout.group, config.advantage_scale, config.std_ddof,
                                  baseline=config.baseline, lengths=rollout.action_mask.sum(1), mesh=mesh)
    if not config.whiten:
        return advantages
    # One number a row counts as one, not once for each token: verl weighs long rows more here.
    counted = rollout.action_mask if advantages.shape[1] > 1 else torch.ones_like(advantages, dtype=torch.bool)
    return whiten(advantages, counted, mesh)


def leave_out(rollout: Rollout, config: RecipeOptions) -> Rollout:
    """The rollout with an empty action mask in the rows that the columns under "filters" take away."""
    mask = rollout.action_mask
    if config.mask_truncated:
        mask = mask & rollout.finished[:, None]
    if config.mask_constant:
        _, index = rollout.group.unique(return_inverse=True)
        mask = mask & ~constant_groups(rollout.rewards, rollout.group)[index][:, None]
    return rollout.replace(action_mask=mask)


def recipe_loss(logprobs: Tensor, mb: Rollout, config: RecipeOptions,
                cp_group: Group | None = None) -> tuple[Tensor, Tensor]:
    """(loss of each token, unreduced; where a bound takes its gradient away): (B, S) both.

    logprobs : (B, S) nats, with gradient; `mb` has the rest, cut to the same rows and columns
    """
    loss, clipped = policy_loss(
        logprobs, mb.old_logprobs, mb.advantages, mb.action_mask, ratio=config.ratio, surrogate=config.surrogate,
        eps_low=config.eps_low, eps_high=config.eps_high, dual_clip=config.dual_clip, tau=config.tau,
        tau_negative=config.tau_negative, row_tokens=mb.row_tokens, cp_group=cp_group)
    if mb.ref_logprobs is not None:
        kl = kl_estimate(logprobs, mb.ref_logprobs, config.kl_kind)
        if config.kl_ratio:
            kl = kl * (1 + bounded_expm1(logprobs - mb.old_logprobs))
        loss = loss + config.kl_coef * kl
    return loss, clipped


def document() -> str:
    """The table as Markdown: what `python -m minirl.recipes` prints, and docs/grpo_family.md shows."""
    lines = ["| recipe | from | idea | differs from `default` in |", "|---|---|---|---|"]
    for name, line in TABLE.items():
        options = "all columns" if name == "default" else "; ".join(
            f"`{option}` {value}" for option, value in line.options.items())
        lines.append(f"| `{name}` | {line.source} | {line.idea} | {options} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
